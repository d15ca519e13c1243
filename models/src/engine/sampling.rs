//! From logits to the next tokens: on CUDA where the logits lie, so that only the tokens come to the host.

use crate::abi::sampling::SamplingRow;
#[cfg(feature = "cuda")]
use crate::abi::sampling::GDN_NO_TOKEN;
use crate::cpu::sampling::draw;
use candle_core::{Device, Result, Tensor};

/// How a row's next token is chosen; see [`Sampling::choice`](super::Sampling::choice).
#[derive(Clone, Debug)]
pub(super) struct Choice {
    pub row: SamplingRow,
    /// The token before.
    pub last: u32,
    /// Tokens before that one which a penalty concerns too.
    pub recent: Vec<u32>,
}

/// A token that was drawn, or what the model gave that none can be drawn from.
pub(super) type Token = std::result::Result<u32, String>;

/// Chooses tokens. Its copies share what the kernel needs, so that they are of one stream.
#[derive(Clone, Debug)]
pub(super) struct Sampler {
    #[cfg(feature = "cuda")]
    workspace: Option<Tensor>,
}

impl Sampler {
    /// # Errors
    /// When the device is out of memory.
    pub fn new(device: &Device) -> Result<Self> {
        let _ = device;
        Ok(Self {
            #[cfg(feature = "cuda")]
            workspace: match device.is_cuda() {
                true => Some(crate::cuda::sampling::workspace(device)?),
                false => None,
            },
        })
    }

    /// The token of each row of `logits [rows, vocabulary]` in f32, which may be overwritten.
    pub fn draw(&self, logits: &Tensor, choices: &[Choice]) -> Result<Vec<Token>> {
        #[cfg(feature = "cuda")]
        if self.workspace.is_some() {
            let _working = candle_gdn::plumbing::Working::new(logits.device());
            let history = choices.iter().map(|choice| choice.row.window as usize).max().unwrap_or(0);
            let rows = Rows::new(choices.len(), history, logits.device())?;
            rows.load(choices)?;
            self.launch(logits, &rows)?;
            return Ok(tokens(&rows.drawn()?.to_vec1()?));
        }
        let rows = logits.to_vec2()?.into_iter().zip(choices);
        Ok(rows.map(|(mut logits, choice)| choice.draw(&mut logits)).collect())
    }

    /// The launch alone: tokens go to `rows`.
    #[cfg(feature = "cuda")]
    pub fn launch(&self, logits: &Tensor, rows: &Rows) -> Result<()> {
        let Some(workspace) = &self.workspace else { candle_core::bail!("sampling: expected a device of CUDA") };
        crate::cuda::sampling::sample(logits, &rows.words, workspace, rows.count, rows.history)
    }
}

impl Choice {
    fn draw(&self, logits: &mut [f32]) -> Token {
        let token = match self.row.window {
            0 => draw(logits, &self.row, &[]),
            _ => draw(logits, &self.row, &[&self.recent[..], &[self.last]].concat()),
        };
        token.ok_or_else(|| match logits.iter().position(|x| !x.is_finite()) {
            Some(i) => format!("the logit {} for token {i}", logits[i]),
            None => "no logits".into(),
        })
    }
}

/// Tokens as the kernel writes them.
#[cfg(feature = "cuda")]
pub(super) fn tokens(drawn: &[u32]) -> Vec<Token> {
    let token = |token: &u32| if *token == GDN_NO_TOKEN { Err("a logit that is no number".into()) } else { Ok(*token) };
    drawn.iter().map(token).collect()
}

/// How rows choose, on the device: a launch moves them on, so that the next one needs nothing of the host.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub(super) struct Rows {
    /// Of each row a [`SamplingRow`], then of each the token before, then the one drawn, then recent ones, then room for the
    /// logits of those.
    words: Tensor,
    count: usize,
    /// Recent tokens of a row that there is room for.
    history: usize,
}

#[cfg(feature = "cuda")]
impl Rows {
    /// All are nobody's.
    pub fn new(count: usize, history: usize, device: &Device) -> Result<Self> {
        let words = count * (crate::cuda::sampling::ROW_WORDS + 2 + 2 * history);
        let rows = Self { words: Tensor::zeros(words, candle_core::DType::U32, device)?, count, history };
        rows.load(&[])?;
        Ok(rows)
    }

    /// The tokens before, `[rows]`: a view, which a launch overwrites with those drawn.
    pub fn ids(&self) -> Result<Tensor> {
        self.words.narrow(0, self.count * crate::cuda::sampling::ROW_WORDS, self.count)
    }

    /// The tokens drawn, `[rows]`: a view.
    pub fn drawn(&self) -> Result<Tensor> {
        self.words.narrow(0, self.count * (crate::cuda::sampling::ROW_WORDS + 1), self.count)
    }

    /// The first rows choose so, the others are nobody's.
    pub fn load(&self, choices: &[Choice]) -> Result<()> {
        let nobody = SamplingRow { scale: -1., ..SamplingRow::GREEDY };
        let mut rows: Vec<SamplingRow> = choices.iter().map(|choice| choice.row).collect();
        rows.resize(self.count, nobody);
        let mut words = crate::cuda::sampling::words(&rows).to_vec();
        words.extend(choices.iter().map(|choice| choice.last));
        words.resize(self.count * (crate::cuda::sampling::ROW_WORDS + 1), 0);
        self.set(&words, 0)?;
        let recent = self.count * (crate::cuda::sampling::ROW_WORDS + 2);
        for (n, choice) in choices.iter().enumerate().filter(|(_, choice)| !choice.recent.is_empty()) {
            self.set(&choice.recent, recent + n * self.history)?;
        }
        Ok(())
    }

    fn set(&self, words: &[u32], at: usize) -> Result<()> {
        self.words.slice_set(&Tensor::new(words, self.words.device())?, 0, at)
    }
}
