//! Products against sums in f64.

use super::*;
use half::{bf16, f16};

fn wave(n: usize, a: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * a + a).sin()).collect()
}

fn check(x: &[f32], rows: Option<&[u32]>, w: &[f32], (n, k): (usize, usize), got: &[f32]) {
    let count = rows.map_or(x.len() / k.max(1), |rows| rows.len());
    assert_eq!(got.len(), count * n);
    for (i, got) in got.chunks_exact(n.max(1)).enumerate() {
        let row = rows.map_or(i, |rows| rows[i] as usize);
        for (j, &got) in got.iter().enumerate() {
            let products = (0..k).map(|c| f64::from(x[row * k + c]) * f64::from(w[j * k + c]));
            let (want, size) = products.fold((0.0, 1.0), |(sum, size), p| (sum + p, size + p.abs()));
            assert!((f64::from(got) - want).abs() <= 1e-6 * size, "[{i}, {j}] of k {k}: {got} {want}");
        }
    }
}

#[test]
fn every_size_and_dtype_is_the_definition() {
    for rows in [0, 1, 2, 3, 5, 8, 9, 12, 23, 97, 200] {
        for (n, k) in [(1, 1), (7, 5), (32, 16), (33, 129), (70, 300), (5, 0), (0, 5)] {
            let x = wave(rows * k, 0.37);
            let exact: Vec<f32> = wave(n * k, 0.61).iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
            let halves: Vec<f16> = wave(n * k, 0.83).into_iter().map(f16::from_f32).collect();
            let bf16s: Vec<bf16> = exact.iter().map(|&x| bf16::from_f32(x)).collect();
            let halves_wide: Vec<f32> = halves.iter().map(|x| x.to_f32()).collect();
            let full = wave(n * k, 0.29);
            for (weights, w) in [
                (Weights::pack_f32(&full, 1, n, k), &full),
                (Weights::pack_f32(&exact, 1, n, k), &exact),
                (Weights::pack_f32(&halves_wide, 1, n, k), &halves_wide),
                (Weights::pack_half(&bf16s, 1, n, k), &exact),
                (Weights::pack_half(&halves, 1, n, k), &halves_wide),
            ] {
                if k == 0 {
                    continue; // the number of rows does not follow from x
                }
                let mut out = vec![f32::NAN; rows * n];
                multiply(&mut [Product { x: &x, rows: None, weights: &weights, matrix: 0, out: &mut out }]);
                check(&x, None, w, (n, k), &out);
            }
        }
    }
}

#[test]
fn products_of_several_sizes_in_one_call() {
    let (k, count) = (40, 3);
    let x = wave(6 * k, 0.37);
    let (w, v) = (wave(count * 50 * k, 0.29), wave(20 * k, 0.91));
    let (experts, other) = (Weights::pack_f32(&w, count, 50, k), Weights::pack_f32(&v, 1, 20, k));
    let rows: [&[u32]; 3] = [&[5, 0, 2, 2], &[], &[1]];
    let mut outs = [vec![f32::NAN; 4 * 50], vec![], vec![f32::NAN; 50], vec![f32::NAN; 6 * 20]];
    let [a, b, c, d] = &mut outs;
    multiply(&mut [
        Product { x: &x, rows: Some(rows[0]), weights: &experts, matrix: 2, out: a },
        Product { x: &x, rows: Some(rows[1]), weights: &experts, matrix: 0, out: b },
        Product { x: &x, rows: Some(rows[2]), weights: &experts, matrix: 1, out: c },
        Product { x: &x, rows: None, weights: &other, matrix: 0, out: d },
    ]);
    check(&x, Some(rows[0]), &w[2 * 50 * k..], (50, k), a);
    check(&x, Some(rows[2]), &w[50 * k..2 * 50 * k], (50, k), c);
    check(&x, None, &v, (20, k), d);
    multiply(&mut []);
}

#[test]
fn f32_is_narrowed_only_where_that_is_exact() {
    let kept = |values: &[f32]| match Weights::pack_f32(values, 1, values.len(), 1).data {
        Data::F32(_) => "f32",
        Data::BF16(_) => "bf16",
        Data::F16(_) => "f16",
    };
    assert_eq!(kept(&[1.0, -0.0, 2f32.powi(120), 2f32.powi(-120)]), "bf16");
    assert_eq!(kept(&[1.0 + 1.0 / 1024.0]), "f16");
    assert_eq!(kept(&[1.0 + 1.0 / 1024.0, 1e6]), "f32");
    assert_eq!(kept(&[0.1]), "f32");
    assert_eq!(kept(&[f32::INFINITY, f32::NEG_INFINITY]), "bf16");
}

#[test]
fn rows_are_read_back() {
    let (n, k) = (45, 7);
    let w = wave(n * k, 0.29);
    let weights = Weights::pack_f32(&w, 1, n, k);
    let mut row = vec![0.0; k];
    for i in 0..n {
        weights.read_row(i, &mut row);
        assert_eq!(row, w[i * k..][..k]);
    }
}

/// The tiles differ between instruction sets, and a machine picks only one of them.
#[test]
fn every_instruction_set_gives_the_same() {
    let (rows, n, k) = (29, 45, 150);
    let (x, w) = (wave(rows * k, 0.37), wave(n * k, 0.29));
    let weights = Weights::pack_f32(&w, 1, n, k);
    let run = |run: &dyn Fn(PanelTask<'_, '_, f32>)| {
        let mut out = vec![f32::NAN; rows * n];
        let panels = n.div_ceil(PANEL);
        let out_shared = Shared::new(&mut out);
        let job =
            Job { first: 0, x: &x, rows: None, row_count: rows, weights: &weights, matrix: 0, panels, out: out_shared };
        let Data::F32(data) = &weights.data else { panic!("narrowed") };
        for panel in 0..panels {
            for rows in [0..7, 7..rows] {
                run(PanelTask {
                    job: &job,
                    panel: &data[panel * k * PANEL..][..k * PANEL],
                    column: panel * PANEL,
                    rows,
                });
            }
        }
        check(&x, None, &w, (n, k), &out);
    };
    run(&|task| Simd::vectorize(pulp::Scalar::new(), task));
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(simd) = pulp::x86::V3::try_new() {
            run(&|task| Simd::vectorize(simd, task));
        }
        if let Some(simd) = pulp::x86::V4::try_new() {
            run(&|task| Simd::vectorize(simd, task));
        }
    }
    #[cfg(target_arch = "aarch64")]
    if let Some(simd) = pulp::aarch64::Neon::try_new() {
        run(&|task| Simd::vectorize(simd, task));
    }
}
