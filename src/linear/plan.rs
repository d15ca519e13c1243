//! Which kernel multiplies a dense weight on CUDA: ours or cuBLAS.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

/// Inputs that 2048 does not divide: from this width on cuBLAS is as fast for more than one row.
const LARGE: usize = 4096;

/// Whether the kernel for few rows is faster than cuBLAS (measured on an H200, cuda/linear/README.md). It gains most where
/// its launch may overlap the kernel before it.
pub fn kernel_wins(rows: usize, inputs: usize, outputs: usize, overlap: bool) -> bool {
    let most = match (inputs.is_multiple_of(2048), overlap) {
        (true, true) => 16,
        (true, false) => 8,
        (false, true) if inputs < LARGE => 8,
        (false, true) if outputs <= LARGE => 4,
        (false, true) => 1,
        (false, false) if inputs < LARGE => 4,
        (false, false) => 0,
    };
    rows <= most
}

#[cfg(test)]
mod tests {
    use super::kernel_wins;

    /// The most rows for which the kernel runs, by width and overlap.
    #[test]
    fn table() {
        for (inputs, outputs, overlap, most) in [
            (2048, 4096, true, 16),
            (4096, 12288, true, 16),
            (4096, 4096, false, 8),
            (2560, 9728, true, 8),
            (2560, 9728, false, 4),
            (9728, 2560, true, 4),
            (9728, 4097, true, 1),
            (9728, 2560, false, 0),
        ] {
            let wins = |rows| kernel_wins(rows, inputs, outputs, overlap);
            assert_eq!((1..=32).filter(|rows| wins(*rows)).count(), most, "{inputs} to {outputs}, overlap {overlap}");
            assert!(most == 0 || wins(most));
        }
    }
}
