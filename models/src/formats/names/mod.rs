//! Names of weights that differ between families: a file each. All others are those of Qwen3.5, and
//! [`GatedDeltaNet::load`](candle_gdn::GatedDeltaNet::load) knows those of its layer.

mod lara_mini;
mod olmo_hybrid;
mod qwen;

use crate::config::{Family, NormPlacement};
use candle_gdn::GdnConfig;

/// Weights below `layers.{i}`.
pub(crate) struct LayerNames {
    /// The norm of the token mixer and that of the feed-forward, where they stand before them; each by any of its names.
    before: [&'static [&'static str]; 2],
    /// The same where they stand behind them.
    behind: [&'static [&'static str]; 2],
    /// The gated norm.
    pub gated_norm: &'static str,
    /// The output projection of Gated DeltaNet.
    pub gdn_output: &'static str,
    /// The input projections of Gated DeltaNet but the rows of b and a, and how many rows they have.
    pub gdn_inputs: fn(&GdnConfig) -> Vec<(&'static str, usize)>,
}

impl LayerNames {
    pub(crate) fn of(family: Family) -> &'static Self {
        match family {
            Family::Qwen3Next => &qwen::QWEN3_NEXT,
            Family::Qwen3_5 | Family::Qwen3_5Moe => &qwen::QWEN3_5,
            Family::OlmoHybrid => &olmo_hybrid::OLMO_HYBRID,
            Family::LaraMini => &lara_mini::LARA_MINI,
        }
    }

    /// The norms of a layer that `has` weights: the mixer's and the feed-forward's.
    pub(crate) fn norms(&self, placement: NormPlacement, has: impl Fn(&str) -> bool) -> [&'static str; 2] {
        let norms = match placement {
            NormPlacement::Before => self.before,
            NormPlacement::Behind => self.behind,
        };
        norms.map(|names| *names.iter().find(|name| has(&format!("{name}.weight"))).unwrap_or(&names[0]))
    }

    /// Every name that a norm of a layer has.
    pub(crate) fn all_norms(&self) -> impl Iterator<Item = &'static str> {
        self.before.into_iter().chain(self.behind).flatten().copied()
    }
}
