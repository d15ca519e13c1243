use super::*;
use std::collections::HashMap;

/// But for Lara-4-Mini's one matrix, whose last rows they are.
#[test]
fn gates_keep_eight_bits() -> Result<()> {
    const ROWS: usize = 12;
    let names = ["in_proj", "in_proj_a", "in_proj_b", "in_proj_ba", "in_proj_z", "a_proj", "b_proj", "g_proj"];
    let weight = |name: &str| (format!("linear_attn.{name}.weight"), (ROWS, 256));
    let ones = |(name, shape)| Ok((name, Tensor::ones(shape, DType::F32, &Device::Cpu)?));
    let weights = names.map(weight).into_iter().map(ones).collect::<Result<HashMap<_, _>>>()?;
    let vb = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
    let quantizer = Quantizer::new(GgmlDType::Q4K)?;
    for name in names {
        let stored = quantizer.matrix(&vb, &weight(name).0, &[ROWS, 256])?.and_then(Stored::blocks);
        let want =
            if name.ends_with(['a', 'b']) || name.starts_with(['a', 'b']) { GgmlDType::Q8_0 } else { GgmlDType::Q4K };
        assert_eq!(stored.map(|blocks| (blocks.dtype, blocks.rows)), Some((want, ROWS)), "{name}");
    }
    assert_eq!(quantizer.other_types(), []);
    Ok(())
}
