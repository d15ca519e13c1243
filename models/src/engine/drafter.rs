//! Drafts for the next step: for each row the better of a look-up in its text and the draft head.

use super::batch::Row;
use super::core::Context;
use super::options::{DraftDepth, EngineOptions};
use super::request::RequestId;
use super::stats::EngineStats;
use crate::drafting::depth::{Chances, Depths, MOST};
use crate::drafting::lookup::look_up;
use crate::sequences::SequencePool;
use candle_core::{Device, Result, Tensor};
use std::time::Duration;

/// Steps between two agreements of the ranks on the times of steps.
const AGREE: usize = 16;
/// Drafts of one sequence, and of all, that acceptance is averaged over.
const MEMORY: [u32; 2] = [32, 256];

#[derive(Debug)]
pub(super) struct Drafter {
    /// The most drafts by look-up.
    lookup: usize,
    depth: DraftDepth,
    depths: Depths,
    /// Steps that `depths` does not know yet: sequences, depth, time.
    measured: Vec<(usize, usize, Duration)>,
    /// The depths of these requests at the next step, where they were chosen before.
    planned: Option<(Vec<RequestId>, Vec<usize>)>,
    /// Whether there are no drafts for now.
    paused: bool,
}

/// The drafts of a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tried {
    pub count: usize,
    /// Whether they come from the text, not from the draft head.
    pub by_lookup: bool,
}

impl Drafter {
    pub fn new(options: &EngineOptions, pool: &SequencePool) -> Self {
        let depths = Depths::after(options.draft_after);
        // A step verifies the drafts and the token before them.
        let lookup = options.draft.min(pool.room().map_or(usize::MAX, |room| room - 1));
        Self { lookup, depth: options.draft_depth, depths, measured: Vec::new(), planned: None, paused: false }
    }

    /// Whether drafts are looked up in the text.
    pub fn looks_up(&self) -> bool {
        self.lookup > 0 && !self.paused
    }

    /// Whether the next step can have drafts.
    pub fn may_draft(&self, pool: &SequencePool) -> bool {
        self.looks_up() || (pool.has_head() && !self.paused)
    }

    /// After a failed pass there are no drafts for a while.
    pub fn set_paused(&mut self, paused: bool) {
        self.paused = paused;
        if paused {
            self.planned = None;
        }
    }

    /// The acceptance that a new sequence begins with.
    pub fn chances_of_a_sequence(&self) -> Chances {
        self.depths.chances.for_a_sequence()
    }

    /// How many tokens the head drafts for each row at the next step, unless a look-up is better.
    pub fn plan(&mut self, rows: &[Row], pool: &mut SequencePool) -> Vec<usize> {
        match self.planned.take() {
            // Tokens that were drawn since have used some of the room.
            Some((planned, depths)) if rows.iter().map(|row| &row.id).eq(&planned) => {
                depths.into_iter().zip(rows).map(|(depth, row)| depth.min(row.room())).collect()
            }
            _ => {
                self.rest_head(rows.len(), pool);
                self.choose_depths(rows, pool)
            }
        }
    }

    /// Keeps a plan that the step after the current one will need.
    pub fn keep_plan(&mut self, requests: Vec<RequestId>, depths: Vec<usize>) {
        self.planned = Some((requests, depths));
    }

    /// Where drafts of this many sequences save no time, the head takes no passes of its own either.
    pub fn rest_head(&self, sequences: usize, pool: &mut SequencePool) {
        pool.set_head_idle(self.paused || (self.depth == DraftDepth::Auto && !self.depths.pays(sequences)));
    }

    fn choose_depths(&mut self, rows: &[Row], pool: &SequencePool) -> Vec<usize> {
        if !pool.has_head() || self.paused {
            return vec![0; rows.len()];
        }
        match self.depth {
            DraftDepth::Fixed(depth) => rows.iter().map(|row| depth.min(MOST).min(row.room())).collect(),
            DraftDepth::Auto => {
                let rows: Vec<(Chances, usize)> = rows.iter().map(|row| (row.head_chances, row.room())).collect();
                self.depths.choose(&rows)
            }
        }
    }

    /// The drafts of all rows, by look-up or, up to `depths`, by the head.
    pub fn draft(&self, depths: &[usize], rows: &[Row], cx: &mut Context) -> Result<(Vec<Vec<u32>>, Vec<Tried>)> {
        let look_up = |row: &Row| look_up(&row.tokens, self.lookup.min(row.lookup_depth).min(row.room()));
        let mut drafts: Vec<Vec<u32>> = rows.iter().map(look_up).collect();
        let mut depths = depths.to_vec();
        for ((row, draft), depth) in rows.iter().zip(&mut drafts).zip(&mut depths) {
            let head = row.head_chances.expected(*depth);
            match draft.is_empty() || row.lookup_chances.expected(draft.len().min(MOST)) < head {
                true if *depth > 0 => draft.clear(),
                _ => *depth = 0,
            }
        }
        let by_lookup: Vec<bool> = drafts.iter().map(|draft| !draft.is_empty()).collect();
        let by_head = rows.iter().zip(&depths).filter(|(_, depth)| **depth > 0);
        let batch: Vec<_> = by_head.map(|(row, depth)| (row.sequence, row.last(), *depth)).collect();
        if !batch.is_empty() {
            let (tokens, _) = cx.model.draft(cx.pool, &batch)?;
            let empty = drafts.iter_mut().zip(&depths).filter(|(_, depth)| **depth > 0);
            empty.zip(tokens).for_each(|((draft, _), tokens)| *draft = tokens);
        }
        let tried = drafts.iter().zip(by_lookup).map(|(draft, by_lookup)| Tried { count: draft.len(), by_lookup });
        let tried = tried.collect();
        Ok((drafts, tried))
    }

    /// Records what each row drafted, and how many tokens it accepted: drafts, and one token more.
    pub fn count(&mut self, rows: &mut [Row], tried: &[Tried], accepted: &[usize], stats: &mut EngineStats) {
        let (lookup, head) = (&mut stats.drafts, &mut stats.head);
        for ((row, tried), &tokens) in rows.iter_mut().zip(tried).zip(accepted) {
            let (count, right) = (tried.count, tokens.saturating_sub(1));
            for (sum_steps, sum_tokens) in
                [(&mut lookup.steps, &mut lookup.tokens), (&mut head.steps, &mut head.tokens)]
            {
                (*sum_steps, *sum_tokens) = (*sum_steps + 1, *sum_tokens + tokens);
            }
            // Drafts after the end of a completion were not verified.
            let verified = if row.finished.is_some() { count.min(right) } else { count };
            if tried.by_lookup {
                row.lookup_depth = 2 * right + 1;
                row.lookup_chances.learn(verified.min(MOST), right.min(MOST), MEMORY[0]);
                (lookup.drafted, lookup.accepted) = (lookup.drafted + count, lookup.accepted + right);
            } else {
                row.head_chances.learn(verified, right, MEMORY[0]);
                self.depths.chances.learn(verified, right, MEMORY[1]);
                head.drafted[..count].iter_mut().for_each(|n| *n += 1);
                head.accepted[..right.min(MOST)].iter_mut().for_each(|n| *n += 1);
            }
        }
    }

    /// Records the time of a step of so many sequences with up to `depth` drafts each.
    pub fn measured(&mut self, sequences: usize, depth: usize, time: Duration, cx: &Context) -> Result<()> {
        if cx.pool.has_head() && self.depth == DraftDepth::Auto {
            self.measured.push((sequences, depth, time));
        }
        // All ranks must choose alike: they sum the times of their steps.
        let group = cx.model.vocabulary.as_ref().map(|vocabulary| &vocabulary.group);
        let mut measured = match group {
            Some(_) if self.measured.len() < AGREE => return Ok(()),
            _ => std::mem::take(&mut self.measured),
        };
        if let Some(group) = group {
            let seconds: Vec<f32> = measured.iter().map(|(_, _, time)| time.as_secs_f32()).collect();
            let sum = group.all_reduce(&Tensor::new(seconds, cx.model.device())?)?;
            let sum = sum.to_device(&Device::Cpu)?.to_vec1::<f32>()?;
            measured.iter_mut().zip(sum).for_each(|(step, sum)| step.2 = Duration::from_secs_f32(sum.max(0.)));
        }
        measured.into_iter().for_each(|(batch, depth, time)| self.depths.measured(batch, depth, time));
        Ok(())
    }
}
