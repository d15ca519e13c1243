use super::*;
use std::collections::HashMap;

fn config(listed: &[&str]) -> Fp8Config {
    Fp8Config::new(Some([2, 3]), listed.iter().map(|name| name.to_string()).collect())
}

#[test]
fn the_numbers_of_e4m3() {
    assert_eq!(
        [0x00, 0x01, 0x07, 0x08, 0x38, 0x39, 0x7e].map(e4m3),
        [0., 2f32.powi(-9), 7. * 2f32.powi(-9), 2f32.powi(-6), 1., 1.125, 448.]
    );
    assert_eq!(e4m3(0xb8), -1.);
    assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
}

/// Two matrices of [3, 4] in blocks of [2, 3]: neither divides.
#[test]
fn every_block_has_its_scale() -> Result<()> {
    let ones = Tensor::ones((2, 3, 4), DType::F32, &Device::Cpu)?.to_dtype(DType::F8E4M3)?;
    let scales = Tensor::arange(1f32, 9., &Device::Cpu)?.reshape((2, 2, 2))?;
    let weights = HashMap::from([("w".to_string(), ones), ("w_scale_inv".to_string(), scales)]);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let vb = VarBuilder::from_tensors(weights.clone(), dtype, &Device::Cpu);
        let got = dequantized(vb, Some(&config(&[])), None, false).get((2, 3, 4), "w")?;
        assert_eq!(got.dtype(), dtype);
        let want = [
            [[1f32, 1., 1., 2.], [1., 1., 1., 2.], [3., 3., 3., 4.]],
            [[5., 5., 5., 6.], [5., 5., 5., 6.], [7., 7., 7., 8.]],
        ];
        assert_eq!(got.to_dtype(DType::F32)?.to_vec3::<f32>()?, want.map(|m| m.map(|row| row.to_vec()).to_vec()));
    }
    Ok(())
}

#[test]
fn only_listed_projections_are_plain() {
    let vb = VarBuilder::from_tensors(HashMap::new(), DType::F32, &Device::Cpu);
    let listed = config(&["lm_head", "model.layers.1.mlp.gate_proj", "model.layers.2.self_attn", "up_proj"]);
    let fp8 = Fp8 { vb, config: Some(listed), shards: None, has_dtypes: false };
    for (name, plain) in [
        ("model.layers.0.mlp.gate_proj.weight", false),
        ("model.layers.1.mlp.gate_proj.weight", true),
        ("model.language_model.layers.1.mlp.gate_proj.weight", true),
        ("model.layers.2.self_attn.q_proj.weight", true),
        ("model.layers.3.self_attn.q_proj.weight", false),
        ("model.layers.3.mlp.up_proj.weight", true),
        ("model.layers.0.linear_attn.in_proj_qkvz.weight", false),
        ("model.layers.0.linear_attn.in_proj_ba.weight", true),
        ("model.layers.0.mlp.gate.weight", true),
        ("model.layers.0.linear_attn.A_log", true),
        ("lm_head.weight", true),
    ] {
        assert_eq!(fp8.may_be_plain(name), plain, "{name}");
    }
}
