//! Where matrices come from, under transformers' names: a checkpoint dense or in fp8, a GGUF file, quantised on the way or
//! not, an adapter merged or not. A format reads a [`Stored`] matrix; [`place`] makes a [`Weight`](crate::weights::Weight) of it.

mod blocks;
mod e4m3;
mod experts;
mod fp8;
mod gguf;
mod lora;
mod names;
pub(crate) mod place;
mod prefixes;
mod quantize;
mod read_once;
mod safetensors;
mod source;
mod stored;

pub(crate) use blocks::Blocks;
pub(crate) use e4m3::{E4m3Rows, ExpertRows};
pub(crate) use experts::{dense_experts, ExpertBlocks, ExpertShape, StoredExperts};
pub(crate) use fp8::{dequantized, Fp8Format};
pub use gguf::GgufFile;
pub(crate) use gguf::{integer, GgufWeights};
pub use lora::LoraAdapter;
pub(crate) use lora::Merge;
pub(crate) use names::LayerNames;
pub(crate) use prefixes::Prefixes;
pub use quantize::OtherType;
pub(crate) use quantize::{type_for, Quantizer};
pub(crate) use read_once::read_once;
pub use safetensors::SafetensorsFiles;
pub(crate) use source::Source;
pub(crate) use stored::Stored;

use candle_core::Result;
use candle_nn::VarBuilder;

/// A number format other than dense.
pub(crate) trait Format {
    /// The matrix `[.., rows, columns]` called `name` at `weights`; `None` where it is loaded dense.
    ///
    /// # Errors
    /// A missing or misshapen weight, by its full name.
    fn matrix(&self, weights: &VarBuilder, name: &str, shape: &[usize]) -> Result<Option<Stored>>;

    /// The experts of a layer at `weights` (`..mlp.experts`); `None` where they are loaded dense.
    ///
    /// # Errors
    /// As [`Format::matrix`].
    fn experts(&self, weights: &VarBuilder, shape: ExpertShape) -> Result<Option<StoredExperts>>;

    /// The matrices that could not keep, or get, the type that was asked for.
    fn other_types(&self) -> Vec<OtherType> {
        Vec::new()
    }
}

/// The full name of a weight.
fn path(weights: &VarBuilder, name: &str) -> String {
    match weights.prefix() {
        prefix if prefix.is_empty() => name.to_string(),
        prefix => format!("{prefix}.{name}"),
    }
}
