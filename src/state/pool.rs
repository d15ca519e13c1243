//! The states of many sequences in one layer, by slot.

use super::copy_slot::copy_slot;
use super::ring::{Ring, RingSpans, Window, RING_ROWS};
use super::GdnState;
use candle_core::{bail, DType, Result, Tensor};
use candle_gdn_core::device::Launch;
use candle_gdn_core::Slots;

const OP: &str = "StatePool";

/// The states of one Gated DeltaNet layer for up to [`capacity`](StatePool::capacity) sequences, each in a slot: the
/// convolution's and the recurrent one. Made by [`GatedDeltaNet::new_pool`](crate::GatedDeltaNet::new_pool), advanced by
/// [`GatedDeltaNet::forward_slots`](crate::GatedDeltaNet::forward_slots). Its memory grows only by [`StatePool::grow`].
///
/// The caller says which sequence has which slot, the same in the pools of all layers, and zeroes a slot before a sequence
/// begins in it ([`StatePool::zero`]). One sequence's state goes out and in as a [`GdnState`] of batch 1, which
/// [`GatedDeltaNet`](crate::GatedDeltaNet) also feeds by itself.
///
/// A pool with a ring ([`PoolOptions::ring`]) serves the same calls. Its decode steps read a state and write it only with
/// every sixteenth token, and drafts are verified without a second slot.
///
/// ```
/// # use candle_core::{DType, Device, Result, Tensor};
/// # use candle_gdn::{Accepted, CuSeqlens, GatedDeltaNet, GdnConfig, Slots};
/// # use candle_nn::VarBuilder;
/// # fn main() -> Result<()> {
/// # let device = &Device::Cpu;
/// # let config = GdnConfig::new(32, (2, 16), (4, 16));
/// # let layer = GatedDeltaNet::load(&config, VarBuilder::zeros(DType::F32, device))?;
/// # let x = |tokens: usize| Tensor::zeros((tokens, 32), DType::F32, device);
/// // One pool a layer. All slots are zero.
/// let mut pool = layer.new_pool(8)?;
/// let (a, b) = (0, 1);
///
/// // Two prompts, of 100 and 7 tokens; then one more token of `a` together with more of `b`.
/// let cu = CuSeqlens::from_lengths(&[100, 7], device)?;
/// layer.forward_slots(&x(107)?, Some(&cu), &Slots::new(&[a, b], device)?, &mut pool)?;
/// let cu = CuSeqlens::from_lengths(&[1, 30], device)?;
/// layer.forward_slots(&x(31)?, Some(&cu), &Slots::new(&[a, b], device)?, &mut pool)?;
///
/// // A decode step of both: [batch, 1, hidden_size].
/// layer.forward_slots(&x(2)?.unsqueeze(1)?, None, &Slots::new(&[a, b], device)?, &mut pool)?;
///
/// // Four drafted tokens of `a`, of which two are accepted. From then on its state is in the other slot.
/// let spare = 2;
/// let (cu, slots) = (CuSeqlens::from_lengths(&[4], device)?, Slots::from_to(&[a], &[spare], device)?);
/// let (_y, drafted) = layer.verify(&x(4)?, &cu, &slots, &mut pool)?;
/// layer.commit(&drafted, &Accepted::new(&drafted, &[2])?, &mut pool)?;
/// // A new sequence begins in the slot that is free.
/// pool.zero(a)?;
/// # Ok(())
/// # }
/// ```
///
/// # Threads
/// Layers, states and pools are `Send` and `Sync`. A layer is only read: any number of host threads may share one. What
/// writes a state or a pool has it by `&mut`, so that one thread at a time does: several that serve one pool put it
/// in a `Mutex`, or each have a pool of their own. The tensors of a state or pool (`conv()`, `recurrent()`) are views:
/// a view that you keep shows later writes, from any thread. A state on another device than the layer's weights is
/// refused.
///
/// A CUDA device that `Device::new_cuda` makes has a stream for each host thread, and nothing orders what two threads
/// launch. There a thread that takes over a state or pool from another one waits for the device once; other tensors that
/// it was handed, the inputs and [`Slots`] among them, are for the caller to wait for (`Device::synchronize`). Threads that
/// use a device at the same time should make it with [`single_stream_device`](crate::single_stream_device): then all share one stream, which also
/// keeps candle's matrix products apart, whose handle they share. CUDA graphs need such a device.
#[derive(Debug)]
pub struct StatePool {
    /// Its batch is the slots. With a ring the convolution's part is memory for calls that need it plain.
    states: GdnState,
    ring: Option<PoolRing>,
    launch: Launch,
}

/// How a pool keeps its states; see [`GatedDeltaNet::new_pool_with`](crate::GatedDeltaNet::new_pool_with). The default is
/// f32 without a ring.
#[derive(Debug, Clone, Default)]
pub struct PoolOptions {
    pub(crate) dtype: Option<DType>,
    pub(crate) ring: bool,
    pub(crate) spans: Option<RingSpans>,
}

impl PoolOptions {
    /// The dtype of the recurrent part, f32 or bf16; see [`GatedDeltaNet::new_state_as`](crate::GatedDeltaNet::new_state_as).
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// With a ring buffer beside each state. Decode reads a state with every token and writes it with every sixteenth; between
    /// two writes the ring keeps the key, the update and the decay of each new token, and outputs are computed from the state
    /// plus the ring. In exact arithmetic it is the same function.
    /// [`GatedDeltaNet::forward_slots`](crate::GatedDeltaNet::forward_slots) of up to 8 tokens a sequence (on the CPU 16) appends to it, and so
    /// does [`GatedDeltaNet::verify`](crate::GatedDeltaNet::verify) in place of up to 16 tokens (a certain one and drafts); every other call flushes the
    /// rings of its sequences first. A ring takes about 0.5 to 1.25 times the memory of an f32 state: more with more key heads and in f32. It is made for CUDA, where it is
    /// faster than a pool without; on the CPU it is not.
    pub fn ring(mut self) -> Self {
        self.ring = true;
        self
    }

    /// With a ring whose spans the pools of other layers share. The caller moves them once a pass, after the last layer:
    /// [`GatedDeltaNet::advance_rings`](crate::GatedDeltaNet::advance_rings), [`RingSpans::draft`], [`RingSpans::accept`].
    pub fn shared_ring(mut self, spans: &RingSpans) -> Self {
        (self.ring, self.spans) = (true, Some(spans.clone()));
        self
    }
}

/// The ring of a pool.
#[derive(Debug)]
pub(crate) struct PoolRing {
    pub ring: Ring,
    /// The spans are this pool's alone: each call moves them. Those of several pools their owner moves.
    pub own: bool,
}

impl StatePool {
    pub(crate) fn new(states: GdnState, ring: Option<PoolRing>) -> Self {
        Self { states, ring, launch: Launch::default() }
    }

    /// For engines: how the kernels of later calls on this pool are launched, until this is called again. It changes no
    /// result. A pass that is captured as a CUDA graph gives an arena for the outputs.
    pub fn launch_with(&mut self, launch: &Launch) {
        self.launch = launch.clone();
    }

    pub(crate) fn launch(&self) -> &Launch {
        &self.launch
    }

    /// Whether there is a ring beside the states: see [`PoolOptions::ring`].
    pub fn has_ring(&self) -> bool {
        self.ring.is_some()
    }

    pub(crate) fn ring(&self) -> Option<&PoolRing> {
        self.ring.as_ref()
    }

    /// Number of slots.
    pub fn capacity(&self) -> usize {
        self.states.batch()
    }

    /// Bytes of device memory held.
    pub fn size_in_bytes(&self) -> usize {
        let bytes = |t: &Tensor| t.elem_count() * t.dtype().size_in_bytes();
        let ring = self.ring.as_ref().map_or(0, |ring| ring.ring.tensors().map(bytes).iter().sum());
        self.states.size_in_bytes() + ring
    }

    /// The convolution's part: `[capacity, width - 1, channels]`, the last inputs, oldest first; channels are q, k, v. With a
    /// ring these are elsewhere: [`StatePool::snapshot`] has both parts as they are now.
    pub fn conv(&self) -> &Tensor {
        self.states.conv()
    }

    /// The recurrent part: `[capacity, HV, V, K]`, f32 or bf16; with a ring that of some tokens ago.
    pub fn recurrent(&self) -> &Tensor {
        self.states.recurrent()
    }

    /// The states as one batch, which this thread is about to write.
    pub(crate) fn states_mut(&mut self) -> &mut GdnState {
        &mut self.states
    }

    pub(crate) fn states(&self) -> &GdnState {
        &self.states
    }

    /// Makes the slot that of a sequence that has not begun. No other slot is touched.
    ///
    /// # Errors
    /// When there is no such slot, or the device refuses.
    pub fn zero(&mut self, slot: u32) -> Result<()> {
        let slot = self.check("zero", slot)?;
        let _working = self.states.take()?;
        for tensor in [&self.states.conv, &self.states.recurrent] {
            tensor.narrow(0, slot, 1)?.zero_set()?;
        }
        if let Some(PoolRing { ring, .. }) = &self.ring {
            let history = self.states.conv.dims()[1];
            ring.inputs.narrow(0, slot, 1)?.narrow(1, RING_ROWS - history, history)?.zero_set()?;
            ring.spans.clear(slot)?;
        }
        Ok(())
    }

    /// Copies the state of slot `src` to slot `dst`, on the device: a fork.
    ///
    /// # Errors
    /// When there is no such slot, or the device refuses.
    pub fn copy(&mut self, src: u32, dst: u32) -> Result<()> {
        let (src, dst) = (self.check("copy", src)?, self.check("copy", dst)?);
        let _working = self.states.take()?;
        if src == dst {
            return Ok(());
        }
        for tensor in [&self.states.conv, &self.states.recurrent] {
            copy_slot("StatePool: copy", tensor, src, dst)?;
        }
        if let Some(PoolRing { ring, .. }) = &self.ring {
            for tensor in ring.tensors() {
                copy_slot("StatePool: copy", tensor, src, dst)?;
            }
            ring.spans.copy(src, dst)?;
        }
        Ok(())
    }

    /// Makes room for `capacity` sequences, no fewer than there is room for. Where it is more, the states move to a larger
    /// allocation; they keep their slots, and new slots are zero.
    ///
    /// # Errors
    /// When `capacity` is less than there is room for, or the device is out of memory. The pool is then as it was.
    pub fn grow(&mut self, capacity: usize) -> Result<()> {
        let old = self.capacity();
        if capacity < old {
            bail!("{OP}: grow: expected a capacity of at least {old}, got {capacity}");
        }
        if capacity == old {
            return Ok(());
        }
        let _working = self.states.take()?;
        let mut grown = self.states.zeros_like(capacity)?;
        grown.put(OP, 0, &self.states, old)?;
        if let Some(PoolRing { ring, .. }) = &mut self.ring {
            ring.grow(capacity)?;
        }
        self.states = grown;
        Ok(())
    }

    /// A copy of the state in a slot that later calls do not touch, on the same device, of batch 1.
    ///
    /// # Errors
    /// When there is no such slot, or the device is out of memory.
    pub fn snapshot(&self, slot: u32) -> Result<GdnState> {
        let number = self.check("snapshot", slot)?;
        let Some(PoolRing { ring, .. }) = &self.ring else { return self.states.rows(number, 1) };
        let copy = self.states.zeros_like(1)?;
        self.states.reading(|| {
            let slots = Slots::from_to(&[slot], &[0], self.states.recurrent.device())?;
            ring.flush(&self.states.recurrent, &slots, Some(&copy.recurrent))?;
            ring.copy_window(&copy.conv, &slots, Window::ToState)
        })?;
        Ok(copy)
    }

    /// Puts a state into a slot: a snapshot of any slot of any pool of such a layer, or a [`GdnState`] of batch 1 that
    /// the layer advanced by itself. The snapshot stays as it is.
    ///
    /// # Errors
    /// When there is no such slot, the snapshot is of another shape, dtype or device, or the device refuses.
    pub fn restore(&mut self, slot: u32, snapshot: &GdnState) -> Result<()> {
        let number = self.check("restore", slot)?;
        self.states.put(OP, number, snapshot, 1)?;
        if let Some(PoolRing { ring, .. }) = &self.ring {
            let _working = self.states.take()?;
            ring.spans.clear(number)?;
            let slots = Slots::new(&[slot], self.states.recurrent.device())?;
            ring.copy_window(&self.states.conv, &slots, Window::ToRing)?;
        }
        Ok(())
    }

    fn check(&self, what: &str, slot: u32) -> Result<usize> {
        if slot as usize >= self.capacity() {
            bail!("{OP}: {what}: expected a slot below {}, got {slot}", self.capacity());
        }
        Ok(slot as usize)
    }
}
