//! What a call of the rule writes besides its output and the new state: copies of the state along the way.

use super::check::*;
use super::options::Gates;
use super::rule::Rule;
use candle_core::{bail, Result, Tensor};
use std::ops::Range;

/// States are kept at multiples of this many tokens of a sequence; see [`crate::GdnPrefill::with_checkpoints`]. It is
/// the chunk of the chunk forms, between whose ends they have no state.
pub const CHECKPOINT_MULTIPLE: usize = 64;

/// The rows of the checkpoints that belong to one sequence of a call, in the order of its tokens: row `start + j` holds
/// its state after `(j + 1) * every` tokens.
///
/// The sequence has `tokens` tokens, the first of which is number `first_token` of the call: `n * tokens` for sequence
/// `n` of a batch, `cu_seqlens[n]` where they are packed.
///
/// # Panics
/// When `every` is zero.
pub fn checkpoint_rows(first_token: usize, tokens: usize, every: usize) -> Range<usize> {
    let start = first_token / every;
    start..start + tokens / every
}

/// Where the states at multiples of `every` tokens go.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    pub tensor: Tensor,
    pub every: usize,
}

impl Rule {
    /// The token states against the call that writes them.
    pub fn check_token_states(&self, lead_dims: &[usize]) -> Result<()> {
        let (op, arg, algo) = (self.name, "token_states", self.options.algo);
        let Some(tensor) = &self.token_states else { return Ok(()) };
        if algo.on_tensor_cores() {
            bail!("{op}: {arg}: expected an algo that goes token by token, got {algo:?}");
        }
        check_dtype(op, arg, tensor.dtype(), self.state.dtype())?;
        check_device(op, arg, tensor, self.state.device())?;
        check_shape(op, arg, tensor, &[lead_dims, &self.state.dims()[1..]].concat())?;
        check_contiguous(op, arg, tensor)?;
        self.check_shares_nothing(arg, tensor)
    }

    /// The checkpoints against the call that writes them.
    pub fn check_checkpoints(&self, total_tokens: usize) -> Result<()> {
        let (op, arg) = (self.name, "checkpoints");
        let Some(Checkpoints { tensor, every }) = &self.checkpoints else { return Ok(()) };
        if *every == 0 || every % CHECKPOINT_MULTIPLE != 0 {
            bail!("{op}: every: expected a positive multiple of {CHECKPOINT_MULTIPLE} tokens, got {every}");
        }
        check_dtype(op, arg, tensor.dtype(), self.state.dtype())?;
        check_device(op, arg, tensor, self.state.device())?;
        let (rows, head) = (total_tokens / every, &self.state.dims()[1..]);
        match tensor.dims() {
            [have, rest @ ..] if *have >= rows && rest == head => {}
            dims => bail!(
                "{op}: {arg}: expected shape [rows, {}, {}, {}] with at least {rows} rows ({total_tokens} tokens, one for \
                 every {every}), got {dims:?}",
                head[0],
                head[1],
                head[2]
            ),
        }
        check_contiguous(op, arg, tensor)?;
        self.check_shares_nothing(arg, tensor)?;
        match &self.token_states {
            Some(other) => check_not_written(op, ("token_states", storage_key(other)), (arg, storage_key(tensor))),
            None => Ok(()),
        }
    }

    /// No argument that the op holds may lie in what `arg` is written to.
    fn check_shares_nothing(&self, arg: &str, tensor: &Tensor) -> Result<()> {
        let (Gates { a, b, a_log, dt_bias }, key) = (&self.gates, storage_key(tensor));
        for (held, tensor) in [("state", &self.state), ("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)] {
            check_not_written(self.name, (held, storage_key(tensor)), (arg, key))?;
        }
        Ok(())
    }

    /// No input may lie in what the op writes while it reads.
    pub fn check_not_written(&self, arg: &str, key: usize) -> Result<()> {
        check_not_state(self.name, arg, key, &self.state)?;
        if let Some(tensor) = &self.token_states {
            check_not_written(self.name, (arg, key), ("token_states", storage_key(tensor)))?;
        }
        if let Some(to) = &self.checkpoints {
            check_not_written(self.name, (arg, key), ("checkpoints", storage_key(&to.tensor)))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::checkpoint_rows;

    /// Packed sequences of any lengths have rows of their own, below the total.
    #[test]
    fn rows_of_sequences_do_not_overlap() {
        let lengths = [0, 64, 63, 1, 200, 0, 127, 65, 128, 500];
        let (mut first, mut end) = (0, 0);
        for tokens in lengths {
            let rows = checkpoint_rows(first, tokens, 64);
            assert_eq!(rows.len(), tokens / 64);
            assert!(rows.start >= end, "{rows:?} after {end}");
            (first, end) = (first + tokens, rows.end);
        }
        assert!(end <= first / 64);
        assert_eq!(checkpoint_rows(256, 256, 128), 2..4);
    }
}
