//! What to change where a run does not fit.

use super::{Run, Size};
use anyhow::Result;
use candle_core::quantized::GgmlDType;
use candle_core::DeviceLocation;
use std::fmt::Write;
use std::num::NonZeroUsize;

/// Types that are offered, the best first.
const TYPES: [(&str, GgmlDType); 3] = [("q8_0", GgmlDType::Q8_0), ("q6k", GgmlDType::Q6K), ("q4k", GgmlDType::Q4K)];
/// Tokens of a pass below which nothing is gained: so many packed experts are not unpacked for.
const LEAST_CHUNK: usize = 256;

/// A run, and the options that make it of another.
#[derive(Clone)]
struct Changed<'a> {
    run: Run<'a>,
    options: String,
}

impl<'a> Changed<'a> {
    fn with(&self, option: &str, value: impl std::fmt::Display, change: impl FnOnce(&mut Run<'a>)) -> Self {
        let mut changed = self.clone();
        change(&mut changed.run);
        let space = if changed.options.is_empty() { "" } else { " " };
        // Writing to a text does not fail.
        let _ = write!(changed.options, "{space}{option} {value}");
        changed
    }

    fn fits(&self, free: u64) -> Result<bool> {
        Ok(self.run.bytes()?.total() <= free)
    }

    fn sequences(&self, n: usize) -> Self {
        self.with("--batch", n, |run| run.room.sequences = n)
    }

    fn max_len(&self, n: usize) -> Self {
        self.with("--max-seq-len", n, |run| run.room.max_len = n)
    }

    fn chunk(&self, n: usize) -> Self {
        self.with("--prefill-chunk", n, |run| run.args.prefill_chunk = NonZeroUsize::new(n))
    }

    fn without_cache(&self) -> Self {
        self.with("--prefix-cache", 0, |run| run.room.cache = 0)
    }

    fn quantized(&self, (name, to): (&str, GgmlDType)) -> Self {
        self.with("--quantize", name, |run| run.args.quantize = Some(to))
    }

    /// Each change but that of the type that is enough by itself, as small as may be.
    fn by_one_more(&self, free: u64) -> Result<Vec<Self>> {
        let room = &self.run.room;
        let cache = (room.cache > 0).then(|| self.without_cache());
        let chunks = self.chunks().into_iter().map(|n| self.chunk(n));
        let mut found = Vec::from_iter(first(cache, free)?);
        found.extend(first(chunks, free)?);
        found.extend(largest(1..room.sequences, free, |n| self.sequences(n))?);
        found.extend(largest(room.least_len..room.max_len, free, |n| self.max_len(n))?);
        Ok(found)
    }

    /// All changes at once, the length as little as may be.
    fn together(&self, free: u64) -> Result<Option<Self>> {
        let room = &self.run.room;
        let mut least = self.clone();
        if room.cache > 0 {
            least = least.without_cache();
        }
        if let Some(n) = self.chunks().last() {
            least = least.chunk(*n);
        }
        if room.sequences > 1 {
            least = least.sequences(1);
        }
        match least.fits(free)? {
            true => Ok(Some(least)),
            false => largest(room.least_len..room.max_len, free, |n| least.max_len(n)),
        }
    }

    fn smaller_types(&self) -> Vec<Self> {
        self.types().into_iter().map(|to| self.quantized(to)).collect()
    }

    /// Smaller pieces of prompts.
    fn chunks(&self) -> Vec<usize> {
        let now = self.run.args.prefill_chunk_at(self.run.device);
        std::iter::successors(Some(now / 2), |n| Some(n / 2)).take_while(|n| *n >= LEAST_CHUNK).collect()
    }

    /// Smaller types than the one now; of a GGUF file only those that change some of it.
    fn types(&self) -> Vec<(&'static str, GgmlDType)> {
        let (run, now) = (&self.run, self.run.args.quantize);
        let bits = |to: GgmlDType| to.type_size() as f64 / to.block_size() as f64;
        let changes = |to: GgmlDType| run.gguf().is_none_or(|file| file.converted(run.config, to) > 0);
        TYPES.into_iter().filter(|(_, to)| changes(*to) && now.is_none_or(|now| bits(*to) < bits(now))).collect()
    }
}

/// The first that fits.
fn first<'a>(runs: impl IntoIterator<Item = Changed<'a>>, free: u64) -> Result<Option<Changed<'a>>> {
    for run in runs {
        if run.fits(free)? {
            return Ok(Some(run));
        }
    }
    Ok(None)
}

/// The run of the largest number that fits; a run of fewer needs no more.
fn largest<'a>(
    numbers: std::ops::Range<usize>,
    free: u64,
    run: impl Fn(usize) -> Changed<'a>,
) -> Result<Option<Changed<'a>>> {
    let (mut fits, mut rest) = (None, numbers);
    while !rest.is_empty() {
        let middle = rest.start + (rest.end - rest.start) / 2;
        let changed = run(middle);
        match changed.fits(free)? {
            true => (fits, rest.start) = (Some(changed), middle + 1),
            false => rest.end = middle,
        }
    }
    Ok(fits)
}

impl Run<'_> {
    /// What to change so that the run takes at most `free` bytes.
    ///
    /// # Errors
    /// When the files of the checkpoint cannot be read.
    pub(super) fn advice(&self, free: u64) -> Result<String> {
        let now = Changed { run: self.clone(), options: String::new() };
        let types = now.smaller_types();
        let mut found = now.by_one_more(free)?;
        found.extend(first(types.iter().cloned(), free)?);
        let mut starts = types.iter();
        while found.is_empty() {
            let Some(quantized) = starts.next() else { break };
            found = quantized.by_one_more(free)?;
        }
        let mut starts = std::iter::once(&now).chain(&types);
        while found.is_empty() {
            let Some(start) = starts.next() else { break };
            found.extend(start.together(free)?);
        }
        if !found.is_empty() {
            let options: Vec<String> = found.into_iter().map(|run| run.options).collect();
            return Ok(format!("it fits with {}", options.join(", or with ")));
        }
        let (run, of) = match types.last() {
            Some(quantized) => (&quantized.run, format!(" with {}", quantized.options)),
            None => (self, String::new()),
        };
        let weights = Size(run.bytes()?.weights);
        let elsewhere = match self.device {
            DeviceLocation::Cpu => "",
            _ if self.room.snapshots > 0 => "; --cpu runs without one",
            _ => "; generate --tensor-parallel divides them among GPUs, --cpu runs without one",
        };
        Ok(format!("no option makes it fit: the weights alone take {weights}{of}{elsewhere}"))
    }
}
