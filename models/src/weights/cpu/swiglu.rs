//! The SwiGLU feed-forward, `down(silu(gate(x)) * up(x))`, of one MLP or of many experts at a time.

use candle_gdn_core::cpu::matmul::{multiply, Product, Weights};
use candle_gdn_core::cpu::simd::{dispatch, silu};
use candle_gdn_core::cpu::{parallel, Shared};
use pulp::{Simd, WithSimd};

/// MLPs of one shape.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mlps<'a> {
    /// `[2 * inner, hidden]` each, the gate's rows, then up's.
    pub gate_up: &'a Weights,
    /// `[hidden, inner]` each.
    pub down: &'a Weights,
}

/// Rows that go through one of the MLPs.
pub(crate) struct MlpRows<'a> {
    pub mlps: Mlps<'a>,
    /// Which of them.
    pub index: usize,
    /// Which rows of x, in this order; all of them if absent.
    pub rows: Option<&'a [u32]>,
    /// `[rows, hidden]`
    pub out: &'a mut [f32],
}

impl Mlps<'_> {
    /// Width of what goes in and comes out.
    pub fn hidden(&self) -> usize {
        self.down.outputs()
    }

    fn inner(&self) -> usize {
        self.down.inputs()
    }
}

/// Runs `x [.., hidden]` through the MLPs of all calls together: two parallel products whatever the number of experts.
pub(crate) fn swiglu(x: &[f32], calls: &mut [MlpRows<'_>]) {
    let sizes: Vec<usize> = calls.iter().map(|c| c.out.len() / c.mlps.hidden() * c.mlps.inner()).collect();
    let total: usize = sizes.iter().sum();
    let mut gate_up = vec![0f32; 2 * total];
    let mut inner = vec![0f32; total];

    let mut products = Vec::with_capacity(calls.len());
    let mut rest = gate_up.as_mut_slice();
    for (call, size) in calls.iter().zip(&sizes) {
        let (out, tail) = rest.split_at_mut(2 * size);
        rest = tail;
        products.push(Product { x, rows: call.rows, weights: call.mlps.gate_up, matrix: call.index, out });
    }
    multiply(&mut products);

    let mut start = 0;
    for (call, size) in calls.iter().zip(&sizes) {
        activate(&gate_up[2 * start..2 * (start + size)], call.mlps.inner(), &mut inner[start..start + size]);
        start += size;
    }

    let mut products = Vec::with_capacity(calls.len());
    let mut rest = inner.as_slice();
    for (call, size) in calls.iter_mut().zip(&sizes) {
        let (x, tail) = rest.split_at(*size);
        rest = tail;
        products.push(Product { x, rows: None, weights: call.mlps.down, matrix: call.index, out: &mut *call.out });
    }
    multiply(&mut products);
}

/// `[rows, gate and up]` to `silu(gate) * up`.
pub(crate) fn activate(gate_up: &[f32], inner: usize, out: &mut [f32]) {
    const ROWS: usize = 8;
    let out = Shared::new(out);
    parallel((gate_up.len() / (2 * inner)).div_ceil(ROWS), 4 * ROWS * inner, |task| {
        let end = gate_up.len().min((task + 1) * ROWS * 2 * inner);
        let gate_up = &gate_up[task * ROWS * 2 * inner..end];
        // SAFETY: each task owns its rows.
        let out = unsafe { out.part(task * ROWS * inner, gate_up.len() / 2) };
        dispatch(Activate { gate_up, inner, out });
    });
}

struct Activate<'a> {
    gate_up: &'a [f32],
    inner: usize,
    out: &'a mut [f32],
}

impl WithSimd for Activate<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        for (row, out) in self.gate_up.chunks_exact(2 * self.inner).zip(self.out.chunks_exact_mut(self.inner)) {
            let (gate, up) = row.split_at(self.inner);
            out.iter_mut().zip(gate).zip(up).for_each(|((out, g), u)| *out = silu(*g) * u);
        }
    }
}

#[cfg(test)]
mod tests;
