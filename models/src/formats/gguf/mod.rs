//! The weights of a model in a GGUF file, as transformers would have them.

mod file;
mod header;
mod names;
mod size;
#[cfg(test)]
mod tests;
mod types;
mod wanted;

pub use file::GgufFile;
pub(crate) use header::integer;

use super::blocks::{float, row_bytes, Blocks};
use super::experts::{by_expert, ExpertBlocks};
use super::quantize::Others;
use super::{path, ExpertShape, Format, OtherType, Stored, StoredExperts};
use crate::config::ModelConfig;
use crate::parallel::WeightShards;
use candle_core::quantized::GgmlDType;
use candle_core::{bail, DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use file::joined;
use names::{is_of_model, place, Heads, Place, Value};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use wanted::{are_whole_blocks, length, Wanted};

/// A file, and the heads of its layers.
#[derive(Debug, Clone)]
pub(crate) struct GgufWeights<'a> {
    file: &'a GgufFile,
    heads: Heads,
    /// What a rank has of each weight, where it has a shard.
    shards: Option<Arc<WeightShards>>,
    /// Whether matrices that are decoded are left to a quantiser.
    requantizes: bool,
    others: Arc<Others>,
    /// The tensors of which something was read.
    read: Arc<Mutex<BTreeSet<String>>>,
}

impl<'a> GgufWeights<'a> {
    /// With `tiled`, value head `h` of the file belongs to key head `h % HK`. With `shards` each weight is the shard of it.
    pub(crate) fn new(file: &'a GgufFile, config: &ModelConfig, tiled: bool, shards: Option<WeightShards>) -> Self {
        let attention = &config.attention;
        let keys = attention.num_kv_heads * attention.head_dim;
        let attention = [attention.query_rows(), keys, keys];
        let heads = Heads { config: config.gdn.clone(), attention, layers: config.layers.len(), tiled };
        let shards = shards.map(Arc::new);
        Self { file, heads, shards, requantizes: false, others: Arc::default(), read: Arc::default() }
    }

    /// Leaves matrices of types that are decoded to a quantiser if there is one.
    pub(crate) fn with_quantizer(self, requantizes: bool) -> Self {
        Self { requantizes, ..self }
    }

    /// # Errors
    /// Where nothing was read of a tensor that belongs to the layers or the ends of the model: its name.
    pub(crate) fn check_all_read(&self) -> Result<()> {
        let read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let is_unread = |name: &&str| {
            // A scale is read with its tensor; that of activations concerns kernels for 4-bit ones.
            let stem = name.strip_suffix(".scale").or(name.strip_suffix(".input_scale"));
            is_of_model(name, self.heads.layers)
                && !stem.map_or(read.contains(*name), |stem| read.contains(&format!("{stem}.weight")))
        };
        match self.file.tensors().filter(is_unread).min() {
            Some(name) => {
                bail!("{}: expected no tensor `{name}`: the model has no use for it", self.file.path().display())
            }
            None => Ok(()),
        }
    }

    /// A matrix `[.., rows, columns]` whose type is a quantised one; `None` for others.
    ///
    /// A part whose columns are not whole blocks cannot stay as it is: it becomes `Q8_0`, which adds little to what any
    /// such type has lost, or is left to the dense weights where it is not whole blocks of that either.
    fn stored(&self, name: &str, shape: &[usize]) -> Result<Option<Stored>> {
        let wanted = self.wanted(name, shape)?;
        let tensor = &wanted.place.tensor;
        // Embeddings are not quantised.
        if self.requantizes && self.file.is_decoded(tensor) && tensor != "token_embd.weight" {
            return Ok(None);
        }
        let dtype = self.file.dtype(tensor).filter(|dtype| float(*dtype).is_none());
        let Some(dtype) = dtype else { return Ok(None) };
        let Some(columns) = &wanted.columns else {
            return self.read(&wanted, None, dtype).map(Stored::Blocks).map(Some);
        };
        let read = |columns: &[Range<usize>], otherwise| self.read(&wanted, Some(columns), otherwise);
        if are_whole_blocks(dtype, columns) {
            return read(columns, dtype).map(Stored::Blocks).map(Some);
        }
        if let Some((columns, tiles)) = wanted.tiled.as_ref().filter(|(columns, _)| are_whole_blocks(dtype, columns)) {
            return Ok(Some(Stored::Tiled(read(columns, dtype)?, *tiles)));
        }
        let other = Some(GgmlDType::Q8_0).filter(|q8_0| row_bytes(*q8_0, length(columns)).is_some());
        self.others.add(name, other);
        other.map(|other| read(columns, other).map(Stored::Blocks)).transpose()
    }

    /// The quantised type that a weight has in the file; `None` where that is a float type.
    pub(crate) fn quantized_as(&self, name: &str) -> Option<GgmlDType> {
        let halves = name.strip_suffix(".gate_up_proj").filter(|_| !self.contains(name));
        let names = halves.map_or(vec![name.to_string()], |experts| {
            ["gate_proj", "up_proj"].map(|half| format!("{experts}.{half}")).into()
        });
        let dtype = |name: &String| self.file.dtype(&self.place(name).ok()?.tensor);
        names.iter().filter_map(dtype).find(|dtype| float(*dtype).is_none())
    }

    /// Whether it has the weight, in a tensor of its own.
    fn contains(&self, name: &str) -> bool {
        self.place(name).is_ok()
    }

    fn place(&self, name: &str) -> Result<Place> {
        match place(name, &self.heads, |tensor| self.file.contains(tensor)) {
            Some(place) if self.file.contains(&place.tensor) => Ok(place),
            Some(place) => {
                bail!("{}: there is no tensor `{}`, for the weight `{name}`", self.file.path().display(), place.tensor)
            }
            None => bail!("{}: GGUF files have no weight `{name}`", self.file.path().display()),
        }
    }

    /// What there is to read where `shape` is asked for; an error where the tensor has another one. Dimensions of one are
    /// not looked at, but for the last, which says what a row is.
    fn wanted(&self, name: &str, shape: &[usize]) -> Result<Wanted> {
        let place = self.place(name)?;
        let slice = self.shards.as_ref().and_then(|shards| shards.ranges_of(name, shape));
        let whole = slice.as_ref().map_or_else(|| shape.to_vec(), |slice| slice.whole(shape));
        let stored = self.file.shape(&place.tensor).unwrap_or_default();
        let taken = place.rows.as_ref().map(|rows| length(&rows.ranges));
        let model = stored.iter().enumerate().map(|(i, n)| taken.filter(|_| i == 0).unwrap_or(*n));
        let same = model.filter(|n| *n != 1).eq(whole.iter().copied().filter(|n| *n != 1));
        let rows = stored.last() == whole.last();
        if !same || !rows || place.rows.as_ref().is_some_and(|rows| stored.first() != Some(&rows.of)) {
            bail!(
                "{}: tensor `{}`: expected {whole:?} for the weight `{name}`, got {stored:?}",
                self.file.path().display(),
                place.tensor
            )
        }
        Ok(Wanted::new(place, &whole, slice))
    }

    /// The rows that are wanted, of them `columns`, and in `otherwise` where these are not whole blocks.
    fn read(&self, wanted: &Wanted, columns: Option<&[Range<usize>]>, otherwise: GgmlDType) -> Result<Blocks> {
        let (tensor, rows) = (&wanted.place.tensor, wanted.rows.as_deref());
        self.read.lock().unwrap_or_else(PoisonError::into_inner).insert(tensor.clone());
        let columns = columns.map(joined);
        let all = self.file.shape(tensor).and_then(|dims| dims.last()).map_or(0..0, |n| 0..*n);
        let Some(columns) = columns.filter(|columns| *columns != [all.clone()]) else {
            return self.file.rows(tensor, rows);
        };
        let mut kept = Vec::new();
        self.file.in_pieces(tensor, rows, |blocks| {
            kept.push(match blocks.select_columns(&columns) {
                Some(kept) => kept,
                None => {
                    let wide = blocks.tensor()?;
                    let parts = columns.iter().map(|range| wide.narrow(1, range.start, range.len()));
                    Blocks::quantize(&Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 1)?, otherwise)?
                }
            });
            Ok(())
        })?;
        match Blocks::one(kept) {
            Some(blocks) => Ok(blocks),
            None => bail!("{}: tensor `{tensor}`: expected rows, got none", self.file.path().display()),
        }
    }

    /// A weight on the CPU, a float type as it is and others in f32.
    fn dense(&self, shape: &Shape, name: &str) -> Result<Tensor> {
        if let Some(experts) = name.strip_suffix(".gate_up_proj").filter(|_| !self.contains(name)) {
            let [experts_, rows, columns] = *shape.dims() else { return self.dense_at(shape, name) };
            let half = Shape::from((experts_, rows / 2, columns));
            let [gate, up] = ["gate_proj", "up_proj"].map(|part| self.dense_at(&half, &format!("{experts}.{part}")));
            return Tensor::cat(&[gate?, up?], 1);
        }
        self.dense_at(shape, name)
    }

    fn dense_at(&self, shape: &Shape, name: &str) -> Result<Tensor> {
        let wanted = self.wanted(name, shape.dims())?;
        let tensor = self.read(&wanted, wanted.columns.as_deref(), GgmlDType::F32)?.tensor()?;
        let tensor = match wanted.place.value {
            Value::Same => tensor,
            Value::PlusOne => (tensor.to_dtype(DType::F32)? - 1.0)?,
            Value::MinusExp => tensor.to_dtype(DType::F32)?.neg()?.log()?,
        };
        tensor.reshape(shape)
    }
}

impl Format for GgufWeights<'_> {
    fn matrix(&self, weights: &VarBuilder, name: &str, shape: &[usize]) -> Result<Option<Stored>> {
        self.stored(&path(weights, name), shape)
    }

    fn experts(&self, weights: &VarBuilder, shape: ExpertShape) -> Result<Option<StoredExperts>> {
        let ExpertShape { experts: n, intermediate, hidden } = shape;
        let stored = |name: &str, rows: usize, columns: usize| -> Result<Option<Blocks>> {
            Ok(self.stored(&path(weights, name), &[n, rows, columns])?.and_then(Stored::blocks))
        };
        let gate_up = match self.contains(&path(weights, "gate_proj")) {
            true => {
                let [gate, up] = ["gate_proj", "up_proj"].map(|name| stored(name, intermediate, hidden));
                gate?.zip(up?).map(|(gate, up)| by_expert(gate, up, shape))
            }
            false => stored("gate_up_proj", 2 * intermediate, hidden)?.map(|both| vec![both]),
        };
        let down = stored("down_proj", hidden, intermediate)?;
        Ok(gate_up.zip(down).map(|(gate_up, down)| StoredExperts::Blocks(ExpertBlocks { gate_up, down })))
    }

    fn other_types(&self) -> Vec<OtherType> {
        self.others.all()
    }
}

/// For all that is loaded dense.
impl SimpleBackend for GgufWeights<'_> {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        self.dense(&shape, name)?.to_device(device)?.to_dtype(dtype)
    }

    /// Nobody asks without a shape, on which it depends what a rank has.
    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        bail!("{}: `{name}`: expected a shape", self.file.path().display())
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let two = |experts: &str| self.contains(&format!("{experts}.gate_proj"));
        self.contains(name) || name.strip_suffix(".gate_up_proj").is_some_and(two)
    }
}
