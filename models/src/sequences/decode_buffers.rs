//! A decode step on buffers that stay where they are, as a captured graph reads and writes them.

use super::kv::KvRows;
use super::pass::{arena, Mode, Pass};
use super::pool::SequencePool;
use crate::causal_lm::CausalLm;
use crate::sampling::rows::Rows;
use crate::sampling::{Choice, Sampler};
use candle_core::{bail, DType, Result, Tensor};
use candle_gdn::{Slots, NO_SLOT};
use candle_gdn_core::Launch;
use std::cell::RefCell;

/// Inputs and output of a step of up to so many sequences; the others are padding.
#[derive(Debug)]
pub(super) struct StepBuffers {
    ids: Tensor,
    pass: Pass,
    output: Output,
    /// Hidden states `[batch, hidden_size]` of the latest step after the last norm, where there is a draft head. The next step
    /// overwrites them.
    hidden: RefCell<Option<Tensor>>,
    /// The values of the state slots, the slots of keys and values, and the positions; empty where they are not known.
    held: [Vec<u32>; 3],
}

/// The output of a step.
#[derive(Debug)]
enum Output {
    /// `[batch, vocab_size]` in the dtype of the head.
    Logits(Tensor),
    /// The next tokens, which are also the ids of the next step.
    Drawn(Sampler, Rows),
}

impl StepBuffers {
    /// All rows are padding. A step draws the next tokens with this sampler, and with log-probabilities or without; `None`: it
    /// leaves its logits.
    pub fn new(model: &CausalLm, pool: &SequencePool, batch: usize, draws: Option<(&Sampler, bool)>) -> Result<Self> {
        let (device, vocab) = (&pool.device, model.config.vocab_size);
        let (ids, output) = match draws {
            Some((sampler, logprobs)) => {
                let rows = Rows::new(batch, pool.max_len, logprobs.then_some(vocab), device)?;
                (rows.ids()?, Output::Drawn(sampler.clone(), rows))
            }
            None => {
                let logits = Tensor::zeros((batch, vocab), model.dtype, device)?;
                (Tensor::zeros(batch, DType::U32, device)?, Output::Logits(logits))
            }
        };
        let (padding, zeros) = (vec![NO_SLOT; batch], vec![0u32; batch]);
        let pass = Pass {
            lengths: vec![1; batch],
            cu_seqlens: None,
            states: Slots::new(&padding, device)?,
            kv: KvRows::Device {
                slots: Slots::new(&padding, device)?,
                positions: Tensor::new(&zeros[..], device)?,
                // The kernels read how long each sequence is; their number of blocks follows from this.
                max_len: pool.max_len,
                pieces: Vec::new(),
            },
            launch: Launch { overlap: true, arena: arena(device)? },
            _working: None,
        };
        Ok(Self { ids, pass, output, hidden: RefCell::new(None), held: [padding.clone(), padding, zeros] })
    }

    /// The launches of a step: what is captured. Each run writes to the same memory.
    pub fn run(&self, model: &CausalLm, pool: &mut SequencePool) -> Result<()> {
        if let Some(arena) = &self.pass.launch.arena {
            arena.begin_pass();
        }
        let x = model.through_layers(&self.ids, &self.pass, pool, Mode::Feed)?;
        let (_, y) = x.norm(&model.norm, &self.pass.launch)?;
        *self.hidden.borrow_mut() = pool.has_head().then(|| y.clone());
        let x = model.scores_launched(&y, &self.pass.launch)?;
        match &self.output {
            Output::Logits(logits) => logits.slice_set(&x, 0, 0),
            Output::Drawn(sampler, rows) => sampler.launch(&x, rows),
        }
    }

    /// The hidden states of the first `sequences` rows of the step before, a copy, for the draft head.
    pub fn hidden(&self, sequences: usize) -> Result<Option<Tensor>> {
        let hidden = self.hidden.borrow();
        hidden.as_ref().map(|hidden| hidden.narrow(0, 0, sequences)?.force_contiguous()).transpose()
    }

    /// Uploads the ids of the next step.
    pub fn load_ids(&self, ids: &[u32]) -> Result<()> {
        let mut ids = ids.to_vec();
        ids.resize(self.pass.lengths.len(), 0);
        upload(&self.ids, &ids)
    }

    /// Uploads the ids of the next step, and how it draws. Without this call both follow from the step before.
    pub fn load_choices(&self, choices: &[Choice]) -> Result<()> {
        match &self.output {
            Output::Drawn(_, rows) => rows.load(choices),
            Output::Logits(_) => bail!("DecodeGraph: expected a step that draws"),
        }
    }

    /// Uploads what else a step of the sequences in `slots` reads, unless a step of the same sequences left it there.
    pub fn load(&mut self, pool: &SequencePool, slots: &[usize]) -> Result<()> {
        let batch = self.pass.lengths.len();
        let padded = |padding: u32, value: &dyn Fn(usize) -> u32| -> Vec<u32> {
            let mut row: Vec<u32> = slots.iter().map(|&slot| value(slot)).collect();
            row.resize(batch, padding);
            row
        };
        let want = [
            padded(NO_SLOT, &|slot| pool.entries[slot].state),
            padded(NO_SLOT, &|slot| slot as u32),
            padded(0, &|slot| pool.entries[slot].len as u32),
        ];
        let held = std::mem::take(&mut self.held);
        let KvRows::Device { slots, positions, .. } = &mut self.pass.kv else {
            bail!("DecodeGraph: expected rows of a device")
        };
        if held[0] != want[0] {
            self.pass.states.set(&want[0], &want[0])?;
        }
        if held[1] != want[1] {
            slots.set(&want[1], &want[1])?;
        }
        if held[2] != want[2] {
            upload(positions, &want[2])?;
        }
        self.held = want;
        Ok(())
    }

    /// Before the step: if it fails, the contents of the buffers are unknown.
    pub fn begin(&mut self) -> [Vec<u32>; 3] {
        std::mem::take(&mut self.held)
    }

    /// After it: the positions advanced on the device.
    pub fn end(&mut self, mut held: [Vec<u32>; 3], sequences: usize) {
        held[2].iter_mut().take(sequences).for_each(|position| *position += 1);
        self.held = held;
    }

    /// The logits of the first `sequences` rows in f32, a copy that the next step does not touch.
    pub fn logits(&self, sequences: usize) -> Result<Tensor> {
        match &self.output {
            Output::Logits(logits) => match logits.narrow(0, 0, sequences)? {
                rows if rows.dtype() == DType::F32 => rows.force_contiguous(),
                rows => rows.to_dtype(DType::F32),
            },
            Output::Drawn(..) => bail!("DecodeGraph: expected a step that leaves logits"),
        }
    }

    /// The tokens drawn, `[batch]`, then log-probabilities where they may be requested. The next step overwrites both.
    pub fn drawn(&self) -> Result<Vec<Tensor>> {
        match &self.output {
            Output::Drawn(_, rows) => Ok([rows.drawn()?].into_iter().chain(rows.logprobs()?).collect()),
            Output::Logits(_) => bail!("DecodeGraph: expected a step that draws"),
        }
    }
}

fn upload(dst: &Tensor, values: &[u32]) -> Result<()> {
    dst.slice_set(&Tensor::new(values, dst.device())?, 0, 0)
}
