//! Outputs that stay where they are from run to run, for a pass that is captured as a graph.
//!
//! In a graph every allocation is a node, and so is its release. Between two kernels they keep the second from
//! beginning while the first still runs: some 2 µs a kernel. While [`Outputs::during`] runs a pass, the ops that ask
//! [`alloc`] instead of [`super::alloc`] write what they wrote in the pass before: the first one allocates,
//! those after it do not. The tensors of a layer are written again two layers later: nothing may be held for longer.

use super::in_place;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Device, Error, Result, Shape, Storage, Tensor};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;

const NAME: &str = "outputs";

/// What the ops of a pass write.
#[derive(Debug, Default)]
pub(crate) struct Outputs {
    tensors: HashMap<Key, Tensor>,
    /// Shared by all that need one: each kernel waits for those before it before it writes.
    workspace: Option<Tensor>,
    /// What a tensor holds while an op has its storage. Lost by an op that fails; then nothing is placed any more.
    stand_in: Option<CudaStorage>,
    layer: usize,
    /// Outputs of the layer so far.
    count: usize,
    /// Of the op that runs, and its tensor, if there is one already.
    pending: Option<(Key, Option<Tensor>)>,
}

/// The layer's parity, the output's number in it, its dtype and shape.
type Key = (usize, usize, DType, Vec<usize>);

thread_local! {
    static ACTIVE: RefCell<Option<Outputs>> = const { RefCell::new(None) };
}

impl Outputs {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let stand_in = match device {
            Device::Cuda(device) => Some(CudaStorage::wrap_cuda_slice(device.alloc_zeros::<f32>(1)?, device.clone())),
            _ => None,
        };
        Ok(Self { stand_in, ..Self::default() })
    }

    /// One pass, whose ops write these outputs. What it returns must not be one of them.
    pub(crate) fn during<R>(held: &RefCell<Self>, pass: impl FnOnce() -> R) -> R {
        let mut outputs = held.take();
        (outputs.layer, outputs.count) = (0, 0);
        ACTIVE.set(Some(outputs));
        let _back = Back(held);
        pass()
    }

    /// The storage that the op which asks now wrote the last time, if it was of this kind.
    fn take(&mut self, dtype: DType, shape: &[usize]) -> Result<Option<CudaStorage>> {
        self.forget_failed();
        let key = (self.layer % 2, self.count, dtype, shape.to_vec());
        self.count += 1;
        let tensor = self.tensors.get(&key).cloned();
        let taken = match (&tensor, self.stand_in.take()) {
            (Some(tensor), Some(stand_in)) => {
                Some(in_place(NAME, tensor, |storage, _| Ok(std::mem::replace(storage, stand_in)))?)
            }
            (_, stand_in) => {
                self.stand_in = stand_in;
                None
            }
        };
        self.pending = Some((key, tensor.filter(|_| taken.is_some())));
        Ok(taken)
    }

    /// Gives the pending tensor its storage back.
    fn put(&mut self, tensor: &Tensor, storage: CudaStorage) -> Result<()> {
        self.stand_in = Some(in_place(NAME, tensor, |held, _| Ok(std::mem::replace(held, storage)))?);
        Ok(())
    }

    /// An op that took a storage and never finished: its tensor holds the stand-in, which nobody may write.
    fn forget_failed(&mut self) {
        if let Some((key, Some(_))) = self.pending.take() {
            self.tensors.remove(&key);
        }
    }
}

/// Brings the outputs back, also from a panic.
struct Back<'a>(&'a RefCell<Outputs>);

impl Drop for Back<'_> {
    fn drop(&mut self) {
        if let Some(mut outputs) = ACTIVE.take() {
            outputs.forget_failed();
            self.0.replace(outputs);
        }
    }
}

/// The next layer of a pass begins.
pub(crate) fn next_layer() {
    ACTIVE.with_borrow_mut(|active| {
        if let Some(outputs) = active {
            outputs.layer += 1;
            outputs.count = 0;
        }
    });
}

/// [`super::alloc`] of an op's only output, which [`finish`] or [`undo`] gets.
pub(super) fn alloc(like: &CudaStorage, shape: &[usize]) -> Result<CudaStorage> {
    let placed = ACTIVE.with_borrow_mut(|active| match active {
        Some(outputs) if !shape.contains(&0) => outputs.take(like.dtype(), shape),
        _ => Ok(None),
    })?;
    placed.map_or_else(|| super::alloc(like, shape), Ok)
}

/// The op does not run after all.
pub(super) fn undo(out: CudaStorage) -> Result<()> {
    ACTIVE.with_borrow_mut(|active| match active.as_mut().map(|outputs| (outputs.pending.take(), outputs)) {
        Some((Some((_, Some(tensor))), outputs)) => outputs.put(&tensor, out),
        _ => Ok(()),
    })
}

/// The tensor of what an op wrote.
pub(crate) fn finish(out: CudaStorage, shape: Shape) -> Result<Tensor> {
    let new = |out, shape| Tensor::from_storage(Storage::Cuda(out), shape, BackpropOp::none(), false);
    ACTIVE.with_borrow_mut(|active| match active.as_mut().map(|outputs| (outputs.pending.take(), outputs)) {
        Some((Some((_, Some(tensor))), outputs)) => {
            outputs.put(&tensor, out)?;
            tensor.reshape(shape)
        }
        Some((Some((key, None)), outputs)) => {
            let tensor = new(out, shape);
            outputs.tensors.insert(key, tensor.clone());
            Ok(tensor)
        }
        _ => Ok(new(out, shape)),
    })
}

/// Calls `launch` with the address of so many bytes that mean nothing before and after, null for none. They are freed
/// on the stream, behind the launch, or stay.
pub(super) fn with_workspace<R>(
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
    let tensor = ACTIVE.with_borrow_mut(|active| match active {
        Some(Outputs { workspace: Some(kept), .. }) if kept.elem_count() >= words => Ok(kept.clone()),
        Some(outputs) => Ok(outputs.workspace.insert(new()?).clone()),
        None => new(),
    })?;
    in_place(NAME, &tensor, |storage, _| {
        let pointer = super::write(storage, stream)?;
        launch(pointer.at(0, 4))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::rms_norm;

    fn address(tensor: &Tensor) -> u64 {
        let (storage, _) = tensor.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { unreachable!("a tensor on CUDA") };
        let stream = storage.device().cuda_stream();
        let pointer = super::super::read(storage, &stream).unwrap();
        pointer.at::<c_void>(0, 4).addr() as u64
    }

    #[test]
    fn passes_write_the_same_places() {
        if std::env::var("CANDLE_GDN_TEST_DEVICE").as_deref() == Ok("cpu") {
            return;
        }
        let Ok(device) = Device::new_cuda(0) else { return };
        let weight = Tensor::ones(16, DType::F32, &device).unwrap();
        let norm = |x: &Tensor| rms_norm(x, &weight, 1e-6).unwrap();
        let held = RefCell::new(Outputs::new(&device).unwrap());
        let mut places = vec![];
        for pass in 0..3 {
            let x = Tensor::randn(0f32, 1., (3, 16), &device).unwrap();
            let values = |x: &Tensor| x.to_vec2::<f32>().unwrap();
            let want = [norm(&x), norm(&norm(&x))].map(|x| values(&x));
            let mut here = vec![];
            Outputs::during(&held, || {
                // Of two layers later it is the place of the first again; another shape has one of its own.
                for layer in 0..4 {
                    next_layer();
                    let y = norm(&x);
                    let z = norm(&y);
                    assert_eq!([values(&y), values(&z)], want, "pass {pass}, layer {layer}");
                    norm(&x.narrow(0, 0, 2 - layer % 2).unwrap());
                    // One that fails takes nothing.
                    assert!(rms_norm(&x, &weight.narrow(0, 0, 8).unwrap(), 1e-6).is_err());
                    here.extend([address(&y), address(&z)]);
                }
            });
            assert_eq!(here[..4], here[4..]);
            places.push(here);
        }
        assert_eq!(places[0], places[1]);
        assert_eq!(places[1], places[2]);
        // Outside of a pass nothing is placed.
        let x = Tensor::randn(0f32, 1., (3, 16), &device).unwrap();
        assert_ne!(address(&norm(&x)), places[0][0]);
    }
}
