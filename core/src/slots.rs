//! Which slots of a state pool the sequences of a call read and write.

use crate::check::{check_dense, check_device, check_dtype};
use crate::cpu;
use crate::device::Working;
use candle_core::{bail, CpuStorage, DType, Device, Result, Storage, Tensor};
use std::sync::Arc;

#[cfg(test)]
mod tests;

/// Marks a padding row in a slot map: it reads and writes no state, and its output is zero. In an i64 map it is -1.
pub const NO_SLOT: u32 = u32::MAX;

/// Which slots of a state pool the sequences of a call read and write: sequence `n` begins at the state in slot
/// `read[n]` and leaves its new one in slot `write[n]`, mostly the same.
///
/// * Where they differ, the slot that was read stays as it is. Several sequences may read one slot (a fork).
/// * No two sequences may write one slot, and none may write a slot that another one reads.
/// * [`NO_SLOT`] in either map makes a row of padding.
///
/// Made from host values ([`Slots::new`], [`Slots::from_to`]) the maps are checked here, whatever the device. Made from
/// tensors they are checked on the CPU when an op runs; on CUDA the host does not see the values: one out of range is
/// treated as padding, and a slot that breaks the rules above holds undefined values after. Make one a batch and use it
/// for every layer.
///
/// The tensors are `[sequences]`, contiguous, u32 or i64. An i64 map is converted on the device by each op; what does
/// not fit in 32 bits wraps there.
#[derive(Debug, Clone)]
pub struct Slots {
    read: Tensor,
    write: Tensor,
    host: Option<Arc<Host>>,
}

/// The values, checked against each other.
#[derive(Debug)]
struct Host {
    read: Vec<u32>,
    /// `None` where the slots read are written.
    write: Option<Vec<u32>>,
    /// One past the largest slot.
    end: usize,
}

impl Slots {
    /// Sequence `n` reads and writes slot `slots[n]`.
    ///
    /// # Errors
    /// When a slot comes twice, or the device is out of memory.
    pub fn new(slots: &[u32], device: &Device) -> Result<Self> {
        let host = Host::new("slots", slots, None)?;
        let read = to_device(slots, device)?;
        Ok(Self { write: read.clone(), read, host: Some(Arc::new(host)) })
    }

    /// Sequence `n` reads slot `read[n]` and writes slot `write[n]`.
    ///
    /// # Errors
    /// When the lengths differ, a slot is written twice, or one is written that another sequence reads.
    pub fn from_to(read: &[u32], write: &[u32], device: &Device) -> Result<Self> {
        let host = Host::new("slots", read, Some(write))?;
        let (read, write) = (to_device(read, device)?, to_device(write, device)?);
        Ok(Self { read, write, host: Some(Arc::new(host)) })
    }

    /// From maps on the device, which may be one tensor; see the type for their shape and dtype, which are checked when
    /// an op runs.
    pub fn from_tensors(read: &Tensor, write: &Tensor) -> Self {
        Self { read: read.clone(), write: write.clone(), host: None }
    }

    /// New values in the same device memory, as a captured CUDA graph reads it. Other clones of this see them as well,
    /// and keep the old values on the host: hold no clones.
    ///
    /// # Errors
    /// As the constructors', or when the number of sequences changes, or where made by [`Slots::new`] `read` and `write`
    /// differ. The values are then as before.
    pub fn set(&mut self, read: &[u32], write: &[u32]) -> Result<()> {
        let separate = !self.in_place();
        if !separate && read != write {
            bail!("slots: set: expected the slots that are read to be written, as this was made");
        }
        let host = Host::new("slots", read, separate.then_some(write))?;
        let maps = [("slots", &self.read, read), ("slots to write", &self.write, write)];
        let maps = &maps[..1 + usize::from(separate)];
        for (arg, map, values) in maps {
            check_dtype("slots: set", arg, map.dtype(), DType::U32)?;
            check_dense("slots: set", arg, map.layout(), &[values.len()])?;
        }
        let _working = Working::new(self.read.device());
        // All are allocated before one is written.
        let filled = maps.iter().filter(|(_, _, values)| !values.is_empty());
        let filled = filled.map(|(_, map, values)| Ok((map, Tensor::new(*values, map.device())?)));
        for (map, values) in filled.collect::<Result<Vec<_>>>()? {
            map.slice_set(&values, 0, 0)?;
        }
        self.host = Some(Arc::new(host));
        Ok(())
    }

    /// Number of sequences.
    pub fn len(&self) -> usize {
        self.read.elem_count()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The map that is read, on the device.
    pub fn read(&self) -> &Tensor {
        &self.read
    }

    /// The map that is written, on the device: the same tensor where the slots read are written.
    pub fn write(&self) -> &Tensor {
        &self.write
    }

    /// The slots read and the slots written, where this was made from host values.
    pub fn on_host(&self) -> Option<(&[u32], &[u32])> {
        let host = self.host.as_ref()?;
        Some((&host.read, host.write.as_deref().unwrap_or(&host.read)))
    }

    /// Whether one tensor is both maps.
    pub fn in_place(&self) -> bool {
        self.read.id() == self.write.id()
    }

    /// Whether the other is a clone of this one, or was made of the same tensors.
    pub fn is_same(&self, other: &Self) -> bool {
        self.read.id() == other.read.id() && self.write.id() == other.write.id()
    }

    /// Those that are written, to be read as well, of a state of `num_slots`. A row of padding in either map stays one.
    ///
    /// # Errors
    /// When the device is out of memory.
    pub fn written(&self, num_slots: usize) -> Result<Self> {
        if self.in_place() {
            return Ok(self.clone());
        }
        let Some((read, write)) = self.on_host() else {
            let Self { read, write, .. } = self.in_u32()?;
            if read.elem_count() == 0 {
                return Ok(Self::from_tensors(&write, &write));
            }
            let _working = Working::new(read.device());
            let slots = read.ge(u32::try_from(num_slots).unwrap_or(NO_SLOT))?.where_cond(&read, &write)?;
            return Ok(Self::from_tensors(&slots, &slots));
        };
        let slots: Vec<u32> = read.iter().zip(write).map(|(r, w)| if *r == NO_SLOT { NO_SLOT } else { *w }).collect();
        let tensor = if slots == write { self.write.clone() } else { to_device(&slots, self.read.device())? };
        let host = Host::new("slots", &slots, None)?;
        Ok(Self { read: tensor.clone(), write: tensor, host: Some(Arc::new(host)) })
    }

    /// The same with both maps in u32.
    pub fn in_u32(&self) -> Result<Self> {
        if self.read.dtype() == DType::U32 && self.write.dtype() == DType::U32 {
            return Ok(self.clone());
        }
        let _working = Working::new(self.read.device());
        let convert = |map: &Tensor| match map.device() {
            _ if map.elem_count() == 0 => Ok(map.clone()),
            Device::Cpu => Tensor::new(cpu_values("slots", map)?, &Device::Cpu),
            _ => map.to_dtype(DType::U32),
        };
        let read = convert(&self.read)?;
        let write = if self.in_place() { read.clone() } else { convert(&self.write)? };
        Ok(Self { read, write, host: self.host.clone() })
    }

    /// Shape, dtype and device of the maps against a call of `sequences` on a state of `num_slots`, and the values where
    /// they are known and need no look at a tensor. Those of CPU tensors are for [`cpu_slots`].
    pub fn check(&self, op: &str, sequences: usize, num_slots: usize, device: &Device) -> Result<()> {
        let maps = [("slots", &self.read), ("slots to write", &self.write)];
        for (arg, map) in maps.into_iter().take(1 + usize::from(!self.in_place())) {
            if !matches!(map.dtype(), DType::U32 | DType::I64) {
                bail!("{op}: {arg}: expected dtype U32 or I64, got {:?}", map.dtype());
            }
            check_device(op, arg, map, device)?;
            check_dense(op, arg, map.layout(), &[sequences])?;
        }
        match &self.host {
            Some(host) if !device.is_cpu() => host.check_range(op, num_slots),
            _ => Ok(()),
        }
    }
}

impl From<&Tensor> for Slots {
    /// The slots that are read are written.
    fn from(slots: &Tensor) -> Self {
        Self::from_tensors(slots, slots)
    }
}

impl From<&Slots> for Slots {
    fn from(slots: &Slots) -> Self {
        slots.clone()
    }
}

/// CUDA has no empty allocation: an empty map is an empty view there.
fn to_device(slots: &[u32], device: &Device) -> Result<Tensor> {
    let _working = Working::new(device);
    match slots {
        [] => Tensor::new(&[0u32], device)?.narrow(0, 0, 0),
        _ => Tensor::new(slots, device),
    }
}

impl Host {
    /// Checks the values against each other: padding aside, none is written twice, nor read by another sequence.
    fn new(op: &str, read: &[u32], write: Option<&[u32]>) -> Result<Self> {
        let separate = write.is_some();
        let write = write.unwrap_or(read);
        if read.len() != write.len() {
            bail!("{op}: expected as many slots to write as to read ({}), got {}", read.len(), write.len());
        }
        let rows = || read.iter().zip(write).enumerate().filter(|(_, (r, w))| **r != NO_SLOT && **w != NO_SLOT);
        let mut written: Vec<(u32, usize)> = rows().map(|(n, (_, w))| (*w, n)).collect();
        written.sort_unstable();
        for pair in written.windows(2) {
            if pair[0].0 == pair[1].0 {
                bail!("{op}: expected distinct values, got {} a second time at {}", pair[0].0, pair[1].1);
            }
        }
        if separate {
            for (n, (r, _)) in rows() {
                match written.binary_search_by_key(r, |(slot, _)| *slot) {
                    Ok(found) if written[found].1 != n => bail!(
                        "{op}: expected no slot to be written that another sequence reads, got {r}, read at {n} and \
                         written at {}",
                        written[found].1
                    ),
                    _ => {}
                }
            }
        }
        let end = rows().map(|(_, (r, w))| *r.max(w) as usize + 1).max().unwrap_or(0);
        Ok(Self { read: read.to_vec(), write: separate.then(|| write.to_vec()), end })
    }

    /// Every slot in range or padding.
    fn check_range(&self, op: &str, num_slots: usize) -> Result<()> {
        if self.end <= num_slots {
            return Ok(());
        }
        let write = self.write.as_ref().unwrap_or(&self.read);
        for (n, (r, w)) in self.read.iter().zip(write).enumerate() {
            let worst = *r.max(w);
            if *r != NO_SLOT && *w != NO_SLOT && worst as usize >= num_slots {
                bail!("{op}: slots: expected values below {num_slots} (the state's slots), got {worst} at {n}");
            }
        }
        Ok(())
    }
}

/// The values of CPU maps, checked.
#[derive(Debug)]
pub struct CpuSlots(Option<Host>);

impl CpuSlots {
    /// As the kernels read them, for a state whose slots are `stride` apart.
    pub fn of_stride(&self, stride: usize) -> cpu::Slots<'_> {
        let (read, write) = match &self.0 {
            Some(host) => (Some(&host.read[..]), Some(host.write.as_deref().unwrap_or(&host.read))),
            None => (None, None),
        };
        cpu::Slots { read, write, stride }
    }
}

/// The slot maps of CPU tensors, their values checked.
pub fn cpu_slots(op: &str, slots: Option<&Slots>, num_slots: usize) -> Result<CpuSlots> {
    let Some(slots) = slots else { return Ok(CpuSlots(None)) };
    let read = cpu_values(op, &slots.read)?;
    let write = if slots.in_place() { None } else { Some(cpu_values(op, &slots.write)?) };
    let host = Host::new(&format!("{op}: slots"), &read, write.as_deref())?;
    host.check_range(op, num_slots)?;
    Ok(CpuSlots(Some(host)))
}

fn cpu_values(op: &str, map: &Tensor) -> Result<Vec<u32>> {
    let (storage, layout) = map.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
    match &*storage {
        Storage::Cpu(CpuStorage::U32(data)) => Ok(data[range].to_vec()),
        Storage::Cpu(CpuStorage::I64(data)) => {
            let narrow = |(n, &slot): (usize, &i64)| match u32::try_from(slot) {
                Ok(slot) if slot != NO_SLOT => Ok(slot),
                _ if slot == -1 => Ok(NO_SLOT),
                _ => bail!("{op}: slots: expected -1 or a slot, got {slot} at {n}"),
            };
            data[range].iter().enumerate().map(narrow).collect()
        }
        _ => bail!("{op}: slots: expected a u32 or i64 tensor on the CPU"),
    }
}
