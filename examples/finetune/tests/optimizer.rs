//! AdamW, clipping, the schedule.

use anyhow::Result;
use candle_core::{Device, Tensor, Var};
use candle_gdn_testing::devices::values;
use candle_nn::{Optimizer, ParamsAdamW};
use finetune::optimizer::{accumulate, clip, global_norm, learning_rate, AdamW, Gradients};
use std::collections::BTreeMap;

fn variables(names: &[&str]) -> Result<BTreeMap<String, Var>> {
    let device = &Device::Cpu;
    let values = |i: usize| Tensor::arange(0f32, 6., device)?.affine(0.3, i as f64 - 1.)?.reshape((2, 3));
    names.iter().enumerate().map(|(i, name)| Ok((name.to_string(), Var::from_tensor(&values(i)?)?))).collect()
}

/// A sum of products of both variables.
fn loss(x: &BTreeMap<String, Var>) -> candle_core::Result<Tensor> {
    x["a"].matmul(&x["b"].t()?)?.sin()?.sum_all()
}

#[test]
fn steps_are_those_of_candle() -> Result<()> {
    let (own, theirs) = (variables(&["a", "b"])?, variables(&["a", "b"])?);
    let params = ParamsAdamW { lr: 0.01, weight_decay: 0.1, ..Default::default() };
    let mut optimizer = AdamW::new(params.clone());
    let mut reference = candle_nn::AdamW::new(theirs.values().cloned().collect(), params)?;
    for _ in 0..5 {
        let mut gradients = Gradients::new();
        accumulate(&mut gradients, &own, &loss(&own)?.backward()?)?;
        optimizer.step(&own, &gradients)?;
        reference.backward_step(&loss(&theirs)?)?;
        for name in ["a", "b"] {
            assert_eq!(values(&own[name]), values(&theirs[name]));
        }
    }
    assert_ne!(values(&own["a"]), values(&variables(&["a"])?["a"]));
    Ok(())
}

#[test]
fn gradients_of_passes_add_up_and_are_clipped_together() -> Result<()> {
    let x = variables(&["a", "b", "unused"])?;
    let mut gradients = Gradients::new();
    accumulate(&mut gradients, &x, &loss(&x)?.backward()?)?;
    let once: Vec<f64> = gradients.values().flat_map(values).collect();
    accumulate(&mut gradients, &x, &loss(&x)?.backward()?)?;
    let twice: Vec<f64> = gradients.values().flat_map(values).collect();
    assert_eq!(values(&gradients["unused"]), [0.; 6]);
    assert_eq!(twice, once.iter().map(|x| 2. * x).collect::<Vec<_>>());

    let norm = twice.iter().map(|x| x * x).sum::<f64>().sqrt();
    assert!((clip(&mut gradients, norm * 1.01)? / norm - 1.).abs() < 1e-6);
    assert_eq!(gradients.values().flat_map(values).collect::<Vec<_>>(), twice, "a smaller norm changes nothing");
    assert!((clip(&mut gradients, 0.5)? / norm - 1.).abs() < 1e-6);
    assert!((global_norm(&gradients)? - 0.5).abs() < 1e-6);
    for (got, old) in gradients.values().flat_map(values).zip(&twice) {
        assert!((got - old * 0.5 / norm).abs() < 1e-6);
    }
    assert_eq!(global_norm(&Gradients::new())?, 0.);
    Ok(())
}

#[test]
fn the_learning_rate_rises_and_falls() {
    let rates: Vec<f64> = (0..10).map(|step| learning_rate(0.4, 4, 10, step)).collect();
    for (got, want) in rates.iter().zip([0.1, 0.2, 0.3, 0.4, 0.4]) {
        assert!((got - want).abs() < 1e-12, "{rates:?}");
    }
    assert!((rates[7] - 0.2).abs() < 1e-12, "half way down: {rates:?}");
    assert!(rates[4..].windows(2).all(|pair| pair[0] > pair[1]) && rates[9] > 0., "{rates:?}");
    assert_eq!(learning_rate(0.5, 0, 1, 0), 0.5);
    assert_eq!(learning_rate(0.5, 4, 4, 3), 0.5);
}
