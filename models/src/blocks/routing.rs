//! Which token goes to which expert, on the host.

use crate::config::MoeConfig;
use crate::weights::cpu::experts::{Combine, Shares};
use std::ops::Range;

/// The choices of all tokens, and the same sorted by expert ("rows").
#[derive(Debug)]
pub(crate) struct Routing {
    pub experts_per_token: usize,
    /// The experts that have tokens, and their rows.
    pub ranges: Vec<(usize, Range<usize>)>,
    pub token_of_row: Vec<u32>,
    pub weight_of_row: Vec<f32>,
    /// For each token its `experts_per_token` rows, token by token.
    pub row_of_choice: Vec<u32>,
}

impl Routing {
    /// `p` are the router's probabilities, `[tokens, experts]`.
    pub(crate) fn top_k(p: &[f32], cfg: &MoeConfig) -> Self {
        let (n, k) = (cfg.num_experts, cfg.experts_per_token);
        let tokens = p.len() / n;
        let mut experts = Vec::with_capacity(tokens * k);
        let mut weights = Vec::with_capacity(tokens * k);
        let mut order: Vec<usize> = Vec::with_capacity(n);
        for row in p.chunks_exact(n) {
            order.clear();
            order.extend(0..n);
            // Ties go to the lower expert. total_cmp: a NaN must not break the order and panic; it
            // reaches the logits, where the caller sees it.
            let better = |a: &usize, b: &usize| row[*b].total_cmp(&row[*a]).then(a.cmp(b));
            if k < n {
                order.select_nth_unstable_by(k - 1, better);
            }
            order[..k].sort_unstable_by(better);
            let total: f32 = match cfg.norm_topk_prob {
                true => order[..k].iter().map(|&e| row[e]).sum(),
                false => 1.,
            };
            experts.extend_from_slice(&order[..k]);
            weights.extend(order[..k].iter().map(|&e| row[e] / total));
        }
        Self::sorted(&experts, &weights, n, k)
    }

    /// The sum of each token's experts, whose rows are `experts [rows, hidden]`, and of the shared one.
    pub(crate) fn combine<'a>(&'a self, experts: &'a [f32], shared: Option<Shares<'a>>, hidden: usize) -> Combine<'a> {
        let (weights, choices, per_token) = (&self.weight_of_row, &self.row_of_choice, self.experts_per_token);
        Combine { experts, weights, choices, per_token, shared, hidden }
    }

    /// Counting sort by expert; tokens of one expert keep their order.
    fn sorted(experts: &[usize], weights: &[f32], n: usize, k: usize) -> Self {
        let mut next = vec![0usize; n + 1];
        for &e in experts {
            next[e + 1] += 1;
        }
        for e in 0..n {
            next[e + 1] += next[e];
        }
        let ranges = (0..n).map(|e| (e, next[e]..next[e + 1])).filter(|(_, r)| !r.is_empty()).collect();
        let mut token_of_row = vec![0u32; experts.len()];
        let mut weight_of_row = vec![0f32; experts.len()];
        let mut row_of_choice = Vec::with_capacity(experts.len());
        for (choice, (&e, &w)) in experts.iter().zip(weights).enumerate() {
            let row = next[e];
            next[e] += 1;
            token_of_row[row] = (choice / k) as u32;
            weight_of_row[row] = w;
            row_of_choice.push(row as u32);
        }
        Self { experts_per_token: k, ranges, token_of_row, weight_of_row, row_of_choice }
    }
}

#[cfg(test)]
mod tests;
