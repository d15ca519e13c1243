#![allow(clippy::single_range_in_vec_init)] // one range is meant

use super::*;

#[test]
fn rows_of_vectors_matrices_and_experts() {
    let rows = |whole: &[usize], dim: usize, ranges: &[Range<usize>]| {
        let kept = DimRanges { dim, of: 6, ranges: ranges.to_vec() };
        assert_eq!(kept.whole(whole), whole);
        match kept.rows_or_columns(whole) {
            RowsOrColumns::Rows(rows) => rows,
            RowsOrColumns::Columns(columns) => panic!("columns {columns:?}"),
        }
    };
    assert_eq!(rows(&[6], 0, &[2..4]), [2..4]);
    assert_eq!(rows(&[6, 9], 0, &[0..1, 4..5]), [0..1, 4..5]);
    // Channels of a convolution.
    assert_eq!(rows(&[6, 1, 4], 0, &[2..4]), [2..4]);
    assert_eq!(rows(&[2, 6, 9], 1, &[0..1, 4..5]), [0..1, 4..5, 6..7, 10..11]);
    let kept = DimRanges { dim: 2, of: 6, ranges: vec![2..4] };
    assert_eq!(kept.rows_or_columns(&[2, 9, 6]), RowsOrColumns::Columns(vec![2..4]));
}

#[test]
fn more_ranks_than_key_value_heads() -> Result<()> {
    let config = include_str!("../../../../examples/generate/configs/qwen3.5-35b-a3b.json");
    let config = ModelConfig::from_json(config)?;
    assert_eq!(config.attention.num_kv_heads, 2);
    let heads: Vec<_> = (0..4)
        .map(|rank| {
            let shards = WeightShards { config: config.clone(), shard: Shard { rank, size: 4 } };
            shards
                .ranges_of("model.layers.3.self_attn.k_proj.weight", &[256, 2048])
                .map(|kept| kept.ranges[0].start / 256)
        })
        .collect();
    assert_eq!(heads, [Some(0), Some(0), Some(1), Some(1)]);
    Ok(())
}
