//! The README's examples: what stands there stands here too, and compiles.

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn::{DenseWeight, GdnParts, InProjection, Projection};
use candle_gdn::{GatedDeltaNet, GdnConfig};
use candle_nn::VarBuilder;

#[test]
fn the_layer_in_a_model() -> Result<()> {
    let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    let (batch, x) = (1, Tensor::zeros((1, 3, 2048), DType::F32, &Device::Cpu)?);

    let config = GdnConfig::new(2048, (16, 128), (32, 128));
    let layer = GatedDeltaNet::load(&config, vb.pp("linear_attn"))?; // weight names of Qwen3-Next or of Qwen3.5
    let mut state = layer.new_state(batch)?; // zero, on the device of the weights
    let y = layer.forward(&x, &mut state)?; // x and y: [batch, tokens, hidden_size]
    assert_eq!(y.dims(), x.dims());

    let vb = vb.pp("other");
    let inner = config.key_size() * 2 + config.value_size() * 2 + config.num_value_heads * 2;
    let in_proj_weight = Tensor::zeros((inner, config.hidden_size), DType::F32, &Device::Cpu)?;
    let out_proj_weight = Tensor::zeros((config.hidden_size, config.value_size()), DType::F32, &Device::Cpu)?;
    // The rows of in_proj_weight are those of q, k, v, z, b and a, in this order. QMatMul takes and returns f32: the other
    // weights of this layer are f32 too, or a Module of yours converts before and after it.
    let qmatmul = QMatMul::from_qtensor(QTensor::quantize(&in_proj_weight, GgmlDType::Q4K)?)?;
    let parts = GdnParts {
        in_proj: InProjection::Fused(Projection::module(qmatmul)), // or Interleaved { .. }, or Split { .. }
        conv_weight: vb.get((config.conv_channels(), 1, config.conv_kernel), "conv1d.weight")?,
        a_log: vb.get(config.num_value_heads, "A_log")?,
        dt_bias: vb.get(config.num_value_heads, "dt_bias")?,
        norm_weight: vb.get(config.value_head_dim, "norm.weight")?,
        out_proj: DenseWeight::new(out_proj_weight)?.into(), // a dense weight: the fast kernels of this crate
    };
    let layer = GatedDeltaNet::new(&config, parts)?;
    assert_eq!(layer.forward(&x, &mut layer.new_state(batch)?)?.dims(), x.dims());
    Ok(())
}

/// Statement by statement, however the lines are broken.
#[test]
fn what_the_readme_shows_is_what_compiles() {
    let squeezed = |text: &str| text.split_whitespace().collect::<String>();
    let (here, readme) = (squeezed(include_str!("readme.rs")), include_str!("../../README.md"));
    let blocks: Vec<&str> = readme.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert_eq!(blocks.len(), 2);
    for statement in blocks.iter().flat_map(|block| block.split_inclusive(';')) {
        assert!(here.contains(&squeezed(statement)), "not compiled: {statement}");
    }
}
