//! Recomputation: a function whose forward pass runs again in its backward pass, so that between them only its input is kept.
//!
//! An op of candle has at most three arguments, but a function may read any number of variables, and candle gives gradients to an
//! op's arguments alone. The variables are arguments of a chain of ops whose outputs carry nothing; the last of them is an argument
//! of the function's own op. Its backward pass comes first, computes all gradients and leaves those of the variables for the chain.

use candle_core::{bail, CpuStorage, CustomOp1, DType, Layout, Result, Shape, Storage, Tensor, TensorId, Var};
use candle_gdn_core::check::*;
use candle_gdn_core::custom_op;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const OP: &str = "checkpoint";

type Function = dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync;

/// `function` of x, of which nothing but x is kept, with gradients of x and of each variable that it reads.
pub fn checkpoint(x: &Tensor, function: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static) -> Result<Tensor> {
    let y = function(&x.detach())?;
    let variables: Vec<Tensor> = y.sorted_nodes().into_iter().filter(|node| node.is_variable()).cloned().collect();
    let y = match y.layout().start_offset() {
        0 => y.detach().contiguous()?,
        _ => y.detach().force_contiguous()?,
    };
    let gradients = Arc::<Gradients>::default();
    let mut carrier = Tensor::zeros(1, DType::F32, x.device())?;
    for pair in variables.chunks(2) {
        carrier = carrier.apply_op3(&pair[0], &pair[pair.len() - 1], Carrier(gradients.clone()))?;
    }
    let op = Recomputed { function: Box::new(function), variables, gradients, y: Mutex::new(Some(y)) };
    x.apply_op2(&carrier, op)
}

/// Gradients of variables between the backward pass of the function and those of the chain.
#[derive(Default)]
struct Gradients(Mutex<HashMap<TensorId, Tensor>>);

impl Gradients {
    fn lock(&self) -> MutexGuard<'_, HashMap<TensorId, Tensor>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An op whose output carries nothing but the order of two backward passes.
struct Carrier(Arc<Gradients>);

impl Carrier {
    fn on_cpu(&self, _: [CpuArg<'_>; 3]) -> CpuOutput {
        Ok((CpuStorage::F32(vec![0.0]), 1.into()))
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(&self, [carrier, ..]: [CudaArg<'_>; 3]) -> CudaOutput {
        use candle_core::backend::BackendStorage;
        Ok((candle_gdn_core::device::cuda::zeros_of(carrier.0.device(), DType::F32, &[1])?, 1.into()))
    }

    fn backward(&self, [carrier, first, second]: [&Tensor; 3], grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let mut gradients = self.0.lock();
        let mut take = |variable: &Tensor| gradients.remove(&variable.id());
        // An odd one is both: it has its gradient once.
        Ok([carrier.track_op().then(|| grad.clone()), take(first), take(second)])
    }
}

custom_op!(differentiable CustomOp3 for Carrier, OP, carrier carrier_layout, first first_layout, second second_layout);

/// The function's own op.
struct Recomputed {
    function: Box<Function>,
    variables: Vec<Tensor>,
    gradients: Arc<Gradients>,
    /// What the function returned, until the forward pass has it.
    y: Mutex<Option<Tensor>>,
}

impl Recomputed {
    fn result(&self) -> Result<(Storage, Shape)> {
        let Some(y) = self.y.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            bail!("{OP}: applied twice");
        };
        let (storage, layout) = y.storage_and_layout();
        Ok((storage.try_clone(layout)?, y.shape().clone()))
    }

    fn on_cpu(&self, _: [CpuArg<'_>; 2]) -> CpuOutput {
        match self.result()? {
            (Storage::Cpu(storage), shape) => Ok((storage, shape)),
            _ => bail!("{OP}: expected a function that stays on x's device"),
        }
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(&self, _: [CudaArg<'_>; 2]) -> CudaOutput {
        match self.result()? {
            (Storage::Cuda(storage), shape) => Ok((storage, shape)),
            _ => bail!("{OP}: expected a function that stays on x's device"),
        }
    }

    fn backward(&self, [x, carrier]: [&Tensor; 2], grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let input = match x.track_op() {
            true => Var::from_tensor(&x.detach())?.into_inner(),
            false => x.detach(),
        };
        let y = (self.function)(&input)?;
        let mut store = y.apply_op1(Seed(grad.clone()))?.backward()?;
        drop(y);
        let mut gradients = self.gradients.lock();
        gradients.clear();
        for variable in &self.variables {
            let gradient = store.remove(variable).map_or_else(|| variable.zeros_like(), Ok)?;
            gradients.insert(variable.id(), gradient);
        }
        let d_x = match x.track_op() {
            true => Some(store.remove(&input).map_or_else(|| x.zeros_like(), Ok)?),
            false => None,
        };
        Ok([d_x, carrier.track_op().then(|| carrier.zeros_like()).transpose()?])
    }
}

custom_op!(differentiable CustomOp2 for Recomputed, OP, x x_layout, carrier carrier_layout);

/// A loss whose gradient is the one given: a backward pass begins with it.
struct Seed(Tensor);

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> CpuOutput {
        Ok((CpuStorage::F32(vec![0.0]), ().into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, y: &candle_core::CudaStorage, _: &Layout) -> CudaOutput {
        use candle_core::backend::BackendStorage;
        Ok((candle_gdn_core::device::cuda::zeros_of(y.device(), DType::F32, &[1])?, ().into()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}
