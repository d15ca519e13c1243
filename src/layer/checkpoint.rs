//! Recomputation: a function whose forward pass runs again in its backward pass, so that between them only its inputs are kept.
//!
//! An op of candle has at most three arguments, but a function may read any number of variables, and candle gives gradients to an
//! op's arguments alone. The variables, and all inputs but the first, are arguments of a chain of ops whose outputs carry nothing; the
//! last of them is an argument of the function's own op, whose output carries nothing either. Its backward pass comes first, computes
//! all gradients and leaves those for the chain. All that the function returns are side outputs: an output that a loss does not
//! reach has no gradient, not zeros, and what it alone depends on has none.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Tensor, TensorId, Var};
use candle_gdn_core::check::*;
use candle_gdn_core::custom_op;
use candle_gdn_core::device::{SideOutput, Working};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

const OP: &str = "checkpoint";

type Function = dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync;

/// The outputs of `function`, of which nothing but its inputs is kept, with gradients of these and of each variable that it reads.
pub fn checkpoint(
    inputs: &[&Tensor],
    function: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync + 'static,
) -> Result<Vec<Tensor>> {
    let inputs: Vec<Tensor> = inputs.iter().copied().cloned().collect();
    let (outputs, variables) = run(&inputs, &function)?;
    let mut reads = vec![];
    for read in inputs[1..].iter().filter(|input| input.track_op()).chain(&variables) {
        if !has(&reads, read) {
            reads.push(read.clone());
        }
    }
    let gradients = Arc::<Gradients>::default();
    let mut carrier = Tensor::zeros(1, DType::F32, inputs[0].device())?;
    for pair in reads.chunks(2) {
        carrier = carrier.apply_op3(&pair[0], &pair[pair.len() - 1], Carrier(gradients.clone()))?;
    }
    let x = inputs[0].clone();
    let function = Box::new(function);
    let op = Recomputed { function, inputs, variables, gradients, outputs: outputs.clone() };
    let main = x.apply_op2(&carrier, op)?;
    outputs.into_iter().map(|output| output.tensor(&main)).collect()
}

/// The outputs once, without what led to them, and the variables that they depend on.
fn run(inputs: &[Tensor], function: &Function) -> Result<(Vec<Arc<SideOutput>>, Vec<Tensor>)> {
    let leaves = leaves(inputs)?;
    let (mut kept, mut variables) = (vec![], vec![]);
    for output in function(&leaves)? {
        for node in output.sorted_nodes() {
            if node.is_variable() && !has(&leaves, node) && !has(&variables, node) {
                variables.push(node.clone());
            }
        }
        let (side, output) = (Arc::<SideOutput>::default(), plain(&output)?);
        side.put(output.storage_and_layout().0.try_clone(output.layout())?, output.shape());
        kept.push(side);
    }
    Ok((kept, variables))
}

/// The inputs as tensors from which no graph leads on. Tracked ones are variables in both passes, so that the first refuses what
/// the second would.
fn leaves(inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    let leaf = |input: &Tensor| match input.track_op() {
        true => Ok(Var::from_tensor(&input.detach())?.into_inner()),
        false => Ok(input.detach()),
    };
    inputs.iter().map(leaf).collect()
}

fn has(all: &[Tensor], tensor: &Tensor) -> bool {
    all.iter().any(|other| other.id() == tensor.id())
}

/// Without gradients, and in a storage of its own.
fn plain(output: &Tensor) -> Result<Tensor> {
    match output.layout().start_offset() {
        0 => output.detach().contiguous(),
        _ => output.detach().force_contiguous(),
    }
}

/// Gradients of what the chain has as arguments, between the backward pass of the function and those of the chain; of each thread
/// that walks the graph.
#[derive(Default)]
struct Gradients(Mutex<HashMap<ThreadId, HashMap<TensorId, Tensor>>>);

impl Gradients {
    fn lock(&self) -> MutexGuard<'_, HashMap<ThreadId, HashMap<TensorId, Tensor>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, gradients: HashMap<TensorId, Tensor>) {
        self.lock().insert(thread::current().id(), gradients);
    }

    fn take(&self, tensor: &Tensor) -> Option<Tensor> {
        self.lock().get_mut(&thread::current().id())?.remove(&tensor.id())
    }
}

/// The output of an op that carries nothing.
fn nothing_on_cpu() -> CpuOutput {
    Ok((CpuStorage::F32(vec![0.0]), 1.into()))
}

#[cfg(feature = "cuda")]
fn nothing_on_cuda(beside: &candle_core::CudaStorage) -> CudaOutput {
    use candle_core::backend::BackendStorage;
    Ok((candle_gdn_core::device::cuda::zeros_of(beside.device(), DType::F32, &[1])?, 1.into()))
}

/// An op whose output carries nothing but the order of two backward passes.
struct Carrier(Arc<Gradients>);

impl Carrier {
    fn on_cpu(&self, _: [CpuArg<'_>; 3]) -> CpuOutput {
        nothing_on_cpu()
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(&self, [carrier, ..]: [CudaArg<'_>; 3]) -> CudaOutput {
        nothing_on_cuda(carrier.0)
    }

    fn backward(&self, [carrier, first, second]: [&Tensor; 3], grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        // An odd one is both: it has its gradient once.
        Ok([carrier.track_op().then(|| grad.clone()), self.0.take(first), self.0.take(second)])
    }
}

custom_op!(differentiable CustomOp3 for Carrier, OP, carrier carrier_layout, first first_layout, second second_layout);

/// The function's own op.
struct Recomputed {
    function: Box<Function>,
    inputs: Vec<Tensor>,
    variables: Vec<Tensor>,
    gradients: Arc<Gradients>,
    outputs: Vec<Arc<SideOutput>>,
}

impl Recomputed {
    fn on_cpu(&self, _: [CpuArg<'_>; 2]) -> CpuOutput {
        nothing_on_cpu()
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(&self, [x, _]: [CudaArg<'_>; 2]) -> CudaOutput {
        nothing_on_cuda(x.0)
    }

    fn backward(&self, [x, carrier]: [&Tensor; 2], _: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let _working = Working::new(x.device());
        let leaves = leaves(&self.inputs)?;
        let mut loss = Tensor::zeros((), DType::F32, x.device())?;
        for (output, side) in (self.function)(&leaves)?.into_iter().zip(&self.outputs) {
            if let Some(grad) = side.take_gradient() {
                loss = (loss + output.apply_op1(Seed(grad))?)?;
            }
        }
        let mut store = loss.backward()?;
        drop(loss);
        let of_leaves = self.inputs.iter().zip(&leaves).filter(|(input, _)| input.track_op());
        let of_leaves = of_leaves.map(|(input, leaf)| match store.remove(leaf) {
            None if input.is_variable() => Ok((input, None)),
            // candle goes on through whatever led to it, and expects a gradient there.
            None => Ok((input, Some(input.zeros_like()?))),
            found => Ok((input, found)),
        });
        let mut all = of_leaves.collect::<Result<Vec<_>>>()?;
        let d_x = all.first_mut().filter(|_| x.track_op()).and_then(|(_, gradient)| gradient.take());
        all.extend(self.variables.iter().map(|variable| (variable, store.remove(variable))));
        let mut gradients = HashMap::new();
        for (tensor, gradient) in all.into_iter().filter_map(|(tensor, gradient)| Some((tensor, gradient?))) {
            // A variable may be an input and be read by a module as well.
            let sum = match gradients.remove(&tensor.id()) {
                Some(other) => (other + gradient)?,
                None => gradient,
            };
            gradients.insert(tensor.id(), sum);
        }
        self.gradients.put(gradients);
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
