//! Recomputation: a function whose forward pass runs again in its backward pass, so that between them only its inputs are kept.
//!
//! An op of candle has at most three arguments, but a function may read any number of variables, and candle gives gradients to an
//! op's arguments alone. The variables, and all inputs but the first, are arguments of a chain of ops whose outputs carry nothing; the
//! last of them is an argument of the function's own op. Its backward pass comes first, computes all gradients and leaves those for the
//! chain. The function's first output is that of the op, further ones are side outputs.

use candle_core::{bail, CpuStorage, CustomOp1, DType, Layout, Result, Shape, Storage, Tensor, TensorId, Var};
use candle_gdn_core::check::*;
use candle_gdn_core::custom_op;
use candle_gdn_core::device::{SideOutput, Working};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const OP: &str = "checkpoint";

type Function = dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync;

/// The outputs of `function`, of which nothing but its inputs is kept, with gradients of these and of each variable that it reads.
pub fn checkpoint(
    inputs: &[&Tensor],
    function: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync + 'static,
) -> Result<Vec<Tensor>> {
    let inputs: Vec<Tensor> = inputs.iter().copied().cloned().collect();
    let detached: Vec<Tensor> = inputs.iter().map(Tensor::detach).collect();
    let outputs = function(&detached)?;
    let mut reads: Vec<Tensor> = inputs[1..].iter().filter(|input| input.track_op()).cloned().collect();
    let mut variables = vec![];
    for node in outputs.iter().flat_map(Tensor::sorted_nodes).filter(|node| node.is_variable()) {
        if !variables.iter().any(|known: &Tensor| known.id() == node.id()) {
            variables.push(node.clone());
        }
    }
    reads.extend(variables.iter().cloned());
    let outputs = outputs.iter().map(plain).collect::<Result<Vec<_>>>()?;
    let gradients = Arc::<Gradients>::default();
    let mut carrier = Tensor::zeros(1, DType::F32, inputs[0].device())?;
    for pair in reads.chunks(2) {
        carrier = carrier.apply_op3(&pair[0], &pair[pair.len() - 1], Carrier(gradients.clone()))?;
    }
    let mut further = vec![];
    for output in &outputs[1..] {
        let side = Arc::<SideOutput>::default();
        side.put(output.storage_and_layout().0.try_clone(output.layout())?, output.shape());
        further.push(side);
    }
    let x = inputs[0].clone();
    let op = Recomputed {
        function: Box::new(function),
        inputs,
        variables,
        gradients,
        y: Mutex::new(outputs.into_iter().next()),
        further: further.clone(),
    };
    let y = x.apply_op2(&carrier, op)?;
    let further: Vec<_> = further.into_iter().map(|side| side.tensor(&y)).collect::<Result<_>>()?;
    Ok([vec![y], further].concat())
}

/// Without gradients, and in a storage of its own.
fn plain(output: &Tensor) -> Result<Tensor> {
    match output.layout().start_offset() {
        0 => output.detach().contiguous(),
        _ => output.detach().force_contiguous(),
    }
}

/// Gradients of what the chain has as arguments, between the backward pass of the function and those of the chain.
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
    inputs: Vec<Tensor>,
    variables: Vec<Tensor>,
    gradients: Arc<Gradients>,
    /// What the function returned first, until the forward pass has it.
    y: Mutex<Option<Tensor>>,
    further: Vec<Arc<SideOutput>>,
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
        let _working = Working::new(x.device());
        let mut inputs = vec![];
        for input in &self.inputs {
            inputs.push(match input.track_op() {
                true => Var::from_tensor(&input.detach())?.into_inner(),
                false => input.detach(),
            });
        }
        let further: Vec<_> = self.further.iter().map(|side| side.take_gradient()).collect();
        let outputs = (self.function)(&inputs)?;
        let mut loss = outputs[0].apply_op1(Seed(grad.clone()))?;
        for (output, grad) in outputs[1..].iter().zip(further) {
            if let Some(grad) = grad {
                loss = (loss + output.apply_op1(Seed(grad))?)?;
            }
        }
        drop(outputs);
        let mut store = loss.backward()?;
        drop(loss);
        let mut gradient = |of: &Tensor| store.remove(of).map_or_else(|| of.zeros_like(), Ok);
        let d_x = x.track_op().then(|| gradient(&inputs[0])).transpose()?;
        let mut gradients = self.gradients.lock();
        gradients.clear();
        for (input, variable) in self.inputs.iter().zip(&inputs).skip(1).filter(|(input, _)| input.track_op()) {
            gradients.insert(input.id(), gradient(variable)?);
        }
        for variable in &self.variables {
            gradients.insert(variable.id(), gradient(variable)?);
        }
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
