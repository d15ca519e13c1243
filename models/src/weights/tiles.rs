//! Columns of a matrix in another order than the model's.

use candle_core::{Result, Tensor};
use std::ops::Range;

/// Runs of columns `[groups, per_group]` that are stored transposed, `[per_group, groups]`: the value heads in GGUF files.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Tiles {
    pub groups: usize,
    pub per_group: usize,
    /// Columns of a run.
    pub size: usize,
}

impl Tiles {
    /// Where the runs of some groups are stored, in the model's order.
    pub fn grouped(self, groups: Range<usize>) -> Vec<Range<usize>> {
        groups.flat_map(|group| (0..self.per_group).map(move |i| self.columns(i, group..group + 1))).collect()
    }

    /// The same in the order in which they are stored.
    pub fn stored(self, groups: Range<usize>) -> Vec<Range<usize>> {
        (0..self.per_group).map(|i| self.columns(i, groups.clone())).collect()
    }

    /// The stored columns of run `i` of each group.
    fn columns(self, i: usize, groups: Range<usize>) -> Range<usize> {
        (i * self.groups + groups.start) * self.size..(i * self.groups + groups.end) * self.size
    }

    /// `x [rows, columns]`, in the model's order, with its columns as they are stored.
    pub fn apply(self, x: &Tensor) -> Result<Tensor> {
        let (rows, columns) = x.dims2()?;
        let runs = x.reshape((rows, self.groups, self.per_group, self.size))?.transpose(1, 2)?;
        runs.contiguous()?.reshape((rows, columns))
    }
}
