use super::*;
use crate::formats::{Blocks, ExpertShape};
use std::sync::Arc;

fn numbers(rows: usize, columns: usize, seed: f32) -> Result<Tensor> {
    let values = (0..rows * columns).map(|i| (seed + i as f32 * 0.37).sin()).collect();
    Tensor::from_vec(values, (rows, columns), &Device::Cpu)
}

/// Whole numbers of which each 32 have the same largest one: candle's rounding to 8 bits leaves them as they are.
fn whole_numbers(rows: usize, columns: usize) -> Result<Tensor> {
    let number = |i: usize| if i % 32 == 7 { 127. } else { ((i * 7919 + i / 13) % 201) as f32 - 100. };
    Tensor::from_vec((0..rows * columns).map(number).collect(), (rows, columns), &Device::Cpu)
}

#[test]
fn each_token_has_the_experts_that_it_chose() -> Result<()> {
    use GgmlDType::{Q2K, Q3K, Q4K, Q5K, Q6K, Q8_0};
    let Some(cuda) = candle_gdn_core::device::cuda::testing::device() else { return Ok(()) };
    let shape = ExpertShape { experts: 5, intermediate: 256, hidden: 512 };
    let ExpertShape { experts: n, intermediate, hidden } = shape;
    for dtype in [Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        let gate_up = Blocks::quantize(&numbers(n * 2 * intermediate, hidden, 0.3)?, dtype)?;
        let down = Blocks::quantize(&numbers(n * hidden, intermediate, 0.9)?, dtype)?;
        let wide = gate_up.tensor()?.reshape((n, 2 * intermediate, hidden))?;
        let ggml = |blocks: &Blocks, rows: usize, columns: usize| {
            Weight::ggml(Arc::new(blocks.qtensor((n, rows, columns), &cuda)?))
        };
        let gate_up = ggml(&gate_up, 2 * intermediate, hidden)?;
        let down = ggml(&down, hidden, intermediate)?;
        let x = whole_numbers(3, hidden)?;
        let chosen = [[3u32, 0], [1, 4], [2, 2]];
        let ids = Tensor::new(&chosen, &cuda)?;
        let got = gate_up.multiply_chosen(&x.to_device(&cuda)?.reshape((3, 1, hidden))?, &ids, n)?;
        let got = got.to_device(&Device::Cpu)?;
        for (token, experts) in chosen.iter().enumerate() {
            for (place, expert) in experts.iter().enumerate() {
                let want = x.narrow(0, token, 1)?.matmul(&wide.get(*expert as usize)?.t()?)?.squeeze(0)?;
                let error = (got.get(token)?.get(place)? - &want)?.sqr()?.sum_all()?.to_scalar::<f32>()?;
                let norm = want.sqr()?.sum_all()?.to_scalar::<f32>()?;
                // Sums of 32 numbers are kept in f16.
                assert!(
                    error.sqrt() < 5e-4 * norm.sqrt(),
                    "{dtype:?} token {token} expert {expert}: {error:e} of {norm:e}"
                );
            }
        }
        // A view gives what its copy gives.
        let x = whole_numbers(4, hidden)?.to_device(&cuda)?.narrow(0, 1, 3)?;
        let weights = (numbers(3, 2, 0.1)?.abs()? + 0.1)?.to_device(&cuda)?;
        let [view, copy] =
            [x.clone(), x.force_contiguous()?].map(|x| chosen_experts([&gate_up, &down], n, &x, &ids, &weights));
        assert_eq!(view?.to_vec2::<f32>()?, copy?.to_vec2::<f32>()?, "{dtype:?}");
    }
    Ok(())
}
