//! Memory that a kernel writes, and around it some that is nobody's.

use crate::support::{rounded, values};
use candle_core::{DType, Device, Result, Tensor};

/// States of sequences in slots of a pool that has more of them; slots of no sequence hold 7.
pub struct SlotPool {
    pub all: Tensor,
    map: Vec<Option<usize>>,
    size: usize,
}

impl SlotPool {
    /// `data` are the states one after the other, of which those without a slot are padding's.
    pub fn new(
        data: &[f64],
        map: &[Option<usize>],
        slots: usize,
        shape: &[usize],
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let size = shape.iter().product();
        let mut pool = vec![7.0; slots * size];
        for (slot, state) in map.iter().zip(data.chunks_exact(size)) {
            if let Some(slot) = slot {
                pool[slot * size..][..size].copy_from_slice(state);
            }
        }
        let all = rounded(&pool, &[&[slots], shape].concat(), dtype)?.0.to_device(device)?;
        Ok(Self { all, map: map.to_vec(), size })
    }

    /// The slots as an op takes them.
    pub fn slots(&self) -> Result<Tensor> {
        let map: Vec<u32> = self.map.iter().map(|slot| slot.map_or(u32::MAX, |slot| slot as u32)).collect();
        Tensor::new(map, self.all.device())
    }

    /// The states of those that have a slot, once it is seen that nothing else was written.
    pub fn states(&self) -> Vec<f64> {
        let all = values(&self.all);
        let mut rest = all.clone();
        let owned = self.map.iter().flatten().map(|slot| slot * self.size..(slot + 1) * self.size);
        owned.clone().for_each(|slot| rest[slot].fill(7.0));
        assert!(rest.iter().all(|&x| x == 7.0), "a slot of no sequence was written");
        owned.flat_map(|slot| all[slot].to_vec()).collect()
    }
}
