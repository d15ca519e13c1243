//! What the kernels stamp, on a GPU; those of the chunk forms and of the step: profile_more.

use crate::profile_more;
use crate::semantics::{args, options, Args};
use crate::support::{devices, gdn_decode, gdn_prefill, values};
use candle_core::{bail, DType, Device, Tensor};
use candle_gdn::ops::{GdnDecode, RuleOptions};
use candle_gdn::profile::{record, Launch, Limits, Profile, Warp};
use candle_gdn::Algo;
use serde_json::Value;
use std::collections::BTreeMap;

pub const LIMITS: Limits = Limits { warps: 1 << 14, events_per_warp: 512 };

pub fn gpus() -> impl Iterator<Item = Device> {
    devices().into_iter().filter(Device::is_cuda)
}

/// In bf16; decode where there is one token.
pub struct Case {
    x: Args,
    pub options: RuleOptions,
}

impl Case {
    pub fn new(batch: usize, tokens: usize, algo: Algo, device: &Device) -> Self {
        let mut x = args(batch, tokens, device).in_dtype(DType::BF16);
        for gate in [&mut x.gates.a, &mut x.gates.b] {
            *gate = gate.to_dtype(DType::BF16).unwrap();
        }
        Self { x: if tokens == 1 { x.token(0) } else { x }, options: options(algo) }
    }

    /// o and the new state, from the same state every time.
    pub fn launch(&self) -> candle_core::Result<(Tensor, Tensor)> {
        let Args { q, k, v, gates, state } = &self.x;
        match q.rank() {
            3 => gdn_decode(q, k, v, gates, state, self.options),
            _ => gdn_prefill(q, k, v, gates, state, None, self.options),
        }
    }

    pub fn recorded(&self, limits: Limits) -> candle_core::Result<Profile> {
        Ok(record(self.x.q.device(), limits, || self.launch())?.1)
    }

    fn profile(&self) -> Launch {
        let mut profile = self.recorded(Limits::default()).unwrap();
        assert_eq!(profile.launches.len(), 1);
        profile.launches.remove(0)
    }

    pub fn what(&self) -> String {
        let RuleOptions { algo, segments, .. } = self.options;
        format!("{algo:?}, v {:?}, {segments} segments", self.x.v.dims())
    }
}

/// Of every kernel of the rule.
fn all_cases(device: &Device) -> impl Iterator<Item = Case> {
    let chunked = profile_more::cases(device).into_iter().map(|chunked| chunked.case);
    cases(device).into_iter().map(|(case, ..)| case).chain(chunked)
}

/// Every kernel: decode, a few tokens, and more than a stage with a part of one at the end.
fn cases(device: &Device) -> Vec<(Case, usize, Algo)> {
    let algos = [Algo::Recurrent, Algo::Recurrent128];
    let lengths = [1, 4, 70];
    let all = lengths.into_iter().flat_map(|tokens| algos.map(|algo| (tokens, algo)));
    let all = all.chain([(1, Algo::Decode), (4, Algo::Decode)]);
    all.map(|(tokens, algo)| (Case::new(3, tokens, algo, device), tokens, algo)).collect()
}

pub fn count(warp: &Warp, scope: &str) -> usize {
    warp.events.iter().filter(|e| e.scope == scope).count()
}

#[test]
fn recording_changes_no_bit() {
    for device in gpus() {
        for case in all_cases(&device) {
            let (o, state) = case.launch().unwrap();
            let ((o_recorded, state_recorded), _) = record(&device, LIMITS, || case.launch()).unwrap();
            assert_eq!(values(&o), values(&o_recorded), "{}", case.what());
            assert_eq!(values(&state), values(&state_recorded), "{}", case.what());
        }
    }
}

#[test]
fn every_warp_tells_its_whole_life() {
    for device in gpus() {
        for (case, tokens, algo) in cases(&device) {
            let launch = case.profile();
            let mut blocks = BTreeMap::<u32, Vec<&Warp>>::new();
            for warp in &launch.warps {
                blocks.entry(warp.block).or_default().push(warp);
            }
            // 3 sequences of 4 heads, a whole number of tiles each.
            assert!(blocks.len() >= 12 && blocks.len().is_multiple_of(12), "{} blocks", blocks.len());
            assert!(blocks.keys().copied().eq(0..blocks.len() as u32));
            for warps in blocks.values() {
                assert!(warps.iter().map(|w| w.warp).eq(0..blocks[&0].len() as u32), "{tokens} tokens, {algo:?}");
                assert!(warps.iter().all(|w| w.sm == warps[0].sm), "a block on two multiprocessors");
            }
            for warp in &launch.warps {
                let which = || format!("{tokens} tokens, {algo:?}: {warp:?}");
                assert_eq!((warp.dropped, warp.events[0].scope, warp.events[1].scope), (0, "empty", "set-up"));
                assert!(warp.ns[0] <= warp.ns[1], "{}", which());
                assert!(warp.events.windows(2).all(|e| e[0].end() <= e[1].begin), "{}", which());
                assert!(warp.events.iter().all(|e| e.end() <= warp.lifetime()), "{}", which());
                assert!(warp.events.iter().map(|e| e.cycles).sum::<u64>() <= warp.lifetime(), "{}", which());
            }
            shares_are_whole(&launch);
        }
    }
}

pub fn shares_are_whole(launch: &Launch) {
    for role in &launch.table().roles {
        let shares = role.unstamped + role.scopes.iter().map(|r| r.share).sum::<f64>();
        assert!((shares - 1.0).abs() < 1e-9 && (0.0..=1.0).contains(&role.unstamped), "{role:?}");
    }
}

#[test]
fn scopes_are_those_of_the_kernel() {
    for device in gpus() {
        for (case, tokens, algo) in cases(&device) {
            let launch = case.profile();
            let table = launch.table();
            let roles: Vec<_> = table.roles.iter().map(|r| (r.role, r.warps)).collect();
            let half = launch.warps.len() / 2;
            match (algo, tokens) {
                (Algo::Decode, _) => assert_eq!(roles, [("decode", launch.warps.len())]),
                (Algo::Recurrent128, _) | (_, 70) => {
                    assert_eq!(roles, [("recurrent consumer", half), ("recurrent producer", half)]);
                }
                _ => assert_eq!(roles, [("recurrent", launch.warps.len())]),
            }
            for warp in &launch.warps {
                let scopes: Vec<_> = warp.events.iter().map(|e| (e.scope, e.token)).collect();
                let tokens_of = |scope: &str| -> Vec<u32> {
                    warp.events.iter().filter(|e| e.scope == scope).map(|e| e.token).collect()
                };
                let stages: Vec<u32> = (0..tokens as u32).step_by(16).collect();
                match warp.role {
                    "recurrent" | "recurrent consumer" => {
                        assert_eq!(tokens_of("update"), stages, "{scopes:?}");
                        assert_eq!(count(warp, "barrier"), stages.len() + 1, "{scopes:?}");
                        assert_eq!((count(warp, "load state"), count(warp, "wait: state")), (1, 1), "{scopes:?}");
                        assert_eq!(scopes.last().unwrap().0, "store state");
                        let at = |scope: &str| scopes.iter().position(|s| s.0 == scope).unwrap();
                        assert!(at("load state") < at("barrier") && at("barrier") < at("wait: state"), "{scopes:?}");
                        assert!(at("wait: state") < at("update"), "{scopes:?}");
                    }
                    "decode" => {
                        // One piece of the state for a warp by itself, four where it streams them.
                        let pieces = count(warp, "update");
                        assert_eq!(pieces, if tokens == 1 { 1 } else { 4 }, "{scopes:?}");
                        assert_eq!((count(warp, "load state"), count(warp, "wait: state")), (1, pieces), "{scopes:?}");
                        assert_eq!(count(warp, "store state"), pieces, "{scopes:?}");
                        let at = |scope: &str| scopes.iter().position(|s| s.0 == scope).unwrap();
                        assert!(at("load state") < at("wait: state") && at("wait: state") < at("update"), "{scopes:?}");
                        assert_eq!(scopes.last().unwrap().0, "store state");
                    }
                    _ => {
                        assert_eq!(warp.role, "recurrent producer");
                        assert_eq!(count(warp, "barrier"), stages.len() + 1, "{scopes:?}");
                        assert_eq!(count(warp, "update") + count(warp, "load state"), 0, "{scopes:?}");
                    }
                }
            }
            // One warp of a block does the gates of a stage; the others the tokens between them.
            let scopes = ["load q/k/v", "wait: gates", "gates", "wait: q/k/v", "normalise"];
            for scope in if algo == Algo::Decode { &scopes[..1] } else { &scopes[..] } {
                assert!(launch.warps.iter().any(|w| count(w, scope) > 0), "{scope}: {tokens} tokens, {algo:?}");
            }
        }
    }
}

#[test]
fn padding_is_a_scope() {
    for device in gpus() {
        let Case { x, options } = Case::new(2, 1, Algo::Auto, &device);
        let slots = Tensor::new(&[0, u32::MAX], &device).unwrap();
        let op = GdnDecode::new(x.gates.clone(), &x.state, options).unwrap().with_slots(&slots);
        let (_, profile) = record(&device, Limits::default(), || op.forward(&x.q, &x.k, &x.v)).unwrap();
        let warps = &profile.launches[0].warps;
        for (i, warp) in warps.iter().enumerate() {
            let padding = i >= warps.len() / 2;
            assert_eq!(
                (count(warp, "padding"), count(warp, "update")),
                (padding.into(), (!padding).into()),
                "{warp:?}"
            );
        }
    }
}

#[test]
fn too_few_events_drop_the_last_ones() {
    // record() itself fails if anything is written past the buffer.
    for device in gpus() {
        // Among more heads than multiprocessors a block takes those that are left: others each time.
        for case in all_cases(&device).filter(|case| case.x.v.dims()[0] < profile_more::MANY) {
            let whole = case.recorded(LIMITS).unwrap().launches;
            for events_per_warp in [0, 1, 3] {
                let some = case.recorded(Limits { events_per_warp, ..LIMITS }).unwrap().launches;
                assert_eq!(some.len(), whole.len());
                for (some, whole) in some.iter().zip(&whole) {
                    drops_the_last(some, whole, events_per_warp, &case.what());
                }
            }
        }
    }
}

fn drops_the_last(some: &Launch, whole: &Launch, events_per_warp: usize, what: &str) {
    assert_eq!(some.warps.len(), whole.warps.len());
    for (some, whole) in some.warps.iter().zip(&whole.warps) {
        let kept = whole.events.len().min(events_per_warp);
        let scopes = |w: &Warp| w.events[..kept].iter().map(|e| (e.scope, e.token)).collect::<Vec<_>>();
        assert_eq!((some.block, some.warp, scopes(some)), (whole.block, whole.warp, scopes(whole)));
        assert_eq!(some.events.len(), kept);
        assert_eq!(some.dropped as usize, whole.events.len() - kept, "{what}");
    }
    let dropped: usize = whole.warps.iter().map(|w| w.events.len().saturating_sub(events_per_warp)).sum();
    assert_eq!(some.table().dropped as usize, dropped);
}

#[test]
fn too_few_warps_are_refused() {
    for device in gpus() {
        let case = Case::new(3, 70, Algo::Recurrent128, &device);
        let warps = case.profile().warps.len();
        let limits = Limits { warps: warps - 1, events_per_warp: 64 };
        let error = case.recorded(limits).unwrap_err().to_string();
        assert!(error.contains("no room for the warps of this launch"), "{error}");
        // Nothing of it stays.
        case.launch().unwrap();
        assert_eq!(case.recorded(Limits { warps, ..limits }).unwrap().launches[0].warps.len(), warps);
        let two = || -> candle_core::Result<_> { Ok((case.launch()?, case.launch()?)) };
        let error = record(&device, Limits { warps: 2 * warps - 1, ..limits }, two).unwrap_err().to_string();
        assert!(error.contains("no room"), "{error}");
        let (_, profile) = record(&device, Limits { warps: 2 * warps, ..limits }, two).unwrap();
        assert!(profile.launches.len() == 2 && profile.launches.iter().all(|l| l.warps.len() == warps));
        let error = case.recorded(Limits { warps: 0, events_per_warp: 64 }).unwrap_err().to_string();
        assert!(error.contains("at least one warp"), "{error}");
    }
}

#[test]
fn only_what_this_thread_launches_inside_is_recorded() {
    for device in gpus() {
        let case = Case::new(1, 1, Algo::Auto, &device);
        let (_, profile) = record(&device, Limits::default(), || {
            std::thread::scope(|scope| scope.spawn(|| case.launch()).join().expect("no panic"))?;
            Ok(())
        })
        .unwrap();
        assert!(profile.launches.is_empty());
        let error = record(&device, Limits::default(), || -> candle_core::Result<()> {
            case.launch()?;
            bail!("mine")
        });
        assert!(error.unwrap_err().to_string().starts_with("mine"));
        case.launch().unwrap();
        assert_eq!(case.recorded(Limits::default()).unwrap().launches.len(), 1);
    }
}

#[test]
fn the_clock_makes_sense() {
    for device in gpus() {
        let case = Case::new(1, 2000, Algo::Recurrent128, &device);
        case.launch().unwrap();
        let profile = case.recorded(Limits { warps: 1024, events_per_warp: 4000 }).unwrap();
        let launch = &profile.launches[0];
        let table = launch.table();
        let clock = table.clock.expect("a clock");
        assert!((0.2..4.0).contains(&clock.ghz) && clock.relative_error < 0.05, "{clock:?}");
        // A warp cannot outlive its kernel.
        let longest = launch.warps.iter().map(Warp::lifetime).max().unwrap() as f64;
        let slack = clock.relative_error * longest + 2.0 * clock.step_ns as f64 * clock.ghz;
        assert!(table.span_cycles.unwrap() >= longest - slack, "{table:?}");
    }
}

#[test]
fn a_trace_holds_all_launches() {
    for device in gpus() {
        for case in all_cases(&device) {
            let profile = case.recorded(LIMITS).unwrap();
            let mut json = vec![];
            profile.write_trace(&mut json, |_| true).unwrap();
            let json: Value = serde_json::from_slice(&json).unwrap();
            let slices = json["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X").count();
            let written = |l: &Launch| l.warps.iter().map(|w| 1 + w.events.len()).sum::<usize>();
            assert_eq!(slices, profile.launches.iter().map(written).sum::<usize>(), "{}", case.what());
        }
    }
}
