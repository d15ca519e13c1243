//! Prompt look-up: drafts from the text itself.

/// The longest run of last tokens that is searched for, then shorter ones.
const LONGEST: usize = 3;

/// Up to `count` tokens that may follow `tokens`: those that followed the latest earlier place of its last three tokens, or
/// the last two, or the last one. None if even that one is new. Past the end the draft continues itself, so that a
/// text that repeats is drafted to the full count.
pub(crate) fn look_up(tokens: &[u32], count: usize) -> Vec<u32> {
    let found = (1..=LONGEST).rev().find_map(|n| after_last(tokens, n));
    let Some(first) = found else { return Vec::new() };
    let mut draft = Vec::with_capacity(count);
    for index in first..first + count {
        let next = tokens.get(index).copied().unwrap_or_else(|| draft[index - tokens.len()]);
        draft.push(next);
    }
    draft
}

/// What follows the latest earlier place of the last `n` tokens.
fn after_last(tokens: &[u32], n: usize) -> Option<usize> {
    // One token must follow, so the last one is excluded.
    let earlier = tokens.split_last()?.1;
    let last = tokens.get(tokens.len().checked_sub(n)?..)?;
    Some(earlier.windows(n).rposition(|w| w == last)? + n)
}
