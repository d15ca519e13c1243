//! Launches of `cuda/gdn_moe.h`: the mixture of experts, routing and all.

use crate::abi::moe::{gdn_moe, gdn_moe_workspace, MoeParams, GDN_MOE_AUTO};
use crate::abi::scaled::NO_SCALES;
use crate::cuda::apply;
use crate::weights::cuda::linear::scales_of;
use crate::weights::{E4m3, Weight};
use candle_core::backend::BackendStorage;
use candle_core::{bail, CudaStorage, DType, Layout, Result, Shape, Tensor};
use candle_gdn_core::device::cuda::{alloc, check, dtype_code, int, read, stream_of, with_workspace, write, Pointer};
use candle_gdn_core::Launch;
use candle_gdn_core::{held, held_or_none};
use std::ffi::c_void;

const OP: &str = "sparse_moe";

/// Whether the kernels read a weight beside x in `dtype`.
fn supports(weight: &Weight, dtype: DType) -> bool {
    match weight {
        Weight::Dense(weight) => weight.dtype() == dtype,
        Weight::E4m3(_) | Weight::Packed(_) => true,
        _ => false,
    }
}

/// The tensor of a weight's numbers, or of their bytes.
fn tensor(weight: &Weight) -> Result<&Tensor> {
    match weight {
        Weight::Dense(weight) => Ok(weight),
        Weight::E4m3(weight) => Ok(&weight.bytes),
        Weight::Packed(weight) => Ok(&weight.bytes),
        weight => bail!("{OP}: expected experts dense, in e4m3 or packed, got {weight:?}"),
    }
}

fn e4m3(weight: &Weight) -> Option<&E4m3> {
    match weight {
        Weight::E4m3(weight) => Some(weight),
        _ => None,
    }
}

fn packed_type(weight: &Weight) -> Option<i32> {
    match weight {
        Weight::Packed(weight) => Some(weight.kind),
        _ => None,
    }
}

/// The weights of a layer, contiguous: all but the router in one storage, dense in the dtype of x, in e4m3 or packed.
pub(crate) struct Moe<'a> {
    /// `[terms, experts, hidden]` in bf16, whose sum it is ([`bf16_terms`]); with a shared expert one row more, its gate.
    pub router: &'a Tensor,
    /// `[experts * 2 * inner, hidden]`, per expert the gate's rows, then up's.
    pub gate_up: &'a Weight,
    /// `[experts * hidden, inner]`
    pub down: &'a Weight,
    /// The same two of the shared expert.
    pub shared: Option<[&'a Weight; 2]>,
    pub experts: usize,
    pub top_k: usize,
    pub normalise: bool,
}

/// `router [rows, hidden]` in f32 as `[terms, rows, hidden]` in bf16, whose sum it is: one term where bf16 holds it, as it
/// does of a checkpoint in bf16, and at most three.
pub(crate) fn bf16_terms(router: &Tensor) -> Result<Tensor> {
    let (mut rest, mut terms) = (router.clone(), Vec::new());
    while terms.is_empty() || (terms.len() < 3 && rest.abs()?.max_all()?.to_scalar::<f32>()? > 0.) {
        let term = rest.to_dtype(DType::BF16)?;
        rest = (rest - term.to_dtype(DType::F32)?)?;
        terms.push(term);
    }
    Tensor::stack(&terms, 0)
}

/// `x [tokens, hidden]` to the same.
///
/// Weights are read while the kernel before it on the stream may still run, which must therefore not write them.
pub(crate) fn forward(x: &Tensor, moe: &Moe<'_>, launch: &Launch) -> Result<Tensor> {
    let aligned = |layout: &Layout| layout.stride()[1] == 1 && (layout.stride()[0] | layout.start_offset()) & 7 == 0;
    let x = if aligned(x.layout()) { x.clone() } else { x.contiguous()? };
    moe.check(&x)?;
    apply(OP, launch.arena.as_ref(), &x, |x, layout| moe.launch(launch, x, layout))
}

impl Moe<'_> {
    /// That the kernels read nothing but what is there.
    fn check(&self, x: &Tensor) -> Result<()> {
        let hidden = x.dim(1)?;
        let expect = |name: &str, tensor: &Tensor, dtype: DType, dims: &[usize]| {
            if tensor.dims() != dims || tensor.dtype() != dtype || !tensor.is_contiguous() {
                bail!("{OP}: {name}: expected {dims:?} in {dtype:?}, got {:?}", tensor.layout())
            }
            if !tensor.device().same_device(x.device()) || !tensor.layout().start_offset().is_multiple_of(8) {
                bail!("{OP}: {name}: expected a tensor on the device of x, aligned to 16 bytes")
            }
            Ok(())
        };
        let scored = self.experts + usize::from(self.shared.is_some());
        expect("router", self.router, DType::BF16, &[self.router.dim(0)?, scored, hidden])?;
        let mut all = [self.gate_up, self.down].into_iter().chain(self.shared.into_iter().flatten());
        let storage = std::mem::discriminant(self.gate_up);
        if !all.all(|weight| std::mem::discriminant(weight) == storage && supports(weight, x.dtype())) {
            bail!("{OP}: expected all weights in {:?}, all in e4m3 or all packed", x.dtype())
        }
        let dtype = if e4m3(self.gate_up).is_some() { DType::U8 } else { x.dtype() };
        let matrix = |name: &str, weight: &Weight, paired: usize, rows: usize, columns: usize| match weight {
            Weight::Packed(packed) if packed.is(rows, columns, paired) => Ok(()),
            Weight::Packed(packed) => bail!("{OP}: {name}: expected [{rows}, {columns}], packed, got {packed:?}"),
            weight => expect(name, tensor(weight)?, dtype, &[rows, columns]),
        };
        let pair = |[gate_up, down]: [&Weight; 2], count: usize| {
            let inner = down.inputs();
            matrix("gate_up", gate_up, inner, count * 2 * inner, hidden)?;
            matrix("down", down, 0, count * hidden, inner)
        };
        pair([self.gate_up, self.down], self.experts)?;
        self.shared.map_or(Ok(()), |shared| pair(shared, 1))
    }

    fn launch(&self, launch: &Launch, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let ((tokens, hidden), dtype) = (layout.shape().dims2()?, x.dtype());
        let (device, size, stream) = (x.device(), dtype.size_in_bytes(), &*stream_of(x)?);
        let mut out = alloc(launch.arena.as_ref(), x, &[tokens, hidden])?;
        let y = write(&mut out, stream)?;
        let x = read(x, stream)?;
        held!(router, self.router, stream);
        let [shared_gate_up, shared_down] = [0, 1].map(|i| self.shared.map(|both| both[i]));
        let weights = [Some(self.gate_up), Some(self.down), shared_gate_up, shared_down];
        let numbers = |i: usize| weights[i].map(tensor).transpose();
        let (gate_up, down, shared_gate_up, shared_down) = (numbers(0)?, numbers(1)?, numbers(2)?, numbers(3)?);
        let scales_tensor = |i: usize| weights[i].and_then(e4m3).map(|weight| &weight.scales);
        held_or_none!(gate_up_at, gate_up, stream);
        held_or_none!(down_at, down, stream);
        held_or_none!(shared_gate_up_at, shared_gate_up, stream);
        held_or_none!(shared_down_at, shared_down, stream);
        held_or_none!(gate_up_scales, scales_tensor(0), stream);
        held_or_none!(down_scales, scales_tensor(1), stream);
        held_or_none!(shared_gate_up_scales, scales_tensor(2), stream);
        held_or_none!(shared_down_scales, scales_tensor(3), stream);
        let start = |p: &Pointer<'_>, tensor: &Tensor| -> *const c_void {
            p.at(tensor.layout().start_offset(), tensor.dtype().size_in_bytes())
        };
        let start_if = |p: &Option<Pointer<'_>>, tensor: Option<&Tensor>| {
            p.as_ref().zip(tensor).map_or(std::ptr::null(), |(p, tensor)| start(p, tensor))
        };
        let scales = |p: &Option<Pointer<'_>>, i: usize| match (p, weights[i].and_then(e4m3)) {
            (Some(p), Some(weight)) => scales_of(weight, p),
            _ => Ok(NO_SCALES),
        };
        let shared_inner = self.shared.map_or(0, |[_, down]| down.inputs());
        let type_of = |i: usize| weights[i].and_then(packed_type).unwrap_or(0);
        let mut params = MoeParams {
            x: x.at(layout.start_offset(), size),
            router: start(&router, self.router),
            gate_up: start_if(&gate_up_at, gate_up),
            down: start_if(&down_at, down),
            shared_gate_up: start_if(&shared_gate_up_at, shared_gate_up),
            shared_down: start_if(&shared_down_at, shared_down),
            gate_up_scales: scales(&gate_up_scales, 0)?,
            down_scales: scales(&down_scales, 1)?,
            shared_gate_up_scales: scales(&shared_gate_up_scales, 2)?,
            shared_down_scales: scales(&shared_down_scales, 3)?,
            quantized: packed_type(self.gate_up).is_some().into(),
            gate_up_type: type_of(0),
            down_type: type_of(1),
            shared_gate_up_type: type_of(2),
            shared_down_type: type_of(3),
            y: y.at(0, size),
            workspace: std::ptr::null_mut(),
            workspace_bytes: 0,
            x_stride: layout.stride()[0] as i64,
            y_stride: hidden as i64,
            tokens: int(OP, "tokens", tokens)?,
            hidden: int(OP, "hidden", hidden)?,
            num_experts: int(OP, "experts", self.experts)?,
            top_k: int(OP, "experts of a token", self.top_k)?,
            inner: int(OP, "inner", self.down.inputs())?,
            shared_inner: int(OP, "inner", shared_inner)?,
            io_dtype: dtype_code(dtype),
            router_parts: int(OP, "terms of the router", self.router.dim(0)?)?,
            normalise: self.normalise.into(),
            algo: GDN_MOE_AUTO,
            overlap: 1,
        };
        // SAFETY: the launcher reads the parameters and writes the one number.
        check(OP, unsafe { gdn_moe_workspace(&params, &mut params.workspace_bytes) })?;
        let bytes = usize::try_from(params.workspace_bytes).unwrap_or(0);
        with_workspace(launch.arena.as_ref(), device, stream, bytes, |workspace| {
            params.workspace = workspace;
            // SAFETY: every pointer reaches what `Moe::check` and the layout of x say, and the guards outlive the launch.
            check(OP, unsafe { gdn_moe(&params, stream.cu_stream().cast::<c_void>()) })
        })?;
        drop(y);
        Ok((out, Shape::from((tokens, hidden))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// A router is the sum of its terms, bit for bit, and has no more of them than it takes.
    #[test]
    fn terms_of_a_router() -> Result<()> {
        let router = Tensor::randn(0f32, 0.02, (5, 64), &Device::Cpu)?;
        for (dtype, count) in [(DType::BF16, 1), (DType::F16, 2), (DType::F32, 3)] {
            let router = router.to_dtype(dtype)?.to_dtype(DType::F32)?;
            let terms = bf16_terms(&router)?;
            assert_eq!((terms.dims(), terms.dtype()), ([count, 5, 64].as_slice(), DType::BF16));
            let mut sum = Tensor::zeros((5, 64), DType::F32, &Device::Cpu)?;
            for i in 0..count {
                sum = (sum + terms.get(i)?.to_dtype(DType::F32)?)?;
            }
            assert_eq!(sum.to_vec2::<f32>()?, router.to_vec2::<f32>()?, "{dtype:?}");
        }
        Ok(())
    }
}
