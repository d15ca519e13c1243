//! What the launches on CUDA share.

use candle_core::{bail, CudaStorage, Layout, Result, Shape, Storage, Tensor};
use candle_gdn_core::device::cuda::finish;
use candle_gdn_core::{Arena, Working};

/// The tensor that `launch` makes of `x`, as candle applies an op without a gradient; in `arena` where there is one.
pub(crate) fn apply(
    op: &str,
    arena: Option<&Arena>,
    x: &Tensor,
    launch: impl FnOnce(&CudaStorage, &Layout) -> Result<(CudaStorage, Shape)>,
) -> Result<Tensor> {
    let _working = Working::new(x.device());
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { bail!("{op}: x: expected a CUDA tensor") };
    let (out, shape) = launch(storage, layout)?;
    finish(arena, out, shape)
}
