//! From logits to the next tokens: on CUDA where the logits lie, so that only the tokens come to the host.

use crate::abi::sampling::{SamplingRow, GDN_NO_TOKEN, ROW_WORDS};
use crate::cpu::sampling::draw;
use candle_core::{DType, Device, Result, Tensor};

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

    /// The token of each row of `logits [rows, vocabulary]` in f32, bf16 or f16, which may be overwritten: the same token from
    /// all of them where they hold the same numbers.
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
        let rows = logits.to_dtype(DType::F32)?.to_vec2()?.into_iter().zip(choices);
        Ok(rows.map(|(mut logits, choice)| choice.draw(&mut logits)).collect())
    }

    /// The launch alone: tokens go to `rows`.
    pub fn launch(&self, logits: &Tensor, rows: &Rows) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(workspace) = &self.workspace {
            return crate::cuda::sampling::sample(logits, &rows.words, workspace, rows.count, rows.history);
        }
        rows.draw(logits)
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

impl Choice {
    /// A row of padding, or of which another one says how it chooses.
    pub fn nobody(last: u32) -> Self {
        Self { row: SamplingRow::NOBODY, last, recent: Vec::new() }
    }
}

/// Tokens as the kernel writes them.
pub(super) fn tokens(drawn: &[u32]) -> Vec<Token> {
    let token = |token: &u32| if *token == GDN_NO_TOKEN { Err("a logit that is no number".into()) } else { Ok(*token) };
    drawn.iter().map(token).collect()
}

/// How rows choose, on the device: a launch moves them on, so that the next one needs nothing of the host.
#[derive(Debug)]
pub(super) struct Rows {
    /// Of each row a [`SamplingRow`], then of each the token before, then the one drawn, then recent ones, then room for the
    /// logits of those.
    pub words: Tensor,
    pub count: usize,
    /// Recent tokens of a row that there is room for.
    pub history: usize,
}

impl Rows {
    /// All are nobody's.
    pub fn new(count: usize, history: usize, device: &Device) -> Result<Self> {
        let words = count * (ROW_WORDS + 2 + 2 * history);
        let rows = Self { words: Tensor::zeros(words, DType::U32, device)?, count, history };
        rows.load(&[])?;
        Ok(rows)
    }

    /// Rows that take the most likely token, without end.
    pub fn greedy(count: usize, device: &Device) -> Result<Self> {
        let rows = Self::new(count, 0, device)?;
        rows.load(&vec![Choice { row: SamplingRow::GREEDY, last: 0, recent: Vec::new() }; count])?;
        Ok(rows)
    }

    /// The tokens before, `[rows]`: a view, which a launch overwrites with those drawn.
    pub fn ids(&self) -> Result<Tensor> {
        self.words.narrow(0, self.count * ROW_WORDS, self.count)
    }

    /// The tokens drawn, `[rows]`: a view.
    #[cfg(feature = "cuda")]
    pub fn drawn(&self) -> Result<Tensor> {
        self.words.narrow(0, self.count * (ROW_WORDS + 1), self.count)
    }

    /// The first rows choose so, the others are nobody's.
    pub fn load(&self, choices: &[Choice]) -> Result<()> {
        let rows = choices.iter().map(|choice| choice.row.words());
        let padding = (choices.len()..self.count).map(|_| SamplingRow::NOBODY.words());
        let mut words: Vec<u32> = rows.chain(padding).flatten().collect();
        words.extend(choices.iter().map(|choice| choice.last));
        words.resize(self.count * (ROW_WORDS + 1), 0);
        self.set(&words, 0)?;
        let recent = self.count * (ROW_WORDS + 2);
        for (n, choice) in choices.iter().enumerate().filter(|(_, choice)| !choice.recent.is_empty()) {
            self.set(&choice.recent, recent + n * self.history)?;
        }
        Ok(())
    }

    fn set(&self, words: &[u32], at: usize) -> Result<()> {
        self.words.slice_set(&Tensor::new(words, self.words.device())?, 0, at)
    }

    /// `gdn_sampling` on the CPU.
    fn draw(&self, logits: &Tensor) -> Result<()> {
        self.on_host(|rows| {
            for (n, mut logits) in logits.to_dtype(DType::F32)?.to_vec2::<f32>()?.into_iter().enumerate() {
                let (row, last) = (rows.rows[n], rows.ids[n]);
                if row.scale < 0. {
                    continue;
                }
                let recent = &mut rows.recent[n * self.history..][..row.window as usize];
                let mut concerned = vec![];
                if !recent.is_empty() {
                    recent[row.seen as usize % recent.len()] = last;
                    rows.rows[n].seen += 1;
                    concerned.extend(&recent[..recent.len().min(row.seen as usize + 1)]);
                }
                let token = draw(&mut logits, &row, &concerned).unwrap_or(GDN_NO_TOKEN);
                rows.rows[n].index += u64::from(row.scale > 0.);
                rows.drawn[n] = token;
                rows.ids[n] = if token == GDN_NO_TOKEN { 0 } else { token };
            }
            Ok(())
        })
    }

    /// Changes what is there, on the CPU.
    pub fn on_host<R>(&self, change: impl FnOnce(&mut HostRows) -> Result<R>) -> Result<R> {
        let words = self.words.to_vec1::<u32>()?;
        let (rows, rest) = words.split_at(self.count * ROW_WORDS);
        let mut host = HostRows {
            rows: rows.as_chunks().0.iter().map(SamplingRow::from_words).collect(),
            ids: rest[..self.count].to_vec(),
            drawn: rest[self.count..2 * self.count].to_vec(),
            recent: rest[2 * self.count..(2 + self.history) * self.count].to_vec(),
        };
        let done = change(&mut host)?;
        let rows: Vec<u32> = host.rows.iter().flat_map(SamplingRow::words).collect();
        self.set(&[rows, host.ids, host.drawn, host.recent].concat(), 0)?;
        Ok(done)
    }
}

/// [`Rows`] on the CPU.
pub(super) struct HostRows {
    pub rows: Vec<SamplingRow>,
    pub ids: Vec<u32>,
    pub drawn: Vec<u32>,
    pub recent: Vec<u32>,
}
