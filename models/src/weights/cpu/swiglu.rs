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
mod tests {
    use super::*;

    fn wave(n: usize, a: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * a + a).sin()).collect()
    }

    struct Random {
        gate_up: Vec<f32>,
        down: Vec<f32>,
        hidden: usize,
        inner: usize,
    }

    impl Random {
        fn new(count: usize, hidden: usize, inner: usize) -> Self {
            Self {
                gate_up: wave(count * 2 * inner * hidden, 0.37),
                down: wave(count * hidden * inner, 0.83),
                hidden,
                inner,
            }
        }

        fn pack(&self, count: usize) -> [Weights; 2] {
            let (h, i) = (self.hidden, self.inner);
            [Weights::pack_f32(&self.gate_up, count, 2 * i, h), Weights::pack_f32(&self.down, count, h, i)]
        }

        /// The definition, in f64.
        fn one(&self, index: usize, x: &[f32]) -> Vec<f32> {
            let (h, i) = (self.hidden, self.inner);
            let product = |w: &[f32], row: usize, x: &[f64]| -> f64 {
                w[row * x.len()..][..x.len()].iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()
            };
            let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
            let w = &self.gate_up[index * 2 * i * h..];
            let inner: Vec<f64> = (0..i)
                .map(|j| {
                    let g = product(w, j, &x);
                    g / (1.0 + (-g).exp()) * product(w, i + j, &x)
                })
                .collect();
            (0..h).map(|j| product(&self.down[index * h * i..], j, &inner) as f32).collect()
        }
    }

    #[test]
    fn experts_and_a_dense_mlp_in_one_call() {
        let (count, hidden, tokens) = (3, 20, 11);
        let (experts, dense) = (Random::new(count, hidden, 9), Random::new(1, hidden, 35));
        let packed = [experts.pack(count), dense.pack(1)];
        let [packed_experts, packed_dense] = packed.each_ref().map(|[gate_up, down]| Mlps { gate_up, down });
        let x = wave(tokens * hidden, 0.53);
        let rows: [&[u32]; 2] = [&[10, 3, 3], &[0]];
        let mut outs = [vec![f32::NAN; 3 * hidden], vec![f32::NAN; hidden], vec![f32::NAN; tokens * hidden]];
        let [a, b, c] = &mut outs;
        swiglu(
            &x,
            &mut [
                MlpRows { mlps: packed_experts, index: 2, rows: Some(rows[0]), out: a },
                MlpRows { mlps: packed_experts, index: 0, rows: Some(rows[1]), out: b },
                MlpRows { mlps: packed_dense, index: 0, rows: None, out: c },
            ],
        );
        let row = |i: u32| &x[i as usize * hidden..][..hidden];
        let want_a = rows[0].iter().flat_map(|&i| experts.one(2, row(i)));
        let want_b = rows[1].iter().flat_map(|&i| experts.one(0, row(i)));
        let want_c = (0..tokens as u32).flat_map(|i| dense.one(0, row(i)));
        for (got, want) in outs.iter().flatten().zip(want_a.chain(want_b).chain(want_c)) {
            assert!((got - want).abs() < 1e-5 * (1.0 + want.abs()), "{got} {want}");
        }
        swiglu(&x, &mut []);
    }
}
