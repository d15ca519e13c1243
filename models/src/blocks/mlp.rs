//! The dense SwiGLU feed-forward.

use crate::formats::{place, Source};
use crate::weights::cpu::swiglu::{swiglu, MlpRows, Mlps};
use crate::weights::Weight;
use candle_core::{Result, Tensor};
use candle_gdn_core::{host, Launch};

/// `down(silu(gate(x)) * up(x))`, or all experts of a layer.
#[derive(Debug, Clone)]
pub(crate) struct Mlp {
    /// The gate's rows, then up's; of several experts one after the other.
    pub gate_up: Weight,
    pub down: Weight,
}

impl Mlp {
    /// `source` is at `..mlp` or `..shared_expert`.
    pub(crate) fn load(hidden: usize, intermediate: usize, source: &Source) -> Result<Self> {
        let get = |name: &str, rows: usize, columns: usize| source.pp(name).matrix(rows, columns, "weight");
        let gate_up = vec![get("gate_proj", intermediate, hidden)?, get("up_proj", intermediate, hidden)?];
        let down = vec![get("down_proj", hidden, intermediate)?];
        let [gate_up, down] = [gate_up, down].map(|matrices| place::stack(matrices, source.device()));
        Ok(Self { gate_up: gate_up?, down: down? })
    }

    pub(crate) fn weights(&self) -> [&Weight; 2] {
        [&self.gate_up, &self.down]
    }

    pub(crate) fn uses_candle(&self) -> bool {
        self.weights().into_iter().any(Weight::uses_candle)
    }

    /// Both matrices where they are packed for the CPU.
    pub(crate) fn panels(&self) -> Option<Mlps<'_>> {
        Some(Mlps { gate_up: self.gate_up.panels()?, down: self.down.panels()? })
    }

    /// `x [.., hidden]` to the same. No kernel of a pass writes a weight, so that its launches may overlap.
    pub(crate) fn forward(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        let Some(mlps) = self.panels() else {
            return self.down.multiply(&self.gate_up.swiglu(x, launch)?, launch);
        };
        let mut out = vec![0f32; x.elem_count()];
        let call = MlpRows { mlps, index: 0, rows: None, out: &mut out };
        host::with_f32(x, |x| swiglu(x, &mut [call]))?;
        host::tensor(out, x.dims(), x.dtype())
    }
}
