//! Custom ops on tensors: candle's way on the CPU, a shorter one on CUDA, whose outputs an arena may place.

use super::launch::Arena;
use crate::check::check_untracked;
use candle_core::{CustomOp1, CustomOp2, CustomOp3, Result, Tensor};

/// `op` on three tensors, given with their names, that the caller has found to be on one device; none is tracked for a
/// gradient.
pub fn apply3<C: CustomOp3>(op: &C, arena: Option<&Arena>, args: [(&str, &Tensor); 3]) -> Result<Tensor> {
    let [x, y, z] = untracked(op.name(), args)?;
    #[cfg(feature = "cuda")]
    if let Some(out) = on_cuda([x, y, z], arena, |[x, y, z]| op.cuda_fwd(x.0, x.1, y.0, y.1, z.0, z.1))? {
        return Ok(out);
    }
    let _ = arena;
    x.apply_op3_no_bwd(y, z, op)
}

/// The same on two.
pub fn apply2<C: CustomOp2>(op: &C, arena: Option<&Arena>, args: [(&str, &Tensor); 2]) -> Result<Tensor> {
    let [x, y] = untracked(op.name(), args)?;
    #[cfg(feature = "cuda")]
    if let Some(out) = on_cuda([x, y], arena, |[x, y]| op.cuda_fwd(x.0, x.1, y.0, y.1))? {
        return Ok(out);
    }
    let _ = arena;
    x.apply_op2_no_bwd(y, op)
}

/// The same on one.
pub fn apply1<C: CustomOp1>(op: &C, arena: Option<&Arena>, arg: (&str, &Tensor)) -> Result<Tensor> {
    let [x] = untracked(op.name(), [arg])?;
    #[cfg(feature = "cuda")]
    if let Some(out) = on_cuda([x], arena, |[x]| op.cuda_fwd(x.0, x.1))? {
        return Ok(out);
    }
    let _ = arena;
    x.apply_op1_no_bwd(op)
}

fn untracked<'a, const N: usize>(op: &str, args: [(&str, &'a Tensor); N]) -> Result<[&'a Tensor; N]> {
    args.iter().try_for_each(|(arg, tensor)| check_untracked(op, arg, tensor))?;
    Ok(args.map(|(_, tensor)| tensor))
}

/// The tensor of what `run` returns for the storages and layouts; `None` where not all tensors are on CUDA. candle's own way
/// compares the devices once more, by cloning them, which takes as long as all our checks.
#[cfg(feature = "cuda")]
fn on_cuda<const N: usize>(
    tensors: [&Tensor; N],
    arena: Option<&Arena>,
    run: impl FnOnce(
        [(&candle_core::CudaStorage, &candle_core::Layout); N],
    ) -> Result<(candle_core::CudaStorage, candle_core::Shape)>,
) -> Result<Option<Tensor>> {
    if !tensors.iter().all(|tensor| tensor.device().is_cuda()) {
        return Ok(None);
    }
    let _working = super::Working::new(tensors[0].device());
    let locked = super::Locked::new(tensors);
    let storages = locked.storages();
    let args: [_; N] = std::array::from_fn(|i| match storages[i] {
        candle_core::Storage::Cuda(storage) => (storage, tensors[i].layout()),
        _ => unreachable!("a tensor on CUDA has a storage on CUDA"),
    });
    let (out, shape) = run(args)?;
    super::arena::finish(arena, out, shape).map(Some)
}

/// candle's custom op for `$op`, of the name `$name`: each argument's storage with its layout goes to the op's own
/// `on_cpu([(storage, layout), ..])` or `on_cuda`, which return an output and its shape. A `differentiable` one of several
/// arguments has `backward([tensor, ..], gradient of the output)`, which returns the gradients of the arguments: some for each
/// that is tracked.
#[macro_export]
macro_rules! custom_op {
    (differentiable $trait:ident for $op:ty, $name:expr, $($arg:ident $layout:ident),+) => {
        $crate::custom_op!($trait for $op, $name, $($arg $layout),+; {
            fn bwd(
                &self,
                $($arg: &candle_core::Tensor,)+
                _: &candle_core::Tensor,
                grad: &candle_core::Tensor,
            ) -> candle_core::Result<($($crate::custom_op!(@gradient $arg),)+)> {
                Ok(self.backward([$($arg),+], grad)?.into())
            }
        });
    };
    (@gradient $arg:ident) => { Option<candle_core::Tensor> };
    ($trait:ident for $op:ty, $name:expr, $($arg:ident $layout:ident),+ $(; {$($more:tt)*})?) => {
        impl candle_core::$trait for $op {
            fn name(&self) -> &'static str {
                $name
            }

            fn cpu_fwd(
                &self,
                $($arg: &candle_core::CpuStorage, $layout: &candle_core::Layout,)+
            ) -> candle_core::Result<(candle_core::CpuStorage, candle_core::Shape)> {
                self.on_cpu([$(($arg, $layout)),+])
            }

            #[cfg(feature = "cuda")]
            fn cuda_fwd(
                &self,
                $($arg: &candle_core::CudaStorage, $layout: &candle_core::Layout,)+
            ) -> candle_core::Result<(candle_core::CudaStorage, candle_core::Shape)> {
                self.on_cuda([$(($arg, $layout)),+])
            }

            $($($more)*)?
        }
    };
}
