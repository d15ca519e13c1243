//! Values of options.

use super::*;

#[test]
fn values_that_mean_nothing_are_refused() {
    let good = Sampling { temperature: 1., top_p: 0.5, min_p: 1., presence_penalty: -2., ..Sampling::default() };
    good.check().unwrap();
    let refused = |sampling: Sampling, says: &str| {
        let error = sampling.check().unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    };
    for x in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.1] {
        refused(
            Sampling { temperature: x, ..good.clone() },
            &format!("temperature: expected a finite number of at least 0, got {x}"),
        );
        refused(Sampling { top_p: x, ..good.clone() }, "top_p: expected a finite number in (0, 1]");
        refused(Sampling { min_p: x, ..good.clone() }, "min_p: expected a finite number in [0, 1]");
        refused(
            Sampling { repeat_penalty: x as f32, ..good.clone() },
            "repeat_penalty: expected a finite number above 0",
        );
    }
    for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        refused(Sampling { presence_penalty: x, ..good.clone() }, "presence_penalty: expected a finite number, got");
        refused(Sampling { frequency_penalty: x, ..good.clone() }, "frequency_penalty: expected a finite number, got");
    }
    refused(Sampling { top_p: 0., ..good.clone() }, "top_p");
    refused(Sampling { top_p: 1.5, ..good.clone() }, "top_p");
    refused(Sampling { min_p: 1.5, ..good.clone() }, "min_p");
    refused(Sampling { repeat_penalty: 0., ..good }, "repeat_penalty");
}
