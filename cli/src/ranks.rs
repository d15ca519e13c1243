//! One run on several devices: a thread a rank, and all of them do the same.

use anyhow::{bail, Result};
use candle_core::{Device, Tensor};
use candle_gdn_models::{Collective, LocalRank};
use std::cell::Cell;
use std::io::Write;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::Builder;

thread_local! {
    static RANK: Cell<usize> = const { Cell::new(0) };
}

/// Whether this thread is the one that reads, prints and decides.
pub fn is_first() -> bool {
    RANK.get() == 0
}

/// Writes a line to stderr, from the first rank only. Where stderr is closed the program goes on: `eprintln` would panic.
#[macro_export]
macro_rules! status {
    ($($arg:tt)*) => {
        if $crate::is_first() {
            use std::io::Write as _;
            let _ = writeln!(std::io::stderr(), $($arg)*);
        }
    };
}

/// A rank of a run.
pub struct Rank {
    pub device: Device,
    /// The other ranks, if there are any.
    pub group: Option<Arc<dyn Collective>>,
    pub pace: Pace,
}

impl Rank {
    /// The only rank.
    pub fn single(device: Device) -> Self {
        Self { device, group: None, pace: Pace::default() }
    }

    /// Whether `own` is true on every rank, so that all go on alike. Every rank must call this.
    ///
    /// # Errors
    /// When a rank is gone.
    pub fn on_all(&self, own: bool) -> Result<bool> {
        let Some(group) = &self.group else { return Ok(own) };
        let count = Tensor::new(&[if own { 1f32 } else { 0. }], &self.device)?;
        let count = group.all_reduce(&count)?.to_vec1::<f32>()?[0];
        Ok(count as usize == group.size())
    }
}

/// Decisions that all ranks must share though only the first one can make them: it sees Ctrl-C and a closed stdout.
#[derive(Default)]
pub struct Pace {
    decisions: Option<Arc<Decisions>>,
    made: Cell<usize>,
}

/// In the order in which they were made.
#[derive(Default)]
struct Decisions {
    all: Mutex<Vec<u8>>,
    more: Condvar,
}

impl Pace {
    /// The first rank's decision, given by all ranks in the same order.
    pub fn agree(&self, own: u8) -> u8 {
        let Some(decisions) = &self.decisions else { return own };
        let number = self.made.replace(self.made.get() + 1);
        let mut all = decisions.all.lock().unwrap_or_else(PoisonError::into_inner);
        if is_first() {
            all.push(own);
            decisions.more.notify_all();
        }
        while all.len() <= number {
            all = decisions.more.wait(all).unwrap_or_else(PoisonError::into_inner);
        }
        all[number]
    }
}

/// Calls `run` on `n` ranks, on the GPUs 0 to n - 1 or all on the CPU, and returns the first rank's result. Where a rank fails
/// the program exits, since the others would wait for it.
pub fn run<R: Send>(n: usize, cpu: bool, run: impl Fn(&Rank) -> Result<R> + Sync) -> Result<R> {
    let makers = makers(n, cpu)?;
    let decisions = Arc::new(Decisions::default());
    std::thread::scope(|scope| {
        let threads: Vec<_> = makers
            .into_iter()
            .enumerate()
            .map(|(number, make)| {
                let (decisions, run) = (decisions.clone(), &run);
                let fail = move |why: String| -> ! {
                    let _ = writeln!(std::io::stderr(), "error: rank {number}{why}");
                    std::process::exit(1)
                };
                let start = move || {
                    RANK.set(number);
                    let pace = Pace { decisions: Some(decisions), made: Cell::new(0) };
                    let work = || make().and_then(|(device, group)| run(&Rank { device, group: Some(group), pace }));
                    match catch_unwind(AssertUnwindSafe(work)) {
                        Ok(Ok(result)) => result,
                        Ok(Err(e)) => fail(format!(": {e:#}")),
                        Err(_) => fail(" panicked".into()),
                    }
                };
                let thread = Builder::new().spawn_scoped(scope, start);
                thread.unwrap_or_else(|e| fail(format!(": cannot start a thread: {e}")))
            })
            .collect();
        let mut results = threads.into_iter().map(|thread| thread.join());
        let first = results.next();
        results.for_each(drop);
        match first {
            Some(Ok(first)) => Ok(first),
            _ => bail!("--tensor-parallel: expected at least 1 rank, got {n}"),
        }
    })
}

/// Makes a rank on its own thread. All are made at the same time, since each waits for the others.
type Maker = Box<dyn FnOnce() -> Result<(Device, Arc<dyn Collective>)> + Send>;

fn makers(n: usize, cpu: bool) -> Result<Vec<Maker>> {
    if cpu {
        let maker = |rank| -> Maker { Box::new(move || Ok((Device::Cpu, Arc::new(rank) as Arc<dyn Collective>))) };
        return Ok(LocalRank::group(n).into_iter().map(maker).collect());
    }
    gpus(n)
}

#[cfg(feature = "nccl")]
fn gpus(n: usize) -> Result<Vec<Maker>> {
    use anyhow::Context;
    use candle_core::cuda_backend::cudarc::driver::CudaContext;
    use candle_gdn_models::{NcclId, NcclRank};

    let count = CudaContext::device_count().context("cannot count the GPUs")?;
    expect_gpus(n, count as usize)?;
    let id = NcclId::new().context("--tensor-parallel")?;
    let rank = move |number: usize| -> Maker {
        Box::new(move || {
            let device = crate::load::gpu(number)?;
            let group: Arc<dyn Collective> = Arc::new(NcclRank::new(id, number, n, &device)?);
            Ok((device, group))
        })
    };
    Ok((0..n).map(rank).collect())
}

#[cfg(not(feature = "nccl"))]
fn gpus(_: usize) -> Result<Vec<Maker>> {
    bail!("--tensor-parallel: this build cannot use several GPUs: --features nccl makes one that can (--cpu divides the CPU)")
}

/// An error where `ranks`, which need a GPU each, are more than `gpus`.
#[cfg(any(feature = "nccl", test))]
fn expect_gpus(ranks: usize, gpus: usize) -> Result<()> {
    let here = match gpus {
        _ if ranks <= gpus => return Ok(()),
        0 => "none is".to_string(),
        1 => "1 is".to_string(),
        gpus => format!("{gpus} are"),
    };
    bail!(
        "--tensor-parallel {ranks}: expected at most as many ranks as there are GPUs, and here {here} \
         (CUDA_VISIBLE_DEVICES may hide some; --cpu divides the CPU)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first rank does not decide alone.
    #[test]
    fn what_holds_on_one_rank_does_not_hold_on_all() -> Result<()> {
        assert!(run(2, true, |rank| rank.on_all(true))?);
        assert!(!run(2, true, |rank| rank.on_all(is_first()))?);
        assert!(!run(2, true, |rank| rank.on_all(!is_first()))?);
        let alone = Rank::single(Device::Cpu);
        assert!(alone.on_all(true)? && !alone.on_all(false)?);
        Ok(())
    }

    #[test]
    fn every_rank_has_a_gpu() {
        for (ranks, gpus) in [(1, 1), (2, 2), (2, 8)] {
            assert!(expect_gpus(ranks, gpus).is_ok());
        }
        for (ranks, gpus, here) in [(4, 2, "here 2 are"), (2, 1, "here 1 is"), (1, 0, "here none is")] {
            let message = expect_gpus(ranks, gpus).expect_err("too few").to_string();
            assert!(message.contains(here) && message.contains(&format!("--tensor-parallel {ranks}:")), "{message}");
        }
    }
}
