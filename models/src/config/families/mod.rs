//! What is common to the published checkpoints of a family, and is not in their config.json: a file each.

mod lara_mini;
mod olmo_hybrid;
mod qwen;

use super::{Family, MixerKind, NormPlacement, QkNorm};
use serde_json::{Map, Value};

/// A family as its checkpoints are published.
pub(super) struct Published {
    pub family: Family,
    /// `model_type`, and whether transformers nests the text model in `text_config`. Other writers have it flat.
    pub model_types: &'static [(&'static str, bool)],
    /// Architectures are these names with an ending.
    pub architectures: &'static [&'static str],
    /// Adds the fields that a file may lack.
    pub complete: fn(&mut Map<String, Value>),
    /// Whether norms but the gated one multiply by `1 + weight`.
    pub zero_centred_norms: bool,
    /// Where the norms of a layer stand, by its mixer.
    pub norms: fn(MixerKind) -> NormPlacement,
    /// Whether queries and keys have positions, by the window of their layer.
    pub positions: fn(Option<usize>) -> bool,
    /// The kind of layers that have positions: settings may stand below its name.
    pub with_positions: &'static str,
    /// Whether a file without `rope_theta` is a model without positions.
    pub positions_are_optional: bool,
    /// The rotated share of a head where the file says none.
    pub partial_rotary_factor: f64,
    /// Whether the output of softmax attention is gated.
    pub output_gate: bool,
    pub qk_norm: QkNorm,
    pub experts: Experts,
    /// Whether the shared expert is scaled by a sigmoid.
    pub shared_expert_gate: bool,
}

/// Which layers are mixtures of experts.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Experts {
    Never,
    /// As the file says.
    Optional,
    /// All.
    Always {
        /// Whether the weights of the chosen experts always sum to one.
        normalised: bool,
    },
}

pub(super) const ALL: [&Published; 5] =
    [&qwen::QWEN3_NEXT, &qwen::QWEN3_5, &qwen::QWEN3_5_MOE, &olmo_hybrid::OLMO_HYBRID, &lara_mini::LARA_MINI];

/// Adds `value` where there is none, or null.
fn default(text: &mut Map<String, Value>, key: &str, value: impl Into<Value>) {
    if text.get(key).is_none_or(Value::is_null) {
        text.insert(key.into(), value.into());
    }
}
