//! Steps whose tokens the host has not read: the next one begins before.

use super::request::RequestId;
use super::row::Row;
use super::scheduler::Engine;
use crate::engine::graph::{Coming, Next};
use crate::engine::sampling::Token;
use crate::CausalLm;
use candle_core::{bail, Result};
use std::borrow::Borrow;
use std::time::Instant;

/// A decode step that was launched. What a request that has ended since drew in it is dropped.
#[derive(Debug)]
pub(super) struct Flight {
    /// Of the step's rows; those that are left are in this order.
    requests: Vec<RequestId>,
    drawn: Drawn,
}

#[derive(Debug)]
enum Drawn {
    /// By a step without a graph, which the host has waited for.
    Here(Vec<Token>),
    Coming(Coming),
}

impl<M: Borrow<CausalLm>> Engine<M> {
    /// One token of each row. Where a graph runs the steps, the next one is launched before the host reads what this one
    /// drew, if it may. Returns how many each row took.
    pub(super) fn one_token(&mut self, may_go_ahead: bool) -> Result<Vec<usize>> {
        let flight = match self.flight.take() {
            Some(flight) => flight,
            None => self.launch()?,
        };
        let ahead = match may_go_ahead && self.goes_ahead(&flight) {
            true => self.launch_ahead(&flight).map(Some),
            false => Ok(None),
        };
        // What has been drawn is not lost by a launch that fails.
        let took = self.take_drawn(&flight)?;
        self.flight = ahead?;
        Ok(took)
    }

    /// Takes what a step drew that the next pass does not follow: prompts go in, say, or guesses are to be checked.
    pub(super) fn land(&mut self) -> Result<()> {
        let (start, Some(flight)) = (Instant::now(), self.flight.take()) else { return Ok(()) };
        let took = self.take_drawn(&flight)?;
        self.stats.decode.add(took.iter().sum(), start.elapsed());
        self.retire()
    }

    fn launch(&mut self) -> Result<Flight> {
        let batch: Vec<_> = self.rows.iter().map(|row| (row.sequence, row.choice(&[]))).collect();
        let model = self.model.borrow();
        let drawn = match self.graphs.find(batch.len(), model, &mut self.pool, &mut self.events)? {
            Some(graph) => Drawn::Coming(graph.draw(model, &mut self.pool, Next::Of(&batch))?),
            None => {
                let (sequences, choices): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
                let last: Vec<u32> = self.rows.iter().map(Row::last).collect();
                let fed: Vec<_> = sequences.into_iter().zip(last.chunks(1)).collect();
                let logits = model.feed(&mut self.pool, &fed)?;
                Drawn::Here(self.sampler.draw(&logits, &choices)?)
            }
        };
        Ok(Flight { requests: self.rows.iter().map(|row| row.id).collect(), drawn })
    }

    /// Whether the step after `flight` is known but for its tokens: it has the same rows, each of which goes on unless it drew
    /// a token that ends it, and there are no guesses to be made from these tokens, nor a draft head that is fed them.
    fn goes_ahead(&self, flight: &Flight) -> bool {
        let follows = matches!(flight.drawn, Drawn::Coming(_)) || self.ahead_without_graph;
        let same = || self.rows.iter().map(|row| row.id).eq(flight.requests.iter().copied());
        follows && self.options.draft == 0 && !self.pool.has_head() && same() && self.rows.iter().all(Row::goes_on)
    }

    fn launch_ahead(&mut self, flight: &Flight) -> Result<Flight> {
        let model = self.model.borrow();
        let drawn = match &flight.drawn {
            Drawn::Coming(_) => {
                let sequences: Vec<_> = self.rows.iter().map(|row| row.sequence).collect();
                let graph = self.graphs.find(sequences.len(), model, &mut self.pool, &mut self.events)?;
                let Some(graph) = graph else { bail!("Engine: expected the graph of the step before") };
                Drawn::Coming(graph.draw(model, &mut self.pool, Next::Same(&sequences))?)
            }
            // As a graph does: what no number follows is token 0.
            Drawn::Here(drawn) => {
                let tokens: Vec<u32> = drawn.iter().map(|token| *token.as_ref().unwrap_or(&0)).collect();
                let rows = self.rows.iter().zip(tokens.chunks(1));
                let fed: Vec<_> = rows.clone().map(|(row, token)| (row.sequence, token)).collect();
                let choices: Vec<_> = rows.map(|(row, token)| row.choice(token)).collect();
                let logits = model.feed(&mut self.pool, &fed)?;
                Drawn::Here(self.sampler.draw(&logits, &choices)?)
            }
        };
        Ok(Flight { requests: flight.requests.clone(), drawn })
    }

    fn take_drawn(&mut self, flight: &Flight) -> Result<Vec<usize>> {
        let read;
        let drawn = match &flight.drawn {
            Drawn::Here(drawn) => drawn,
            Drawn::Coming(coming) => {
                read = coming.read()?;
                &read
            }
        };
        let mut rows = self.rows.iter_mut().peekable();
        let mut took = Vec::with_capacity(drawn.len());
        for (id, token) in flight.requests.iter().zip(drawn) {
            if let Some(row) = rows.next_if(|row| row.id == *id) {
                took.push(row.take(std::slice::from_ref(token), &[], &mut self.events));
            }
        }
        Ok(took)
    }
}
