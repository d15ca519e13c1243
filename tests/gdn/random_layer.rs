//! Layers with drawn weights, for tests of what a layer does with states.

use crate::support::{values, Rng};
use candle_core::{DType, Device, Tensor};
use candle_gdn::{GatedDeltaNet, GdnConfig, GdnState, Slots, StatePool};
use candle_nn::VarBuilder;
use std::collections::HashMap;

/// A width that a small test is quick with.
pub fn small() -> GdnConfig {
    GdnConfig::new(32, (2, 16), (4, 16))
}

/// Heads of 128, which the fused kernels take.
pub fn of_128() -> GdnConfig {
    GdnConfig::new(64, (2, 128), (4, 128))
}

/// OLMo-Hybrid's heads, which they take too.
pub fn of_96_192() -> GdnConfig {
    GdnConfig::new(64, (3, 96), (3, 192)).with(|c| c.beta_scale = 2.0)
}

/// A layer and inputs whose projection is exact in f32 and bf16 sums of any order: multiples of 1/64 times multiples of
/// 1/8. What is left may only differ in the kernels after it, not by the rows of a matrix product.
pub fn layer(c: &GdnConfig, dtype: DType, device: &Device, seed: u64) -> GatedDeltaNet {
    let rng = &mut Rng::new(seed);
    let mut grid = |rows: usize, columns: usize| {
        let steps: Vec<f32> = (0..rows * columns).map(|_| (rng.uniform() * 65.0).floor() as f32 - 32.0).collect();
        (Tensor::from_vec(steps, (rows, columns), device).unwrap() / 64.0).unwrap()
    };
    let (keys, vals) = (c.num_key_heads * c.key_head_dim, c.num_value_heads * c.value_head_dim);
    let (channels, h, heads) = (2 * keys + vals, c.hidden_size, c.num_value_heads);
    let mut weights = HashMap::from([
        ("in_proj_qkv.weight", grid(channels, h)),
        ("in_proj_z.weight", grid(vals, h)),
        ("in_proj_b.weight", grid(heads, h)),
        ("in_proj_a.weight", grid(heads, h)),
        ("out_proj.weight", (grid(h, vals) * 0.3).unwrap()),
        ("conv1d.weight", grid(channels, c.conv_kernel).unsqueeze(1).unwrap()),
    ]);
    weights.insert("A_log", grid(1, heads).squeeze(0).unwrap());
    weights.insert("dt_bias", grid(1, heads).squeeze(0).unwrap());
    weights.insert("norm.weight", (grid(1, c.value_head_dim).squeeze(0).unwrap() + 1.0).unwrap());
    let named = weights.into_iter().map(|(name, t)| (name.to_owned(), t)).collect();
    GatedDeltaNet::load(c, VarBuilder::from_tensors(named, dtype, device)).unwrap()
}

/// `tokens` rows of input, on the host.
pub fn rows(rng: &mut Rng, tokens: usize, hidden: usize) -> Vec<Vec<f32>> {
    let row = |rng: &mut Rng| (0..hidden).map(|_| ((rng.uniform() * 33.0).floor() as f32 - 16.0) / 8.0).collect();
    (0..tokens).map(|_| row(rng)).collect()
}

/// Rows as one tensor `[rows, hidden]`.
pub fn packed<'a>(rows: impl IntoIterator<Item = &'a Vec<f32>>, dtype: DType, device: &Device) -> Tensor {
    let flat: Vec<Vec<f32>> = rows.into_iter().cloned().collect();
    let (n, hidden) = (flat.len(), flat.first().map_or(0, Vec::len));
    let flat = Tensor::from_vec(flat.concat(), (n, hidden), &Device::Cpu).unwrap();
    flat.to_dtype(dtype).unwrap().to_device(device).unwrap()
}

/// y of rows that are fed to one slot of a pool.
pub fn feed(layer: &GatedDeltaNet, rows: &[Vec<f32>], slot: u32, pool: &mut StatePool) -> Vec<f64> {
    let device = pool.conv().device().clone();
    let x = packed(rows, pool.conv().dtype(), &device).unsqueeze(0).unwrap();
    values(&layer.forward_slots(&x, None, &Slots::new(&[slot], &device).unwrap(), pool).unwrap())
}

/// The sequence from its beginning in one call, with a state of its own: y by token, and the state.
pub fn from_scratch(layer: &GatedDeltaNet, rows: &[Vec<f32>], state: DType, device: &Device) -> (Vec<f64>, GdnState) {
    let mut state = layer.new_state_as(1, state).unwrap();
    if rows.is_empty() {
        return (vec![], state);
    }
    let x = packed(rows, state.conv().dtype(), device).unsqueeze(0).unwrap();
    let y = layer.forward(&x, &mut state).unwrap();
    (values(&y), state)
}

/// Both parts of a state.
pub fn parts(state: &GdnState) -> [Vec<f64>; 2] {
    [values(state.conv()), values(state.recurrent())]
}
