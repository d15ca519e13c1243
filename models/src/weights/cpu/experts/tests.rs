use super::*;

fn wave(n: usize, a: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * a + a).sin() * 3.0).collect()
}

#[test]
fn softmax_of_a_part_of_each_row() {
    for (rows, stride, n) in [(0, 3, 3), (1, 1, 1), (5, 9, 8), (40, 33, 33)] {
        let scores = wave(rows * stride, 0.7);
        let got = softmax(&scores, stride, n);
        assert_eq!(got.len(), rows * n);
        for (got, row) in got.chunks_exact(n).zip(scores.chunks_exact(stride)) {
            let total: f64 = row[..n].iter().map(|&x| f64::from(x).exp()).sum();
            for (&got, &x) in got.iter().zip(row) {
                assert!((f64::from(got) - f64::from(x).exp() / total).abs() < 1e-6);
            }
        }
    }
    assert!(softmax(&[1.0, f32::NAN], 2, 2).iter().all(|p| p.is_nan()));
    assert_eq!(softmax(&[-1e30, 3e38], 2, 2), [0.0, 1.0]);
}

#[test]
fn combines_as_it_says() {
    for (tokens, per_token, hidden) in [(1, 1, 1), (3, 2, 40), (50, 3, 17)] {
        let rows = tokens * per_token;
        let (experts, weights) = (wave(rows * hidden, 0.3), wave(rows, 0.9));
        let choices: Vec<u32> = (0..rows as u32).rev().collect();
        let (out, gates) = (wave(tokens * hidden, 0.2), wave(tokens * 4, 0.4));
        for shared in [None, Some(Shares { out: &out, gates: &gates[3..], stride: 4 })] {
            let mut got = vec![f32::NAN; tokens * hidden];
            Combine { experts: &experts, weights: &weights, choices: &choices, per_token, shared, hidden }
                .run(&mut got);
            for (i, got) in got.iter().enumerate() {
                let (t, c) = (i / hidden, i % hidden);
                let mut want: f32 = (0..per_token)
                    .map(|j| choices[t * per_token + j] as usize)
                    .map(|row| weights[row] * experts[row * hidden + c])
                    .sum();
                if let Some(s) = shared {
                    want += s.out[i] / (1.0 + (-s.gates[t * 4]).exp());
                }
                assert!((got - want).abs() < 1e-5 * (1.0 + want.abs()), "{got} {want}");
            }
        }
    }
}
