//! A further output of an op with gradients. A custom op of candle has one output and candle walks a graph from its end, so a side
//! output is the output of an op of its own whose argument is the op's output: its backward pass, which runs first, leaves the
//! gradient of the side output for that of the op.
//!
//! A pass that fails between the two must leave nothing for the next one, and candle tells an op neither that a pass begins nor
//! that it failed. But a pass has its gradients in a `GradStore`, which goes when the pass fails. The gradient of the side output
//! stays alive in there alone, as part of the gradient of an argument that nobody asks for; here is a weak reference to it.

use candle_core::{bail, CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Storage, Tensor, Var};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, ThreadId};

/// What an op and its side output tell each other.
#[derive(Default)]
pub struct SideOutput {
    /// Between the two forward passes: what the op left.
    value: Mutex<Option<(Storage, Shape)>>,
    /// Between the two backward passes of a thread, which walks a graph by itself: several may walk one graph at once.
    gradients: Mutex<HashMap<ThreadId, Weak<Gradient>>>,
}

type Gradient = Mutex<Option<Tensor>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SideOutput {
    /// For the op's forward pass: the values.
    pub fn put(&self, values: Storage, shape: impl Into<Shape>) {
        *lock(&self.value) = Some((values, shape.into()));
    }

    /// For the op's backward pass: the gradient, where the loss of this pass depends on the side output.
    pub fn take_gradient(&self) -> Option<Tensor> {
        let gradient = lock(&self.gradients).remove(&thread::current().id())?.upgrade()?;
        let gradient = lock(&gradient).take();
        gradient
    }

    /// The side output of the op that gave `main`.
    ///
    /// # Errors
    /// When the op left no values.
    pub fn tensor(self: Arc<Self>, main: &Tensor) -> Result<Tensor> {
        // One element of it, whose gradient nobody asks for; of no elements candle adds nothing up.
        let place = match main.elem_count() {
            0 => Tensor::zeros(1, main.dtype(), main.device())?,
            _ => (0..main.rank()).try_fold(main.detach(), |place, dim| place.narrow(dim, 0, 1))?,
        };
        main.apply_op2(&place, Output(self))
    }
}

struct Output(Arc<SideOutput>);

impl CustomOp2 for Output {
    fn name(&self) -> &'static str {
        "side_output"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match lock(&self.0.value).take() {
            Some((Storage::Cpu(values), shape)) => Ok((values, shape)),
            _ => bail!("{}: expected values on the CPU", self.name()),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        _: &candle_core::CudaStorage,
        _: &Layout,
        _: &candle_core::CudaStorage,
        _: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        match lock(&self.0.value).take() {
            Some((Storage::Cuda(values), shape)) => Ok((values, shape)),
            _ => bail!("{}: expected values on CUDA", self.name()),
        }
    }

    fn bwd(
        &self,
        main: &Tensor,
        place: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let _working = super::Working::new(main.device());
        let gradient = Arc::new(Mutex::new(Some(grad.contiguous()?)));
        let mut gradients = lock(&self.0.gradients);
        gradients.retain(|_, gradient| gradient.strong_count() > 0); // of passes that failed
        gradients.insert(thread::current().id(), Arc::downgrade(&gradient));
        drop(gradients);
        let keeper = Var::zeros(place.shape(), place.dtype(), place.device())?.apply_op1(Keeper(gradient))?;
        // So that the op's backward pass runs, even where nothing else depends on its output.
        let nothing = Tensor::zeros((), main.dtype(), main.device())?.broadcast_as(main.shape())?;
        Ok((Some(nothing), Some(keeper)))
    }
}

/// Keeps a gradient as long as its own output, of which candle makes the sum that it stores.
struct Keeper(#[allow(dead_code)] Arc<Gradient>); // alive, not read

impl CustomOp1 for Keeper {
    fn name(&self) -> &'static str {
        "side_output_gradient"
    }

    fn cpu_fwd(&self, zeros: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((zeros.clone(), layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, zeros: &candle_core::CudaStorage, layout: &Layout) -> Result<(candle_core::CudaStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        Ok((zeros.try_clone(layout)?, layout.shape().clone()))
    }
}
