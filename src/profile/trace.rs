//! The Chrome trace format, for Perfetto.

use super::clock::Time;
use super::{Profile, Warp};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{Result, Write};

/// The warps of one block on one multiprocessor, in whole nanoseconds from the profile's begin. Whole ones, so that
/// rounding keeps scopes that touch from overlapping.
struct Block<'a> {
    time: &'a Time,
    launch: usize,
    warps: Vec<&'a Warp>,
    begin: u64,
    end: u64,
}

impl Profile {
    /// Writes the warps that `keep` names as a Chrome trace: JSON for <https://ui.perfetto.dev> or `chrome://tracing`.
    ///
    /// A process is a multiprocessor, and a thread a place for a warp on it: blocks of a launch that ran one after the
    /// other may share the place. A warp is a slice named by its role with its scopes inside, both with their exact length in
    /// `args.cycles`. `ts` and `dur` are microseconds from the first begin, aligned between multiprocessors as
    /// [`Clock`](super::Clock) says; where a launch has no clock a cycle counts as a nanosecond.
    ///
    /// # Errors
    /// What `out` returns.
    pub fn write_trace(&self, out: &mut impl Write, keep: impl Fn(&Warp) -> bool) -> Result<()> {
        let times: Vec<Time> = self.launches.iter().map(Time::new).collect();
        let zero_ns = self.launches.iter().flat_map(|l| &l.warps).map(|w| w.ns[0]).min().unwrap_or(0);
        let all = || times.iter().zip(&self.launches).flat_map(|(time, l)| l.warps.iter().map(move |w| (time, w)));
        let first = all().map(|(time, w)| time.ns(w, w.cycles[0], zero_ns)).fold(f64::INFINITY, f64::min);
        let position =
            |time: &Time, warp: &Warp, cycles| (time.ns(warp, cycles, zero_ns) - first).max(0.0).round() as u64;

        let mut sms = BTreeMap::<u32, Vec<Block>>::new();
        for (launch, (time, warps)) in times.iter().zip(self.launches.iter().map(|l| &l.warps)).enumerate() {
            let kept: Vec<&Warp> = warps.iter().filter(|w| keep(w)).collect();
            for warps in kept.chunk_by(|a, b| (a.block, a.sm) == (b.block, b.sm)) {
                let begin = warps.iter().map(|w| position(time, w, w.cycles[0])).min().unwrap_or(0);
                let end = warps.iter().map(|w| position(time, w, w.cycles[1])).max().unwrap_or(0);
                sms.entry(warps[0].sm).or_default().push(Block { time, launch, warps: warps.to_vec(), begin, end });
            }
        }

        write!(out, "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
        let (mut tid, mut lines) = (0, Lines { out, any: false });
        for (sm, blocks) in sms {
            // Perfetto keeps process 0 for the idle task.
            let pid = sm + 1;
            lines.meta(pid, 0, "process_name", json!({ "name": format!("SM {sm}") }))?;
            lines.meta(pid, 0, "process_sort_index", json!({ "sort_index": sm }))?;
            for place in places(blocks) {
                let warps = place.iter().flat_map(|b| &b.warps).map(|w| w.warp + 1).max().unwrap_or(0);
                for number in 0..warps {
                    tid += 1;
                    let mut here = place.iter().flat_map(|b| b.warps.iter().map(move |w| (b, *w)));
                    let mut here: Vec<_> = here.by_ref().filter(|(_, w)| w.warp == number).collect();
                    here.sort_by_key(|(b, _)| b.begin);
                    let name = match here[..] {
                        [] => continue,
                        [(_, w)] => format!("block {} warp {number}: {}", w.block, w.role),
                        [(_, w), ..] => format!("{} blocks, warp {number}: {}", here.len(), w.role),
                    };
                    let launch = here[0].0.launch + 1;
                    let name = if times.len() > 1 { format!("launch {launch} {name}") } else { name };
                    lines.meta(pid, tid, "thread_name", json!({ "name": name }))?;
                    lines.meta(pid, tid, "thread_sort_index", json!({ "sort_index": tid }))?;
                    for (block, warp) in here {
                        let position = |cycles| position(block.time, warp, cycles);
                        let args = json!({
                            "launch": block.launch, "block": warp.block, "warp": warp.warp, "cycles": warp.lifetime(),
                            "dropped": warp.dropped,
                        });
                        lines.slice(pid, tid, warp.role, warp.cycles.map(position), args)?;
                        for event in &warp.events {
                            let ends = [event.begin, event.end()].map(|cycles| position(warp.cycles[0] + cycles));
                            let args = json!({ "cycles": event.cycles, "token": event.token });
                            lines.slice(pid, tid, event.scope, ends, args)?;
                        }
                    }
                }
            }
        }
        writeln!(lines.out, "\n]}}")
    }
}

/// Blocks in groups of one launch that follow each other in time: as many groups as there were blocks at once.
fn places(mut blocks: Vec<Block<'_>>) -> Vec<Vec<Block<'_>>> {
    blocks.sort_by_key(|b| b.begin);
    let mut places: Vec<Vec<Block>> = vec![];
    for block in blocks {
        let fits = |last: &Block| last.launch == block.launch && last.end <= block.begin;
        match places.iter_mut().find(|p| p.last().is_some_and(fits)) {
            Some(place) => place.push(block),
            None => places.push(vec![block]),
        }
    }
    places
}

/// The elements of `traceEvents`, one a line.
struct Lines<'a, W> {
    out: &'a mut W,
    any: bool,
}

impl<W: Write> Lines<'_, W> {
    fn next(&mut self) -> Result<()> {
        let comma = if std::mem::replace(&mut self.any, true) { "," } else { "" };
        writeln!(self.out, "{comma}")
    }

    fn meta(&mut self, pid: u32, tid: u32, name: &str, args: serde_json::Value) -> Result<()> {
        self.next()?;
        write!(self.out, r#"{{"ph":"M","pid":{pid},"tid":{tid},"name":{},"args":{args}}}"#, json!(name))
    }

    /// A complete event between two times in nanoseconds.
    fn slice(&mut self, pid: u32, tid: u32, name: &str, [begin, end]: [u64; 2], args: serde_json::Value) -> Result<()> {
        self.next()?;
        let us = |ns: u64| format!("{}.{:03}", ns / 1000, ns % 1000);
        let (ts, dur, name) = (us(begin), us(end - begin), json!(name));
        write!(self.out, r#"{{"ph":"X","pid":{pid},"tid":{tid},"ts":{ts},"dur":{dur},"name":{name},"args":{args}}}"#)
    }
}
