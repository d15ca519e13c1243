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
