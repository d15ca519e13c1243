//! `gdn_replay_step`, and what moves its rings: folds, windows, cursors.

use super::arena::alloc;
use super::pointers::{check, dense, dtype_code, heads, int, read, stream_of, write, Pointer};
use super::step::StepArgs;
use crate::abi as gdn;
use crate::ops::ring::{Move, Ring, Window, RING_ROWS, RING_WINDOW};
use crate::ops::{in_place_cuda, in_place_cuda_if_any, CuSeqlens, CudaWritten, GateActivation, Slots};
use crate::{held, held_slots, held_u32};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{CudaStorage, Result, Tensor};
use std::ffi::c_void;

const OP: &str = "ring";

/// The pointers of a ring that is written.
struct Written<'a> {
    ring: gdn::Ring,
    inputs: *mut c_void,
    inputs_stride: i64,
    _guards: [Pointer<'a>; 4],
}

/// `run` with all tensors of the ring but the cursors held for writing.
fn with_ring<R>(
    ring: &Ring,
    stream: &CudaStream,
    cursors: *const u32,
    run: impl FnOnce(&Written<'_>) -> Result<R>,
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
                    let at =
                        |(pointer, offset, size): &(Pointer<'_>, usize, usize)| pointer.at::<c_void>(*offset, *size);
                    run(&Written {
                        ring: gdn::Ring {
                            keys: at(&keys),
                            updates: at(&updates).cast(),
                            decays: at(&decays).cast(),
                            cursors,
                            keys_stride: strides[0],
                            updates_stride: strides[1],
                            decays_stride: strides[2],
                            capacity: RING_ROWS as i32,
                            window: RING_WINDOW as i32,
                        },
                        inputs: at(&inputs),
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

/// Runs the step over the pair of the state and its ring.
pub(crate) fn step(args: &StepArgs<'_>, ring: &Ring, state: &Tensor) -> Result<CudaStorage> {
    in_place_cuda(args.name, state, |state| launch_step(args, ring, state))
}

fn launch_step(args: &StepArgs<'_>, ring: &Ring, (state, layout): CudaWritten<'_>) -> Result<CudaStorage> {
    let StepArgs { name, plan, x, z, conv_weight, norm_weight, gates, slots, cu_seqlens, .. } = *args;
    let (stream, arena) = (&*stream_of(x)?, plan.launch.arena.as_ref());
    let (dims, rule, options) = (plan.rule.dims, &plan.rule, &plan.options);
    let mut out = alloc(arena, x, &[rule.seqs.total_tokens, dims.value_heads, dims.value_dim])?;
    let to = write(&mut out, stream)?;
    let (state_dtype, num_slots, stride) = (state.dtype(), layout.dims()[0], layout.stride()[0]);
    let state = write(state, stream)?;
    let (dtype, conv_dtype, norm_dtype) = (x.dtype(), conv_weight.dtype(), norm_weight.dtype());
    let gate_dtype = gates.a.dtype();
    let (x, z, weight) = (read(x, stream)?, read(z, stream)?, read(conv_weight, stream)?);
    held!(norm, norm_weight, stream);
    held!(a, gates.a, stream);
    held!(b, gates.b, stream);
    held!(a_log, gates.a_log, stream);
    held!(dt_bias, gates.dt_bias, stream);
    held_slots!(slots, slots, stream);
    held_u32!(cu_seqlens, cu_seqlens, stream);
    let cursors = ring.cursors.tensor();
    held!(cursors, cursors, stream);
    let state_ptr: *mut c_void = state.at(layout.start_offset(), state_dtype.size_in_bytes());
    let [in_slots, out_slots] = addressed(slots, num_slots, stride);
    with_ring(ring, stream, cursors.at(0, 4), |written| {
        let params = gdn::ReplayStepParams {
            x: heads(&x, plan.x, dtype),
            z: heads(&z, plan.z, dtype),
            a: heads(&a, rule.a, gate_dtype),
            b: heads(&b, rule.b, gate_dtype),
            out: dense(&to, rule.seqs.tokens, dims.value_heads, dims.value_dim),
            conv_weight: weight.at(plan.conv_weight_offset, conv_dtype.size_in_bytes()),
            norm_weight: norm.at(norm_weight.layout().start_offset(), norm_dtype.size_in_bytes()),
            a_log: a_log.at(gates.a_log.layout().start_offset(), 4),
            dt_bias: dt_bias.at(gates.dt_bias.layout().start_offset(), 4),
            inputs: written.inputs,
            state_in: state_ptr,
            state_out: state_ptr,
            counts: std::ptr::null(),
            cu_seqlens,
            ring: written.ring,
            in_slots,
            out_slots,
            inputs_stride: written.inputs_stride,
            num_seqs: int(name, "sequences", rule.seqs.count)?,
            tokens_per_seq: int(name, "tokens", rule.seqs.max_tokens)?,
            num_k_heads: int(name, "key heads", dims.key_heads)?,
            num_v_heads: int(name, "value heads", dims.value_heads)?,
            head_k: dims.key_dim as i32,
            head_v: dims.value_dim as i32,
            conv_width: plan.conv_width as i32,
            io_dtype: dtype_code(dtype),
            gate_dtype: dtype_code(gate_dtype),
            state_dtype: dtype_code(state_dtype),
            conv_dtype: dtype_code(conv_dtype),
            norm_dtype: dtype_code(norm_dtype),
            l2norm: options.rule.l2norm.into(),
            fold: 0,
            sigmoid: (options.gate == GateActivation::Sigmoid).into(),
            overlap: plan.launch.overlap.into(),
            algo: gdn::GDN_AUTO,
            l2_eps: options.rule.l2_eps as f32,
            scale: rule.scale as f32,
            beta_scale: options.rule.beta_scale as f32,
            norm_eps: options.norm_eps as f32,
        };
        // SAFETY: every pointer reaches what the plan and the ring were checked for, and the guards outlive the launch.
        check(name, unsafe { gdn::gdn_replay_step(&params, stream.cu_stream().cast::<c_void>()) })
    })?;
    drop((to, state));
    Ok(out)
}

/// See [`Ring::fold`]; slots are u32.
pub(crate) fn fold(ring: &Ring, state: &Tensor, slots: &Slots, to: Option<&Tensor>) -> Result<()> {
    let dims = ring.dims()?;
    in_place_cuda(OP, state, |(storage, layout)| {
        in_place_cuda_if_any(OP, to, |to| {
            let stream = &*stream_of(storage)?;
            let (dtype, io_dtype) = (storage.dtype(), ring.keys.dtype());
            let (count, num_slots, stride) = (slots.len(), layout.dims()[0], layout.stride()[0]);
            let state = write(storage, stream)?;
            let state_ptr: *mut c_void = state.at(layout.start_offset(), dtype.size_in_bytes());
            let apart = to.map(|(storage, layout)| Ok::<_, candle_core::Error>((write(storage, stream)?, layout)));
            let apart = apart.transpose()?;
            held_slots!(slots, Some(slots), stream);
            let [in_slots, mut out_slots] = addressed(slots, num_slots, stride);
            let mut state_out = state_ptr;
            if let Some((pointer, layout)) = &apart {
                state_out = pointer.at(layout.start_offset(), dtype.size_in_bytes());
                (out_slots.num_slots, out_slots.slot_stride) = (layout.dims()[0] as i64, layout.stride()[0] as i64);
            }
            let cursors = ring.cursors.tensor();
            held!(cursors, cursors, stream);
            let none = gdn::Heads { ptr: std::ptr::null(), seq_stride: 0, token_stride: 0, head_stride: 0 };
            with_ring(ring, stream, cursors.at(0, 4), |written| {
                let params = gdn::ReplayParams {
                    q: none,
                    k: none,
                    v: none,
                    a: none,
                    b: none,
                    o: none,
                    a_log: std::ptr::null(),
                    dt_bias: std::ptr::null(),
                    state_in: state_ptr,
                    state_out,
                    counts: std::ptr::null(),
                    cu_seqlens: std::ptr::null(),
                    ring: written.ring,
                    in_slots,
                    out_slots,
                    num_seqs: int(OP, "sequences", count)?,
                    tokens_per_seq: 0,
                    num_k_heads: int(OP, "key heads", dims.key_heads)?,
                    num_v_heads: int(OP, "value heads", dims.value_heads)?,
                    head_k: dims.key_dim as i32,
                    head_v: dims.value_dim as i32,
                    io_dtype: dtype_code(io_dtype),
                    gate_dtype: gdn::GDN_F32,
                    state_dtype: dtype_code(dtype),
                    l2norm: 0,
                    fold: 1,
                    algo: gdn::GDN_AUTO,
                    l2_eps: 0.0,
                    scale: 1.0,
                    beta_scale: 1.0,
                };
                // SAFETY: as above; there are no tokens.
                check(OP, unsafe { gdn::gdn_replay(&params, stream.cu_stream().cast::<c_void>()) })
            })
        })
    })
}

/// See [`Ring::window`]; slots are u32.
pub(crate) fn window(ring: &Ring, conv_state: &Tensor, slots: &Slots, to: Window) -> Result<()> {
    in_place_cuda(OP, conv_state, |(storage, layout)| {
        let stream = &*stream_of(storage)?;
        let (dtype, count) = (storage.dtype(), slots.len());
        let (num_slots, width, channels) = (layout.dims()[0], layout.dims()[1] + 1, layout.dims()[2]);
        let state = write(storage, stream)?;
        held_slots!(slots, Some(slots), stream);
        let [mut in_slots, out_slots] = addressed(slots, num_slots, layout.stride()[0]);
        in_slots.num_slots = ring.inputs.dims()[0] as i64;
        let cursors = ring.cursors.tensor();
        held!(cursors, cursors, stream);
        in_place_cuda(OP, &ring.inputs, |(inputs, inputs_layout)| {
            let inputs = write(inputs, stream)?;
            let params = gdn::ReplayWindowParams {
                inputs: inputs.at(inputs_layout.start_offset(), dtype.size_in_bytes()),
                window: state.at(layout.start_offset(), dtype.size_in_bytes()),
                cursors: cursors.at(0, 4),
                in_slots,
                out_slots,
                inputs_stride: inputs_layout.stride()[0] as i64,
                num_seqs: int(OP, "sequences", count)?,
                channels: int(OP, "channels", channels)?,
                conv_width: width as i32,
                capacity: RING_ROWS as i32,
                io_dtype: dtype_code(dtype),
                to_ring: (to == Window::ToRing).into(),
            };
            // SAFETY: as above.
            check(OP, unsafe { gdn::gdn_replay_window(&params, stream.cu_stream().cast::<c_void>()) })
        })
    })
}

/// Moves cursors behind a call; slots are u32.
pub(crate) fn advance(cursors: &Tensor, slots: &Slots, moved: Move<'_>) -> Result<()> {
    in_place_cuda(OP, cursors, |(storage, layout)| {
        let stream = &*stream_of(storage)?;
        let (count, num_slots) = (slots.len(), layout.dims()[0]);
        let cursors = write(storage, stream)?;
        held_slots!(slots, Some(slots), stream);
        let [in_slots, out_slots] = addressed(slots, num_slots, 1);
        held_u32!(cu_seqlens, moved.cu_seqlens.map(CuSeqlens::tensor), stream);
        held_u32!(accepted, moved.accepted, stream);
        let params = gdn::ReplayAdvanceParams {
            cursors: cursors.at(layout.start_offset(), 4),
            counts: std::ptr::null(),
            cu_seqlens,
            accepted,
            in_slots,
            out_slots,
            num_seqs: int(OP, "sequences", count)?,
            tokens_per_seq: int(OP, "tokens", moved.cu_seqlens.map_or(moved.each, CuSeqlens::max_len))?,
            capacity: RING_ROWS as i32,
            window: RING_WINDOW as i32,
            fold: moved.fold.into(),
        };
        // SAFETY: as above.
        check(OP, unsafe { gdn::gdn_replay_advance(&params, stream.cu_stream().cast::<c_void>()) })
    })
}
