//! A place among the weights of a model.

use super::{path, ExpertShape, Format, OtherType, Quantizer, Stored, StoredExperts};
use candle_core::{Device, Result, Shape, Tensor};
use candle_nn::VarBuilder;
use std::sync::Arc;

/// Every block of a model loads from one.
#[derive(Clone)]
pub(crate) struct Source<'a> {
    /// Any weight, dense; its dtype and device are the model's.
    pub dense: VarBuilder<'a>,
    /// The format in which matrices are stored and stay.
    pub stored: Option<Arc<dyn Format + 'a>>,
    /// What becomes of the other matrices.
    pub quantizer: Option<Arc<Quantizer>>,
    /// Whether all weights are in one file, whose errors say best what it lacks.
    pub is_one_file: bool,
}

impl<'a> Source<'a> {
    /// Dense weights.
    pub(crate) fn new(dense: VarBuilder<'a>) -> Self {
        Self { dense, stored: None, quantizer: None, is_one_file: false }
    }

    /// The place `name` below this one.
    pub(crate) fn pp(&self, name: impl ToString) -> Self {
        Self { dense: self.dense.pp(name), ..self.clone() }
    }

    /// The same, where an empty name is this place.
    pub(crate) fn pp_some(&self, name: &str) -> Self {
        if name.is_empty() {
            return self.clone();
        }
        self.pp(name)
    }

    /// The full name of a weight.
    pub(crate) fn name(&self, weight: &str) -> String {
        path(&self.dense, weight)
    }

    /// The same place with all weights dense.
    pub(crate) fn all_dense(&self) -> Self {
        Self { stored: None, quantizer: None, ..self.clone() }
    }

    /// The matrices that could not have the type that was asked for, or that of their file.
    pub(crate) fn other_types(&self) -> Vec<OtherType> {
        let formats = self.formats().into_iter().flatten();
        formats.flat_map(|format| format.other_types()).collect()
    }

    /// Those that there are, in the order in which they are asked.
    fn formats(&self) -> [Option<&(dyn Format + 'a)>; 2] {
        [self.stored.as_deref(), self.quantizer.as_deref().map(|quantizer| quantizer as &dyn Format)]
    }

    pub(crate) fn device(&self) -> &Device {
        self.dense.device()
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.dense.contains_tensor(name)
    }

    /// A weight in the model's dtype and on its device; another shape is an error that names the tensor.
    pub(crate) fn get(&self, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
        self.dense.get(shape, name)
    }

    /// A matrix `[rows, columns]` for a projection.
    pub(crate) fn matrix(&self, rows: usize, columns: usize, name: &str) -> Result<Stored> {
        for format in self.formats().into_iter().flatten() {
            if let Some(matrix) = format.matrix(&self.dense, name, &[rows, columns])? {
                return Ok(matrix);
            }
        }
        self.get((rows, columns), name).map(Stored::Dense)
    }

    /// A matrix as it is stored; `None` where that is dense.
    pub(crate) fn stored(&self, rows: usize, columns: usize, name: &str) -> Result<Option<Stored>> {
        match &self.stored {
            Some(format) => format.matrix(&self.dense, name, &[rows, columns]),
            None => Ok(None),
        }
    }

    /// The experts here (`..mlp.experts`).
    pub(crate) fn experts(&self, shape: ExpertShape) -> Result<Option<StoredExperts>> {
        for format in self.formats().into_iter().flatten() {
            if let Some(experts) = format.experts(&self.dense, shape)? {
                return Ok(Some(experts));
            }
        }
        Ok(None)
    }
}
