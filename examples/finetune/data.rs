//! The text as sequences, and the order in which they come.

use anyhow::{bail, Error, Result};
use candle_core::{Device, Tensor};
use candle_gdn::CuSeqlens;
use candle_gdn_models::SplitMix64;
use tokenizers::Tokenizer;

/// Sequences of a text and a place among them: an epoch and how many of its sequences were used.
pub struct Data {
    /// Each has at least 2 tokens: inputs are all but the last, targets all but the first.
    sequences: Vec<Vec<u32>>,
    /// Tokens that one pass has at most.
    pass_tokens: usize,
    seed: u64,
    position: Position,
    order: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Position {
    pub epoch: u64,
    pub used: usize,
}

/// Sequences one after the other, which run in one pass.
pub struct Pack {
    /// `[tokens]`
    pub inputs: Tensor,
    /// `[tokens]`
    pub targets: Tensor,
    pub sequences: CuSeqlens,
}

impl Pack {
    pub fn new(sequences: &[&[u32]], device: &Device) -> candle_core::Result<Self> {
        let all =
            |part: fn(&[u32]) -> &[u32]| sequences.iter().flat_map(|ids| part(ids).to_vec()).collect::<Vec<u32>>();
        let lengths: Vec<usize> = sequences.iter().map(|ids| ids.len() - 1).collect();
        Ok(Self {
            inputs: Tensor::new(all(|ids| &ids[..ids.len() - 1]), device)?,
            targets: Tensor::new(all(|ids| &ids[1..]), device)?,
            sequences: CuSeqlens::from_lengths(&lengths, device)?,
        })
    }

    pub fn tokens(&self) -> usize {
        self.sequences.total_tokens()
    }
}

/// What stands between two documents of a text; the model learns its token as the last one of each.
const END: &str = "<|endoftext|>";

/// The documents of a text as sequences. A document of more than `len` tokens becomes several, the last token of one being the first of
/// the next.
///
/// # Errors
/// When the text cannot be tokenised, or has fewer than two tokens.
pub fn sequences(text: &str, tokenizer: &Tokenizer, len: usize) -> Result<Vec<Vec<u32>>> {
    let end = tokenizer.token_to_id(END);
    let mut sequences = Vec::new();
    for document in text.split(END).map(str::trim).filter(|document| !document.is_empty()) {
        let encoding = tokenizer.encode(document, false).map_err(Error::msg)?;
        let document: Vec<u32> = encoding.get_ids().iter().copied().chain(end).collect();
        let starts = (0..document.len().saturating_sub(1)).step_by(len);
        let parts = starts.map(|start| document[start..document.len().min(start + len + 1)].to_vec());
        sequences.extend(parts);
    }
    if sequences.is_empty() {
        bail!("expected at least 2 tokens of text")
    }
    Ok(sequences)
}

impl Data {
    /// Of sequences whose inputs have at most `pass_tokens` tokens.
    pub fn new(sequences: Vec<Vec<u32>>, pass_tokens: usize, seed: u64) -> Self {
        let mut data = Self { sequences, pass_tokens, seed, position: Position { epoch: 0, used: 0 }, order: vec![] };
        data.seek(data.position);
        data
    }

    pub fn position(&self) -> Position {
        self.position
    }

    /// Goes on at a position of an earlier run. Each epoch has an order of its own, which its number and the seed fix.
    pub fn seek(&mut self, position: Position) {
        self.position = position;
        self.order = (0..self.sequences.len()).collect();
        let mut random = SplitMix64::new(SplitMix64::seed(self.seed, position.epoch as usize));
        for i in (1..self.order.len()).rev() {
            self.order.swap(i, (random.next() % (i as u64 + 1)) as usize);
        }
    }

    /// The sequences of the next pass: as many as fit, of one epoch.
    pub fn next(&mut self, device: &Device) -> Result<Pack> {
        if self.position.used == self.sequences.len() {
            self.seek(Position { epoch: self.position.epoch + 1, used: 0 });
        }
        let mut room = self.pass_tokens;
        let left = self.order[self.position.used..].iter().map(|&i| self.sequences[i].as_slice());
        let fitting = left.map_while(|ids| {
            room = room.checked_sub(ids.len() - 1)?;
            Some(ids)
        });
        let chosen: Vec<&[u32]> = fitting.collect();
        self.position.used += chosen.len();
        Ok(Pack::new(&chosen, device)?)
    }

    /// A hash of all sequences, the same in every process.
    pub fn hash(&self) -> u64 {
        let numbers =
            self.sequences.iter().flat_map(|ids| std::iter::once(ids.len() as u32).chain(ids.iter().copied()));
        numbers.fold(0, |hash, number| SplitMix64::new(hash ^ u64::from(number)).next())
    }

    /// Sequences and the tokens that they predict.
    pub fn counts(&self) -> [usize; 2] {
        [self.sequences.len(), self.sequences.iter().map(|ids| ids.len() - 1).sum()]
    }
}
