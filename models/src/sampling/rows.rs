//! How rows choose, on the device.

use super::cuda::{self, Launcher};
use super::{Choice, Drawn, Logprobs, Sampler, Token};
use crate::abi::logprobs::{gdn_logprobs_begin, gdn_logprobs_end, GDN_MOST_LIKELIEST, LOGPROBS_WORDS};
use crate::abi::sampling::{SamplingRow, GDN_NO_TOKEN, ROW_WORDS};
use candle_core::{bail, DType, Device, Result, Tensor};

/// The rows of a launch. A launch advances them to the next token, so that the next launch needs nothing of the host.
#[derive(Debug)]
pub(crate) struct Rows {
    /// A [`SamplingRow`] a row, then the token before of each row, the token drawn, the recent tokens, and room for the logits of
    /// those.
    pub words: Tensor,
    pub count: usize,
    /// The most recent tokens of a row.
    pub history: usize,
    /// Where log-probabilities may be requested: a `gdn_logprobs_row` a row, then what the launches need between them.
    logprobs: Option<Tensor>,
}

impl Rows {
    /// All rows are padding. Choices may request log-probabilities if `logprobs` is the size of the vocabulary.
    pub fn new(count: usize, history: usize, logprobs: Option<usize>, device: &Device) -> Result<Self> {
        let zeros = |words: usize| Tensor::zeros(words, DType::U32, device);
        let logprobs = logprobs.map(|vocab| zeros(cuda::logprobs_words(count, vocab, history)?)).transpose()?;
        let rows = Self { words: zeros(count * (ROW_WORDS + 2 + 2 * history))?, count, history, logprobs };
        rows.load(&[])?;
        Ok(rows)
    }

    /// Rows that take the most likely token, without end.
    pub fn greedy(count: usize, device: &Device) -> Result<Self> {
        let rows = Self::new(count, 0, None, device)?;
        rows.load(&vec![Choice { row: SamplingRow::GREEDY, last: 0, recent: Vec::new() }; count])?;
        Ok(rows)
    }

    /// The tokens before, `[rows]`: a view, which a launch overwrites with the tokens drawn.
    pub fn ids(&self) -> Result<Tensor> {
        self.words.narrow(0, self.count * ROW_WORDS, self.count)
    }

    /// The tokens drawn, `[rows]`: a view.
    pub fn drawn(&self) -> Result<Tensor> {
        self.words.narrow(0, self.count * (ROW_WORDS + 1), self.count)
    }

    /// The log-probabilities, `[rows * LOGPROBS_WORDS]`: a view. None where none may be requested.
    pub fn logprobs(&self) -> Result<Option<Tensor>> {
        self.logprobs.as_ref().map(|words| words.narrow(0, 0, self.count * LOGPROBS_WORDS)).transpose()
    }

    /// The first rows choose so, the others are padding.
    pub fn load(&self, choices: &[Choice]) -> Result<()> {
        let rows = choices.iter().map(|choice| choice.row.words());
        let padding = (choices.len()..self.count).map(|_| SamplingRow::PADDING.words());
        let mut words: Vec<u32> = rows.chain(padding).flatten().collect();
        words.extend(choices.iter().map(|choice| choice.last));
        words.resize(self.count * (ROW_WORDS + 1), 0);
        self.set(&words, 0)?;
        let recent = self.count * (ROW_WORDS + 2);
        for (n, choice) in choices.iter().enumerate().filter(|(_, choice)| !choice.recent.is_empty()) {
            self.set(&choice.recent, recent + n * self.history)?;
        }
        Ok(())
    }

    fn set(&self, words: &[u32], offset: usize) -> Result<()> {
        self.words.slice_set(&Tensor::new(words, self.words.device())?, 0, offset)
    }
}

impl Sampler {
    /// The launch alone: the tokens go to `rows`.
    pub fn launch(&self, logits: &Tensor, rows: &Rows) -> Result<()> {
        let Some(workspace) = &self.workspace else { bail!("sampling: expected a sampler of a CUDA device") };
        let logprobs = |launcher: Launcher| match &rows.logprobs {
            Some(out) => cuda::logprobs(launcher, logits, &rows.words, out, rows.count, rows.history),
            None => Ok(()),
        };
        logprobs(gdn_logprobs_begin)?;
        cuda::sample(logits, &rows.words, workspace, rows.count, rows.history)?;
        logprobs(gdn_logprobs_end)
    }
}

/// [`Sampler::draw`] on a device.
pub(super) fn draw(sampler: &Sampler, logits: &Tensor, choices: &[Choice]) -> Result<Vec<Token>> {
    let _working = candle_gdn_core::Working::new(logits.device());
    let history = choices.iter().map(|choice| choice.row.window as usize).max().unwrap_or(0);
    let logprobs = choices.iter().any(|choice| choice.row.likeliest > 0).then_some(logits.dim(1)?);
    let rows = Rows::new(choices.len(), history, logprobs, logits.device())?;
    rows.load(choices)?;
    sampler.launch(logits, &rows)?;
    let logprobs = rows.logprobs()?.map(|words| words.to_vec1()).transpose()?;
    Ok(tokens(&rows.drawn()?.to_vec1()?, &logprobs.unwrap_or_default()))
}

impl Choice {
    /// A padding row, or a row whose choice another row makes.
    pub fn padding(last: u32) -> Self {
        Self { row: SamplingRow::PADDING, last, recent: Vec::new() }
    }
}

/// Tokens as the kernel writes them; `logprobs` has [`LOGPROBS_WORDS`] of each, or nothing.
pub(crate) fn tokens(drawn: &[u32], logprobs: &[u32]) -> Vec<Token> {
    let mut rows = logprobs.as_chunks::<LOGPROBS_WORDS>().0.iter();
    let token = |id: &u32| {
        let row = rows.next();
        match *id {
            GDN_NO_TOKEN => Err("a logit that is no number".into()),
            id => Ok(Drawn { id, logprobs: row.and_then(logprobs_of) }),
        }
    };
    drawn.iter().map(token).collect()
}

/// The words of a `gdn_logprobs_row`.
fn logprobs_of(row: &[u32; LOGPROBS_WORDS]) -> Option<Box<Logprobs>> {
    let [likeliest, token, rest @ ..] = row;
    let count = likeliest.checked_sub(1)? as usize;
    let (ids, logprobs) = rest.split_at(GDN_MOST_LIKELIEST);
    let likeliest = ids.iter().zip(logprobs).take(count).filter(|(id, _)| **id != GDN_NO_TOKEN);
    let likeliest = likeliest.map(|(id, logprob)| (*id, f32::from_bits(*logprob))).collect();
    Some(Box::new(Logprobs { token: f32::from_bits(*token), likeliest }))
}
