//! The choices as tables.

use super::*;

#[test]
fn calls_of_few_tokens_use_the_step() {
    for (longest, cuda, step) in
        [(0, true, true), (8, true, true), (9, true, false), (16, false, true), (17, false, false)]
    {
        assert_eq!(uses_step(longest, cuda), step, "{longest}");
    }
}

#[test]
fn launches_of_one_token_of_few_sequences_overlap() {
    for (longest, sequences, overlap) in [(1, 1, true), (1, 16, true), (1, 17, false), (2, 1, false), (0, 1, false)] {
        assert_eq!(overlaps(longest, sequences), overlap, "{longest} {sequences}");
    }
}

#[test]
fn kernels_of_the_rule_and_what_they_support() {
    use Algo::*;
    use DType::{BF16, F32};
    let cases = [
        (Auto, F32, (7, 5), 1000, true),
        (Unfused, F32, (7, 5), 1000, true),
        (Recurrent, F32, (256, 1), 1000, true),
        (Recurrent128, F32, (128, 128), 1000, true),
        (Recurrent128, F32, (128, 64), 1, false),
        (Decode, F32, (128, 128), 16, true),
        (Decode, F32, (128, 128), 17, false),
        (Decode, F32, (64, 64), 1, true),
        (Decode, F32, (256, 32), 1, true),
        (Decode, F32, (96, 192), 16, true),
        (Decode, F32, (64, 64), 2, false),
        (Decode, F32, (160, 128), 1, false),
        (Decode, F32, (128, 48), 1, false),
        (ChunkedSm80, BF16, (128, 256), 1000, true),
        (ChunkedSm80, F32, (128, 128), 64, false),
        (ChunkedSm90, BF16, (136, 128), 64, false),
        (ChunkedSm90, BF16, (124, 128), 64, false),
        (ChunkedSm90, BF16, (128, 124), 64, false),
        (StepWhole, BF16, (128, 128), 1, false),
    ];
    for (algo, dtype, sizes, longest, want) in cases {
        let supports = |packed| refuses_rule(algo, dtype, sizes, longest, packed).is_none();
        assert_eq!(supports(false), want, "{algo} {dtype:?} {sizes:?} {longest}");
        // Boundaries count as several tokens.
        let packed = want && (algo != Decode || FUSED_DIMS.contains(&sizes));
        assert_eq!(supports(true), packed, "{algo} {dtype:?} {sizes:?} {longest} packed");
    }
}

#[test]
fn kernels_of_the_step_and_what_they_support() {
    use Algo::*;
    let cases = [
        (Auto, (64, 64, 3), 16, true, true),
        (Recurrent, (64, 64, 3), 16, true, true),
        (StepWhole, (128, 128, 4), 16, true, true),
        (StepWhole, (128, 128, 3), 1, false, false),
        (StepHeads, (64, 128, 4), 1, false, false),
        (StepHeads, (96, 192, 4), 8, true, true),
        (StepWhole, (192, 96, 4), 1, false, false),
        (StepSplit, (128, 128, 4), 1, false, true),
        (StepSplit, (128, 128, 4), 2, false, false),
        (StepSplit, (128, 128, 4), 1, true, false),
    ];
    for (algo, sizes, longest, packed, want) in cases {
        assert_eq!(refuses_step(algo, sizes, longest, packed).is_none(), want, "{algo} {sizes:?} {longest} {packed}");
    }
}
