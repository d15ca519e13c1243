//! Rotary positions: what config.json says of them, at whatever level, and the frequencies that follow.

use super::families::Published;
use super::fields::Fields;
use candle_core::{bail, Result};
use serde_json::Value;
use std::f64::consts::TAU;

/// Keys of a block of any type, those of images among them: with text positions alone the axes of "mrope" agree.
const COMMON: &[&str] = &[
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    ORIGINAL,
    "mrope_section",
    "mrope_interleaved",
    "finetuned",
    "linear_attention",
];
const ORIGINAL: &str = "original_max_position_embeddings";
const OF_YARN: &[&str] =
    &["factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"];

/// Angles for more positions than those of the training (YaRN): rapid pairs turn as before, slow ones `factor` times slower.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Yarn {
    pub factor: f64,
    /// Positions of the training.
    pub original_max_position_embeddings: usize,
    /// Pairs that turn more often in them are rapid.
    pub beta_fast: f64,
    /// Pairs that turn less often are slow; between the two is a ramp.
    pub beta_slow: f64,
    /// What cosines and sines are multiplied by.
    pub attention_factor: f64,
    /// Whether the ramp begins and ends at whole pairs.
    pub truncate: bool,
}

impl Yarn {
    /// The one of the paper.
    pub(super) fn new(factor: f64, original_max_position_embeddings: usize) -> Self {
        Self {
            factor,
            original_max_position_embeddings,
            beta_fast: 32.,
            beta_slow: 1.,
            attention_factor: mscale(factor, 1.),
            truncate: true,
        }
    }

    /// How many positions it is made for.
    pub(super) fn positions(&self) -> usize {
        (self.original_max_position_embeddings as f64 * self.factor) as usize
    }

    /// Scales the frequencies of pairs whose base is `theta`.
    fn scale(&self, theta: f64, inv_freq: &mut [f64]) {
        let rotary_dim = 2. * inv_freq.len() as f64;
        // The pair, counted as a real number, that turns so often.
        let pair = |turns: f64| {
            let positions = self.original_max_position_embeddings as f64;
            rotary_dim * (positions / (turns * TAU)).ln() / (2. * theta.ln())
        };
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.), high.min(rotary_dim - 1.));
        if low == high {
            high += 0.001;
        }
        for (i, f) in inv_freq.iter_mut().enumerate() {
            let slow = ((i as f64 - low) / (high - low)).clamp(0., 1.);
            *f = *f / self.factor * slow + *f * (1. - slow);
        }
    }
}

/// How much longer contexts sharpen the scores.
pub(super) fn mscale(factor: f64, weight: f64) -> f64 {
    if factor <= 1. {
        1.
    } else {
        0.1 * weight * factor.ln() + 1.
    }
}

/// Radians per position of the pairs of `rotary_dim` rotated values.
pub(super) fn inv_freq(theta: f64, rotary_dim: usize, yarn: Option<&Yarn>) -> Vec<f64> {
    let mut inv_freq: Vec<f64> = (0..rotary_dim / 2).map(|i| theta.powf(-2. * i as f64 / rotary_dim as f64)).collect();
    if let Some(yarn) = yarn {
        yarn.scale(theta, &mut inv_freq);
    }
    inv_freq
}

/// What a config.json says.
pub(super) struct Rope {
    pub theta: f64,
    /// The rotated share of a head.
    pub partial_rotary_factor: f64,
    pub yarn: Option<Yarn>,
}

impl Rope {
    /// From all places where files have it: flat, in `rope_parameters` or `rope_scaling`, there by the type of the layer too; in
    /// each of `levels`, the whole file and its text model. `max_positions`: as the file says. `None`: no positions.
    pub(super) fn read(levels: &[&Fields], max_positions: usize, published: &Published) -> Result<Option<Self>> {
        let (mut all, mut blocks) = (Vec::new(), Vec::new());
        for level in levels {
            all.push((*level).clone());
            for block in [level.object("rope_parameters")?, level.object("rope_scaling")?].into_iter().flatten() {
                blocks.extend(block.object(published.with_positions)?);
                blocks.push(block);
            }
        }
        all.extend(blocks.iter().cloned());
        let places = Places { all, blocks, with_positions: published.with_positions };
        let theta = match places.number("rope_theta")? {
            Some((_, theta)) if theta.is_finite() && theta > 1. => theta,
            Some((key, theta)) => bail!("config: `{key}`: expected a number above 1, got {theta}"),
            None if published.positions_are_optional => return Ok(None),
            None => bail!("config: `rope_theta` is missing: expected a number, there or in `rope_parameters`"),
        };
        let partial_rotary_factor = match places.number("partial_rotary_factor")? {
            None => published.partial_rotary_factor,
            Some((_, factor)) if factor > 0. && factor <= 1. => factor,
            Some((key, factor)) => bail!("config: `{key}`: expected a number in (0, 1], got {factor}"),
        };
        Ok(Some(Self { theta, partial_rotary_factor, yarn: places.yarn(max_positions)? }))
    }
}

/// Objects that may have settings: all, and those that have nothing else.
struct Places<'a> {
    all: Vec<Fields<'a>>,
    blocks: Vec<Fields<'a>>,
    with_positions: &'static str,
}

impl Places<'_> {
    /// The value that all places agree on, and the name of the first.
    fn one<T: PartialEq + std::fmt::Debug>(
        places: &[Fields],
        key: &str,
        read: impl Fn(&Fields, &str) -> Result<Option<T>>,
    ) -> Result<Option<(String, T)>> {
        let mut found: Option<(String, T)> = None;
        for place in places {
            match (read(place, key)?, &found) {
                (Some(value), None) => found = Some((place.name(key), value)),
                (Some(value), Some((name, first))) if value != *first => {
                    bail!("config: `{}`: expected {first:?} as `{name}` has it, got {value:?}", place.name(key))
                }
                _ => {}
            }
        }
        Ok(found)
    }

    fn number(&self, key: &str) -> Result<Option<(String, f64)>> {
        Self::one(&self.all, key, |place, key| place.opt_f64(key))
    }

    /// A number in a block that is above `bound`.
    fn above(&self, key: &str, bound: f64) -> Result<Option<f64>> {
        match Self::one(&self.blocks, key, |block, key| block.opt_f64(key))? {
            Some((name, x)) if !x.is_finite() || x <= bound => {
                bail!("config: `{name}`: expected a number above {bound}, got {x}")
            }
            found => Ok(found.map(|(_, x)| x)),
        }
    }

    /// The name of the key that asks for YaRN.
    fn yarn_key(&self) -> Result<Option<String>> {
        let kind = |block: &Fields, key: &str| match block.opt_str(key)? {
            None => Ok(None),
            Some("default" | "mrope") => Ok(Some("default")),
            Some("yarn") => Ok(Some("yarn")),
            Some(other) => block.wrong(key, "\"default\" or \"yarn\"", &Value::from(other)),
        };
        let kinds = [Self::one(&self.blocks, "rope_type", kind)?, Self::one(&self.blocks, "type", kind)?];
        if let [Some((name, first)), Some((other, second))] = &kinds {
            if first != second {
                bail!("config: `{other}`: expected {first:?} as `{name}` has it, got {second:?}")
            }
        }
        Ok(kinds.into_iter().flatten().find(|(_, kind)| *kind == "yarn").map(|(name, _)| name))
    }

    fn yarn(&self, max_positions: usize) -> Result<Option<Yarn>> {
        let yarn_key = self.yarn_key()?;
        for block in &self.blocks {
            let is_known = |key: &str, value: &Value| match OF_YARN.contains(&key) {
                // A factor of one scales nothing.
                true => yarn_key.is_some() || key == "factor" && value.as_f64() == Some(1.),
                false => key == self.with_positions || COMMON.contains(&key),
            };
            if let Some((key, value)) = block.entries().find(|(key, value)| !is_known(key, value)) {
                return block.wrong(key, "no such setting of this rope_type", value);
            }
        }
        let Some(yarn_key) = yarn_key else { return Ok(None) };
        let original = Self::one(&self.all, ORIGINAL, |place, key| place.opt_uint(key))?.map(|(_, n)| n);
        let factor = match (self.above("factor", 0.)?, original) {
            (None, Some(original @ 1..)) => max_positions as f64 / original as f64,
            (factor, _) => factor.unwrap_or(0.),
        };
        if factor < 1. || original == Some(0) {
            bail!(
                "config: `{yarn_key}` \"yarn\": expected `factor` of at least 1, or positive `{}` up to \
                 `max_position_embeddings` ({max_positions}), got {factor} and {}",
                ORIGINAL,
                original.unwrap_or(0)
            )
        }
        let mut yarn = Yarn::new(factor, original.unwrap_or(max_positions));
        yarn.beta_fast = self.above("beta_fast", 0.)?.unwrap_or(yarn.beta_fast);
        yarn.beta_slow = self.above("beta_slow", 0.)?.unwrap_or(yarn.beta_slow);
        if yarn.beta_fast < yarn.beta_slow {
            bail!("config: `beta_fast`: expected at least `beta_slow` ({}), got {}", yarn.beta_slow, yarn.beta_fast)
        }
        if let (Some(over), Some(under)) = (self.above("mscale", 0.)?, self.above("mscale_all_dim", 0.)?) {
            yarn.attention_factor = mscale(factor, over) / mscale(factor, under);
        }
        yarn.attention_factor = self.above("attention_factor", 0.)?.unwrap_or(yarn.attention_factor);
        let truncate = |block: &Fields, key: &str| block.opt(key, "true or false", Value::as_bool);
        yarn.truncate = Self::one(&self.blocks, "truncate", truncate)?.is_none_or(|(_, truncate)| truncate);
        Ok(Some(yarn))
    }
}

#[cfg(test)]
mod tests;
