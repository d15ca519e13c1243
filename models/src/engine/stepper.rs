//! Steps whose tokens the host has not read: the next one begins before.

use super::drafting::Tried;
use super::request::RequestId;
use super::row::Row;
use super::scheduler::Engine;
use crate::engine::graph::{Coming, Next};
use crate::engine::round_graph::Round;
use crate::engine::sampling::Token;
use crate::{CausalLm, Sequence};
use candle_core::{bail, Result};
use std::borrow::Borrow;
use std::time::Instant;

/// A decode step that was launched. What a request that has ended since drew in it is dropped.
#[derive(Debug)]
pub(super) struct Flight {
    /// Of the step's rows; those that are left are in this order.
    requests: Vec<RequestId>,
    sequences: Vec<Sequence>,
    /// Tokens that the head drafts for each.
    depth: usize,
    /// Whether one of them asked for log-probabilities.
    tells: bool,
    drawn: Drawn,
    launched: Instant,
}

#[derive(Debug)]
enum Drawn {
    /// By a step without a graph, which the host has waited for.
    Here(Vec<Token>),
    Coming(Coming),
    Round(Round),
}

impl<M: Borrow<CausalLm>> Engine<M> {
    /// Drafts of each row that a step without the host is to have: none, or as many as a round that there is; nothing where
    /// the host is to see the drafts.
    pub(super) fn flight_depth(&mut self, depths: &[usize]) -> Result<Option<usize>> {
        if self.options.draft > 0 {
            return Ok(None);
        }
        let (depth, rows) = (depths.iter().copied().max().unwrap_or(0), self.rows.len());
        if depth == 0 || !self.pool.can_draft(self.rows.iter().map(|row| row.sequence)) {
            return Ok(Some(0));
        }
        // A round goes on behind the end of a completion, of which a snapshot may be wanted.
        if !self.has_room(depth + 1) || self.rows.iter().any(|row| row.request.snapshot_end) {
            return Ok(None);
        }
        let size = (rows, depth, self.tells());
        let round = self.graphs.find_round(size, self.model.borrow(), &mut self.pool, &mut self.events)?.is_some();
        Ok(round.then_some(depth))
    }

    /// Whether somebody asks for log-probabilities.
    fn tells(&self) -> bool {
        self.rows.iter().any(|row| row.request.logprobs.is_some())
    }

    /// Whether each row has room for so many more tokens.
    fn has_room(&self, tokens: usize) -> bool {
        self.rows.iter().all(|row| row.tokens.len() - 1 + tokens <= self.pool.max_len())
    }

    /// What the step in flight drew. Where a graph runs the steps, the next one is launched before the host reads that, if it
    /// may. Returns how many tokens there were.
    pub(super) fn take_flight(&mut self, may_go_ahead: bool) -> Result<usize> {
        let Some(flight) = self.flight.take() else { return Ok(0) };
        let ahead = match may_go_ahead && self.goes_ahead(&flight)? {
            true => self.launch_ahead(&flight).map(Some),
            false => Ok(None),
        };
        // What has been drawn is not lost by a launch that fails.
        let took = self.take_drawn(&flight, !matches!(ahead, Ok(Some(_))))?;
        self.flight = ahead?;
        // From when the device could begin with it.
        let since = flight.launched.max(self.landed);
        self.landed = Instant::now();
        let size = (flight.requests.len(), flight.depth);
        self.measured(size, self.landed - since)?;
        Ok(took)
    }

    /// Takes what a step drew that the next pass does not follow: prompts go in, say, or guesses are to be checked.
    pub(super) fn land(&mut self) -> Result<()> {
        let (start, Some(flight)) = (Instant::now(), self.flight.take()) else { return Ok(()) };
        let took = self.take_drawn(&flight, true)?;
        self.stats.decode.add(took, start.elapsed());
        self.retire()
    }

    pub(super) fn launch(&mut self, depth: usize) -> Result<Flight> {
        let batch: Vec<_> = self.rows.iter().map(|row| (row.sequence, row.choice(&[]))).collect();
        let sequences: Vec<Sequence> = batch.iter().map(|(sequence, _)| *sequence).collect();
        let requests = self.rows.iter().map(|row| row.id).collect();
        let tells = self.tells();
        if depth > 0 {
            let (drawn, launched) = self.launch_round(&sequences, depth)?;
            return Ok(Flight { requests, sequences, depth, tells, drawn, launched });
        }
        let model = self.model.borrow();
        let graph = self.graphs.find((batch.len(), tells), model, &mut self.pool, &mut self.events)?;
        let launched = Instant::now();
        let drawn = match graph {
            Some(graph) => Drawn::Coming(graph.draw(model, &mut self.pool, Next::Of(&batch))?),
            None => {
                let (sequences, choices): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
                let last: Vec<u32> = self.rows.iter().map(Row::last).collect();
                let fed: Vec<_> = sequences.into_iter().zip(last.chunks(1)).collect();
                let logits = model.feed(&mut self.pool, &fed)?;
                Drawn::Here(self.sampler.draw(&logits, &choices)?)
            }
        };
        Ok(Flight { requests, sequences, depth, tells, drawn, launched })
    }

    fn launch_round(&mut self, sequences: &[Sequence], depth: usize) -> Result<(Drawn, Instant)> {
        let (model, size) = (self.model.borrow(), (sequences.len(), depth, self.tells()));
        let round = self.graphs.find_round(size, model, &mut self.pool, &mut self.events)?;
        let Some(round) = round else { bail!("Engine: expected the graph of a round") };
        let (rows, launched) = (&self.rows, Instant::now());
        let choices = || rows.iter().map(|row| row.choice(&[])).collect();
        Ok((Drawn::Round(round.launch(model, &mut self.pool, sequences, choices)?), launched))
    }

    /// Whether the step after `flight` is known but for its tokens: it has the same rows and drafts as many, each row goes on unless
    /// it drew a token that ends it, and there are no guesses to be made from these tokens.
    fn goes_ahead(&mut self, flight: &Flight) -> Result<bool> {
        let follows = match flight.drawn {
            Drawn::Here(_) => self.ahead_without_graph,
            Drawn::Coming(_) | Drawn::Round(_) => true,
        };
        let same = self.rows.iter().map(|row| row.id).eq(flight.requests.iter().copied());
        if !follows || !same || self.options.draft > 0 || !self.rows.iter().all(Row::goes_on) {
            return Ok(false);
        }
        let depths = self.plan();
        let depth = depths.iter().copied().max().unwrap_or(0);
        let goes = match flight.depth {
            0 => depth == 0,
            // As many tokens as the step may bring, and as the next one has.
            drafted => depth == drafted && self.has_room(2 * (drafted + 1)) && self.still_holds(flight)?,
        };
        if !goes {
            self.planned = Some((flight.requests.clone(), depths));
        }
        Ok(goes)
    }

    /// Whether the graph of a round finds all that the next one reads.
    fn still_holds(&mut self, flight: &Flight) -> Result<bool> {
        let (model, size) = (self.model.borrow(), (flight.sequences.len(), flight.depth, flight.tells));
        let round = self.graphs.find_round(size, model, &mut self.pool, &mut self.events)?;
        Ok(round.is_some_and(|round| round.holds(&self.pool, &flight.sequences)))
    }

    fn launch_ahead(&mut self, flight: &Flight) -> Result<Flight> {
        let Flight { requests, sequences, depth, tells, .. } = flight;
        let (requests, sequences, depth, tells) = (requests.clone(), sequences.clone(), *depth, *tells);
        let launched = Instant::now();
        let drawn = match &flight.drawn {
            Drawn::Coming(_) => {
                let model = self.model.borrow();
                let graph = self.graphs.find((sequences.len(), tells), model, &mut self.pool, &mut self.events)?;
                let Some(graph) = graph else { bail!("Engine: expected the graph of the step before") };
                Drawn::Coming(graph.draw(model, &mut self.pool, Next::Same(&sequences))?)
            }
            Drawn::Round(_) => self.launch_round(&sequences, depth)?.0,
            // As a graph does: what no number follows is token 0.
            Drawn::Here(drawn) => {
                let model = self.model.borrow();
                let tokens: Vec<u32> = drawn.iter().map(|token| token.as_ref().map_or(0, |token| token.id)).collect();
                let rows = self.rows.iter().zip(tokens.chunks(1));
                let fed: Vec<_> = rows.clone().map(|(row, token)| (row.sequence, token)).collect();
                let choices: Vec<_> = rows.map(|(row, token)| row.choice(token)).collect();
                let logits = model.feed(&mut self.pool, &fed)?;
                Drawn::Here(self.sampler.draw(&logits, &choices)?)
            }
        };
        Ok(Flight { requests, sequences, depth, tells, drawn, launched })
    }

    /// What a step drew goes to its rows; it is the `last` one that was launched. How many tokens there were.
    fn take_drawn(&mut self, flight: &Flight, last: bool) -> Result<usize> {
        let one = |token: &Token| vec![token.clone()];
        let model = self.model.borrow();
        let drawn: Vec<Vec<Token>> = match &flight.drawn {
            Drawn::Here(drawn) => drawn.iter().map(one).collect(),
            Drawn::Coming(coming) => coming.read()?.iter().map(one).collect(),
            Drawn::Round(round) => round.read()?,
        };
        let (sequences, tells) = (flight.requests.len(), flight.tells);
        match &flight.drawn {
            Drawn::Here(_) => {}
            Drawn::Coming(_) if !last || !self.pool.has_head() => {}
            Drawn::Coming(_) => {
                let row_of = |row: &Row| flight.requests.iter().position(|id| *id == row.id);
                let fed = self.rows.iter().filter_map(|row| Some((row_of(row)?, row.sequence, row.last())));
                let fed: Vec<_> = fed.collect();
                if let Some(graph) = self.graphs.find((sequences, tells), model, &mut self.pool, &mut self.events)? {
                    graph.hear(model, &mut self.pool, &fed)?;
                }
            }
            Drawn::Round(_) => {
                let size = (sequences, flight.depth, tells);
                let round = self.graphs.find_round(size, model, &mut self.pool, &mut self.events)?;
                let Some(round) = round else { bail!("Engine: expected the graph of a round") };
                round.land(&mut self.pool, &flight.sequences, &drawn, last)?;
            }
        }
        let mut rows = self.rows.iter_mut().peekable();
        let mut took = Vec::with_capacity(drawn.len());
        for (id, drawn) in flight.requests.iter().zip(&drawn) {
            if let Some(row) = rows.next_if(|row| row.id == *id) {
                // All but the last one were drafts.
                let drafts: Vec<u32> = drawn[..drawn.len() - 1].iter().flatten().map(|drawn| drawn.id).collect();
                took.push(row.take(drawn, &drafts, &mut self.events));
            }
        }
        self.count(&vec![Tried { count: flight.depth, guessed: false }; took.len()], &took);
        Ok(took.iter().sum())
    }
}
