//! Approximations against `f64`.

use super::*;

#[test]
fn exp_is_accurate_everywhere() {
    let mut worst = 0f64;
    for i in -87_000..88_000 {
        let x = i as f32 * 1e-3;
        let want = f64::from(x).exp();
        worst = worst.max((f64::from(exp(x)) / want - 1.0).abs());
    }
    assert!(worst < 2e-7, "{worst:e}");
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(-1e4), 0.0);
    assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(exp(f32::INFINITY), f32::INFINITY);
    assert!(exp(f32::NAN).is_nan());
}

#[test]
fn silu_at_the_ends() {
    assert_eq!(silu(-1e4), 0.0);
    assert_eq!(silu(1e4), 1e4);
    assert!((silu(1.0) - 0.731_058_6).abs() < 1e-6);
}
