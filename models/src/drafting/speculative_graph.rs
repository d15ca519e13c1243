//! Rounds of drafting, verifying and accepting as CUDA graphs, of which the host reads what came out.

#[cfg(feature = "cuda")]
use super::capture::capture;
#[cfg(feature = "cuda")]
use super::landing::Landing;
use super::pool::{Sequence, SequencePool};
use super::round::{RoundBuffers, Start, OP};
use super::sampling::{tokens, Choice, Sampler, Token};
use crate::abi::logprobs::TOLD_WORDS;
#[cfg(feature = "cuda")]
use crate::blocks::moe::asks_the_host;
use crate::causal_lm::CausalLm;
use candle_core::{bail, Result};
#[cfg(feature = "cuda")]
use std::cell::RefCell;
use std::marker::PhantomData;
#[cfg(feature = "cuda")]
use std::rc::Rc;

/// A round of up to a number of sequences. What follows from it lies on the device: for the same sequences the next one needs
/// nothing of the host.
#[derive(Debug)]
pub(super) struct RoundGraph {
    batch: usize,
    buffers: RoundBuffers,
    tells: bool,
    #[cfg(feature = "cuda")]
    graph: Option<Captured>,
    /// Whose addresses it holds: the model and the pool's memory.
    captured_for: (usize, u64),
    /// Of which sequences the buffers hold all that a round reads: slots, and their versions.
    held: Vec<(usize, u64)>,
    #[cfg(feature = "cuda")]
    landings: Vec<Rc<RefCell<Landing>>>,
    /// Not `Send`, as streams are not.
    thread: PhantomData<*mut ()>,
}

#[cfg(feature = "cuda")]
struct Captured {
    graph: candle_core::cuda_backend::cudarc::driver::CudaGraph,
    /// Behind the graph: see [`DecodeGraph`](super::DecodeGraph).
    _group: Option<std::sync::Arc<dyn crate::Collective>>,
}

#[cfg(feature = "cuda")]
impl std::fmt::Debug for Captured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Captured").finish_non_exhaustive()
    }
}

/// What a round that was launched will bring.
#[derive(Debug)]
pub(super) struct Round {
    sequences: usize,
    /// Of each.
    tokens: usize,
    words: Words,
}

#[derive(Debug)]
enum Words {
    #[cfg(feature = "cuda")]
    Coming(Rc<RefCell<Landing>>),
    Here(Vec<Vec<u32>>),
}

impl Round {
    /// Waits for it: of each sequence the tokens that were drawn, the drafts that were right and the one behind them. They are
    /// gone once the round after the next begins.
    pub fn read(&self) -> Result<Vec<Vec<Token>>> {
        let read;
        let words = match &self.words {
            #[cfg(feature = "cuda")]
            Words::Coming(landing) => {
                read = landing.borrow().words()?;
                &read
            }
            Words::Here(words) => {
                read = words.clone();
                &read
            }
        };
        let told = words.get(1).map_or(&[][..], Vec::as_slice);
        let each = words[0].chunks_exact(1 + self.tokens).take(self.sequences).enumerate();
        let drawn = |(n, words): (usize, &[u32])| {
            let told = told.get(n * self.tokens * TOLD_WORDS..).unwrap_or_default();
            tokens(&words[1..][..(words[0] as usize).min(self.tokens)], told)
        };
        Ok(each.map(drawn).collect())
    }
}

impl RoundGraph {
    /// Rounds of up to `batch` sequences with `depth` drafts each, that tell log-probabilities or do not: on CUDA captured, as
    /// [`DecodeGraph::capture`](super::DecodeGraph::capture) does; elsewhere they run as they are, for tests.
    ///
    /// # Errors
    /// As that, for as many rows as there are tokens; or when the pool has no rings or no draft head.
    pub fn new(
        model: &CausalLm,
        pool: &mut SequencePool,
        (batch, depth): (usize, usize),
        sampler: &Sampler,
        forced: Option<f32>,
        tells: bool,
    ) -> Result<Self> {
        let buffers = {
            let _working = pool.take()?;
            RoundBuffers::new(model, pool, batch, depth, sampler, forced, tells)?
        };
        Ok(Self {
            batch,
            tells,
            #[cfg(feature = "cuda")]
            graph: match pool.device.is_cuda() {
                true => Some(Self::captured(model, pool, batch * (depth + 1), &buffers)?),
                false => None,
            },
            #[cfg(feature = "cuda")]
            landings: match pool.device.is_cuda() {
                true => {
                    let out = buffers.out()?;
                    let landing = || Landing::new(&out);
                    vec![Rc::new(RefCell::new(landing()?)), Rc::new(RefCell::new(landing()?))]
                }
                false => Vec::new(),
            },
            buffers,
            captured_for: (model.id, pool.memory),
            held: Vec::new(),
            thread: PhantomData,
        })
    }

    #[cfg(feature = "cuda")]
    fn captured(model: &CausalLm, pool: &mut SequencePool, rows: usize, buffers: &RoundBuffers) -> Result<Captured> {
        let asks = |moe| asks_the_host(moe, model.config.hidden_size, model.dtype, rows);
        if model.config.moe.as_ref().is_some_and(asks) {
            bail!("{OP}: expected at most 32 tokens in a round of a model with experts in f32, got {rows}")
        }
        super::graph::check_rows(OP, model, rows)?;
        let device = pool.device.clone();
        let graph = capture(OP, &device, || buffers.run(model, pool))?;
        Ok(Captured { graph, _group: model.vocabulary.as_ref().map(|vocabulary| vocabulary.group().clone()) })
    }

    /// Sequences at most, and drafts of each.
    pub fn size(&self) -> (usize, usize) {
        (self.batch, self.buffers.tokens() - 1)
    }

    /// Whether it tells log-probabilities.
    pub fn tells(&self) -> bool {
        self.tells
    }

    /// Whether a round of just these sequences needs nothing of the host.
    pub fn holds(&self, pool: &SequencePool, sequences: &[Sequence]) -> bool {
        let same = |(s, (slot, version)): (&Sequence, &(usize, u64))| {
            s.slot as usize == *slot && pool.slot(OP, *s).is_ok() && pool.entries[*slot].version == *version
        };
        self.captured_for.1 == pool.memory
            && sequences.len() == self.held.len()
            && sequences.iter().zip(&self.held).all(same)
    }

    /// A round of the sequences, each of which has room for it and behind it chooses as `choices` say. They are not to be used
    /// until [`land`](Self::land) had what came of it; another round of the same may be launched before.
    ///
    /// # Errors
    /// When a sequence is none of the pool, or cannot go on, or the device refuses.
    pub fn launch(
        &mut self,
        model: &CausalLm,
        pool: &mut SequencePool,
        sequences: &[Sequence],
        choices: impl FnOnce() -> Vec<Choice>,
    ) -> Result<Round> {
        if self.captured_for != (model.id, pool.memory) {
            let (sampler, forced) = (self.buffers.sampler().clone(), self.buffers.forced());
            *self = Self::new(model, pool, self.size(), &sampler, forced, self.tells)?;
        }
        let tokens = self.buffers.tokens();
        let slots: Vec<usize> = if self.holds(pool, sequences) {
            self.held.iter().map(|(slot, _)| *slot).collect()
        } else {
            self.held.clear();
            let slots = pool.batch_slots(OP, model.id, sequences.iter().map(|s| (*s, tokens)))?;
            if slots.len() > self.batch {
                bail!("{OP}: expected at most {} sequences, got {}", self.batch, slots.len())
            }
            let _working = pool.take()?;
            pool.digest_to(model, &slots, tokens)?;
            let starts = slots.iter().zip(choices()).map(|(&slot, choice)| Start { slot, choice });
            self.buffers.load(pool, &starts.collect::<Vec<_>>())?;
            slots
        };
        let _working = pool.take()?;
        pool.about_to_write(&slots);
        let held = slots.iter().map(|&slot| (slot, pool.entries[slot].version)).collect();
        self.held.clear();
        let words = self.run(model, pool)?;
        model.settle()?;
        self.held = held;
        Ok(Round { sequences: slots.len(), tokens, words })
    }

    fn run(&mut self, model: &CausalLm, pool: &mut SequencePool) -> Result<Words> {
        #[cfg(feature = "cuda")]
        if let Some(Captured { graph, .. }) = &self.graph {
            graph.launch().map_err(candle_core::Error::wrap)?;
            let landing = self.landings[0].clone();
            landing.borrow_mut().send(&self.buffers.out()?)?;
            self.landings.rotate_left(1);
            return Ok(Words::Coming(landing));
        }
        self.buffers.run(model, pool)?;
        Ok(Words::Here(self.buffers.out()?.iter().map(|out| out.to_vec1()).collect::<Result<_>>()?))
    }

    /// What a round of these sequences drew is part of them; of those that have ended since nothing is. Where no other round was
    /// launched behind it, they are then as if they had been fed one by one.
    pub fn land(
        &self,
        pool: &mut SequencePool,
        sequences: &[Sequence],
        drawn: &[Vec<Token>],
        last: bool,
    ) -> Result<()> {
        let hidden = if last { Some(self.buffers.hidden(sequences.len())?) } else { None };
        for (n, (s, drawn)) in sequences.iter().zip(drawn).enumerate() {
            let Ok(slot) = pool.slot(OP, *s) else { continue };
            let first = n * self.buffers.tokens();
            pool.landed(slot, drawn, hidden.as_ref().map(|hidden| (hidden, first)));
        }
        Ok(())
    }
}
