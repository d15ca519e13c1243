//! Launches of `models/cuda/gdn_attention.h`: the append to a cache of keys and values, attention over it, and the advance of
//! its positions.

use super::cache::AttentionPlan;
use super::{AttentionCache, AttentionDecode, AttentionPrepare};
use crate::abi::attention::{gdn_advance, gdn_attention, gdn_attention_prepare, gdn_attention_workspace};
use crate::abi::attention::{AdvanceParams, AttentionParams, KvCache, PrepareParams};
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Layout, Result};
use candle_gdn_core::abi as gdn;
use candle_gdn_core::device::cuda::{
    addressing, alloc, check, dense, dtype_code, heads, int, read, stream_of, with_workspace, write, Pointer,
};
use candle_gdn_core::{held, held_slots, held_u32, CuSeqlens, Slots};
use candle_gdn_core::{in_place_cuda, SequencePlan};
use std::ffi::c_void;

impl AttentionPlan {
    fn output(&self, pointer: &Pointer<'_>) -> gdn::Heads {
        dense(pointer, self.seqs.tokens, self.heads, self.dim)
    }
}

impl AttentionCache {
    fn slots_in_u32(&self) -> Result<Option<Slots>> {
        self.slots.as_ref().map(Slots::in_u32).transpose()
    }

    /// The caches by their addresses, and the sequences.
    fn addresses(
        &self,
        (name, seqs, dtype): (&'static str, &SequencePlan, DType),
        [k, v]: [(&Pointer<'_>, &Layout); 2],
        slots: (*const u32, *const u32),
        cu_seqlens: *const u32,
    ) -> Result<(KvCache, gdn::Sequences)> {
        let (seqs, slots, _) = addressing(name, seqs, cu_seqlens, slots, k.1)?;
        let start =
            |(pointer, layout): (&Pointer<'_>, &Layout)| pointer.at(layout.start_offset(), dtype.size_in_bytes());
        let stride = k.1.stride();
        let cache = KvCache {
            k: start(k),
            v: start(v),
            slots,
            head_stride: stride[1] as i64,
            token_stride: stride[2] as i64,
            capacity: int(name, "capacity", self.capacity())?,
            window: int(name, "window", self.window.unwrap_or(0))?,
        };
        Ok((cache, seqs))
    }

    /// Adds the new tokens to the positions.
    pub(super) fn advance_cuda(
        &self,
        name: &'static str,
        seqs: &SequencePlan,
        cu_seqlens: Option<&CuSeqlens>,
    ) -> Result<()> {
        let slots = self.slots_in_u32()?;
        in_place_cuda(name, &self.positions, |(positions, layout)| {
            let stream = &*stream_of(positions)?;
            let positions = write(positions, stream)?;
            held_slots!(slots, slots.as_ref(), stream);
            held_u32!(cu_seqlens, cu_seqlens.map(candle_gdn::CuSeqlens::tensor), stream);
            let (seqs, slots, _) = addressing(name, seqs, cu_seqlens, slots, self.k.layout())?;
            let params = AdvanceParams { positions: positions.at(layout.start_offset(), 4), slots, seqs, overlap: 0 };
            // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
            check(name, unsafe { gdn_advance(&params, stream.cu_stream().cast::<c_void>()) })
        })
    }
}

impl AttentionPrepare {
    /// Appends to the caches in place and returns the queries.
    pub(super) fn prepare_cuda(
        &self,
        name: &'static str,
        plan: &AttentionPlan,
        inputs: [&CudaStorage; 3],
    ) -> Result<CudaStorage> {
        // candle writes no empty tensor in place.
        if plan.out_shape.contains(&0) {
            return alloc(self.launch.arena.as_ref(), inputs[0], &plan.out_shape);
        }
        in_place_cuda(name, &self.cache.k, |keys| {
            in_place_cuda(name, &self.cache.v, |values| self.launch_prepare(name, plan, inputs, [keys, values]))
        })
    }

    fn launch_prepare(
        &self,
        name: &'static str,
        plan: &AttentionPlan,
        [q, k, v]: [&CudaStorage; 3],
        [(keys, keys_layout), (values, values_layout)]: [(&mut CudaStorage, &Layout); 2],
    ) -> Result<CudaStorage> {
        let (dtype, stream, slots) = (q.dtype(), &*stream_of(q)?, self.cache.slots_in_u32()?);
        let mut out = alloc(self.launch.arena.as_ref(), q, &plan.out_shape)?;
        let q_out = write(&mut out, stream)?;
        let (keys, values) = (write(keys, stream)?, write(values, stream)?);
        let (q, k, v) = (read(q, stream)?, read(k, stream)?, read(v, stream)?);
        held!(positions, self.cache.positions, stream);
        // The frequencies stand in for weights that there are none of.
        let [of_q, of_k] = self.weights.clone().unwrap_or([(); 2].map(|()| self.inv_freq.clone()));
        held!(q_weight, of_q, stream);
        held!(k_weight, of_k, stream);
        held!(frequencies, self.inv_freq, stream);
        held_slots!(slots, slots.as_ref(), stream);
        held_u32!(cu_seqlens, self.cu_seqlens.as_ref().map(candle_gdn::CuSeqlens::tensor), stream);
        let caches = [(&keys, keys_layout), (&values, values_layout)];
        let (cache, seqs) = self.cache.addresses((name, &plan.seqs, dtype), caches, slots, cu_seqlens)?;
        let first = self.inv_freq.layout().start_offset();
        let pairs = self.inv_freq.elem_count() / self.inv_freq.rank();
        let params = PrepareParams {
            q: heads(&q, plan.inputs[0], dtype),
            k: heads(&k, plan.inputs[1], dtype),
            v: heads(&v, plan.inputs[2], dtype),
            q_out: plan.output(&q_out),
            q_weight: if self.weights.is_some() {
                q_weight.at(of_q.layout().start_offset(), 4)
            } else {
                std::ptr::null()
            },
            k_weight: if self.weights.is_some() {
                k_weight.at(of_k.layout().start_offset(), 4)
            } else {
                std::ptr::null()
            },
            inv_freq: frequencies.at(first, 4),
            inv_freq_low: if self.inv_freq.rank() == 2 { frequencies.at(first + pairs, 4) } else { std::ptr::null() },
            positions: positions.at(self.cache.positions.layout().start_offset(), 4),
            cache,
            seqs,
            num_heads: int(name, "heads", plan.heads)?,
            num_kv_heads: int(name, "kv heads", plan.kv_heads)?,
            head_dim: plan.dim as i32,
            rotary_dim: 2 * pairs as i32,
            io_dtype: dtype_code(dtype),
            zero_centred: self.options.zero_centred.into(),
            overlap: self.launch.overlap.into(),
            eps: self.options.eps as f32,
        };
        // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
        check(name, unsafe { gdn_attention_prepare(&params, stream.cu_stream().cast::<c_void>()) })?;
        drop((q_out, keys, values));
        Ok(out)
    }
}

impl AttentionDecode {
    /// Attention over the caches.
    pub(super) fn decode_cuda(
        &self,
        name: &'static str,
        plan: &AttentionPlan,
        q: &CudaStorage,
        gate: Option<&CudaStorage>,
    ) -> Result<CudaStorage> {
        let (dtype, stream, slots) = (q.dtype(), &*stream_of(q)?, self.cache.slots_in_u32()?);
        let mut out = alloc(self.launch.arena.as_ref(), q, &plan.out_shape)?;
        if plan.out_shape.contains(&0) {
            return Ok(out);
        }
        let o = write(&mut out, stream)?;
        let device = q.device();
        let (q, gate) = (read(q, stream)?, gate.map(|gate| read(gate, stream)).transpose()?);
        let AttentionCache { k, v, positions: counts, .. } = &self.cache;
        held!(keys, k, stream);
        held!(values, v, stream);
        held!(positions, counts, stream);
        held_slots!(slots, slots.as_ref(), stream);
        held_u32!(cu_seqlens, self.cu_seqlens.as_ref().map(candle_gdn::CuSeqlens::tensor), stream);
        let caches = [(&keys, k.layout()), (&values, v.layout())];
        let (cache, seqs) = self.cache.addresses((name, &plan.seqs, dtype), caches, slots, cu_seqlens)?;
        let absent = gdn::Heads { ptr: std::ptr::null(), seq_stride: 0, token_stride: 0, head_stride: 0 };
        let mut params = AttentionParams {
            q: heads(&q, plan.inputs[0], dtype),
            gate: gate.as_ref().map_or(absent, |gate| heads(gate, plan.inputs[1], dtype)),
            o: plan.output(&o),
            positions: positions.at(counts.layout().start_offset(), 4),
            cache,
            workspace: std::ptr::null_mut(),
            workspace_bytes: 0,
            seqs,
            num_heads: int(name, "heads", plan.heads)?,
            num_kv_heads: int(name, "kv heads", plan.kv_heads)?,
            head_dim: plan.dim as i32,
            io_dtype: dtype_code(dtype),
            max_len: int(name, "max_len", self.max_len)?,
            splits: 0,
            overlap: self.launch.overlap.into(),
            scale: self.scale as f32,
        };
        // SAFETY: the launcher reads the parameters and writes the one number.
        check(name, unsafe { gdn_attention_workspace(&params, &mut params.workspace_bytes) })?;
        let bytes = usize::try_from(params.workspace_bytes).unwrap_or(0);
        with_workspace(self.launch.arena.as_ref(), device, stream, bytes, |workspace| {
            params.workspace = workspace;
            // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
            check(name, unsafe { gdn_attention(&params, stream.cu_stream().cast::<c_void>()) })
        })?;
        drop(o);
        Ok(out)
    }
}
