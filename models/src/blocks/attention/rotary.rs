//! Cosines and sines of rotary positions, for the CPU's attention. The kernels of a device compute their own.

use std::sync::{Arc, PoisonError, RwLock};

/// The tables of the positions seen so far, shared by the layers of a model.
///
/// They grow by doubling, so that a short chat does not pay for a quarter of a million positions.
#[derive(Debug)]
pub(crate) struct Rotary {
    inv_freq: Vec<f64>,
    max_positions: usize,
    tables: RwLock<Arc<Angles>>,
}

/// Of some positions one after the other, `[positions, pairs]`.
#[derive(Debug, Default)]
pub(crate) struct Angles {
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
}

const FIRST_POSITIONS: usize = 512;

impl Rotary {
    /// `inv_freq` are the radians per position of each rotated pair.
    pub(crate) fn new(inv_freq: &[f64], max_positions: usize) -> Self {
        Self { inv_freq: inv_freq.to_vec(), max_positions, tables: RwLock::default() }
    }

    /// Appends the angles of the positions `start..start + tokens`, which end within `max_positions`.
    pub(crate) fn append(&self, start: usize, tokens: usize, dst: &mut Angles) {
        let (pairs, end) = (self.inv_freq.len(), start + tokens);
        // The tables are replaced whole, so a lock poisoned elsewhere still holds good ones.
        let mut tables = self.tables.read().unwrap_or_else(PoisonError::into_inner).clone();
        if tables.cos.len() < end * pairs {
            let positions = end.next_power_of_two().max(FIRST_POSITIONS).min(self.max_positions);
            tables = Arc::new(self.first(positions));
            *self.tables.write().unwrap_or_else(PoisonError::into_inner) = tables.clone();
        }
        dst.cos.extend_from_slice(&tables.cos[start * pairs..end * pairs]);
        dst.sin.extend_from_slice(&tables.sin[start * pairs..end * pairs]);
    }

    /// Of the first so many positions.
    fn first(&self, positions: usize) -> Angles {
        let mut angles = Angles::default();
        for position in 0..positions {
            for f in &self.inv_freq {
                // f64: at position 200,000 an f32 angle is wrong in its second decimal.
                let (sin, cos) = (position as f64 * f).sin_cos();
                angles.cos.push(cos as f32);
                angles.sin.push(sin as f32);
            }
        }
        angles
    }
}
