//! What is read of a tensor for a weight, or for a rank's shard of one.

use super::super::blocks::row_bytes;
use super::file::joined;
use super::names::Place;
use crate::parallel::{DimRanges, RowsOrColumns};
use crate::weights::Tiles;
use candle_core::quantized::GgmlDType;
use std::ops::Range;

type Ranges = Vec<Range<usize>>;

/// Rows and columns of a tensor, in the model's order; `None` for all as they are.
pub(super) struct Wanted {
    pub place: Place,
    pub rows: Option<Ranges>,
    pub columns: Option<Ranges>,
    /// The same columns as they stand, where that is another order.
    pub tiled: Option<(Ranges, Tiles)>,
}

impl Wanted {
    /// Of a weight of shape `whole` all, or what `slice` has.
    pub fn new(place: Place, whole: &[usize], slice: Option<DimRanges>) -> Self {
        let (rows, columns) = match slice.map(|slice| slice.rows_or_columns(whole)) {
            Some(RowsOrColumns::Rows(rows)) => (Some(rows), None),
            Some(RowsOrColumns::Columns(columns)) => (None, Some(columns)),
            None => (None, None),
        };
        let rows = match (&place.rows, rows) {
            (Some(of), Some(some)) => Some(within(&of.ranges, &some)),
            (Some(of), None) => Some(of.ranges.clone()),
            (None, some) => some,
        };
        let Some(tiles) = place.columns else { return Self { place, rows, columns, tiled: None } };
        let group = tiles.per_group * tiles.size;
        let groups = match columns.as_deref() {
            // Ranks have whole key heads.
            Some([range]) => range.start / group..range.end / group,
            _ => 0..tiles.groups,
        };
        let tiled = (tiles.stored(groups.clone()), Tiles { groups: groups.len(), ..tiles });
        Self { place, rows, columns: Some(tiles.grouped(groups)), tiled: Some(tiled) }
    }
}

/// How many places ranges have.
pub(super) fn length(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}

/// Whether ranges of columns are whole blocks of a type.
pub(super) fn are_whole_blocks(dtype: GgmlDType, ranges: &[Range<usize>]) -> bool {
    let whole = |range: &Range<usize>| row_bytes(dtype, range.start).is_some() && row_bytes(dtype, range.end).is_some();
    joined(ranges).iter().all(whole)
}

/// Of what `ranges` are, one after the other, the places `some`.
fn within(ranges: &[Range<usize>], some: &[Range<usize>]) -> Ranges {
    let mut found = Vec::new();
    for some in some {
        let mut start = 0;
        for range in ranges {
            let (src, to) = (some.start.max(start), some.end.min(start + range.len()));
            if src < to {
                found.push(range.start + src - start..range.start + to - start);
            }
            start += range.len();
        }
    }
    found
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // one range is meant
mod tests {
    use super::*;

    #[test]
    fn places_within_ranges() {
        let ranges = [10..14, 0..3, 20..25];
        assert_eq!(within(&ranges, &[0..12]), ranges);
        assert_eq!(within(&ranges, &[3..5, 6..8]), [13..14, 0..1, 2..3, 20..21]);
        assert!(within(&ranges, &[4..4]).is_empty());
    }

    #[test]
    fn blocks_may_be_made_of_several_ranges() {
        use GgmlDType::{Q4K, Q8_0};
        assert!(are_whole_blocks(Q4K, &[256..384, 384..512]) && !are_whole_blocks(Q4K, &[256..384, 0..128]));
        assert!(are_whole_blocks(Q8_0, &[256..384, 0..128]) && !are_whole_blocks(Q8_0, &[0..48]));
    }
}
