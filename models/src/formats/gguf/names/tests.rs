use super::*;

fn heads(tiled: bool) -> Heads {
    let config = GdnConfig::new(8, (2, 3), (6, 4));
    Heads { config, attention: [4, 2, 2], layers: 8, tiled }
}

fn rows(name: &str, heads: &Heads, has: &[&str]) -> (String, Vec<usize>) {
    let place = place(name, heads, |tensor| has.contains(&tensor)).unwrap();
    (place.tensor, place.rows.unwrap().ranges.into_iter().flatten().collect())
}

#[test]
fn tiled_heads_come_back_in_groups() {
    // Stored: the first of each key head, then the second, then the third.
    let (tensor, got) = rows("model.layers.7.linear_attn.in_proj_b.weight", &heads(true), &[]);
    assert_eq!((tensor.as_str(), got), ("blk.7.ssm_beta.weight", vec![0, 2, 4, 1, 3, 5]));
    let (_, got) = rows("model.layers.7.linear_attn.in_proj_qkv.weight", &heads(true), &[]);
    assert_eq!(got[..12], (0..12).collect::<Vec<_>>());
    assert_eq!(got[12..20], [12, 13, 14, 15, 20, 21, 22, 23]);
    let (_, got) = rows("model.layers.7.linear_attn.in_proj_z.weight", &heads(false), &[]);
    assert_eq!(got, (0..24).collect::<Vec<_>>());
}

#[test]
fn interleaved_projections_are_taken_apart() {
    let has = ["blk.0.ssm_ba.weight", "blk.0.ssm_in.weight"];
    let of = |name: &str| rows(&format!("model.layers.0.linear_attn.{name}.weight"), &heads(false), &has).1;
    assert_eq!(of("in_proj_b"), [0, 1, 2, 6, 7, 8]);
    assert_eq!(of("in_proj_a"), [3, 4, 5, 9, 10, 11]);
    // A key head: 3 rows of q, 3 of k, 12 of v, 12 of z.
    let part = |first: usize, n: usize| (first..first + n).chain(30 + first..30 + first + n);
    assert_eq!(of("in_proj_qkv"), part(0, 3).chain(part(3, 3)).chain(part(6, 12)).collect::<Vec<_>>());
    assert_eq!(of("in_proj_z"), part(18, 12).collect::<Vec<_>>());
}

#[test]
fn only_moved_columns_are_moved_back() {
    let columns = |heads: &Heads| {
        let place = place("model.layers.0.linear_attn.out_proj.weight", heads, |_| false);
        place.unwrap().columns
    };
    assert_eq!(columns(&heads(false)), None);
    assert_eq!(columns(&heads(true)), Some(Tiles { groups: 2, per_group: 3, size: 4 }));
    let mut one = heads(true);
    one.config.num_value_heads = 2;
    assert_eq!(columns(&one), None);
}

#[test]
fn knows_no_other_weights() {
    for name in [
        "mtp.layers.1.x.weight",
        "mtp.fc",
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "model.visual.x",
        "lm_head",
    ] {
        assert_eq!(place(name, &heads(true), |_| true), None, "{name}");
    }
}
