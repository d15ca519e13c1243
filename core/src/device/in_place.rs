//! Tensors that an op writes in place: the one way to do so, through candle's own machinery, so that its locks hold.
//!
//! A thread takes locks in this order, any of which it may skip:
//! 1. the shared stream ([`Working`]), which a thread that captures a graph has for itself;
//! 2. the storages of an op's arguments, in their order. On CUDA, untracked ops and backward passes lock one that two of them share once;
//!    candle, which runs ops on the CPU and tracked ones, once for each;
//! 3. the states that it writes: the convolution's, then the recurrent one;
//! 4. the tensors that it holds and reads: weights, gates, slots, boundaries;
//! 5. a ring's tensors, which it writes: keys, updates, decays, inputs.
//!
//! Between them, each released before the next lock is taken:
//! - the arena, and under it the tensor that it lends, for an op's output: after the states and before 4 and 5 to borrow it, and
//!   after the launch to give it back;
//! - the mutex of a pool's `RingSpans`, after the states and before the spans, which are of 4 (in the call that moves them
//!   of 3). A pool that grows keeps it while it copies them.
//!
//! A workspace's tensor is locked last of all and stays locked over the launch.
//!
//! An op refuses arguments that share a storage with what it writes before it locks anything of 3: the thread would wait for
//! itself. A storage that 2 and 4 share, as views of one projection do, is locked twice for reading. A thread that comes to write
//! it in between waits for the first lock, the second lock waits for that thread, and both wait for ever. So nobody may write
//! the arguments of a running op: inside this crate states are behind `&mut`, and projections belong to one call.

use super::Working;
use crate::check::storage_dtype;
use crate::cpu::Element;
use candle_core::{bail, CpuStorage, InplaceOp1, Layout, Result, Tensor};
use std::cell::RefCell;

/// The storage of a tensor that is being written, on whichever device it is.
pub enum StorageMut<'a> {
    Cpu(&'a mut CpuStorage),
    #[cfg(feature = "cuda")]
    Cuda(&'a mut candle_core::CudaStorage),
}

/// A tensor on the CPU under its write lock.
pub type CpuWritten<'a> = (&'a mut CpuStorage, &'a Layout);

/// A tensor on CUDA under its write lock.
#[cfg(feature = "cuda")]
pub type CudaWritten<'a> = (&'a mut candle_core::CudaStorage, &'a Layout);

/// Calls `run` with the tensor's lock held for writing.
pub fn in_place<R>(
    op: &'static str,
    tensor: &Tensor,
    run: impl FnOnce(StorageMut<'_>, &Layout) -> Result<R>,
) -> Result<R> {
    let _working = Working::new(tensor.device());
    let adapter = InPlace { op, run: RefCell::new(Some(run)), out: RefCell::new(None) };
    tensor.inplace_op1(&adapter)?;
    match adapter.out.into_inner() {
        Some(out) => Ok(out),
        None => bail!("{op}: no output"),
    }
}

/// [`in_place`] on the CPU.
pub fn in_place_cpu<R>(op: &'static str, tensor: &Tensor, run: impl FnOnce(CpuWritten<'_>) -> Result<R>) -> Result<R> {
    in_place(op, tensor, |storage, layout| match storage {
        StorageMut::Cpu(storage) => run((storage, layout)),
        #[cfg(feature = "cuda")]
        StorageMut::Cuda(_) => bail!("{op}: expected a tensor on the CPU"),
    })
}

/// The elements of a tensor from its first on.
pub fn elements<'a, S: Element>((op, arg): (&str, &str), (storage, layout): CpuWritten<'a>) -> Result<&'a mut [S]> {
    let dtype = storage_dtype(storage);
    let Some(data) = S::slice_mut(storage) else { bail!("{op}: {arg}: expected another dtype than {dtype:?}") };
    let start = layout.start_offset().min(data.len());
    Ok(&mut data[start..])
}

/// [`in_place`] on CUDA.
#[cfg(feature = "cuda")]
pub fn in_place_cuda<R>(
    op: &'static str,
    tensor: &Tensor,
    run: impl FnOnce(CudaWritten<'_>) -> Result<R>,
) -> Result<R> {
    in_place(op, tensor, |storage, layout| match storage {
        StorageMut::Cuda(storage) => run((storage, layout)),
        StorageMut::Cpu(_) => bail!("{op}: expected a CUDA tensor"),
    })
}

/// [`in_place_cuda`] on a tensor that there may be. candle refuses to write an empty tensor in place for its zero strides, so
/// that one counts as none.
#[cfg(feature = "cuda")]
pub fn in_place_cuda_if_any<R>(
    op: &'static str,
    tensor: Option<&Tensor>,
    run: impl FnOnce(Option<CudaWritten<'_>>) -> Result<R>,
) -> Result<R> {
    match tensor.filter(|tensor| tensor.elem_count() > 0) {
        Some(tensor) => in_place_cuda(op, tensor, |dst| run(Some(dst))),
        None => run(None),
    }
}

struct InPlace<F, R> {
    op: &'static str,
    run: RefCell<Option<F>>,
    out: RefCell<Option<R>>,
}

impl<R, F: FnOnce(StorageMut<'_>, &Layout) -> Result<R>> InPlace<F, R> {
    fn apply(&self, storage: StorageMut<'_>, layout: &Layout) -> Result<()> {
        let Some(run) = self.run.take() else { bail!("{}: applied twice", self.op) };
        *self.out.borrow_mut() = Some(run(storage, layout)?);
        Ok(())
    }
}

impl<R, F: FnOnce(StorageMut<'_>, &Layout) -> Result<R>> InplaceOp1 for InPlace<F, R> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        self.apply(StorageMut::Cpu(storage), layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, layout: &Layout) -> Result<()> {
        self.apply(StorageMut::Cuda(storage), layout)
    }
}
