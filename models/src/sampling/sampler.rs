//! Draws the next tokens.

use super::cpu::draw_with_logprobs;
use crate::abi::sampling::SamplingRow;
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_core::cpu::parallel;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Natural logarithms of probabilities, by the softmax of the logits as the model gives them: before penalties, temperature and
/// the choice among likely tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// That of the token itself.
    pub token: f32,
    /// The likeliest tokens with theirs, the likeliest first, as many as were requested or as the vocabulary has. Of equal ones
    /// the lower id comes first. The token itself is among them only where it is that likely.
    pub likeliest: Vec<(u32, f32)>,
}

/// How a row's next token is chosen; see [`Sampling::choice`](super::Sampling::choice).
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    pub row: SamplingRow,
    /// The token before.
    pub last: u32,
    /// Tokens before that one which a penalty concerns too.
    pub recent: Vec<u32>,
}

/// A token that was drawn, or why none could be drawn.
pub(crate) type Token = std::result::Result<Drawn, String>;

#[derive(Clone, Debug)]
pub(crate) struct Drawn {
    pub id: u32,
    /// Where they were requested.
    pub logprobs: Option<Box<Logprobs>>,
}

/// Draws tokens. Copies share the kernel's workspace, so they belong to one stream.
#[derive(Clone, Debug)]
pub(crate) struct Sampler {
    #[cfg(feature = "cuda")]
    pub(super) workspace: Option<Tensor>,
}

impl Sampler {
    /// # Errors
    /// When the device is out of memory.
    pub fn new(device: &Device) -> Result<Self> {
        let _ = device;
        Ok(Self {
            #[cfg(feature = "cuda")]
            workspace: match device.is_cuda() {
                true => Some(super::cuda::workspace(device)?),
                false => None,
            },
        })
    }

    /// The token of each row of `logits [rows, vocabulary]` in f32, bf16 or f16, which may be overwritten. Equal numbers give
    /// equal tokens in every dtype.
    pub fn draw(&self, logits: &Tensor, choices: &[Choice]) -> Result<Vec<Token>> {
        #[cfg(feature = "cuda")]
        if self.workspace.is_some() {
            return super::rows::draw(self, logits, choices);
        }
        let rows = logits.to_dtype(DType::F32)?.to_vec2()?.into_iter().zip(choices);
        let rows: Vec<_> = rows.map(|(logits, choice)| (choice, Mutex::new(logits), OnceLock::new())).collect();
        parallel(rows.len(), 16 * logits.dim(1)?, |n| {
            let (choice, logits, token) = &rows[n];
            token.get_or_init(|| choice.draw(&mut logits.lock().unwrap_or_else(PoisonError::into_inner)));
        });
        Ok(rows.into_iter().filter_map(|(.., token)| token.into_inner()).collect())
    }
}

impl Choice {
    fn draw(&self, logits: &mut [f32]) -> Token {
        let recent = match self.row.window {
            0 => Vec::new(),
            _ => [&self.recent[..], &[self.last]].concat(),
        };
        draw_with_logprobs(logits, &self.row, &recent).ok_or_else(|| match logits.iter().position(|x| !x.is_finite()) {
            Some(i) => format!("the logit {} for token {i}", logits[i]),
            None => "no logits".into(),
        })
    }
}
