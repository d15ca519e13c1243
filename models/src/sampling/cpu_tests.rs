//! Random numbers and weights by their definitions.

use super::*;

/// The first is of the authors' own table of known answers; the second has another number in each word of key and counter that is used.
#[test]
fn random_numbers_are_philox() {
    assert_eq!(random_bits(0, 0), 0xe169_c58d_6627_e8d5);
    assert_eq!(random_bits(0x0123_4567_89ab_cdef, 0x1_0000_0002), 0xa665_e43b_4743_d04b);
    assert_ne!(random_bits(1, 0), random_bits(0, 1));
}

/// Where the first tokens have just the share, no further one is drawn.
#[test]
fn a_nucleus_ends_where_its_share_is_reached() {
    for (logits, p, kept) in [(&[2f32, 2.][..], 0.5, 1), (&[1., 2., 2., 2., 2., 1.][..], 0.25, 1), (&[3.; 8], 0.375, 3)]
    {
        let best = logits.iter().copied().fold(f32::MIN, f32::max);
        // Colder than the difference, so that those below the best have no weight.
        let tokens = weighed(logits, best, 1e3);
        let cut = nucleus(&tokens, p);
        assert_eq!(tokens.iter().filter(|token| token.rank >= cut).count(), kept, "{p} of {logits:?}");
        let cut = nucleus(&tokens, p + 1e-9);
        assert_eq!(tokens.iter().filter(|token| token.rank >= cut).count(), kept + 1, "above {p} of {logits:?}");
    }
}

#[test]
fn weights_are_powers_of_two() {
    for (temperature, best) in [(1., 0f32), (0.7, 23.5), (30., -8.)] {
        let scale = std::f64::consts::LOG2_E / temperature;
        for i in 0..2000 {
            let x = best - 0.013 * i as f32;
            let want = ((f64::from(x) - f64::from(best)) / temperature).exp() * HEAVIEST as f64;
            let got = weight(x, best, scale) as f64;
            assert!((got - want).abs() <= 1. + 4e-7 * want, "{x} below {best} at {temperature}: {got}, not {want}");
        }
    }
    assert_eq!(weight(f32::MIN, f32::MAX, 1e-9), 0);
    assert_eq!([weight(1., 1., f64::INFINITY), weight(0.5, 1., f64::INFINITY)], [HEAVIEST, 0]);
    assert_eq!(weight(0.5, 1., f64::MIN_POSITIVE), HEAVIEST);
}
