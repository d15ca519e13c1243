//! AdamW with its state in reach, the norm of all gradients, the schedule of the learning rate.

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::ParamsAdamW;
use std::collections::BTreeMap;

/// Gradients by the name of the variable.
pub type Gradients = BTreeMap<String, Tensor>;

/// Adds those of one pass. A variable that the pass did not use, of an expert without tokens, has a gradient of zero, with which its moments
/// go on: as in torch, where the experts of a layer are one tensor.
pub fn accumulate(sum: &mut Gradients, variables: &BTreeMap<String, Var>, pass: &GradStore) -> Result<()> {
    for (name, variable) in variables {
        let total = match (sum.get(name), pass.get(variable)) {
            (Some(sum), Some(gradient)) => (sum + gradient)?,
            (None, Some(gradient)) => gradient.clone(),
            (Some(_), None) => continue,
            (None, None) => variable.zeros_like()?,
        };
        sum.insert(name.clone(), total);
    }
    Ok(())
}

/// The norm of all gradients as one vector.
pub fn global_norm(gradients: &Gradients) -> Result<f64> {
    let squares = gradients.values().map(|gradient| gradient.to_dtype(DType::F32)?.sqr()?.sum_all());
    let squares = squares.collect::<Result<Vec<_>>>()?;
    if squares.is_empty() {
        return Ok(0.);
    }
    Ok(f64::from(Tensor::stack(&squares, 0)?.sum_all()?.to_scalar::<f32>()?).sqrt())
}

/// Scales all gradients by one number so that their norm is at most `limit`. Returns the norm that it was.
pub fn clip(gradients: &mut Gradients, limit: f64) -> Result<f64> {
    let norm = global_norm(gradients)?;
    if norm > limit {
        for gradient in gradients.values_mut() {
            *gradient = (&*gradient * (limit / norm))?;
        }
    }
    Ok(norm)
}

/// The learning rate of step `step` (from 0 on) of `steps`: linear up to `peak` over `warmup` steps, then a half cosine down to zero.
pub fn learning_rate(peak: f64, warmup: usize, steps: usize, step: usize) -> f64 {
    if step < warmup {
        return peak * (step + 1) as f64 / warmup as f64;
    }
    let done = (step - warmup) as f64 / (steps - warmup).max(1) as f64;
    peak * 0.5 * (1. + (std::f64::consts::PI * done.min(1.)).cos())
}

/// The formulas of candle-nn's AdamW, whose moments cannot be read or set: a run could not be resumed.
pub struct AdamW {
    pub params: ParamsAdamW,
    /// Steps done.
    pub step: usize,
    /// First and second moment of each variable, from its first step on.
    pub moments: BTreeMap<String, [Tensor; 2]>,
}

impl AdamW {
    pub fn new(params: ParamsAdamW) -> Self {
        Self { params, step: 0, moments: BTreeMap::new() }
    }

    /// One step of the variables with these gradients.
    pub fn step(&mut self, variables: &BTreeMap<String, Var>, gradients: &Gradients) -> Result<()> {
        self.step += 1;
        let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = self.params;
        let scale = |beta: f64| 1. / (1. - beta.powi(self.step as i32));
        let (scale_m, scale_v) = (scale(beta1), scale(beta2));
        for (name, gradient) in gradients {
            let variable = &variables[name];
            let [m, v] = match self.moments.remove(name) {
                Some(moments) => moments,
                None => [variable.zeros_like()?, variable.zeros_like()?],
            };
            let m = ((m * beta1)? + (gradient * (1. - beta1))?)?;
            let v = ((v * beta2)? + (gradient.sqr()? * (1. - beta2))?)?;
            let update = ((&m * scale_m)? / ((&v * scale_v)?.sqrt()? + eps)?)?;
            let decayed = (variable.as_detached_tensor() * (1. - lr * weight_decay))?;
            variable.set(&(decayed - (update * lr)?)?)?;
            self.moments.insert(name.clone(), [m, v]);
        }
        Ok(())
    }
}
