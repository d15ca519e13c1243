use super::*;

fn cfg(n: usize, k: usize, norm: bool) -> MoeConfig {
    MoeConfig {
        num_experts: n,
        experts_per_token: k,
        intermediate_size: 1,
        shared_intermediate_size: 0,
        norm_topk_prob: norm,
        shared_gate: true,
    }
}

#[test]
fn sorts_by_expert_and_back() {
    let p = [0.1, 0.5, 0.4, 0.0, 0.6, 0.1, 0.0, 0.3, 0.0, 0.2, 0.7, 0.1];
    let r = Routing::top_k(&p, &cfg(4, 2, false));
    // Choices: token 0 takes 1, 2; token 1 takes 0, 3; token 2 takes 2, 1.
    assert_eq!(r.token_of_row, [1, 0, 2, 0, 2, 1]);
    assert_eq!(r.weight_of_row, [0.6, 0.5, 0.2, 0.4, 0.7, 0.3]);
    assert_eq!(r.row_of_choice, [1, 3, 0, 5, 4, 2]);
    assert_eq!(r.ranges, [(0, 0..1), (1, 1..3), (2, 3..5), (3, 5..6)]);
}

#[test]
fn normalises_ties_and_survives_nan() {
    let r = Routing::top_k(&[0.25; 4], &cfg(4, 2, true));
    assert_eq!(r.weight_of_row, [0.5, 0.5]);
    assert_eq!(r.ranges, [(0, 0..1), (1, 1..2)]);
    let r = Routing::top_k(&[f32::NAN; 4], &cfg(4, 4, true));
    assert!(r.weight_of_row.iter().all(|w| w.is_nan()));
}
