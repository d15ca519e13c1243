//! Launches of `cuda/gdn_attention.h`: the append to a cache of keys and values, and attention over it.

use crate::abi::attention::{gdn_advance, gdn_attention, gdn_attention_prepare, gdn_attention_workspace};
use crate::abi::attention::{AdvanceParams, AttentionParams, KvCache, PrepareParams};
use crate::ops::{AttentionCache, AttentionPlan};
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Layout, Result, Tensor};
use candle_gdn::plumbing::abi::gdn;
use candle_gdn::plumbing::cuda::{
    addressing, alloc, check, dense, dtype_code, heads, int, read, stream_of, with_workspace,
};
use candle_gdn::plumbing::cuda::{write, Pointer};
use candle_gdn::plumbing::{in_place_cuda, Launch, SequencePlan};
use candle_gdn::{held, held_slots, held_u32, Slots};
use std::ffi::c_void;

/// What the two halves, before and behind the append, have in common.
pub(crate) struct CacheArgs<'a> {
    pub name: &'static str,
    pub plan: &'a AttentionPlan,
    pub cache: &'a AttentionCache,
    pub slots: Option<&'a Slots>,
    pub cu_seqlens: Option<&'a Tensor>,
    pub launch: &'a Launch,
}

pub(crate) struct PrepareArgs<'a> {
    pub common: CacheArgs<'a>,
    pub q_weight: &'a Tensor,
    pub k_weight: &'a Tensor,
    pub inv_freq: &'a Tensor,
    pub eps: f64,
    pub zero_centred: bool,
}

pub(crate) struct DecodeArgs<'a> {
    pub common: CacheArgs<'a>,
    pub scale: f64,
    pub max_len: usize,
}

impl CacheArgs<'_> {
    /// Whether there is nothing to launch for: candle writes no empty tensor in place.
    fn is_empty(&self) -> bool {
        self.plan.out_shape.contains(&0)
    }

    fn output(&self, pointer: &Pointer<'_>) -> gdn::Heads {
        dense(pointer, self.plan.seqs.tokens, self.plan.heads, self.plan.dim)
    }

    /// The caches by their addresses, and the sequences.
    fn addresses(
        &self,
        [k, v]: [(&Pointer<'_>, &Layout); 2],
        dtype: DType,
        slots: (*const u32, *const u32),
        cu_seqlens: *const u32,
    ) -> Result<(KvCache, gdn::Sequences)> {
        let (seqs, slots, _) = addressing(self.name, &self.plan.seqs, cu_seqlens, slots, k.1)?;
        let at = |(pointer, layout): (&Pointer<'_>, &Layout)| pointer.at(layout.start_offset(), dtype.size_in_bytes());
        let stride = k.1.stride();
        let cache = KvCache {
            k: at(k),
            v: at(v),
            slots,
            head_stride: stride[1] as i64,
            token_stride: stride[2] as i64,
            capacity: int(self.name, "capacity", self.cache.capacity())?,
        };
        Ok((cache, seqs))
    }
}

/// Appends to the caches in place and returns the queries.
pub(crate) fn prepare(args: &PrepareArgs<'_>, inputs: [&CudaStorage; 3]) -> Result<CudaStorage> {
    let (name, (k, v, _)) = (args.common.name, args.common.cache.parts());
    if args.common.is_empty() {
        return alloc(args.common.launch.arena.as_ref(), inputs[0], &args.common.plan.out_shape);
    }
    in_place_cuda(name, k, |(k, k_layout)| {
        in_place_cuda(name, v, |(v, v_layout)| launch_prepare(args, inputs, [(k, k_layout), (v, v_layout)]))
    })
}

fn launch_prepare(
    args: &PrepareArgs<'_>,
    [q, k, v]: [&CudaStorage; 3],
    [(keys, keys_layout), (values, values_layout)]: [(&mut CudaStorage, &Layout); 2],
) -> Result<CudaStorage> {
    let PrepareArgs { common, q_weight, k_weight, inv_freq, .. } = args;
    let (name, plan, dtype, stream) = (common.name, common.plan, q.dtype(), &*stream_of(q)?);
    let mut out = alloc(common.launch.arena.as_ref(), q, &plan.out_shape)?;
    let to = write(&mut out, stream)?;
    let (keys, values) = (write(keys, stream)?, write(values, stream)?);
    let (q, k, v) = (read(q, stream)?, read(k, stream)?, read(v, stream)?);
    let positions_offset = common.cache.parts().2.layout().start_offset();
    held!(positions, common.cache.parts().2, stream);
    held!(q_scale, q_weight, stream);
    held!(k_scale, k_weight, stream);
    held!(frequencies, inv_freq, stream);
    held_slots!(slots, common.slots, stream);
    held_u32!(cu_seqlens, common.cu_seqlens, stream);
    let (cache, seqs) = common.addresses([(&keys, keys_layout), (&values, values_layout)], dtype, slots, cu_seqlens)?;
    let first = inv_freq.layout().start_offset();
    let pairs = inv_freq.elem_count() / inv_freq.rank();
    let params = PrepareParams {
        q: heads(&q, plan.inputs[0], dtype),
        k: heads(&k, plan.inputs[1], dtype),
        v: heads(&v, plan.inputs[2], dtype),
        q_out: common.output(&to),
        q_weight: q_scale.at(q_weight.layout().start_offset(), 4),
        k_weight: k_scale.at(k_weight.layout().start_offset(), 4),
        inv_freq: frequencies.at(first, 4),
        inv_freq_low: if inv_freq.rank() == 2 { frequencies.at(first + pairs, 4) } else { std::ptr::null() },
        positions: positions.at(positions_offset, 4),
        cache,
        seqs,
        num_heads: int(name, "heads", plan.heads)?,
        num_kv_heads: int(name, "kv heads", plan.kv_heads)?,
        head_dim: plan.dim as i32,
        rotary_dim: 2 * pairs as i32,
        io_dtype: dtype_code(dtype),
        zero_centred: args.zero_centred.into(),
        overlap: common.launch.overlap.into(),
        eps: args.eps as f32,
    };
    // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
    check(name, unsafe { gdn_attention_prepare(&params, stream.cu_stream().cast::<c_void>()) })?;
    drop((to, keys, values));
    Ok(out)
}

/// Attention over the caches.
pub(crate) fn decode(args: &DecodeArgs<'_>, q: &CudaStorage, gate: Option<&CudaStorage>) -> Result<CudaStorage> {
    let common = &args.common;
    let (name, plan, dtype, stream) = (common.name, common.plan, q.dtype(), &*stream_of(q)?);
    let mut out = alloc(common.launch.arena.as_ref(), q, &plan.out_shape)?;
    if common.is_empty() {
        return Ok(out);
    }
    let o = write(&mut out, stream)?;
    let device = q.device();
    let (q, gate) = (read(q, stream)?, gate.map(|gate| read(gate, stream)).transpose()?);
    let (k, v, positions_tensor) = common.cache.parts();
    held!(keys, k, stream);
    held!(values, v, stream);
    held!(positions, positions_tensor, stream);
    held_slots!(slots, common.slots, stream);
    held_u32!(cu_seqlens, common.cu_seqlens, stream);
    let (cache, seqs) = common.addresses([(&keys, k.layout()), (&values, v.layout())], dtype, slots, cu_seqlens)?;
    let nowhere = gdn::Heads { ptr: std::ptr::null(), seq_stride: 0, token_stride: 0, head_stride: 0 };
    let mut params = AttentionParams {
        q: heads(&q, plan.inputs[0], dtype),
        gate: gate.as_ref().map_or(nowhere, |gate| heads(gate, plan.inputs[1], dtype)),
        o: common.output(&o),
        positions: positions.at(positions_tensor.layout().start_offset(), 4),
        cache,
        workspace: std::ptr::null_mut(),
        workspace_bytes: 0,
        seqs,
        num_heads: int(name, "heads", plan.heads)?,
        num_kv_heads: int(name, "kv heads", plan.kv_heads)?,
        head_dim: plan.dim as i32,
        io_dtype: dtype_code(dtype),
        max_len: int(name, "max_len", args.max_len)?,
        splits: 0,
        overlap: common.launch.overlap.into(),
        scale: args.scale as f32,
    };
    // SAFETY: the launcher reads the parameters and writes the one number.
    check(name, unsafe { gdn_attention_workspace(&params, &mut params.workspace_bytes) })?;
    with_workspace(
        common.launch.arena.as_ref(),
        device,
        stream,
        usize::try_from(params.workspace_bytes).unwrap_or(0),
        |workspace| {
            params.workspace = workspace;
            // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
            check(name, unsafe { gdn_attention(&params, stream.cu_stream().cast::<c_void>()) })
        },
    )?;
    drop(o);
    Ok(out)
}

/// Adds the new tokens to the positions.
pub(crate) fn advance(
    name: &'static str,
    cache: &AttentionCache,
    seqs: &SequencePlan,
    slots: Option<&Slots>,
    cu_seqlens: Option<&Tensor>,
) -> Result<()> {
    let (k, _, positions) = cache.parts();
    in_place_cuda(name, positions, |(positions, layout)| {
        let stream = &*stream_of(positions)?;
        let positions = write(positions, stream)?;
        held_slots!(slots, slots, stream);
        held_u32!(cu_seqlens, cu_seqlens, stream);
        let (seqs, slots, _) = addressing(name, seqs, cu_seqlens, slots, k.layout())?;
        let params = AdvanceParams { positions: positions.at(layout.start_offset(), 4), slots, seqs, overlap: 0 };
        // SAFETY: every pointer reaches what the plan checked, and the guards outlive the launch.
        check(name, unsafe { gdn_advance(&params, stream.cu_stream().cast::<c_void>()) })
    })
}
