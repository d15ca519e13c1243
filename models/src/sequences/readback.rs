//! Tokens on their way from the device to the host.

use super::step_graph::Pending;
use crate::abi::logprobs::LOGPROBS_WORDS;
use crate::sampling::rows::tokens;
use crate::sampling::Token;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, PinnedHostSlice};
use candle_core::{bail, Device, Error, Result, Storage, Tensor};
use candle_gdn_core::Working;
use std::cell::RefCell;
use std::rc::Rc;

/// Pinned memory that the output of a step is copied to after the step, while the host goes on.
pub(crate) struct Readback {
    /// One for each tensor.
    host: Vec<PinnedHostSlice<u32>>,
    /// The copies are done. The event of the memory itself would let the thread sleep.
    done: CudaEvent,
}

impl Readback {
    /// For tensors of as many words as these.
    fn new(tensors: &[Tensor]) -> Result<Self> {
        let Some(Device::Cuda(device)) = tensors.first().map(Tensor::device) else {
            bail!("readback: expected tensors on a CUDA device")
        };
        let context = device.cuda_stream().context().clone();
        let pinned = |tensor: &Tensor| {
            let words = tensor.elem_count();
            // SAFETY: written right below, before anything reads it.
            let mut host = unsafe { context.alloc_pinned_with_flags(words, 0) }.map_err(Error::wrap)?;
            host.as_mut_slice().map_err(Error::wrap)?.copy_from_slice(&vec![0; words]);
            Ok(host)
        };
        let host = tensors.iter().map(pinned).collect::<Result<_>>()?;
        Ok(Self { host, done: context.new_event(None).map_err(Error::wrap)? })
    }

    /// Copies the tensors once all work launched so far is done.
    fn send(&mut self, tensors: &[Tensor]) -> Result<()> {
        for (tensor, host) in tensors.iter().zip(&mut self.host) {
            let _working = Working::new(tensor.device());
            let (storage, layout) = tensor.storage_and_layout();
            let Storage::Cuda(storage) = &*storage else { bail!("readback: expected a tensor on CUDA") };
            let first = layout.start_offset();
            let stream = storage.device.cuda_stream();
            let words = storage.as_cuda_slice::<u32>()?.slice(first..first + layout.shape().elem_count());
            stream.memcpy_dtoh(&words, host).map_err(Error::wrap)?;
            self.done.record(&stream).map_err(Error::wrap)?;
        }
        Ok(())
    }

    /// Waits for the last copy: the words of each tensor.
    fn words(&self) -> Result<Vec<Vec<u32>>> {
        self.done.synchronize().map_err(Error::wrap)?;
        self.host.iter().map(|host| Ok(host.as_slice().map_err(Error::wrap)?.to_vec())).collect()
    }
}

impl std::fmt::Debug for Readback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Readback").field("tensors", &self.host.len()).finish_non_exhaustive()
    }
}

/// Two, used in turn: the next step is launched before the tokens of a step are read.
#[derive(Debug)]
pub(crate) struct Readbacks([Rc<RefCell<Readback>>; 2]);

impl Readbacks {
    /// For tensors of as many words as these.
    pub fn new(tensors: &[Tensor]) -> Result<Self> {
        let one = || Readback::new(tensors).map(|readback| Rc::new(RefCell::new(readback)));
        Ok(Self([one()?, one()?]))
    }

    /// Copies the tensors to the host after the work launched so far.
    pub fn send(&mut self, tensors: &[Tensor]) -> Result<Rc<RefCell<Readback>>> {
        self.0.swap(0, 1);
        self.0[0].borrow_mut().send(tensors)?;
        Ok(self.0[0].clone())
    }
}

/// Tokens that a step draws.
#[derive(Debug)]
pub(crate) struct PendingTokens {
    pub readback: Rc<RefCell<Readback>>,
    pub sequences: usize,
    pub layout: Layout,
}

/// What the words of a step are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Layout {
    /// The token of each sequence.
    Single,
    /// How many tokens each sequence has drawn, and that number of tokens at most.
    Counted(usize),
}

impl Pending for PendingTokens {
    fn read(&self) -> Result<Vec<Vec<Token>>> {
        let words = self.readback.borrow().words()?;
        let logprobs = words.get(1).map_or(&[][..], Vec::as_slice);
        Ok(match self.layout {
            Layout::Single => {
                tokens(&words[0][..self.sequences], logprobs).into_iter().map(|token| vec![token]).collect()
            }
            Layout::Counted(most) => {
                let rows = words[0].chunks_exact(1 + most).take(self.sequences).enumerate();
                let drawn = |(n, words): (usize, &[u32])| {
                    let logprobs = logprobs.get(n * most * LOGPROBS_WORDS..).unwrap_or_default();
                    tokens(&words[1..][..(words[0] as usize).min(most)], logprobs)
                };
                rows.map(drawn).collect()
            }
        })
    }
}
