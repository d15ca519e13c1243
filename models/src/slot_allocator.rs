//! Who has which slot.

use candle_core::{bail, Result};

#[cfg(test)]
mod tests;

const OP: &str = "SlotAllocator";

/// Hands out the slots of state pools: one for all layers of a model, since a sequence has the same slot in each.
///
/// It lives on the host and holds no state itself.
#[derive(Debug)]
pub(crate) struct SlotAllocator {
    /// Those not handed out; the last is the next.
    free: Vec<u32>,
    used: Vec<bool>,
}

impl SlotAllocator {
    /// For pools of `capacity` slots each.
    ///
    /// # Errors
    /// When `capacity` is above 2^31 - 1.
    pub fn new(capacity: usize) -> Result<Self> {
        let Some(end) = u32::try_from(capacity).ok().filter(|end| *end <= i32::MAX as u32) else {
            bail!("{OP}: capacity: expected at most {}, got {capacity}", i32::MAX);
        };
        Ok(Self { free: (0..end).rev().collect(), used: vec![false; capacity] })
    }

    /// A slot with whatever its last owner left there: for callers that write it before it is read, as the target of a
    /// copy or of a verify pass.
    ///
    /// # Errors
    /// When no slot is free.
    pub fn allocate_unset(&mut self) -> Result<u32> {
        let Some(slot) = self.free.pop() else {
            bail!("{OP}: allocate: expected a free slot, all {} are in use", self.capacity());
        };
        self.used[slot as usize] = true;
        Ok(slot)
    }

    /// Takes a slot back. Its state stays where it is until the slot is handed out again.
    ///
    /// # Errors
    /// When the slot is not in use: freed already, or none of these.
    pub fn free(&mut self, slot: u32) -> Result<()> {
        match self.used.get_mut(slot as usize) {
            Some(used) if *used => *used = false,
            Some(_) => bail!("{OP}: free: expected a slot in use, got {slot}, which is free"),
            None => bail!("{OP}: free: expected a slot below {}, got {slot}", self.capacity()),
        }
        self.free.push(slot);
        Ok(())
    }

    /// Slots in use.
    pub fn len(&self) -> usize {
        self.capacity() - self.free.len()
    }

    /// Whether none is in use.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Slots that can be handed out still.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// Slots in all.
    pub fn capacity(&self) -> usize {
        self.used.len()
    }
}
