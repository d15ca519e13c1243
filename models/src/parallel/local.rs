//! Ranks that are host threads of one process, on the CPU.

use super::Collective;
use candle_core::{bail, DType, Result, Tensor};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A rank among host threads, whose tensors are on the CPU. When one is dropped, those that wait for it get an error.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device, Tensor};
/// use candle_gdn_models::{Collective, LocalRank};
///
/// let sums: Vec<_> = std::thread::scope(|scope| {
///     let ranks: Vec<_> = LocalRank::group(3)
///         .into_iter()
///         .map(|rank| {
///             let x = Tensor::new(&[rank.rank() as f32], &Device::Cpu);
///             scope.spawn(move || rank.all_reduce(&x?)?.to_vec1::<f32>())
///         })
///         .collect();
///     ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<candle_core::Result<_>>()
/// })?;
/// assert_eq!(sums, [[3f32], [3.], [3.]]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct LocalRank {
    rank: usize,
    size: usize,
    meeting: Arc<Meeting>,
}

#[derive(Debug, Default)]
struct Meeting {
    round: Mutex<Round>,
    turned: Condvar,
}

#[derive(Debug, Default)]
struct Round {
    /// What the ranks brought to this one.
    brought: Vec<Option<Tensor>>,
    /// What they brought to the last one.
    taken: Vec<Tensor>,
    number: u64,
    gone: bool,
}

impl LocalRank {
    /// All ranks of a group of `size`, first to last.
    pub fn group(size: usize) -> Vec<Self> {
        let meeting = Arc::new(Meeting::default());
        meeting.lock().brought = vec![None; size];
        (0..size).map(|rank| Self { rank, size, meeting: meeting.clone() }).collect()
    }

    /// What all ranks bring, once they all have.
    fn exchange(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        let meeting = &*self.meeting;
        let mut round = meeting.lock();
        let number = round.number;
        round.brought[self.rank] = Some(x.clone());
        if round.brought.iter().all(Option::is_some) {
            round.taken = round.brought.iter_mut().filter_map(Option::take).collect();
            round.number += 1;
            meeting.turned.notify_all();
        }
        while round.number == number && !round.gone {
            round = meeting.turned.wait(round).unwrap_or_else(PoisonError::into_inner);
        }
        if round.number == number {
            bail!("rank {}: expected all {} ranks to go on, but one is gone", self.rank, self.size)
        }
        // The next round turns only when this rank has come to it.
        Ok(round.taken.clone())
    }
}

impl Meeting {
    fn lock(&self) -> MutexGuard<'_, Round> {
        self.round.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collective for LocalRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_reduce(&self, x: &Tensor) -> Result<Tensor> {
        let all = self.exchange(x)?;
        let mut sum = all[0].to_dtype(DType::F32)?;
        for other in &all[1..] {
            sum = (sum + other.to_dtype(DType::F32)?)?;
        }
        sum.to_dtype(x.dtype())
    }

    fn all_gather(&self, x: &Tensor) -> Result<Tensor> {
        Tensor::stack(&self.exchange(x)?, 0)
    }
}

impl Drop for LocalRank {
    fn drop(&mut self) {
        self.meeting.lock().gone = true;
        self.meeting.turned.notify_all();
    }
}
