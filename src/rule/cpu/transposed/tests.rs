//! A pass over several tokens on every instruction set.

use super::*;

/// The widths of a tile differ between instruction sets, and a machine picks only one of them.
#[test]
fn every_instruction_set_gives_the_same() {
    let want = run(pulp::Scalar::new());
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(simd) = pulp::x86::V3::try_new() {
            assert_close(&run(simd), &want);
        }
        if let Some(simd) = pulp::x86::V4::try_new() {
            assert_close(&run(simd), &want);
        }
    }
    #[cfg(target_arch = "aarch64")]
    if let Some(simd) = pulp::aarch64::Neon::try_new() {
        assert_close(&run(simd), &want);
    }
    // And the step over the state as it lies, which is how decode runs.
    assert_close(&steps(), &want);
}

const K: usize = 40;
const V: usize = 72;

struct Drawn {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    state: Vec<f32>,
    gates: [(f32, f32); AT_ONCE],
}

fn drawn() -> Drawn {
    let wave = |n: usize, a: f32| (0..n).map(|i| (i as f32 * a).sin()).collect::<Vec<_>>();
    Drawn {
        q: wave(AT_ONCE * K, 0.37).iter().map(|x| x * 0.2).collect(),
        k: wave(AT_ONCE * K, 1.13).iter().map(|x| x * 0.2).collect(),
        v: wave(AT_ONCE * V, 0.71),
        state: wave(V * K, 0.053),
        gates: [(-0.1, 0.9), (-2.0, 0.3), (0.0, 1.7), (-0.5, 0.6)],
    }
}

/// Four tokens in one pass: o, then the state.
fn run<S: Simd>(simd: S) -> Vec<f32> {
    let Drawn { q, k, v, mut state, gates } = drawn();
    let mut transposed = TransposedState::new(&state, K, V);
    let mut values = vec![0.0; AT_ONCE * padded(V)];
    for (to, from) in values.chunks_exact_mut(padded(V)).zip(v.chunks_exact(V)) {
        to[..V].copy_from_slice(from);
    }
    simd.vectorize(Pass::<AT_ONCE> {
        q: std::array::from_fn(|i| &q[i * K..][..K]),
        k: std::array::from_fn(|i| &k[i * K..][..K]),
        v_to_o: &mut values,
        gates,
        state: &mut transposed.data,
        padded: padded(V),
    });
    transposed.store(&mut state);
    let o = values.chunks_exact(padded(V)).flat_map(|row| row[..V].to_vec());
    o.chain(state).collect()
}

fn steps() -> Vec<f32> {
    let Drawn { q, k, mut v, mut state, gates } = drawn();
    for (i, (log_decay, beta)) in gates.into_iter().enumerate() {
        let (q, k, v_to_o) = (&q[i * K..][..K], &k[i * K..][..K], &mut v[i * V..][..V]);
        dispatch(super::super::recurrent::Step { q, k, v_to_o, log_decay, beta, state: &mut state });
    }
    v.into_iter().chain(state).collect()
}

fn assert_close(got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 2e-6, "{worst:e}");
}
