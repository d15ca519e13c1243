//! Ranks that are host threads of one process, on the CPU.

use super::Collective;
use candle_core::{DType, Error, Result, Tensor};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A rank that is a host thread, with tensors on the CPU. When one is dropped, ranks that wait for it get an error.
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
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    exchange: Mutex<Exchange>,
    complete: Condvar,
}

#[derive(Debug, Default)]
struct Exchange {
    /// The ranks' inputs of this exchange.
    inputs: Vec<Option<Tensor>>,
    /// All inputs of the last exchange.
    results: Vec<Tensor>,
    number: u64,
    /// Whether a rank was dropped.
    gone: bool,
}

impl LocalRank {
    /// All ranks of a group of `size`, first to last.
    pub fn group(size: usize) -> Vec<Self> {
        let shared = Arc::new(Shared::default());
        shared.lock().inputs = vec![None; size];
        (0..size).map(|rank| Self { rank, size, shared: shared.clone() }).collect()
    }

    /// The inputs of all ranks, once they all have called this.
    fn exchange(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        let mut exchange = self.shared.lock();
        let number = exchange.number;
        // Not only where one waits: an input that a rank left behind completes no exchange.
        let gone =
            || Error::Msg(format!("rank {}: expected all {} ranks to go on, but one is gone", self.rank, self.size));
        if exchange.gone {
            return Err(gone());
        }
        exchange.inputs[self.rank] = Some(x.clone());
        if exchange.inputs.iter().all(Option::is_some) {
            exchange.results = exchange.inputs.iter_mut().filter_map(Option::take).collect();
            exchange.number += 1;
            self.shared.complete.notify_all();
        }
        while exchange.number == number && !exchange.gone {
            exchange = self.shared.complete.wait(exchange).unwrap_or_else(PoisonError::into_inner);
        }
        if exchange.number == number {
            return Err(gone());
        }
        // The next exchange completes, and replaces these, only after this rank has called it.
        Ok(exchange.results.clone())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Exchange> {
        self.exchange.lock().unwrap_or_else(PoisonError::into_inner)
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

    fn is_lost(&self) -> bool {
        self.shared.lock().gone
    }

    fn leave(&self) {
        self.shared.lock().gone = true;
        self.shared.complete.notify_all();
    }
}

impl Drop for LocalRank {
    fn drop(&mut self) {
        self.leave();
    }
}
