//! How many experts a pass reads.

use super::{Router, SparseMoe};
use crate::blocks::routing::Routing;
use candle_core::{DType, Result, Tensor};
use candle_gdn_core::cpu::matmul::products;
use candle_gdn_core::{host, Launch};
use std::cell::Cell;

thread_local! {
    static CHOSEN: Cell<Option<usize>> = const { Cell::new(None) };
}

/// For benchmarks: runs a pass, such as [`CausalLm::feed`](crate::CausalLm::feed), and counts the experts that its tokens choose,
/// in each layer every expert once. The host reads the scores of each layer, which cannot be captured in a CUDA graph.
///
/// # Errors
/// Those of the pass.
pub fn experts_chosen<T>(pass: impl FnOnce() -> Result<T>) -> Result<(T, usize)> {
    CHOSEN.set(Some(0));
    let done = pass();
    let chosen = CHOSEN.take().unwrap_or(0);
    Ok((done?, chosen))
}

impl SparseMoe {
    /// Where a pass is counted: adds the experts that `x [tokens, hidden]` chooses.
    pub(super) fn count_chosen(&self, x: &Tensor) -> Result<()> {
        if let Some(chosen) = CHOSEN.get() {
            let experts = Routing::top_k(&softmaxed(&self.scores(x)?, self.cfg.num_experts)?, &self.cfg).ranges;
            CHOSEN.set(Some(chosen + experts.len()));
        }
        Ok(())
    }

    /// `[tokens, experts]` in f32, with a shared expert one more.
    fn scores(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.to_dtype(DType::F32)?.contiguous()?;
        match &self.router {
            Router::Cpu(router) => {
                let [scores] = host::with_f32(&x, |x| products(x, [router]))?;
                host::tensor(scores, (x.dim(0)?, router.outputs()), DType::F32)
            }
            #[cfg(feature = "cuda")]
            Router::Cuda(terms) => x.matmul(&terms.to_dtype(DType::F32)?.sum(0)?.t()?),
            Router::General(router) => router.multiply(&x, &Launch::default()),
        }
    }
}

/// Their probabilities on the host, token by token.
fn softmaxed(scores: &Tensor, experts: usize) -> Result<Vec<f32>> {
    candle_nn::ops::softmax_last_dim(&scores.narrow(1, 0, experts)?.contiguous()?)?.flatten_all()?.to_vec1()
}
