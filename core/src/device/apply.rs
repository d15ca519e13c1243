//! Custom ops on tensors: candle's way on the CPU, a shorter one on CUDA, whose outputs an arena may place.

use super::launch::Arena;
#[cfg(feature = "cuda")]
use super::Working;
#[cfg(feature = "cuda")]
use crate::check::storage_key;
#[cfg(feature = "cuda")]
use candle_core::Storage;
use candle_core::{CustomOp1, CustomOp2, CustomOp3, Result, Tensor};

/// `op` on three tensors that the caller has found to be on one device.
pub fn apply3<C: CustomOp3>(op: &C, arena: Option<&Arena>, x: &Tensor, y: &Tensor, z: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        let _working = Working::new(x.device());
        // candle's own way compares the three devices once more, by cloning them, which takes as long as all our checks.
        // A storage that two of them share is locked once.
        let keys = [x, y, z].map(storage_key);
        let x_guard = x.storage_and_layout().0;
        let y_guard = (keys[1] != keys[0]).then(|| y.storage_and_layout().0);
        let z_guard = (keys[2] != keys[0] && keys[2] != keys[1]).then(|| z.storage_and_layout().0);
        let y_storage = y_guard.as_deref().unwrap_or(&*x_guard);
        let z_storage = z_guard.as_deref().unwrap_or(if keys[2] == keys[0] { &*x_guard } else { y_storage });
        if let [Storage::Cuda(a), Storage::Cuda(b), Storage::Cuda(c)] = [&*x_guard, y_storage, z_storage] {
            let (out, shape) = op.cuda_fwd(a, x.layout(), b, y.layout(), c, z.layout())?;
            return super::arena::finish(arena, out, shape);
        }
    }
    let _ = arena;
    x.apply_op3_no_bwd(y, z, op)
}

/// The same on two.
pub fn apply2<C: CustomOp2>(op: &C, arena: Option<&Arena>, x: &Tensor, y: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        let _working = Working::new(x.device());
        let shared = storage_key(x) == storage_key(y);
        let x_guard = x.storage_and_layout().0;
        let y_guard = (!shared).then(|| y.storage_and_layout().0);
        if let [Storage::Cuda(a), Storage::Cuda(b)] = [&*x_guard, y_guard.as_deref().unwrap_or(&*x_guard)] {
            let (out, shape) = op.cuda_fwd(a, x.layout(), b, y.layout())?;
            return super::arena::finish(arena, out, shape);
        }
    }
    let _ = arena;
    x.apply_op2_no_bwd(y, op)
}

/// The same on one.
pub fn apply1<C: CustomOp1>(op: &C, arena: Option<&Arena>, x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        let _working = Working::new(x.device());
        let guard = x.storage_and_layout().0;
        if let Storage::Cuda(storage) = &*guard {
            let (out, shape) = op.cuda_fwd(storage, x.layout())?;
            return super::arena::finish(arena, out, shape);
        }
    }
    let _ = arena;
    x.apply_op1_no_bwd(op)
}

/// candle's custom op for `$op`, of the name `$name`: each argument's storage with its layout goes to the op's own
/// `on_cpu([(storage, layout), ..])` or `on_cuda`, which return an output and its shape.
#[macro_export]
macro_rules! custom_op {
    ($trait:ident for $op:ty, $name:expr, $($arg:ident $layout:ident),+) => {
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
        }
    };
}
