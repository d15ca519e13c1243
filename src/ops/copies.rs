//! Checks of what a call of the rule writes besides its output and the new state: copies of the state along the way.

use super::check::*;
use super::checkpoints::{Checkpoints, CHECKPOINT_MULTIPLE};
use super::options::Gates;
use super::rule::Rule;
use candle_core::{bail, Result, Tensor};

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
