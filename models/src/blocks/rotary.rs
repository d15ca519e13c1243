//! Rotary position embedding on the first values of a head.

use candle_core::{DType, Device, Result, Tensor};
use std::sync::{Arc, PoisonError, RwLock};

/// Cosines and sines of the positions seen so far, shared by the layers of a model.
///
/// The tables grow by doubling, so that a short chat does not pay for a quarter of a million
/// positions and decoding does not upload a row per token.
#[derive(Debug)]
pub(crate) struct Rotary {
    inv_freq: Vec<f64>,
    max_positions: usize,
    device: Device,
    tables: RwLock<Arc<Tables>>,
}

/// cos and sin, `[positions, rotary_dim / 2]` in f32.
#[derive(Debug)]
struct Tables {
    cos: Tensor,
    sin: Tensor,
}

/// cos and sin of the positions of one forward pass, `[tokens, rotary_dim / 2]` in f32.
#[derive(Debug, Clone)]
pub(crate) struct Angles {
    cos: Tensor,
    sin: Tensor,
}

const FIRST_POSITIONS: usize = 512;

impl Rotary {
    /// `inv_freq` are the radians per position of each rotated pair.
    pub(crate) fn new(inv_freq: &[f64], max_positions: usize, device: &Device) -> Result<Self> {
        let tables = tables(inv_freq, FIRST_POSITIONS.min(max_positions), device)?;
        Ok(Self {
            inv_freq: inv_freq.to_vec(),
            max_positions,
            device: device.clone(),
            tables: RwLock::new(Arc::new(tables)),
        })
    }

    /// The angles of the positions `start..start + tokens`, which end within `max_positions`.
    pub(crate) fn angles(&self, start: usize, tokens: usize) -> Result<Angles> {
        let end = start + tokens;
        // The tables are replaced whole, so a lock poisoned elsewhere still holds good ones.
        let mut now = self.tables.read().unwrap_or_else(PoisonError::into_inner).clone();
        if now.cos.dim(0)? < end {
            let positions = end.next_power_of_two().min(self.max_positions);
            now = Arc::new(tables(&self.inv_freq, positions, &self.device)?);
            *self.tables.write().unwrap_or_else(PoisonError::into_inner) = now.clone();
        }
        Ok(Angles { cos: now.cos.narrow(0, start, tokens)?, sin: now.sin.narrow(0, start, tokens)? })
    }
}

fn tables(inv_freq: &[f64], positions: usize, device: &Device) -> Result<Tables> {
    // f64: at position 200,000 an f32 angle is wrong in its second decimal.
    let (mut cos, mut sin) = (Vec::new(), Vec::new());
    for p in 0..positions {
        for f in inv_freq {
            let (s, c) = (p as f64 * f).sin_cos();
            cos.push(c as f32);
            sin.push(s as f32);
        }
    }
    let shape = (positions, inv_freq.len());
    Ok(Tables { cos: Tensor::from_vec(cos, shape, device)?, sin: Tensor::from_vec(sin, shape, device)? })
}

impl Angles {
    /// cos and sin, `[tokens, rotary_dim / 2]` in f32.
    pub(crate) fn tables(&self) -> (&Tensor, &Tensor) {
        (&self.cos, &self.sin)
    }

    /// Rotates the first values of each head of `x [batch, heads, tokens, head_dim]`, f32; value `i`
    /// is paired with value `i + rotary_dim / 2`.
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        debug_assert_eq!(x.dtype(), DType::F32);
        let head_dim = x.dim(3)?;
        let rotary_dim = 2 * self.cos.dim(1)?;
        let rotated = x.narrow(3, 0, rotary_dim)?.contiguous()?;
        let rotated = candle_nn::rotary_emb::rope(&rotated, &self.cos, &self.sin)?;
        if rotary_dim == head_dim {
            return Ok(rotated);
        }
        let rest = x.narrow(3, rotary_dim, head_dim - rotary_dim)?;
        Tensor::cat(&[&rotated, &rest], 3)
    }
}
