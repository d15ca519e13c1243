use super::*;
use serde_json::Value;

const EVENTS: usize = 4;

fn names() -> Names {
    Names { scopes: vec!["empty", "load", "wait", "inner"], roles: vec!["consumer", "producer"] }
}

/// A warp as a kernel writes it; events are (scope, token, begin from the warp's begin, cycles).
#[derive(Clone)]
struct Slot {
    launch: u32,
    role: u32,
    sm: u32,
    block: u32,
    warp: u32,
    dropped: u32,
    cycles: [u64; 2],
    ns: [u64; 2],
    events: Vec<(u32, u32, u64, u32)>,
}

impl Slot {
    fn new(cycles: [u64; 2], events: &[(u32, u32, u64, u32)]) -> Self {
        let ns = cycles.map(|c| c / 2);
        Self { launch: 1, role: 0, sm: 0, block: 0, warp: 0, dropped: 0, cycles, ns, events: events.to_vec() }
    }

    fn bytes(&self) -> Vec<u8> {
        let count = self.events.len() as u32;
        let head = [self.launch, self.role, self.sm, self.block, self.warp, count, self.dropped, 0];
        let times = [self.ns[0], self.cycles[0], self.cycles[1], self.ns[1]];
        let events = self.events.iter().flat_map(|&(scope, token, begin, cycles)| {
            [scope, token, self.cycles[0].wrapping_add(begin) as u32, cycles]
        });
        let head = head.into_iter().flat_map(u32::to_le_bytes).chain(times.into_iter().flat_map(u64::to_le_bytes));
        let mut bytes: Vec<u8> = head.chain(events.flat_map(u32::to_le_bytes)).collect();
        bytes.resize(WARP_BYTES + EVENTS * EVENT_BYTES, 0);
        bytes
    }
}

fn decode(slots: &[Slot]) -> Result<Profile> {
    // Slots that no warp used are zero.
    let mut bytes: Vec<u8> = slots.iter().flat_map(Slot::bytes).collect();
    bytes.resize(bytes.len() + 2 * (WARP_BYTES + EVENTS * EVENT_BYTES), 0);
    Profile::decode(&bytes, EVENTS, &names())
}

fn table(slots: &[Slot]) -> Table {
    decode(slots).unwrap().launches[0].table()
}

fn error(slots: &[Slot]) -> String {
    decode(slots).unwrap_err().to_string()
}

fn trace(profile: &Profile) -> Vec<Value> {
    let mut out = vec![];
    profile.write_trace(&mut out, |_| true).unwrap();
    let json: Value = serde_json::from_slice(&out).unwrap();
    json["traceEvents"].as_array().unwrap().clone()
}

fn slices(profile: &Profile) -> Vec<Value> {
    trace(profile).into_iter().filter(|e| e["ph"] == "X").collect()
}

#[test]
fn nothing_recorded() {
    let profile = decode(&[]).unwrap();
    assert!(profile.launches.is_empty());
    assert!(trace(&profile).is_empty());
    let table = Launch { warps: vec![] }.table();
    assert_eq!((table.warps, table.events, table.span_us, table.clock), (0, 0, None, None));
    assert!(table.roles.is_empty());
    assert!(serde_json::from_str::<Value>(&table.json()).unwrap()["clock"].is_null());
}

#[test]
fn a_warp_comes_back_in_order() {
    let slot =
        Slot { role: 1, sm: 7, block: 3, warp: 2, ..Slot::new([1000, 2000], &[(2, 16, 500, 300), (1, 0, 0, 10)]) };
    let profile = decode(&[slot]).unwrap();
    let [warp] = &profile.launches[0].warps[..] else { panic!("one warp") };
    assert_eq!((warp.role, warp.sm, warp.block, warp.warp, warp.lifetime()), ("producer", 7, 3, 2, 1000));
    let load = Event { scope: "load", token: 0, begin: 0, cycles: 10 };
    let wait = Event { scope: "wait", token: 16, begin: 500, cycles: 300 };
    assert_eq!(warp.events, [load, wait]);
}

#[test]
fn shares_count_nested_scopes_once() {
    // Two in one, which begins with the first of them, and one beside it.
    let events = [(3, 0, 100, 50), (3, 0, 200, 100), (1, 0, 100, 400), (2, 0, 500, 300)];
    let table = table(&[Slot::new([0, 1000], &events)]);
    let [role] = &table.roles[..] else { panic!("one role") };
    let row = |scope| role.scopes.iter().find(|r| r.scope == scope).unwrap();
    assert_eq!((row("load").max, row("load").total), (400, 250));
    assert_eq!((row("inner").count, row("inner").total, row("inner").max), (2, 150, 100));
    assert_eq!(row("wait").share, 0.3);
    let sum: f64 = role.scopes.iter().map(|r| r.share).sum();
    assert!((sum - 0.7).abs() < 1e-12 && (role.unstamped - 0.3).abs() < 1e-12, "{sum} {}", role.unstamped);
    assert_eq!(role.scopes.iter().map(|r| r.scope).collect::<Vec<_>>(), ["load", "inner", "wait"]);
}

#[test]
fn percentiles_are_by_nearest_rank() {
    let slots: Vec<Slot> = (1..=20).map(|i| Slot { block: i, ..Slot::new([0, 1000], &[(1, 0, 0, 10 * i)]) }).collect();
    let table = table(&slots);
    let row = &table.roles[0].scopes[0];
    assert_eq!((row.count, row.median, row.p95, row.max), (20, 100, 190, 200));
    assert_eq!((table.blocks, table.warps, table.multiprocessors), (20, 20, 1));
}

#[test]
fn the_low_half_of_the_clock_may_wrap() {
    let begin = 0x7_ffff_ff00;
    let profile = decode(&[Slot::new([begin, begin + 1000], &[(1, 0, 10, 20), (2, 0, 300, 600)])]).unwrap();
    let warp = &profile.launches[0].warps[0];
    assert_eq!(warp.events.iter().map(|e| (e.begin, e.cycles)).collect::<Vec<_>>(), [(10, 20), (300, 600)]);
}

#[test]
fn lean_events_begin_where_the_one_before_ended() {
    let begin = 0x7_ffff_ff00;
    let slot = Slot::new([begin, begin + 1000], &[]);
    let end = |cycles: u64| (begin + cycles) as u32;
    let (lean, chunk) = (GDN_PROFILE_LEAN, GDN_PROFILE_LEAN | GDN_PROFILE_CHUNK);
    let words = [(lean, end(10)), (chunk | 5 << 8 | 2, end(300)), (lean | 1, end(310)), (chunk | 6 << 8 | 3, end(900))];
    let mut bytes = slot.bytes();
    bytes[20..24].copy_from_slice(&4u32.to_le_bytes());
    for (at, (scope, end)) in (WARP_BYTES..).step_by(EVENT_BYTES).zip(words) {
        bytes[at..at + 8].copy_from_slice(&[scope.to_le_bytes(), end.to_le_bytes()].concat());
    }
    let profile = Profile::decode(&bytes, EVENTS, &names()).unwrap();
    let events: Vec<_> =
        profile.launches[0].warps[0].events.iter().map(|e| (e.scope, e.token, e.begin, e.cycles)).collect();
    assert_eq!(events, [("empty", 0, 0, 10), ("wait", 320, 10, 290), ("load", 320, 300, 10), ("inner", 384, 310, 590)]);
}

#[test]
fn launches_do_not_share_a_track() {
    let slot = |launch, at| Slot { launch, ..Slot::new([at, at + 1000], &[(1, 0, 0, 10)]) };
    let all = trace(&decode(&[slot(1, 1000), slot(2, 5000)]).unwrap());
    let names: Vec<_> = all.iter().filter(|e| e["name"] == "thread_name").map(|e| &e["args"]["name"]).collect();
    assert_eq!(names, ["launch 1 block 0 warp 0: consumer", "launch 2 block 0 warp 0: consumer"]);
}

#[test]
fn dropped_events_are_counted() {
    let slot = Slot { dropped: 5, ..Slot::new([0, 1000], &[(1, 0, 0, 10); EVENTS]) };
    let table = table(&[slot.clone(), Slot { warp: 1, ..slot }]);
    assert_eq!((table.events, table.dropped), (2 * EVENTS, 10));
}

#[test]
fn what_no_kernel_writes_is_refused() {
    let good = Slot::new([100, 1100], &[(1, 0, 0, 10)]);
    let message = error(&[Slot { cycles: [100, 0], block: 4, warp: 3, ..good.clone() }]);
    assert!(message.contains("warp 3 of block 4") && message.contains("did not end"), "{message}");
    assert!(error(&[Slot { cycles: [100, 100 + (1 << 32)], ..good.clone() }]).contains("2^32"));
    assert!(error(&[Slot { cycles: [100, 99], ..good.clone() }]).contains("2^32"));
    assert!(error(&[Slot { role: 2, ..good.clone() }]).contains("unknown role 2"));
    assert!(error(&[Slot { events: vec![(4, 0, 0, 1)], ..good.clone() }]).contains("unknown scope 4"));
    assert!(error(&[Slot { events: vec![(1, 0, 991, 10)], ..good.clone() }]).contains("outside its life"));
    let mut bytes = good.bytes();
    bytes[20] = EVENTS as u8 + 1;
    let message = Profile::decode(&bytes, EVENTS, &names()).unwrap_err().to_string();
    assert!(message.contains("5 events where 4 fit"), "{message}");
}

#[test]
fn launches_stay_apart() {
    let slot = |launch, block, warp| Slot { launch, block, warp, ..Slot::new([0, 1000], &[]) };
    let profile = decode(&[slot(2, 0, 0), slot(1, 1, 0), slot(1, 0, 1), slot(1, 0, 0)]).unwrap();
    let warps = |l: &Launch| l.warps.iter().map(|w| (w.block, w.warp)).collect::<Vec<_>>();
    assert_eq!(profile.launches.iter().map(warps).collect::<Vec<_>>(), [vec![(0, 0), (0, 1), (1, 0)], vec![(0, 0)]]);
}

/// Warps on multiprocessors whose counts began at different times, at 1.8 GHz, seen by a timer with steps of 32 ns.
fn many_sms(span_ns: u64) -> (Vec<Slot>, Vec<[f64; 2]>) {
    let start = 1_700_000_000_000_000_000u64;
    let (mut slots, mut truth) = (vec![], vec![]);
    for i in 0..40u64 {
        let sm = i % 8;
        let times = [i * 37, i * 37 + span_ns].map(|t| t as f64);
        let cycles = times.map(|t| (sm + 1) * 1_000_000_007 + (t * 1.8) as u64);
        let ns = times.map(|t| start + (t as u64) / 32 * 32);
        slots.push(Slot { sm: sm as u32, block: i as u32, cycles, ns, ..Slot::new([0, 1], &[]) });
        truth.push(times);
    }
    (slots, truth)
}

#[test]
fn the_clock_is_found_and_multiprocessors_align() {
    let (slots, truth) = many_sms(50_000);
    let profile = decode(&slots).unwrap();
    let table = profile.launches[0].table();
    let clock = table.clock.unwrap();
    assert!((clock.ghz / 1.8 - 1.0).abs() <= clock.relative_error, "{clock:?}");
    assert!(clock.relative_error < 1e-3 && clock.step_ns == 32, "{clock:?}");
    assert!((table.span_us.unwrap() - 51.443).abs() < 0.064, "{:?}", table.span_us);
    assert!((table.span_cycles.unwrap() / 1.8 - 51_443.).abs() < 64., "{:?}", table.span_cycles);
    for slice in slices(&profile) {
        let block = slice["args"]["block"].as_u64().unwrap() as usize;
        let ts = slice["ts"].as_f64().unwrap() * 1e3;
        assert!((ts - truth[block][0]).abs() <= 64.0, "block {block}: {ts} for {:?}", truth[block]);
    }
}

#[test]
fn a_short_launch_owns_up_to_its_clock() {
    let (slots, _) = many_sms(300);
    let clock = table(&slots).clock.unwrap();
    assert!((clock.ghz / 1.8 - 1.0).abs() <= clock.relative_error && clock.relative_error > 0.01, "{clock:?}");
}

#[test]
fn a_timer_that_stands_still_gives_no_clock() {
    let slot = Slot { ns: [5, 5], ..Slot::new([1000, 3000], &[(1, 0, 100, 200)]) };
    let profile = decode(&[slot]).unwrap();
    let table = profile.launches[0].table();
    assert_eq!((table.clock, table.span_us, table.span_cycles), (None, None, None));
    assert_eq!(slices(&profile)[0]["dur"], 2.0);
}

#[test]
fn slices_nest_and_touch_in_the_trace() {
    // At 3 cycles a nanosecond boundaries fall between whole nanoseconds.
    let begin = 3_000_000;
    let events: Vec<_> = (0..EVENTS as u64).map(|i| (1, i as u32, 7 + 100 * i, 100)).collect();
    let slot = |sm, block, begin: u64| {
        let cycles = [begin, begin + 500];
        Slot { sm, block, cycles, ns: cycles.map(|c| c / 3), ..Slot::new(cycles, &events) }
    };
    let profile =
        decode(&[slot(0, 0, begin), slot(0, 1, begin + 10), slot(0, 2, begin + 600), slot(1, 3, begin)]).unwrap();
    let all = trace(&profile);
    let name = |e: &Value| e["args"]["name"].as_str().unwrap().to_owned();
    let named = |kind: &str| all.iter().filter(|e| e["name"] == kind).map(name).collect::<Vec<_>>();
    assert_eq!(named("process_name"), ["SM 0", "SM 1"]);
    // The third block takes the place of the first.
    let threads = named("thread_name");
    assert_eq!(threads, ["2 blocks, warp 0: consumer", "block 1 warp 0: consumer", "block 3 warp 0: consumer"]);

    let us = |v: &Value| (v.as_f64().unwrap() * 1e3).round() as i64;
    let mut open: Option<(Value, i64, i64)> = None;
    for e in all.iter().filter(|e| e["ph"] == "X") {
        let (begin, end) = (us(&e["ts"]), us(&e["ts"]) + us(&e["dur"]));
        if e["name"] == "consumer" {
            assert_eq!(e["args"]["cycles"], 500);
            open = Some((e["tid"].clone(), begin, end));
            continue;
        }
        let Some((tid, at, outer_end)) = &mut open else { panic!("a scope without its warp") };
        assert_eq!(e["tid"], *tid);
        assert!(begin >= *at && end <= *outer_end, "{e}");
        assert_eq!(e["args"]["cycles"], 100);
        *at = end;
    }
    assert_eq!(all.iter().filter(|e| e["ph"] == "X").count(), 4 * (1 + EVENTS));
}

#[test]
fn a_trace_of_some_warps() {
    let slot = |sm| Slot { sm, block: sm, ..Slot::new([0, 1000], &[]) };
    let profile = decode(&[slot(0), slot(1), slot(2)]).unwrap();
    let mut out = vec![];
    profile.write_trace(&mut out, |w| w.sm < 1).unwrap();
    assert_eq!(String::from_utf8(out).unwrap().matches("\"ph\":\"X\"").count(), 1);
}

#[test]
fn the_table_as_json() {
    let table = table(&[Slot::new([0, 1000], &[(1, 0, 0, 250)])]);
    let json: Value = serde_json::from_str(&table.json()).unwrap();
    assert_eq!(json["roles"][0]["role"], "consumer");
    assert_eq!(json["roles"][0]["scopes"][0]["share"], 0.25);
    assert_eq!(json["roles"][0]["unstamped"], 0.75);
    assert_eq!(json["clock"]["ghz"], 2.0);
}

#[test]
#[cfg(feature = "profile")]
fn the_cpu_is_refused() {
    let error = record(&Device::Cpu, Limits::default(), || Ok(())).unwrap_err();
    assert!(error.to_string().contains("expected a CUDA device"), "{error}");
}

#[test]
fn limits_that_hold_nothing_or_too_much() {
    assert_eq!(Limits::default().bytes(), Some(16384 * (64 + 16 * 256)));
    assert_eq!(Limits { warps: usize::MAX, events_per_warp: 1 }.bytes(), None);
    assert_eq!(Limits { warps: 1, events_per_warp: usize::MAX }.bytes(), None);
}
