//! The most likely token, looked for on the device: its number comes to the host instead of a whole vocabulary.

use candle_core::{DType, Device, Result, Tensor};

/// What a token is drawn from.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Logits {
    /// Those of all tokens.
    All(Vec<f32>),
    /// The first of the most likely tokens; whether all logits are numbers.
    Best { id: u32, sound: bool },
}

#[derive(Debug)]
pub(super) struct Greedy {
    /// `[1, vocabulary]`
    ids: Tensor,
    /// `[1, 1]`: more than any.
    none: Tensor,
}

impl Greedy {
    pub fn new(vocab: usize, device: &Device) -> Result<Self> {
        let ids = Tensor::arange(0, vocab as u32, device)?.unsqueeze(0)?;
        Ok(Self { ids, none: Tensor::full(u32::MAX, (1, 1), device)? })
    }

    /// Of each row of `logits [rows, vocabulary]` in f32.
    pub fn best(&self, logits: &Tensor) -> Result<Vec<Logits>> {
        // Of equal ones the first, as on the host: candle's argmax does not say which it takes.
        let is_best = logits.broadcast_ge(&logits.max_keepdim(1)?)?;
        let [ids, none] = [&self.ids, &self.none].map(|x| x.broadcast_as(logits.shape()));
        let ids = is_best.where_cond(&ids?, &none?)?.min(1)?.to_vec1::<u32>()?;
        // Anything infinite, or none at all, stays in a sum.
        let sums = logits.to_dtype(DType::F32)?.sum(1)?.to_vec1::<f32>()?;
        let rows = ids.into_iter().zip(sums);
        Ok(rows.map(|(id, sum)| Logits::Best { id, sound: sum.is_finite() && id != u32::MAX }).collect())
    }
}
