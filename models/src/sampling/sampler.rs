//! From logits to the next tokens: on CUDA where the logits lie, so that only the tokens come to the host.

use super::serve::Logprobs;
use crate::abi::logprobs::{GDN_MOST_LIKELIEST, TOLD_WORDS};
use crate::abi::sampling::{SamplingRow, GDN_NO_TOKEN, ROW_WORDS};
use crate::cpu::logprobs::LogSoftmax;
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
pub(super) type Token = std::result::Result<Drawn, String>;

#[derive(Clone, Debug)]
pub(super) struct Drawn {
    pub id: u32,
    /// Where they are asked for.
    pub logprobs: Option<Box<Logprobs>>,
}

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
            let mut rows = Rows::new(choices.len(), history, logits.device())?;
            if choices.iter().any(|choice| choice.row.likeliest > 0) {
                rows = rows.telling(logits.dim(1)?)?;
            }
            rows.load(choices)?;
            self.launch(logits, &rows)?;
            let told = rows.told()?.map(|told| told.to_vec1()).transpose()?;
            return Ok(tokens(&rows.drawn()?.to_vec1()?, &told.unwrap_or_default()));
        }
        let rows = logits.to_dtype(DType::F32)?.to_vec2()?.into_iter().zip(choices);
        Ok(rows.map(|(mut logits, choice)| choice.draw(&mut logits)).collect())
    }

    /// The launch alone: tokens go to `rows`.
    pub fn launch(&self, logits: &Tensor, rows: &Rows) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(workspace) = &self.workspace {
            use crate::cuda::logprobs::{logprobs, Half};
            let tell = |half| match &rows.told {
                Some(told) => logprobs(half, logits, &rows.words, told, rows.count, rows.history),
                None => Ok(()),
            };
            tell(Half::Begin)?;
            crate::cuda::sampling::sample(logits, &rows.words, workspace, rows.count, rows.history)?;
            return tell(Half::End);
        }
        rows.draw(logits)
    }
}

impl Choice {
    fn draw(&self, logits: &mut [f32]) -> Token {
        let recent = match self.row.window {
            0 => Vec::new(),
            _ => [&self.recent[..], &[self.last]].concat(),
        };
        draw_and_tell(logits, &self.row, &recent).ok_or_else(|| match logits.iter().position(|x| !x.is_finite()) {
            Some(i) => format!("the logit {} for token {i}", logits[i]),
            None => "no logits".into(),
        })
    }
}

/// [`draw`], and the log-probabilities that the row asks for, which are of the logits without penalties.
fn draw_and_tell(logits: &mut [f32], row: &SamplingRow, recent: &[u32]) -> Option<Drawn> {
    if row.likeliest == 0 {
        return draw(logits, row, recent).map(|id| Drawn { id, logprobs: None });
    }
    let raw = logits.to_vec();
    let id = draw(logits, row, recent)?;
    let softmax = LogSoftmax::new(&raw, row.likeliest as usize - 1);
    let of = |id: u32| softmax.of(raw[id as usize]);
    let likeliest = softmax.likeliest.iter().map(|&id| (id, of(id))).collect();
    Some(Drawn { id, logprobs: Some(Box::new(Logprobs { token: of(id), likeliest })) })
}

impl Choice {
    /// A row of padding, or of which another one says how it chooses.
    pub fn nobody(last: u32) -> Self {
        Self { row: SamplingRow::NOBODY, last, recent: Vec::new() }
    }
}

/// Tokens as the kernel writes them, and what is told of each in so many rows as there are, or none.
pub(super) fn tokens(drawn: &[u32], told: &[u32]) -> Vec<Token> {
    let mut told = told.as_chunks::<TOLD_WORDS>().0.iter();
    let token = |id: &u32| {
        let told = told.next();
        match *id {
            GDN_NO_TOKEN => Err("a logit that is no number".into()),
            id => Ok(Drawn { id, logprobs: told.and_then(logprobs) }),
        }
    };
    drawn.iter().map(token).collect()
}

/// The words of a `gdn_logprobs_row`.
fn logprobs(told: &[u32; TOLD_WORDS]) -> Option<Box<Logprobs>> {
    let [likeliest, token, rest @ ..] = told;
    let count = likeliest.checked_sub(1)? as usize;
    let (ids, logprobs) = rest.split_at(GDN_MOST_LIKELIEST);
    let likeliest = ids.iter().zip(logprobs).take(count).filter(|(id, _)| **id != GDN_NO_TOKEN);
    let likeliest = likeliest.map(|(id, logprob)| (*id, f32::from_bits(*logprob))).collect();
    Some(Box::new(Logprobs { token: f32::from_bits(*token), likeliest }))
}

/// What [`logprobs`] reads.
fn told(drawn: Option<&Drawn>) -> [u32; TOLD_WORDS] {
    let mut words = [0; TOLD_WORDS];
    if let Some(told) = drawn.and_then(|drawn| drawn.logprobs.as_ref()) {
        (words[0], words[1]) = (1 + told.likeliest.len() as u32, told.token.to_bits());
        for (i, (id, logprob)) in told.likeliest.iter().enumerate() {
            (words[2 + i], words[2 + GDN_MOST_LIKELIEST + i]) = (*id, logprob.to_bits());
        }
    }
    words
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
    /// Where log-probabilities may be asked for: of each row a `gdn_logprobs_row`, then what the launch needs besides.
    told: Option<Tensor>,
}

impl Rows {
    /// All are nobody's.
    pub fn new(count: usize, history: usize, device: &Device) -> Result<Self> {
        let words = count * (ROW_WORDS + 2 + 2 * history);
        let rows = Self { words: Tensor::zeros(words, DType::U32, device)?, count, history, told: None };
        rows.load(&[])?;
        Ok(rows)
    }

    /// The same, for choices that ask for log-probabilities in a vocabulary of so many tokens.
    pub fn telling(self, vocab: usize) -> Result<Self> {
        let _ = vocab;
        #[cfg(feature = "cuda")]
        if self.words.device().is_cuda() {
            let words = crate::cuda::logprobs::words(self.count, vocab, self.history)?;
            return Ok(Self { told: Some(Tensor::zeros(words, DType::U32, self.words.device())?), ..self });
        }
        let words = self.count * TOLD_WORDS;
        Ok(Self { told: Some(Tensor::zeros(words, DType::U32, self.words.device())?), ..self })
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

    /// What rows that ask are told, `[rows * TOLD_WORDS]`: a view. None where none may ask.
    pub fn told(&self) -> Result<Option<Tensor>> {
        self.told.as_ref().map(|told| told.narrow(0, 0, self.count * TOLD_WORDS)).transpose()
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
                    let seen = row.seen as usize;
                    recent[seen % recent.len()] = last;
                    rows.rows[n].seen += 1;
                    concerned.extend((seen + 1).saturating_sub(recent.len())..=seen);
                }
                let concerned: Vec<u32> = concerned.iter().map(|i| recent[i % recent.len()]).collect();
                let token = draw_and_tell(&mut logits, &row, &concerned);
                if let Some(to) = &self.told {
                    let told = told(token.as_ref());
                    to.slice_set(&Tensor::new(&told, to.device())?, 0, n * TOLD_WORDS)?;
                }
                rows.rows[n].index += u64::from(row.scale > 0.);
                rows.drawn[n] = token.as_ref().map_or(GDN_NO_TOKEN, |token| token.id);
                rows.ids[n] = token.map_or(0, |token| token.id);
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
