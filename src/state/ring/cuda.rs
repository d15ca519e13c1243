//! What moves rings on CUDA besides the step: flushes, the convolution's windows, spans.

use super::spans::{RingMove, RING_ENTRIES, RING_ROWS};
use super::tensors::{Ring, Window, OP};
use crate::state::common::{common_of, sequences};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{Result, Tensor};
use candle_gdn_core::abi as gdn;
use candle_gdn_core::device::cuda::*;
use candle_gdn_core::device::{in_place_cuda, in_place_cuda_if_any};
use candle_gdn_core::{held, held_slots, held_u32, CuSeqlens, Slots};
use std::ffi::c_void;

/// The pointers of a ring that is written.
pub(crate) struct WrittenRing<'a> {
    pub ring: gdn::Ring,
    pub inputs: *mut c_void,
    pub inputs_stride: i64,
    _guards: [Pointer<'a>; 4],
}

/// `run` with all tensors of the ring but the spans held for writing.
pub(crate) fn with_ring<R>(
    ring: &Ring,
    stream: &CudaStream,
    spans: *const u32,
    run: impl FnOnce(&WrittenRing<'_>) -> Result<R>,
) -> Result<R> {
    in_place_cuda(OP, &ring.keys, |keys| {
        in_place_cuda(OP, &ring.updates, |updates| {
            in_place_cuda(OP, &ring.decays, |decays| {
                in_place_cuda(OP, &ring.inputs, |inputs| {
                    let strides = [&keys, &updates, &decays, &inputs].map(|(_, layout)| layout.stride()[0] as i64);
                    let [keys, updates, decays, inputs] = [keys, updates, decays, inputs].map(|(storage, layout)| {
                        let size = storage.dtype().size_in_bytes();
                        Ok::<_, candle_core::Error>((write(storage, stream)?, layout.start_offset(), size))
                    });
                    let (keys, updates, decays, inputs) = (keys?, updates?, decays?, inputs?);
                    let start =
                        |(pointer, offset, size): &(Pointer<'_>, usize, usize)| pointer.at::<c_void>(*offset, *size);
                    run(&WrittenRing {
                        ring: gdn::Ring {
                            keys: start(&keys),
                            updates: start(&updates).cast(),
                            decays: start(&decays).cast(),
                            spans,
                            keys_stride: strides[0],
                            updates_stride: strides[1],
                            decays_stride: strides[2],
                            capacity: RING_ROWS as i32,
                            max_entries: RING_ENTRIES as i32,
                        },
                        inputs: start(&inputs),
                        inputs_stride: strides[3],
                        _guards: [keys.0, updates.0, decays.0, inputs.0],
                    })
                })
            })
        })
    })
}

fn addressed((slots_read, slots_write): (*const u32, *const u32), num_slots: usize, stride: usize) -> [gdn::Slots; 2] {
    [slots_read, slots_write].map(|slots| gdn::Slots { slots, num_slots: num_slots as i64, slot_stride: stride as i64 })
}

/// See [`Ring::flush`]; slots are u32.
pub(super) fn flush(ring: &Ring, state: &Tensor, slots: &Slots, dst: Option<&Tensor>) -> Result<()> {
    let sizes = ring.sizes()?;
    in_place_cuda(OP, state, |(storage, layout)| {
        in_place_cuda_if_any(OP, dst, |dst| {
            let stream = &*stream_of(storage)?;
            let (dtype, count) = (storage.dtype(), slots.len());
            let state = write(storage, stream)?;
            let other_pool =
                dst.map(|(storage, layout)| Ok::<_, candle_core::Error>((write(storage, stream)?, layout)));
            let other_pool = other_pool.transpose()?;
            held_slots!(slots, Some(slots), stream);
            let mut common = common_of(OP, sizes, ring.keys.dtype(), (&state, layout, dtype))?;
            common.seqs = sequences(int(OP, "sequences", count)?, 0, std::ptr::null());
            [common.in_slots, common.out_slots] = addressed(slots, layout.dims()[0], layout.stride()[0]);
            if let Some((pointer, layout)) = &other_pool {
                common.state_out = pointer.at(layout.start_offset(), dtype.size_in_bytes());
                common.out_slots.num_slots = layout.dims()[0] as i64;
                common.out_slots.slot_stride = layout.stride()[0] as i64;
            }
            let spans = ring.spans.tensor();
            held!(spans, spans, stream);
            with_ring(ring, stream, spans.at(0, 4), |written| {
                let params = gdn::RingFlushParams { common, ring: written.ring };
                // SAFETY: as above.
                check(OP, unsafe { gdn::gdn_ring_flush(&params, stream.cu_stream().cast::<c_void>()) })
            })
        })
    })
}

/// See [`Ring::copy_window`]; slots are u32.
pub(super) fn copy_window(ring: &Ring, conv_state: &Tensor, slots: &Slots, dst: Window) -> Result<()> {
    in_place_cuda(OP, conv_state, |(storage, layout)| {
        let stream = &*stream_of(storage)?;
        let (dtype, count) = (storage.dtype(), slots.len());
        let (num_slots, width, channels) = (layout.dims()[0], layout.dims()[1] + 1, layout.dims()[2]);
        let state = write(storage, stream)?;
        held_slots!(slots, Some(slots), stream);
        let [mut in_slots, out_slots] = addressed(slots, num_slots, layout.stride()[0]);
        in_slots.num_slots = ring.inputs.dims()[0] as i64;
        let spans = ring.spans.tensor();
        held!(spans, spans, stream);
        in_place_cuda(OP, &ring.inputs, |(inputs, inputs_layout)| {
            let inputs = write(inputs, stream)?;
            let params = gdn::RingInputsParams {
                inputs: inputs.at(inputs_layout.start_offset(), dtype.size_in_bytes()),
                conv_state: state.at(layout.start_offset(), dtype.size_in_bytes()),
                spans: spans.at(0, 4),
                in_slots,
                out_slots,
                inputs_stride: inputs_layout.stride()[0] as i64,
                num_seqs: int(OP, "sequences", count)?,
                channels: int(OP, "channels", channels)?,
                conv_width: width as i32,
                capacity: RING_ROWS as i32,
                io_dtype: dtype_code(dtype),
                to_ring: (dst == Window::ToRing).into(),
            };
            // SAFETY: as above.
            check(OP, unsafe { gdn::gdn_ring_inputs(&params, stream.cu_stream().cast::<c_void>()) })
        })
    })
}

/// Moves spans after a call; slots are u32.
pub(super) fn advance(spans: &Tensor, slots: &Slots, moved: RingMove<'_>) -> Result<()> {
    in_place_cuda(OP, spans, |(storage, layout)| {
        let stream = &*stream_of(storage)?;
        let (count, num_slots) = (slots.len(), layout.dims()[0]);
        let spans = write(storage, stream)?;
        held_slots!(slots, Some(slots), stream);
        let [in_slots, out_slots] = addressed(slots, num_slots, 1);
        held_u32!(cu_seqlens, moved.cu_seqlens.map(CuSeqlens::tensor), stream);
        held_u32!(accepted, moved.accepted, stream);
        let tokens = moved.cu_seqlens.map_or(moved.tokens, CuSeqlens::max_len);
        let params = gdn::RingAdvanceParams {
            spans: spans.at(layout.start_offset(), 4),
            accepted,
            in_slots,
            out_slots,
            seqs: sequences(int(OP, "sequences", count)?, int(OP, "tokens", tokens)?, cu_seqlens),
            capacity: RING_ROWS as i32,
            max_entries: RING_ENTRIES as i32,
            flushed: moved.flush.into(),
        };
        // SAFETY: as above.
        check(OP, unsafe { gdn::gdn_ring_advance(&params, stream.cu_stream().cast::<c_void>()) })
    })
}
