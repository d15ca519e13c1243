//! Are there enough GPUs? Asked before any is opened.

use anyhow::{bail, Result};

/// An error where `ranks`, which need a GPU each, are more than `gpus`.
pub fn expect_gpus(ranks: usize, gpus: usize) -> Result<()> {
    let here = match gpus {
        _ if ranks <= gpus => return Ok(()),
        0 => "none is".to_string(),
        1 => "1 is".to_string(),
        gpus => format!("{gpus} are"),
    };
    bail!(
        "--tensor-parallel {ranks}: expected at most as many ranks as there are GPUs, and here {here} \
         (CUDA_VISIBLE_DEVICES may hide some; --cpu divides the CPU)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_a_gpu() {
        for (ranks, gpus) in [(1, 1), (2, 2), (2, 8)] {
            assert!(expect_gpus(ranks, gpus).is_ok());
        }
        for (ranks, gpus, here) in [(4, 2, "here 2 are"), (2, 1, "here 1 is"), (1, 0, "here none is")] {
            let message = expect_gpus(ranks, gpus).expect_err("too few").to_string();
            assert!(message.contains(here) && message.contains(&format!("--tensor-parallel {ranks}:")), "{message}");
        }
    }
}
