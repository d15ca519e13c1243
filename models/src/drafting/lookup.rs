//! Guesses of the next tokens from the text itself.

/// The longest run of last tokens that is looked for, then shorter ones.
const LONGEST: usize = 3;

/// Up to `count` tokens that may follow `tokens`: those that followed the last time its last three tokens came before,
/// or the last two, or the last one. None if even that one is new. Past the end the guess continues itself, so that a
/// text that goes round in a circle is guessed as far as asked.
pub(super) fn guess(tokens: &[u32], count: usize) -> Vec<u32> {
    let found = (1..=LONGEST).rev().find_map(|n| after_last(tokens, n));
    let Some(from) = found else { return Vec::new() };
    let mut guess = Vec::with_capacity(count);
    for at in from..from + count {
        let next = tokens.get(at).copied().unwrap_or_else(|| guess[at - tokens.len()]);
        guess.push(next);
    }
    guess
}

/// What follows the latest earlier place of the last `n` tokens.
fn after_last(tokens: &[u32], n: usize) -> Option<usize> {
    // One token must follow, so the very end is left out.
    let earlier = tokens.split_last()?.1;
    let last = tokens.get(tokens.len().checked_sub(n)?..)?;
    Some(earlier.windows(n).rposition(|w| w == last)? + n)
}

/// How well drafts did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftTally {
    /// Tokens guessed.
    pub guessed: usize,
    /// Those of them that were right.
    pub right: usize,
    /// Tokens that decode steps gave, summed over the sequences.
    pub tokens: usize,
    /// These steps, summed over the sequences.
    pub steps: usize,
}

impl std::fmt::Display for DraftTally {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let percent = 100. * self.right as f64 / self.guessed.max(1) as f64;
        let a_step = self.tokens as f64 / self.steps.max(1) as f64;
        let Self { right, guessed, .. } = self;
        write!(f, "draft: {right} of {guessed} tokens accepted ({percent:.0} %), {a_step:.1} tokens a step")
    }
}
