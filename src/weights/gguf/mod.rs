//! The weights of a model in a GGUF file, as transformers would have them.

mod file;
mod names;

pub use file::GgufFile;

use super::blocks::{float, Blocks};
use super::{Matrix, Tiles};
use crate::GdnConfig;
use candle_core::{bail, DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::Init;
use names::{place, Heads, Place, Value};
use std::ops::Range;

/// A file, and the heads of its Gated DeltaNet layers.
#[derive(Debug, Clone)]
pub(crate) struct GgufWeights<'a> {
    file: &'a GgufFile,
    heads: Heads,
}

impl<'a> GgufWeights<'a> {
    /// With `tiled`, value head `h` of the file belongs to key head `h % HK`.
    pub(crate) fn new(file: &'a GgufFile, config: &GdnConfig, tiled: bool) -> Self {
        Self { file, heads: Heads { config: config.clone(), tiled } }
    }

    /// A matrix whose type is a quantised one; `None` for others.
    pub(crate) fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Option<Matrix>> {
        let place = self.place(name)?;
        if self.file.dtype(&place.tensor).is_none_or(|dtype| float(dtype).is_some()) {
            return Ok(None);
        }
        if !self.fits(&place) {
            return self.misshapen(name, &place, &[rows, columns]);
        }
        let blocks = self.read(&place)?;
        if (blocks.rows(), blocks.columns()) != (rows, columns) {
            return self.misshapen(name, &place, &[rows, columns]);
        }
        Ok(Some(match place.columns {
            None => Matrix::Blocks(blocks),
            Some(tiles) => match untiled(&blocks, tiles) {
                Some(blocks) => Matrix::Blocks(blocks),
                None => Matrix::Tiled(blocks, tiles),
            },
        }))
    }

    pub(crate) fn is_quantized(&self) -> bool {
        self.file.is_quantized()
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

    fn read(&self, place: &Place) -> Result<Blocks> {
        self.file.rows(&place.tensor, place.rows.as_ref().map(|rows| &rows.ranges[..]))
    }

    /// Whether the tensor has the rows that some are to be taken of.
    fn fits(&self, place: &Place) -> bool {
        let rows = self.file.shape(&place.tensor).and_then(|dims| dims.first().copied());
        place.rows.as_ref().is_none_or(|part| rows == Some(part.of))
    }

    /// A weight on the CPU, a float type as it is and others in f32. Dimensions of one are not looked at.
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
        let place = self.place(name)?;
        let tensor_shape = self.file.shape(&place.tensor).unwrap_or_default();
        let taken = place.rows.as_ref().map(|rows| rows.ranges.iter().map(Range::len).sum());
        let stored = tensor_shape.iter().enumerate().map(|(i, n)| taken.filter(|_| i == 0).unwrap_or(*n));
        let same = stored.filter(|n| *n != 1).eq(shape.dims().iter().copied().filter(|n| *n != 1));
        if !same || !self.fits(&place) {
            return self.misshapen(name, &place, shape.dims());
        }
        let mut blocks = self.read(&place)?;
        let mut tensor = match place.columns.map(|tiles| (untiled(&blocks, tiles), tiles)) {
            Some((Some(untiled), _)) => {
                blocks = untiled;
                blocks.tensor()?
            }
            Some((None, Tiles { groups, per_group, size })) => {
                let tiled = blocks.tensor()?.reshape((blocks.rows(), per_group, groups, size))?;
                tiled.transpose(1, 2)?.contiguous()?
            }
            None => blocks.tensor()?,
        };
        tensor = match place.value {
            Value::Same => tensor,
            Value::PlusOne => (tensor.to_dtype(DType::F32)? - 1.0)?,
            Value::MinusExp => tensor.to_dtype(DType::F32)?.neg()?.log()?,
        };
        tensor.reshape(shape)
    }

    fn misshapen<T>(&self, name: &str, place: &Place, expected: &[usize]) -> Result<T> {
        bail!(
            "{}: tensor `{}`: expected {expected:?} for the weight `{name}`, got {:?}",
            self.file.path().display(),
            place.tensor,
            self.file.shape(&place.tensor).unwrap_or_default()
        )
    }
}

/// Its columns in the model's order, where the pieces are whole blocks.
fn untiled(blocks: &Blocks, tiles: Tiles) -> Option<Blocks> {
    let Tiles { groups, per_group, size } = tiles;
    blocks.reorder_columns(size, |piece| piece % per_group * groups + piece / per_group)
}

/// For all that takes dense weights.
impl SimpleBackend for GgufWeights<'_> {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        self.dense(&shape, name)?.to_device(device)?.to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let place = self.place(name)?;
        let shape = self.file.shape(&place.tensor).unwrap_or_default();
        self.get(shape.into(), name, Init::default(), dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let two = |experts: &str| self.contains(&format!("{experts}.gate_proj"));
        self.contains(name) || name.strip_suffix(".gate_up_proj").is_some_and(two)
    }
}
