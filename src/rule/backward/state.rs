//! The final state as a second output of the rule. A custom op has one output and candle walks a graph from its end, so the final
//! state is the output of an op of its own whose input is o: its backward pass, which runs first, leaves the state's gradient
//! for that of the rule.

use candle_core::{bail, CpuStorage, CustomOp1, Layout, Result, Shape, Storage, Tensor};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What the rule and its final state tell each other.
#[derive(Default)]
pub struct Shared {
    /// Between the two forward passes: what the rule left.
    state: Mutex<Option<Storage>>,
    /// Between the two backward passes: the gradient of the final state.
    gradient: Mutex<Option<Tensor>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub fn put_state(&self, state: Storage) {
        *lock(&self.state) = Some(state);
    }

    /// The gradient of the final state, where the loss depends on it. Each backward pass leaves its own.
    pub fn take_gradient(&self) -> Option<Tensor> {
        lock(&self.gradient).take()
    }
}

/// The op from o to the final state.
pub struct FinalState {
    pub shared: Arc<Shared>,
    pub shape: Shape,
}

impl CustomOp1 for FinalState {
    fn name(&self) -> &'static str {
        "gdn_rule_diff_state"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match lock(&self.shared.state).take() {
            Some(Storage::Cpu(state)) => Ok((state, self.shape.clone())),
            _ => bail!("{}: expected the state of the rule", self.name()),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, _: &candle_core::CudaStorage, _: &Layout) -> Result<(candle_core::CudaStorage, Shape)> {
        match lock(&self.shared.state).take() {
            Some(Storage::Cuda(state)) => Ok((state, self.shape.clone())),
            _ => bail!("{}: expected the state of the rule", self.name()),
        }
    }

    fn bwd(&self, o: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        *lock(&self.shared.gradient) = Some(grad.contiguous()?);
        // So that the rule's backward pass runs, even where nothing else depends on o.
        Tensor::zeros((), o.dtype(), o.device())?.broadcast_as(o.shape()).map(Some)
    }
}
