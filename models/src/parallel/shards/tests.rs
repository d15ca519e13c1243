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

/// Every rank finds its heads in thirds that are cut inside them, and that differ by the last.
#[test]
fn channels_in_thirds_of_the_whole() -> Result<()> {
    let config = include_str!("../../../../examples/generate/configs/olmo-hybrid-7b.json");
    let mut config = ModelConfig::from_json(config)?;
    for ((keys, key_dim), (values, value_dim), ranks) in [
        ((30, 96), (30, 192), &[1, 2, 3, 15, 30][..]),
        ((2, 5), (4, 7), &[1, 2]),
        ((4, 1), (4, 3), &[2, 4]),
        ((2, 8), (2, 8), &[2]),
    ] {
        let c = &mut config.gdn;
        (c.num_key_heads, c.key_head_dim, c.num_value_heads, c.value_head_dim) = (keys, key_dim, values, value_dim);
        let (key, value) = (c.key_size(), c.value_size());
        let mut channels = 0..c.conv_channels();
        let thirds = c.conv_thirds().map(|rows| channels.by_ref().take(rows).collect::<Vec<_>>());
        assert!(channels.is_empty());
        for size in ranks.iter().copied() {
            for rank in 0..size {
                let shards = WeightShards { config: config.clone(), shard: Shard { rank, size } };
                for (name, start, all) in [("q", 0, key), ("k", key, key), ("v", 2 * key, value)] {
                    let rows = all / size;
                    let name = format!("model.layers.1.linear_attn.{name}_conv1d.weight");
                    let mut got = Vec::new();
                    for (tensor, kept) in shards.in_thirds(&name, &[rows, 1, 4]).expect("a convolution") {
                        let third =
                            ["q", "k", "v"].iter().position(|name| tensor.contains(&format!(".{name}_conv1d.")));
                        let third = &thirds[third.expect("one of the three")];
                        assert_eq!((kept.dim, kept.of), (0, third.len()));
                        kept.ranges.into_iter().for_each(|range| got.extend_from_slice(&third[range]));
                    }
                    let first = start + rank * rows;
                    assert_eq!(got, (first..first + rows).collect::<Vec<_>>(), "{name}, rank {rank} of {size}");
                    assert!(shards.in_thirds(&name, &[rows + 1, 1, 4]).is_none());
                }
                assert!(shards.in_thirds("model.layers.1.linear_attn.conv1d.weight", &[key, 1, 4]).is_none());
            }
        }
    }
    Ok(())
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
