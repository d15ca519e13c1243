//! The weights of a model in a GGUF file, as transformers would have them.

mod file;
mod header;
mod names;
#[cfg(test)]
mod tests;
mod wanted;

pub use file::GgufFile;

use super::blocks::{float, row_bytes, Blocks};
use super::quantize::Others;
use super::{Matrix, OtherType};
use crate::config::ModelConfig;
use crate::parallel::WeightShards;
use candle_core::quantized::GgmlDType;
use candle_core::{bail, DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::Init;
use file::joined;
use names::{place, Heads, Place, Value};
use std::ops::Range;
use std::sync::Arc;
use wanted::{are_whole_blocks, length, Wanted};

/// A file, and the heads of its Gated DeltaNet layers.
#[derive(Debug, Clone)]
pub(crate) struct GgufWeights<'a> {
    file: &'a GgufFile,
    heads: Heads,
    /// What a rank has of each weight, where it has a part.
    cuts: Option<Arc<WeightShards>>,
    others: Arc<Others>,
}

impl<'a> GgufWeights<'a> {
    /// With `tiled`, value head `h` of the file belongs to key head `h % HK`. With `cuts` each weight is the part of it.
    pub(crate) fn new(file: &'a GgufFile, config: &ModelConfig, tiled: bool, cuts: Option<WeightShards>) -> Self {
        let heads = Heads { config: config.gdn.clone(), layers: config.layers.len(), tiled };
        Self { file, heads, cuts: cuts.map(Arc::new), others: Arc::default() }
    }

    /// A matrix `[.., rows, columns]` whose type is a quantised one; `None` for others.
    ///
    /// A part whose columns are not whole blocks cannot stay as it is: it becomes `Q8_0`, which adds little to what any
    /// such type has lost, or is left to the dense weights where it is not whole blocks of that either.
    pub(crate) fn matrix(&self, name: &str, shape: &[usize]) -> Result<Option<Matrix>> {
        let wanted = self.wanted(name, shape)?;
        let dtype = self.file.dtype(&wanted.place.tensor).filter(|dtype| float(*dtype).is_none());
        let Some(dtype) = dtype else { return Ok(None) };
        let Some(columns) = &wanted.columns else {
            return self.read(&wanted, None, dtype).map(Matrix::Blocks).map(Some);
        };
        let read = |columns: &[Range<usize>], otherwise| self.read(&wanted, Some(columns), otherwise);
        if are_whole_blocks(dtype, columns) {
            return read(columns, dtype).map(Matrix::Blocks).map(Some);
        }
        if let Some((columns, tiles)) = wanted.tiled.as_ref().filter(|(columns, _)| are_whole_blocks(dtype, columns)) {
            return Ok(Some(Matrix::Tiled(read(columns, dtype)?, *tiles)));
        }
        let other = Some(GgmlDType::Q8_0).filter(|q8_0| row_bytes(*q8_0, length(columns)).is_some());
        self.others.add(name, other);
        other.map(|other| read(columns, other).map(Matrix::Blocks)).transpose()
    }

    pub(crate) fn is_quantized(&self) -> bool {
        self.file.is_quantized()
    }

    /// The matrices that could not keep the type of the file.
    pub(super) fn others(&self) -> Vec<OtherType> {
        self.others.all()
    }

    /// Whether it has the weight, in a tensor of its own.
    pub(crate) fn contains(&self, name: &str) -> bool {
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
        let cut = self.cuts.as_ref().and_then(|cuts| cuts.ranges_of(name, shape));
        let whole = cut.as_ref().map_or_else(|| shape.to_vec(), |cut| cut.whole(shape));
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
        Ok(Wanted::new(place, &whole, cut))
    }

    /// The rows that are wanted, of them `columns`, and in `otherwise` where these are not whole blocks.
    fn read(&self, wanted: &Wanted, columns: Option<&[Range<usize>]>, otherwise: GgmlDType) -> Result<Blocks> {
        let (tensor, rows) = (&wanted.place.tensor, wanted.rows.as_deref());
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

/// For all that takes dense weights.
impl SimpleBackend for GgufWeights<'_> {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        self.dense(&shape, name)?.to_device(device)?.to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        if self.cuts.is_some() {
            bail!("{name}: which part of it a rank has depends on its shape, and none was asked for")
        }
        let place = self.place(name)?;
        let shape = self.file.shape(&place.tensor).unwrap_or_default();
        self.get(shape.into(), name, Init::default(), dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let two = |experts: &str| self.contains(&format!("{experts}.gate_proj"));
        self.contains(name) || name.strip_suffix(".gate_up_proj").is_some_and(two)
    }
}
