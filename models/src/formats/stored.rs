//! Matrices as a format reads them.

use super::{Blocks, E4m3Rows};
use crate::weights::Tiles;
use candle_core::{bail, Result, Tensor};
use candle_gdn::formats::select_rows;
use std::ops::Range;

/// A matrix before it is a weight: its rows can still be put in another order and below those of others.
#[derive(Debug, Clone)]
pub(crate) enum Stored {
    /// On the model's device, in its dtype.
    Dense(Tensor),
    /// In e4m3, on the host.
    E4m3(E4m3Rows),
    /// In a ggml type, on the host.
    Blocks(Blocks),
    /// The same with columns in another order than the model's.
    Tiled(Blocks, Tiles),
}

impl Stored {
    /// The rows in the order of `ranges`.
    pub fn select_rows(self, ranges: &[Range<usize>]) -> Result<Self> {
        Ok(match self {
            Self::Dense(rows) => Self::Dense(select_rows(&rows, ranges)?),
            Self::E4m3(rows) => Self::E4m3(rows.select_rows(ranges)?),
            Self::Blocks(rows) => Self::Blocks(rows.select_rows(ranges)),
            Self::Tiled(rows, tiles) => Self::Tiled(rows.select_rows(ranges), tiles),
        })
    }

    /// How many rows it has.
    pub fn rows(&self) -> usize {
        match self {
            Self::Dense(rows) => rows.dims()[0],
            Self::E4m3(rows) => rows.rows(),
            Self::Blocks(rows) | Self::Tiled(rows, _) => rows.rows,
        }
    }

    pub fn blocks(self) -> Option<Blocks> {
        match self {
            Self::Blocks(blocks) => Some(blocks),
            _ => None,
        }
    }

    pub fn into_dense(self) -> Result<Tensor> {
        match self {
            Self::Dense(weight) => Ok(weight),
            stored => bail!("expected a dense matrix, got {stored:?}"),
        }
    }
}
