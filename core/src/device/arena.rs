//! Outputs that stay where they are from pass to pass, for a pass that is captured as a graph.

use super::in_place_cuda;
use super::pointers::write;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::op::BackpropOp;
use candle_core::{bail, CudaDevice, CudaStorage, DType, Device, Error, Result, Shape, Storage, Tensor};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[cfg(test)]
mod tests;

const NAME: &str = "arena";

/// What the ops of a pass write, kept from one pass to the next; an op finds it in its [`Launch`](super::Launch).
///
/// In a graph every allocation is a node, and so is its release. Between two kernels they keep the second from
/// beginning while the first still runs: some 2 µs a kernel. The first pass with an arena allocates; those after it,
/// of the same ops on the same shapes in the same order, write to the same places.
///
/// The outputs of a layer are written again two layers later ([`Arena::next_layer`]): no tensor may be held for longer.
/// Builds with debug assertions fill them with NaN when their time is over, so that whoever holds one reads NaN.
#[derive(Debug, Clone)]
pub struct Arena(Arc<Mutex<Outputs>>);

#[derive(Debug, Default)]
struct Outputs {
    tensors: HashMap<Key, Tensor>,
    /// Shared by all that need one: each kernel waits for those before it before it writes.
    workspace: Option<Tensor>,
    /// What a tensor holds while an op has its storage. Lost by an op that fails; then nothing is placed any more.
    placeholder: Option<CudaStorage>,
    layer: usize,
    /// Outputs of the layer so far.
    count: usize,
    /// Of the op that runs, and its tensor, if there is one already.
    pending: Option<(Key, Option<Tensor>)>,
}

/// The layer's parity, the output's number in it, its dtype and shape.
type Key = (usize, usize, DType, Vec<usize>);

impl Arena {
    /// # Errors
    /// When the device is none of CUDA, or out of memory.
    pub fn new(device: &Device) -> Result<Self> {
        let _working = super::Working::new(device);
        let Device::Cuda(device) = device else { bail!("{NAME}: expected a CUDA device, got {:?}", device.location()) };
        let placeholder = CudaStorage::wrap_cuda_slice(device.alloc_zeros::<f32>(1)?, device.clone());
        Ok(Self(Arc::new(Mutex::new(Outputs { placeholder: Some(placeholder), ..Outputs::default() }))))
    }

    /// A pass begins. What the one before it returned must not be an output that this one writes again.
    pub fn begin_pass(&self) {
        let mut outputs = self.outputs();
        outputs.forget_failed();
        (outputs.layer, outputs.count) = (0, 0);
    }

    /// The next layer of a pass begins.
    pub fn next_layer(&self) {
        let mut outputs = self.outputs();
        outputs.forget_failed();
        outputs.layer += 1;
        outputs.count = 0;
        #[cfg(debug_assertions)]
        outputs.fill_with_nan();
    }

    fn outputs(&self) -> MutexGuard<'_, Outputs> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Outputs {
    /// The storage that this op wrote in the last pass, if dtype and shape are the same.
    fn take(&mut self, dtype: DType, shape: &[usize]) -> Result<Option<CudaStorage>> {
        self.forget_failed();
        let key = (self.layer % 2, self.count, dtype, shape.to_vec());
        self.count += 1;
        let tensor = self.tensors.get(&key).cloned();
        let taken = match (&tensor, self.placeholder.take()) {
            (Some(tensor), Some(placeholder)) => {
                Some(in_place_cuda(NAME, tensor, |(storage, _)| Ok(std::mem::replace(storage, placeholder)))?)
            }
            (_, placeholder) => {
                self.placeholder = placeholder;
                None
            }
        };
        self.pending = Some((key, tensor.filter(|_| taken.is_some())));
        Ok(taken)
    }

    /// Gives the pending tensor its storage back.
    fn put(&mut self, tensor: &Tensor, storage: CudaStorage) -> Result<()> {
        self.placeholder = Some(in_place_cuda(NAME, tensor, |(held, _)| Ok(std::mem::replace(held, storage)))?);
        Ok(())
    }

    /// An op that allocated a storage and never finished: its tensor holds the placeholder, which no op may write.
    fn forget_failed(&mut self) {
        if let Some((key, Some(_))) = self.pending.take() {
            self.tensors.remove(&key);
        }
    }

    /// Fills what this layer will write with NaN.
    #[cfg(debug_assertions)]
    fn fill_with_nan(&self) {
        use candle_core::cuda_backend::cudarc::driver::result::memset_d8_async;
        for ((parity, _, dtype, _), tensor) in &self.tensors {
            if *parity == self.layer % 2 {
                let bytes = tensor.elem_count() * dtype.size_in_bytes();
                let filled = in_place_cuda(NAME, tensor, |(storage, _)| {
                    let stream = &*super::pointers::stream_of(storage)?;
                    let address = write(storage, stream)?.at::<c_void>(0, 1) as u64;
                    // SAFETY: the tensor is a whole allocation of so many bytes.
                    unsafe { memset_d8_async(address, 0xff, bytes, stream.cu_stream()) }.map_err(Error::wrap)
                });
                debug_assert!(filled.is_ok(), "{NAME}: {filled:?}");
            }
        }
    }
}

/// An op's only output, of which every element will be written; [`finish`] or [`undo`] gets it next.
pub fn alloc(arena: Option<&Arena>, like: &CudaStorage, shape: &[usize]) -> Result<CudaStorage> {
    let placed = match arena {
        Some(arena) if !shape.contains(&0) => arena.outputs().take(like.dtype(), shape)?,
        _ => None,
    };
    placed.map_or_else(|| super::pointers::alloc(like, shape), Ok)
}

/// The op does not run after all.
pub fn undo(arena: Option<&Arena>, out: CudaStorage) -> Result<()> {
    let Some(arena) = arena else { return Ok(()) };
    let mut outputs = arena.outputs();
    match outputs.pending.take() {
        Some((_, Some(tensor))) => outputs.put(&tensor, out),
        _ => Ok(()),
    }
}

/// The tensor of what an op wrote.
pub fn finish(arena: Option<&Arena>, out: CudaStorage, shape: Shape) -> Result<Tensor> {
    let new = |out, shape| Tensor::from_storage(Storage::Cuda(out), shape, BackpropOp::none(), false);
    let Some(arena) = arena else { return Ok(new(out, shape)) };
    let mut outputs = arena.outputs();
    match outputs.pending.take() {
        Some((_, Some(tensor))) => {
            outputs.put(&tensor, out)?;
            tensor.reshape(shape)
        }
        Some((key, None)) => {
            let tensor = new(out, shape);
            outputs.tensors.insert(key, tensor.clone());
            Ok(tensor)
        }
        None => Ok(new(out, shape)),
    }
}

/// Calls `launch` with the address of so many bytes that mean nothing before and after, null for none. They are freed
/// on the stream after the launch, or kept in the arena.
pub fn with_workspace<R>(
    arena: Option<&Arena>,
    device: &CudaDevice,
    stream: &CudaStream,
    bytes: usize,
    launch: impl FnOnce(*mut c_void) -> Result<R>,
) -> Result<R> {
    if bytes == 0 {
        return launch(std::ptr::null_mut());
    }
    let words = bytes.div_ceil(4);
    let new = || {
        // SAFETY: the kernels read nothing there that they have not written.
        let slice = unsafe { device.alloc::<u32>(words)? };
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(slice, device.clone()));
        Ok::<_, Error>(Tensor::from_storage(storage, words, BackpropOp::none(), false))
    };
    let tensor = match arena {
        None => new()?,
        Some(arena) => {
            let mut outputs = arena.outputs();
            match &outputs.workspace {
                Some(kept) if kept.elem_count() >= words => kept.clone(),
                _ => outputs.workspace.insert(new()?).clone(),
            }
        }
    };
    in_place_cuda(NAME, &tensor, |(storage, _)| launch(write(storage, stream)?.at(0, 4)))
}
