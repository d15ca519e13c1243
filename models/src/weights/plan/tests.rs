use super::*;

/// Kernel by kernel the most rows.
#[test]
fn products() {
    let most = |kernel, choose: &dyn Fn(usize) -> Kernel| (1..=512).filter(|rows| choose(*rows) == kernel).max();
    for (dtype, q4_k, few, many) in [
        (DType::BF16, false, 8, Some(128)),
        (DType::BF16, true, 6, Some(128)),
        (DType::F16, true, 6, Some(128)),
        (DType::F32, true, 8, None),
    ] {
        let choose = |rows| packed(rows, dtype, q4_k);
        assert_eq!((most(Kernel::Few, &choose), most(Kernel::Many, &choose)), (Some(few), many), "{dtype:?} {q4_k}");
    }
    assert_eq!((most(Kernel::Few, &e4m3), most(Kernel::Many, &e4m3)), (Some(64), None));
    for (inputs, rows) in [(2048, 8), (2560, 8), (4096, 8), (5120, 4), (6144, 8), (9728, 4)] {
        assert_eq!((1..=64).filter(|rows| dense_swiglu_wins(*rows, inputs)).count(), rows, "{inputs} inputs");
    }
}

#[test]
fn experts() {
    let cfg = |experts, top_k, inner, shared| MoeConfig {
        num_experts: experts,
        experts_per_token: top_k,
        intermediate_size: inner,
        shared_intermediate_size: shared,
        norm_topk_prob: true,
        shared_gate: true,
    };
    for (cfg, hidden, dtype, supported) in [
        (cfg(256, 8, 512, 512), 2048, DType::BF16, true),
        (cfg(256, 8, 512, 0), 2048, DType::F16, true),
        (cfg(256, 8, 512, 512), 2048, DType::F32, false),
        (cfg(256, 8, 500, 512), 2048, DType::BF16, false),
        (cfg(256, 8, 512, 512), 2050, DType::BF16, false),
        (cfg(2048, 8, 512, 512), 2048, DType::BF16, false),
        (cfg(256, 17, 512, 512), 2048, DType::BF16, false),
    ] {
        assert_eq!(experts_supported(&cfg, hidden, dtype), supported, "{cfg:?} {hidden} {dtype:?}");
        let on_host = |tokens| routed_on_host(&cfg, hidden, dtype, tokens);
        assert_eq!((on_host(32), on_host(33)), (false, !supported));
    }
    assert_eq!([1, 256, 257].map(|tokens| packed_experts(tokens, 2048)), [Some(16), Some(16), None]);
    assert_eq!([8192, 65537].map(packed_expert_tokens), [8, 0]);
}
