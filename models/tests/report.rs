//! The report of the benchmark records: tables, plots and errors, of records made here.

#[path = "../../benches/report/compare.rs"]
mod compare;
#[path = "../../benches/report/folder.rs"]
mod folder;
#[path = "../../benches/report/markdown.rs"]
mod markdown;
#[path = "../../benches/report/output.rs"]
mod output;
#[allow(dead_code)]
#[path = "../../benches/gpu/parts.rs"]
mod parts;
#[path = "../../benches/report/plots/mod.rs"]
mod plots;
#[path = "../../benches/report/rates.rs"]
mod rates;
#[path = "../../benches/report/record.rs"]
mod record;
#[path = "../../benches/report/stats.rs"]
mod stats;
#[path = "../../benches/report/summary.rs"]
mod summary;
#[path = "../../benches/report/tables/mod.rs"]
mod tables;
#[path = "../../benches/report/timing.rs"]
mod timing;

use folder::{File, Folder};
use parts::{added_us, Activity};
use record::{cargo_command, date_of, Ceilings, Machine, Part, Row, Run, Shape, Time};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

// ---- records ----

fn us(median: f64) -> Time {
    Time { median, min: median, max: median }
}

fn run(tool: &str, machine: Machine, rows: Vec<Row>) -> Run {
    let mut run = Run {
        schema: 1,
        tool: tool.into(),
        commit: "0123abc".into(),
        date: "2026-11-21".into(),
        command: format!("measure {tool}"),
        machine,
        ceilings: Ceilings { copy_gb_s: Some(4000.), matmul_tflop_s: Some(800.) },
        contenders: BTreeMap::new(),
        rows: vec![],
    };
    rows.into_iter().for_each(|row| run.push(row));
    run
}

fn gpu(tool: &str, rows: Vec<Row>) -> Run {
    let (driver, cuda) = (Some("580.1".into()), Some("13.0".into()));
    run(tool, Machine { device: "H200".into(), host: "Xeon".into(), threads: Some(8), driver, cuda }, rows)
}

fn cpu(tool: &str, threads: usize, rows: Vec<Row>) -> Run {
    run(tool, Machine { device: "EPYC".into(), threads: Some(threads), ..Machine::default() }, rows)
}

/// What the report says of them.
fn table_of(runs: Vec<Run>) -> String {
    tables::table(&pooled(runs))
}

fn pooled(runs: Vec<Run>) -> Folder {
    let files = runs.into_iter().enumerate().map(|(i, run)| File { name: format!("{i}.json"), run });
    Folder::pool("box".into(), files.collect()).unwrap()
}

/// 4,000,000 bytes a sequence: at the copy rate 1 µs.
fn decode(batch: usize, contender: &str, time: f64) -> Row {
    let shape = Shape::heads(16, 32, 128, 128).batch(batch).tokens(1);
    let row = Row::new("decode", &format!("16/32 B={batch}"), contender).shape(shape).l2("cold");
    row.work(4_000_000 * batch as u64, 0).gpu(us(time))
}

/// 800 MFLOP a token: at the matmul rate 1 µs.
fn prefill(hv: usize, (batch, tokens): (usize, usize), contender: &str, time: f64) -> Row {
    let shape = Shape::heads(4, hv, 128, 128).batch(batch).tokens(tokens);
    let row = Row::new("prefill", &format!("4/{hv} {batch}x{tokens}"), contender).shape(shape);
    row.work(0, 800_000_000 * (batch * tokens) as u64).gpu(us(time))
}

/// By contenders, and after a space their variants.
fn prefills(hv: usize, shape: (usize, usize), times: &[(&str, f64)]) -> Vec<Row> {
    let row = |(name, time): &(&str, f64)| match name.split_once(' ') {
        Some((contender, variant)) => prefill(hv, shape, contender, *time).variant(variant),
        None => prefill(hv, shape, name, *time),
    };
    times.iter().map(row).collect()
}

fn projection(tokens: usize, variant: &str, time: f64) -> Row {
    let shape = Shape::default().hidden(2048).batch(1).tokens(tokens);
    Row::new("projections", &format!("T={tokens}"), "candle").variant(variant).shape(shape).gpu(us(time))
}

fn rule(tokens: usize, contender: &str, time: f64) -> Row {
    let shape = Shape::heads(16, 32, 128, 128).batch(1).tokens(tokens);
    Row::new("rule", &format!("1x{tokens}"), contender).shape(shape).wall(us(time))
}

/// Something of every plot.
fn everything() -> Folder {
    let layer = |batch: usize, tokens, time| {
        let shape = Shape::heads(16, 32, 128, 128).hidden(2048).batch(batch).tokens(tokens);
        Row::new("layer", &format!("{batch}x{tokens}"), "candle-gdn").shape(shape).work(1 << 26, 0).event(us(time))
    };
    let peers = vec![
        decode(1, "candle-gdn", 4.),
        decode(1, "flashinfer", 5.),
        decode(1, "a<b & \"c\"", 3.5),
        decode(8, "candle-gdn", 11.),
        decode(8, "flashinfer", 10.),
        prefill(8, (1, 64), "candle-gdn", 90.),
        prefill(8, (1, 64), "flashqla", 80.),
        prefill(8, (1, 128), "candle-gdn", 150.),
        prefill(8, (4, 64), "candle-gdn", 300.),
        // Plotted apart: ours was measured by the other tool.
        Row { contender: "fla".into(), ..layer(1, 1, 90.) },
        Row { contender: "fla".into(), ..layer(1, 512, 190.) },
    ];
    let gpus = vec![
        layer(1, 1, 45.),
        layer(8, 1, 85.),
        layer(1, 512, 180.),
        projection(1, "one", 17.),
        projection(1, "six", 39.),
        projection(64, "one", 18.),
    ];
    let rules = vec![rule(1, "candle-gdn", 30.), rule(64, "candle-gdn", 800.), rule(64, "tensor ops", 89e3)];
    pooled(vec![gpu("benches/peers", peers), gpu("benches/gpu", gpus), cpu("benches/cpu", 2, rules)])
}

/// The lines of `text` from the one that starts with `from`, up to the next empty line behind the table in it.
#[track_caller]
fn table_after(text: &str, from: &str) -> String {
    let at = text.find(&format!("\n{from}")).unwrap_or_else(|| panic!("no {from:?} in:\n{text}"));
    let lines = text[at + 1..].lines().skip_while(|line| !line.starts_with('|'));
    lines.take_while(|line| line.starts_with('|')).map(|line| format!("{line}\n")).collect()
}

#[track_caller]
fn assert_table(text: &str, from: &str, want: &str) {
    let got = table_after(text, from);
    let want: String = want.lines().map(str::trim).filter(|line| !line.is_empty()).map(|l| format!("{l}\n")).collect();
    assert!(got == want, "got:\n{got}\nwanted:\n{want}");
}

// ---- the record ----

#[test]
fn each_clock_ranks_the_kernels() {
    let timed = |batch, contender, [gpu, event, call, wall]: [f64; 4]| {
        decode(batch, contender, gpu).event(us(event)).call(us(call)).wall(us(wall))
    };
    let rows = vec![
        timed(1, "candle-gdn", [3., 4., 9., 14.]),
        timed(1, "fla", [4., 5., 30., 12.]),
        timed(1, "flashinfer", [5., 6., 8., 40.]),
        timed(8, "candle-gdn", [9., 10., 15., 20.]),
        timed(8, "fla", [10., 11., 16., 21.]),
        // Alone, warm or without the clock in question: nothing to compare.
        timed(64, "fla", [1., 1., 1., 1.]),
        timed(8, "candle-gdn", [1., 1., 3., 3.]).l2("warm"),
        timed(8, "fla", [2., 2., 2., 2.]).l2("warm"),
        decode(8, "flashinfer", 1.),
    ];
    let folder = pooled(vec![gpu("benches/peers", rows)]);
    let text = timing::page(&folder, &tables::suites(&folder)).unwrap();
    assert!(text.contains("`measure benches/peers` at commit 0123abc, 2026-11-21:"), "{text}");
    for line in [
        "- `event` against `gpu`: another fastest kernel in 0 of 2 works, another order in 0 of 2",
        "- `call` against `gpu`: another fastest kernel in 1 of 2 works, another order in 1 of 2",
        "- `wall` against `gpu`: another fastest kernel in 1 of 2 works, another order in 1 of 2",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
    let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_string()).collect::<Vec<_>>();
    let rows: Vec<_> = text.lines().filter(|line| line.starts_with('|')).map(cells).collect();
    assert_eq!(rows.len(), 2 + 5, "{text}");
    assert_eq!(rows[0][1..7], ["B", "kernel", "gpu", "event", "call", "wall"]);
    assert_eq!(rows[4][1..7], ["1", "flashinfer", "5.00 (3)", "6.00 (3)", "8.00 (1)", "40.0 (3)"]);
    // No such page of records without that clock, which older ones are.
    let old = pooled(vec![gpu("benches/peers", vec![decode(1, "candle-gdn", 3.), decode(1, "fla", 4.)])]);
    assert!(timing::page(&old, &tables::suites(&old)).is_none());
    assert!(output::files(&old).unwrap().iter().all(|(name, _)| name != "timing.md"));
    assert!(output::files(&folder).unwrap().iter().any(|(name, _)| name == "timing.md"));
}

#[test]
fn baselines_have_a_speedup_and_are_no_peers() {
    let rows = vec![
        decode(1, "candle-gdn", 4.).variant("recurrent_128"),
        decode(1, "flashinfer", 8.),
        decode(1, "torch", 100.),
        decode(1, "torch-compile", 50.),
        decode(8, "candle-gdn", 9.),
        decode(8, "torch", 6.),
        decode(64, "torch", 700.),
    ];
    let text = table_of(vec![gpu("benches/peers", rows)]);
    let table = "\nSpeedup over tensor operations, gpu, µs, L2 cold:\n\n";
    let lines: Vec<&str> = text.split(table).nth(1).expect(&text).lines().take(5).collect();
    let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_string()).collect::<Vec<_>>();
    assert_eq!(
        cells(lines[0])[1..8],
        ["heads", "B", "candle-gdn", "torch", "× torch", "torch-compile", "× torch-compile"]
    );
    assert_eq!(cells(lines[2])[1..8], ["16/32", "1", "4.00", "100", "25.0", "50.0", "12.5"]);
    assert_eq!(cells(lines[3])[1..8], ["16/32", "8", "9.00", "6.00", "0.67", "–", "–"]);
    assert_eq!(lines[4], "", "what is not ours has no speedup");
    assert!(text.contains("/ flashinfer") && !text.contains("/ torch") && !text.contains("| / best"), "{text}");
    // With nobody else there is no best peer.
    let alone = vec![decode(1, "candle-gdn", 4.), decode(1, "candle", 100.)];
    let text = table_of(vec![gpu("benches/gpu", alone)]);
    assert!(text.contains("× candle") && !text.contains("best peer"), "{text}");
    // Elsewhere they are what is measured.
    let text = table_of(vec![gpu("benches/gpu", vec![projection(1, "one", 2.)])]);
    assert!(text.contains("candle one") && !text.contains("Speedup"), "{text}");
}

#[test]
fn a_time_is_of_its_samples() {
    assert_eq!(Time::of(&mut [3., 1., 2.]), Time { median: 2., min: 1., max: 3. });
    assert_eq!(Time::of(&mut [4., 1., 2., 3.]), Time { median: 2.5, min: 1., max: 4. });
    assert_eq!(Time::of(&mut [0.12344, 0.12346]), Time { median: 0.1235, min: 0.1234, max: 0.1235 });
}

#[test]
fn a_record_comes_back_as_it_was_written() {
    let rows = vec![
        decode(1, "candle-gdn", 4.).variant("recurrent").auto(true).error("o", 1e-3).error("state", f64::NAN),
        decode(1, "fla", 5.).event(us(6.)).wall(None).includes("gates").launches(2).note("slow").note("no wall"),
    ];
    let run = gpu("benches/peers", rows);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a/b/peers.json");
    run.write(&path).unwrap();
    assert_eq!(Run::read(&path).unwrap(), run);
    assert_eq!(run.rows[0].floor_us, Some(1.));
    assert_eq!(run.rows[0].error["state"], None);
    assert_eq!(run.rows[1].note, "slow; no wall");
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().filter(|line| line.contains("\"suite\":\"decode\"")).count(), 2, "{text}");
    let empty = Run { rows: vec![], ..run };
    assert_eq!(serde_json::from_str::<Run>(&empty.to_json().unwrap()).unwrap(), empty);
}

#[test]
fn the_example_of_the_readme_is_a_record() {
    let readme = include_str!("../../benches/README.md");
    let example = readme.split("```json").nth(1).and_then(|rest| rest.split("```").next()).expect("an example");
    let run: Run = serde_json::from_str(example).unwrap();
    assert_eq!((run.schema, run.tool.as_str(), run.machine.threads), (record::SCHEMA, "benches/gpu", Some(2)));
    let row = &run.rows[0];
    assert_eq!((row.shape.hk, row.shape.total_tokens, row.launches), (Some(16), Some(1), Some(1)));
    assert_eq!((row.auto, row.gpu.unwrap().median, row.error["o"]), (true, 3.8, Some(0.0012)));
}

#[test]
fn null_is_absent() {
    let text = r#"{ "suite": "conv", "workload": "x", "contender": "y", "variant": null, "auto": null, "l2": null,
        "shape": null, "gpu": null, "floor_us": null, "error": null, "note": null, "launches": null }"#;
    assert_eq!(serde_json::from_str::<Row>(text).unwrap(), Row::new("conv", "x", "y"));
}

#[test]
fn the_floor_is_the_larger_of_memory_and_arithmetic() {
    let ceilings = Ceilings { copy_gb_s: Some(4000.), matmul_tflop_s: Some(800.) };
    assert_eq!(ceilings.floor_us(Some(4_000_000), Some(1_600_000_000)), Some(2.));
    assert_eq!(ceilings.floor_us(Some(8_000_000), Some(800_000_000)), Some(2.));
    assert_eq!(ceilings.floor_us(None, Some(0)), None);
    assert_eq!(Ceilings::default().floor_us(Some(1), Some(1)), None);
}

#[test]
fn dates_of_unix_times() {
    let days = [(0, "1970-01-01"), (951_782_400, "2000-02-29"), (951_868_800, "2000-03-01")];
    let later = [(1_798_761_599, "2026-12-31"), (1_798_761_600, "2027-01-01"), (4_107_542_400, "2100-03-01")];
    for (seconds, date) in days.into_iter().chain(later) {
        assert_eq!(date_of(seconds), date);
    }
}

#[test]
fn the_command_is_what_a_user_types() {
    let of = |args: &[&str]| cargo_command(" --features cuda", args.iter().map(|arg| arg.to_string()));
    assert_eq!(
        of(&["gpu", "decode", "--out", "/somewhere", "--quick"]),
        "cargo bench --features cuda --bench gpu -- decode --quick"
    );
    assert_eq!(of(&["gpu", "--out=/somewhere"]), "cargo bench --features cuda --bench gpu");
    let program = "/somewhere/deps/gpu-0123456789abcdef";
    assert_eq!(of(&[program, "--bench"]), "cargo bench --features cuda --bench gpu");
    let command = of(&["gpu", "decode", "--heads", "16/32", "a b", "--bench"]);
    assert_eq!(command, "cargo bench --features cuda --bench gpu -- decode --heads 16/32 'a b'");
    assert_eq!(of(&["/x/my-tool"]), "cargo bench --features cuda --bench my-tool");
}

// ---- parts of a call ----

fn activity(name: &str, start: u64, end: u64) -> Activity {
    Activity { name: name.into(), start, end }
}

#[test]
fn what_overlaps_counts_once() {
    // Waits for the first, then a gap, then one within another.
    let spans = [(1000, 5000), (2000, 9000), (10_000, 20_000), (12_000, 15_000), (19_000, 21_000)];
    let call = spans.map(|(start, end)| activity("", start, end));
    assert_eq!(added_us(&call), [4., 4., 10., 0., 1.]);
    assert_eq!(call[1].us(), 7.);
}

#[test]
fn parts_of_a_step_are_told_by_their_kernels() {
    let call = |shift: u64| {
        let names = [
            "_ZN3gdn8residual44_GLOBAL__N__c6ff9e0b_11_residual_cu_55243eb012packs_kernelI13__nv_bfloat16Li1ELb1EEEvv",
            "_ZN3gdn6linear13linear_kernelI13__nv_bfloat16S2_Li1ELNS0_4FromE1EEEvNS0_4ArgsE",
            "_ZN3gdn4ring12token_kernelI13__nv_bfloat16fEEvv",
            "_ZN3gdn3moe11down_kernelI13__nv_bfloat16S2_EEvNS0_4ArgsE",
            "_ZN3gdn9attention10mma_kernelI13__nv_bfloat16Li256ELi1ELi6EEEvv",
            "nvjet_sm90_tst_128x8_64x12_4x1_v_bz_TNT",
            "cast_bf16_f32",
            "_ZN3gdn8",
        ];
        let timed = |(i, name): (usize, &&str)| activity(name, 1000 * i as u64, 1000 * i as u64 + 1000 + shift);
        names.iter().enumerate().map(timed).collect::<Vec<_>>()
    };
    let calls = [call(0), call(500)];
    let found = parts::parts(calls.iter().map(|call| &call[..]));
    let of = |name: &str| found.iter().filter(|part| part.name == name).map(|p| (p.launches, p.us)).collect::<Vec<_>>();
    // The first of a call ends half a microsecond later in the second call, and so do all others.
    assert_eq!(of("residuals, norms, gates"), [(1, 1.25)]);
    for name in
        [parts::PROJECTIONS, parts::GDN, parts::EXPERTS, parts::ATTENTION, parts::HEAD, "copies, casts", "others"]
    {
        assert_eq!(of(name), [(1, 1.)], "{name}");
    }
    assert_eq!(found.len(), 8);
    assert_eq!(found.iter().map(|part| part.us).sum::<f64>(), 8.25);
    assert!(parts::parts([].into_iter()).is_empty());
}

#[test]
fn the_parts_of_a_step_add_up_to_what_the_host_waits() {
    let part = |name: &str, launches, us, bytes| Part { name: name.into(), launches, us, bytes };
    let parts = vec![part("projections", 64, 60., Some(160_000_000)), part("sampler", 1, 15., None)];
    let row = Row { parts, ..Row::new("model", "4b step B=1", "candle-gdn").variant("graph") };
    let row = row.work(200_000_000, 0).gpu(us(75.)).wall(us(100.)).launches(65);
    let table = table_of(vec![gpu("benches/gpu", vec![row, Row::new("model", "4b fork", "candle-gdn").wall(us(9.))])]);
    let want = "
        | part                   | launches |  MB | floor | time | of all |
        | ---------------------- | -------: | --: | ----: | ---: | -----: |
        | projections            |       64 | 160 |  40.0 | 60.0 |   60 % |
        | sampler                |        1 |   – |     – | 15.0 |   15 % |
        | no kernel              |        – |   – |     – | 25.0 |   25 % |
        | all, as the host waits |       65 | 200 |  50.0 |  100 |  100 % |";
    assert_table(&table, "Where it goes, 4b step B=1, candle-gdn graph, µs", want);
    assert_eq!(table.matches("Where it goes").count(), 1);
}

// ---- statistics ----

#[test]
fn statistics_know_gaps() {
    assert_eq!(stats::geomean([]), None);
    assert!((stats::geomean([0.5, 2., 8.]).unwrap() - 2.).abs() < 1e-12);
    assert_eq!(stats::median([]), None);
    assert_eq!(stats::median([9., 1., 3., 5.]), Some(4.));
    assert_eq!(stats::ratio(Some(3.), Some(2.)), Some(1.5));
    assert_eq!(stats::ratio(Some(3.), Some(0.)), None);
    assert_eq!(stats::ratio(Some(3.), None), None);
}

// ---- pooling ----

#[test]
fn a_later_row_replaces_only_its_own() {
    let older = vec![decode(1, "candle-gdn", 9.), decode(1, "fla", 8.), decode(1, "flashinfer", 7.).variant("cp")];
    let newer =
        vec![decode(1, "candle-gdn", 4.), decode(1, "flashinfer", 6.).variant("nocp"), decode(1, "fla", 3.).l2("warm")];
    let newer = Run { date: "2026-11-22".into(), ..gpu("benches/peers", newer) };
    // The newer file is named first: its date counts.
    let folder =
        pooled(vec![newer, gpu("benches/peers", older), gpu("benches/gpu", vec![decode(1, "candle-gdn", 5.)])]);
    let mut times: Vec<_> = folder.rows.iter().map(|e| (e.tool.as_str(), e.row.gpu.unwrap().median)).collect();
    times.sort_by(|a, b| a.partial_cmp(b).unwrap());
    let peers = [3., 4., 6., 7., 8.].map(|time| ("benches/peers", time));
    assert_eq!(times, [&[("benches/gpu", 5.)][..], &peers].concat());
}

#[test]
fn ratios_stay_within_a_source() {
    let ours = gpu("benches/gpu", vec![decode(1, "candle-gdn", 1.)]);
    let peers = gpu("benches/peers", vec![decode(1, "fla", 2.).work(1, 0), decode(1, "candle-gdn", 4.)]);
    let table = tables::table(&pooled(vec![ours, peers]));
    let want = "
        |   B | L2   | floor | candle-gdn | GB/s | % of copy | % of floor |
        | --: | ---- | ----: | ---------: | ---: | --------: | ---------: |
        |   1 | cold |  1.00 |       1.00 | 4000 |     100 % |      100 % |";
    assert_table(&table, "### decode, by benches/gpu", want);
    let want = "
        |   B | L2   | floor | candle-gdn | GB/s | % of copy | % of floor |  fla | / fla |
        | --: | ---- | ----: | ---------: | ---: | --------: | ---------: | ---: | ----: |
        |   1 | cold |  1.00 |       4.00 | 1000 |      25 % |       25 % | 2.00 |  2.00 |";
    assert_table(&table, "### decode, by benches/peers", want);
}

// ---- tables ----

#[test]
fn decode_compares_on_each_clock_apart() {
    let rows = vec![
        decode(8, "fi", 10.).host(us(20.)).wall(us(30.)),
        decode(8, "candle-gdn", 11.).variant("a"),
        decode(8, "candle-gdn", 12.).variant("b").auto(true).host(us(6.)).wall(us(24.)),
        decode(1, "candle-gdn", 4.).variant("a").auto(true).launches(1).error("o", 1.2e-3),
        decode(1, "candle-gdn", 5.).variant("b").launches(2).error("o", f64::NAN),
        decode(1, "fi", 5.).includes("gates").error("o", 2e-3),
        decode(1, "fla", 8.).gpu(None).note("not installed"),
        decode(1, "candle-gdn", 3.).l2("warm").variant("a").auto(true),
    ];
    let table = table_of(vec![gpu("benches/peers", rows)]);
    let want = "
        |   B | L2   | floor | candle-gdn a | candle-gdn b | GB/s | % of copy | % of floor |   fi | fla | / fi | / fla | / best |
        | --: | ---- | ----: | -----------: | -----------: | ---: | --------: | ---------: | ---: | --: | ---: | ----: | -----: |
        |   1 | cold |  1.00 |        4.00* |         5.00 | 1000 |      25 % |       25 % | 5.00 |   – | 0.80 |     – |   0.80 |
        |   8 | cold |  8.00 |         11.0 |        12.0* | 2667 |      67 % |       67 % | 10.0 |   – | 1.20 |     – |   1.20 |
        |   1 | warm |  1.00 |        3.00* |            – | 1333 |      33 % |       33 % |    – |   – |    – |     – |      – |";
    assert_table(&table, "gpu, µs", want);
    let wall = table_after(&table, "wall and host, µs");
    let header =
        "|   B | L2   | candle-gdn a wall | candle-gdn a host | candle-gdn b wall | candle-gdn b host | fi wall | ";
    assert!(wall.starts_with(header), "{wall}");
    let cells: Vec<_> = wall.lines().nth(3).unwrap().split('|').map(str::trim).collect();
    assert_eq!(cells[1..], ["8", "cold", "–", "–", "24.0*", "6.00", "30.0", "20.0", "–", "–", "0.80", "–", "0.80", ""]);
    let want = "
        | contender    | includes | launches | worst error of o |
        | ------------ | -------- | -------: | ---------------- |
        | candle-gdn a | –        |        1 | 1.2e-3           |
        | candle-gdn b | –        |        2 | NaN              |
        | fi           | gates    |        – | 2.0e-3           |
        | fla          | –        |        – | –                |";
    assert_table(&table, "A call of each", want);
    assert!(table.contains("\n- fla: not installed (1 of 1 rows)\n"), "{table}");
    assert!(!table.contains("\nevent, µs"), "{table}");
}

#[test]
fn a_lone_variant_is_not_marked() {
    let rows = vec![decode(1, "candle-gdn", 4.).variant("a").auto(true)];
    let table = table_of(vec![gpu("benches/gpu", rows)]);
    assert!(table_after(&table, "gpu, µs").contains(" 4.00 "), "{table}");
}

#[test]
fn auto_is_a_mark_or_a_name() {
    let rows = vec![
        decode(1, "candle-gdn", 4.).variant("auto"),
        decode(1, "candle-gdn", 3.).variant("a"),
        decode(1, "fi", 2.).variant(""),
    ];
    let table = table_of(vec![gpu("benches/peers", rows)]);
    let want = "
        |   B | L2   | floor | candle-gdn auto | candle-gdn a | GB/s | % of copy | % of floor |   fi | / fi |
        | --: | ---- | ----: | --------------: | -----------: | ---: | --------: | ---------: | ---: | ---: |
        |   1 | cold |  1.00 |           4.00* |         3.00 | 1000 |      25 % |       25 % | 2.00 | 2.00 |";
    assert_table(&table, "gpu, µs", want);
}

#[test]
fn prefill_counts_the_best_variant_of_a_peer() {
    let rows = [
        prefills(8, (1, 64), &[("candle-gdn", 80.), ("fi nocp", 160.), ("fi cp", 100.), ("qla", 40.)]),
        prefills(8, (8, 16), &[("candle-gdn", 256.), ("fi cp", 128.)]),
        prefills(16, (1, 64), &[("candle-gdn", 100.), ("fi cp", 200.)]),
    ];
    let table = table_of(vec![gpu("benches/peers", rows.concat())]);
    let want = "
        | heads | 1×64 | 8×16 |
        | ----: | ---: | ---: |
        |   4/8 | 2.00 | 2.00 |
        |  4/16 | 0.50 |    – |";
    assert_table(&table, "Ours over the best peer, gpu", want);
    let want = "
        |  B×T | floor | candle-gdn | TFLOP/s | % of matmul | % of floor | fi nocp | fi cp |  qla | / fi | / qla | / best |
        | ---: | ----: | ---------: | ------: | ----------: | ---------: | ------: | ----: | ---: | ---: | ----: | -----: |
        | 1×64 |  64.0 |       80.0 |     640 |        80 % |       80 % |     160 |   100 | 40.0 | 0.80 |  2.00 |   2.00 |
        | 8×16 |   128 |        256 |     400 |        50 % |       50 % |       – |   128 |    – | 2.00 |     – |   2.00 |";
    assert_table(&table, "#### 4/8", want);
    // qla has no row of these heads, and keeps its place.
    let header =
        "|  B×T | floor | candle-gdn | TFLOP/s | % of matmul | % of floor | fi cp | qla | / fi | / qla | / best |\n";
    let other = table_after(&table, "#### 4/16");
    assert!(other.starts_with(header) && other.contains("|   200 |   – | 0.50 |     – |   0.50 |"), "{other}");
    // 0.8, 2 and 0.5 have the product 0.8.
    let want = "
        | heads |       fi |      qla | best peer |
        | ----- | -------: | -------: | --------: |
        | 4/8   | 1.26 (2) | 2.00 (1) |  2.00 (2) |
        | 4/16  | 0.50 (1) |        – |  0.50 (1) |
        | all   | 0.93 (3) | 2.00 (1) |  1.26 (3) |";
    assert_table(&table, "Geometric means", want);
}

#[test]
fn works_of_one_shape_go_by_their_names() {
    let named =
        |name: &str, time| Row { workload: format!("4/8 1x64 {name}"), ..prefill(8, (1, 64), "candle-gdn", time) };
    let table = table_of(vec![gpu("benches/gpu", vec![named("with state", 5.), named("without", 4.)])]);
    let body = table_after(&table, "gpu, µs");
    assert!(body.contains("| 1x64 with state |") && body.contains("|    1x64 without |"), "{body}");
}

#[test]
fn the_crossover_is_computed() {
    let sentence = |times: &[(usize, f64, f64)]| {
        let rows = times.iter().flat_map(|&(t, one, six)| [projection(t, "one", one), projection(t, "six", six)]);
        let table = table_of(vec![gpu("benches/gpu", rows.collect())]);
        let line = table.lines().find(|line| line.starts_with("- hidden 2048, gpu: "));
        line.map(|line| line["- hidden 2048, gpu: ".len()..].to_string())
    };
    let never = sentence(&[(1, 17., 39.), (64, 18., 40.), (512, 38., 62.)]);
    assert_eq!(never.unwrap(), "`one` is the fastest at every T from 1 to 512: there is no crossover.");
    let once = sentence(&[(1, 17., 39.), (64, 18., 40.), (128, 50., 40.), (512, 80., 60.)]);
    assert_eq!(once.unwrap(), "`one` is the fastest from T=1; from T=128 on `six` is (there by 20 %).");
    let tied = sentence(&[(1, 17., 39.), (4096, 279., 278.)]);
    assert_eq!(tied.unwrap(), "`one` is the fastest at every T from 1 to 4096: there is no crossover.");
}

#[test]
fn one_variant_has_no_crossover() {
    let table = table_of(vec![gpu("benches/gpu", vec![projection(1, "one", 17.), projection(8, "one", 17.)])]);
    assert!(!table.contains("The fastest variant"), "{table}");
}

#[test]
fn the_contest_is_summed_up_by_size() {
    let work = |i: usize, tokens: usize, contender: &str, time: f64| {
        let shape = Shape { total_tokens: Some(tokens), ..Shape::heads(4, 8, 128, 128).packed(&[tokens]) };
        Row::new("contest-prefill", &format!("#{i} {tokens}"), contender).shape(shape).gpu(us(time)).error("o", 1e-3)
    };
    let untimed = |row: Row, note: &str| row.gpu(None).note(note);
    let rows = vec![
        work(0, 6, "candle-gdn", 8.),
        work(0, 6, "fi", 4.),
        work(1, 64, "candle-gdn", 10.),
        work(1, 64, "fi", 20.),
        work(2, 65, "candle-gdn", 30.),
        untimed(work(2, 65, "fi", 0.), "not timed, over its bound: o 2e-1"),
        untimed(work(3, 65, "candle-gdn", 0.), "passes the contest's tolerance"),
        Row { error: BTreeMap::new(), ..untimed(work(3, 65, "fi", 0.), "not installed") },
        work(4, 9000, "candle-gdn", 100.),
        untimed(work(4, 9000, "fi", 0.), ""),
    ];
    let folder = pooled(vec![gpu("benches/peers", rows)]);
    let table = tables::table(&folder);
    let want = "
        | tokens | workloads | candle-gdn |   fi | / fi | / best |
        | ------ | --------: | ---------: | ---: | ---: | -----: |
        | ≤ 64   |         2 |       9.00 | 12.0 | 1.00 |   1.00 |
        | ≤ 128  |         2 |       30.0 |    – |    – |      – |
        | > 8192 |         1 |        100 |    – |    – |      – |";
    assert_table(&table, "gpu, medians", want);
    let want = "
        | tokens | candle-gdn |        fi |
        | ------ | ---------: | --------: |
        | ≤ 64   |  2 / 0 / 0 | 2 / 0 / 0 |
        | ≤ 128  |  2 / 0 / 0 | 0 / 1 / 1 |
        | > 8192 |  1 / 0 / 0 | 0 / 1 / 0 |";
    assert_table(&table, "Workloads passed", want);
    let contest = tables::contest(&folder).expect("a contest");
    let want = "
        | failed  | contender | note                              |
        | ------- | --------- | --------------------------------- |
        | #2 65   | fi        | not timed, over its bound: o 2e-1 |
        | #4 9000 | fi        | –                                 |";
    assert_table(&contest, "### contest-prefill", want);
    assert!(contest.contains("| #4 9000  |"), "{contest}");
    assert_eq!(tables::contest(&everything()), None);
}

#[test]
fn the_cpu_has_one_clock_for_all_tools() {
    let rules = vec![rule(64, "candle-gdn", 800.).work(800_000_000, 0), rule(64, "tensor ops", 80e3)];
    let llama = vec![rule(64, "llama.cpp", 16e3), rule(1, "llama.cpp", 400.)];
    let table =
        |threads| table_of(vec![cpu("benches/cpu", 2, rules.clone()), cpu("llama_cpp", threads, llama.clone())]);
    let want = "
        |  B×T | floor | candle-gdn | GB/s | % of copy | % of floor | llama.cpp | tensor ops | / llama.cpp | / tensor ops | / best |
        | ---: | ----: | ---------: | ---: | --------: | ---------: | --------: | ---------: | ----------: | -----------: | -----: |
        |  1×1 |     – |          – |    – |         – |          – |       400 |          – |           – |            – |      – |
        | 1×64 |   200 |        800 | 1000 |      25 % |       25 % |     16000 |      80000 |        0.05 |         0.01 |   0.05 |";
    assert_table(&table(2), "## rule, CPU, 2 threads", want);
    let apart = table(4);
    assert!(!apart.contains("/ llama.cpp") && apart.contains("\n## rule, CPU, 4 threads\n"), "{apart}");
}

#[test]
fn the_worst_cells_come_first() {
    let rows = [(1, 4., 5.), (8, 30., 10.), (32, 40., 30.)];
    let rows =
        rows.iter().flat_map(|&(b, ours, peer)| [decode(b, "candle-gdn", ours), decode(b, "fi", peer).variant("x")]);
    let table = table_of(vec![gpu("benches/peers", rows.collect())]);
    let want = "
        | suite  |   workload | L2   | ours | best peer | its time | ours / best |
        | ------ | ---------: | ---- | ---: | --------- | -------: | ----------: |
        | decode |  16/32 B=8 | cold | 30.0 | fi x      |     10.0 |        3.00 |
        | decode | 16/32 B=32 | cold | 40.0 | fi x      |     30.0 |        1.33 |
        | decode |  16/32 B=1 | cold | 4.00 | fi x      |     5.00 |        0.80 |";
    assert_table(&table, "Against the best peer", want);
    let want = "
        | suite  |   workload | L2   | ours | floor | % of floor |
        | ------ | ---------: | ---- | ---: | ----: | ---------: |
        | decode |  16/32 B=1 | cold | 4.00 |  1.00 |       25 % |
        | decode |  16/32 B=8 | cold | 30.0 |  8.00 |       27 % |
        | decode | 16/32 B=32 | cold | 40.0 |  32.0 |       80 % |";
    assert_table(&table, "Against the floor", want);
}

#[test]
fn no_suite_is_dropped() {
    let row = Row::new("novel", "a|b", "candle-gdn").event(us(3.)).error("y", 1e-3).note("see\nbelow");
    let copy = Row { bytes: Some(8_000_000), ..Row::new("copy", "large", "memcpy").wall(us(400.)) };
    let table = table_of(vec![gpu("benches/gpu", vec![row]), cpu("benches/cpu", 2, vec![copy])]);
    let want = "
        | workload | contender  | event | errors   | note      |
        | -------- | ---------- | ----: | -------- | --------- |
        | a\\|b     | candle-gdn |  3.00 | y 1.0e-3 | see below |";
    assert_table(&table, "### novel, by benches/gpu", want);
    let want = "
        | workload | contender | wall | floor | GB/s |
        | -------- | --------- | ---: | ----: | ---: |
        | large    | memcpy    |  400 |  2.00 | 20.0 |";
    assert_table(&table, "## copy, CPU, 2 threads", want);
}

#[test]
fn the_head_names_machine_commands_and_ceilings() {
    let mut peers = gpu("benches/peers", vec![decode(1, "candle-gdn", 4.)]);
    peers.contender("candle-gdn", "0.1.0");
    peers.contender("fla", "0.6.0");
    let table = tables::table(&pooled(vec![peers, cpu("benches/cpu", 2, vec![rule(1, "candle-gdn", 3.)])]));
    let want = "
        | machine | host | threads | driver | CUDA |
        | ------- | ---- | ------: | -----: | ---: |
        | H200    | Xeon |       8 |  580.1 | 13.0 |
        | EPYC    | –    |       2 |      – |    – |";
    assert_table(&table, "", want);
    let want = "| 0.json | benches/peers | 0123abc | 2026-11-21 |    1 |       4000 |             800 |";
    for part in [want, "\nmeasure benches/peers  # 0.json\n", "\nContenders: candle-gdn 0.1.0, fla 0.6.0.\n"] {
        assert!(table.contains(part), "no {part:?} in:\n{table}");
    }
}

#[test]
fn the_summary_is_short() {
    let folder = everything();
    let text = summary::summary(&folder, &tables::suites(&folder));
    assert!(text.lines().count() <= 25, "{text}");
    let want = "
        |                |  B=1 |  B=8 |
        | -------------- | ---: | ---: |
        | candle-gdn, µs | 4.00 | 11.0 |
        | best peer, µs  | 3.50 | 10.0 |
        | floor, µs      | 1.00 | 8.00 |";
    assert_table(&format!("\n{text}"), "decode 16/32, gpu time, L2 cold, H200; ", want);
    for part in
        ["(`measure benches/peers`; commit 0123abc, 2026-11-21)", "\nprefill 4/8, gpu time", "\nrule 16/32, wall"]
    {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

#[test]
fn the_summary_prefers_rows_beside_peers() {
    let newest = Run { date: "2026-12-01".into(), ..gpu("benches/gpu", vec![decode(1, "candle-gdn", 1.)]) };
    let peers = gpu("benches/peers", vec![decode(1, "candle-gdn", 4.), decode(1, "fla", 2.)]);
    let text = |runs| {
        let folder = pooled(runs);
        summary::summary(&folder, &tables::suites(&folder))
    };
    let both = text(vec![newest.clone(), peers]);
    assert!(both.contains("| best peer, µs  | 2.00 |") && both.contains("benches/peers`"), "{both}");
    let alone = text(vec![newest]);
    assert!(!alone.contains("best peer") && alone.contains("| candle-gdn, µs | 1.00 |"), "{alone}");
}

// ---- plots ----

/// Panics unless tags nest, attributes are quoted and no text holds a bare `&` or `<`.
fn assert_well_formed(name: &str, svg: &str) {
    let mut open = vec![];
    let mut rest = svg;
    while let Some(start) = rest.find('<') {
        let (text, tag) = rest.split_at(start);
        for entity in text.split('&').skip(1) {
            assert!(
                ["lt;", "gt;", "amp;", "quot;", "apos;"].iter().any(|e| entity.starts_with(e)),
                "{name}: &{entity}"
            );
        }
        let end = tag.find('>').unwrap_or_else(|| panic!("{name}: {tag} does not end"));
        let (inner, after) = (&tag[1..end], &tag[end + 1..]);
        assert!(!inner.contains('<') && inner.matches('"').count() % 2 == 0, "{name}: <{inner}>");
        let word = inner.split_whitespace().next().unwrap_or_default();
        match (word.strip_prefix('/'), inner.ends_with('/') || inner.starts_with(['?', '!'])) {
            (Some(closed), _) => assert_eq!(open.pop(), Some(closed), "{name}"),
            (None, true) => {}
            (None, false) => open.push(word),
        }
        rest = after;
    }
    assert!(open.is_empty() && rest.trim().is_empty(), "{name}: {open:?} {rest:?}");
}

#[test]
fn every_plot_is_well_formed_and_names_its_series() {
    let folder = everything();
    let plots: BTreeMap<_, _> = plots::plots(&tables::suites(&folder)).unwrap().into_iter().collect();
    let wanted: [(&str, &[&str]); 8] = [
        ("copy-rate-16-32.svg", &["candle-gdn", "flashinfer", "a&lt;b &amp; &quot;c&quot;", "% of the copy rate"]),
        ("cpu-rule-16-32.svg", &["candle-gdn", "tensor ops", "tokens", "CPU, 2 threads"]),
        (
            "decode-16-32.svg",
            &["candle-gdn", "flashinfer", "a&lt;b &amp; &quot;c&quot;", "floor", "time, µs", "L2 cold"],
        ),
        ("layer-batch-16-32-h2048.svg", &["candle-gdn", "floor", "sequences (B)", "benches/gpu"]),
        ("layer-tokens-16-32-h2048-peers.svg", &["fla", "benches/peers"]),
        ("layer-tokens-16-32-h2048.svg", &["candle-gdn", "floor", "tokens"]),
        ("prefill-4-8.svg", &["candle-gdn", "flashqla", "floor", "tokens"]),
        ("projections-h2048.svg", &["one", "six", "tokens"]),
    ];
    assert_eq!(plots.keys().collect::<Vec<_>>(), wanted.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    for (name, words) in wanted {
        let svg = &plots[name];
        assert_well_formed(name, svg);
        assert!(svg.starts_with("<svg width=\"900\" height=\"560\""), "{name}: {}", &svg[..80]);
        for word in words {
            assert!(svg.lines().any(|line| line.contains(word)), "{name}: no {word:?}");
        }
        // As text a number stands on a line of its own.
        assert!(!svg.contains("NaN") && !svg.lines().any(|line| line.trim_start_matches('-') == "inf"), "{name}");
    }
    assert!(!plots["projections-h2048.svg"].contains("floor"));
}

#[test]
fn a_point_stands_where_its_value_is() {
    let times = [(1, 10.), (10, 100.), (100, 1000.)];
    let rows = times.iter().map(|&(b, time)| Row { floor_us: None, ..decode(b, "candle-gdn", time) });
    let rows: Vec<_> = rows.map(|row| Row { bytes: None, ..row }).collect();
    let folder = pooled(vec![gpu("benches/gpu", rows)]);
    let plots = plots::plots(&tables::suites(&folder)).unwrap();
    let [(name, svg)] = &plots[..] else { panic!("{} plots", plots.len()) };
    assert_eq!(name, "decode-16-32.svg");
    let number = |line: &str, name: &str| -> i32 {
        let value = line.split(&format!(" {name}=\"")).nth(1).and_then(|rest| rest.split('"').next());
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name} of {line}"))
    };
    // Of a power law on two logarithmic axes the points are evenly apart on a rising line; the last is the legend's.
    let circles = svg.lines().filter(|line| line.starts_with("<circle"));
    let [a, b, c, _] = circles.map(|line| (number(line, "cx"), number(line, "cy"))).collect::<Vec<_>>()[..] else {
        panic!("circles of {svg}")
    };
    assert!(a.0 < b.0 && a.1 > b.1, "{a:?} {b:?}");
    assert!((2 * b.0 - a.0 - c.0).abs() <= 1 && (2 * b.1 - a.1 - c.1).abs() <= 1, "{a:?} {b:?} {c:?}");
}

#[test]
fn a_plot_without_data_is_left_out() {
    let rows = vec![decode(1, "candle-gdn", 4.).gpu(None), decode(8, "fi", 4.).gpu(None)];
    let folder = pooled(vec![gpu("benches/peers", rows)]);
    assert_eq!(plots::plots(&tables::suites(&folder)).unwrap(), []);
    assert!(tables::table(&folder).contains("\nNothing was timed.\n"));
}

// ---- files and errors ----

fn names(dir: &Path) -> Vec<String> {
    let names = dir.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

#[test]
fn the_same_records_give_the_same_files() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let contents = dirs.map(|dir| {
        let machine = dir.path().join("box");
        for (i, file) in everything().files.into_iter().enumerate() {
            file.run.write(&machine.join(format!("{i}.json"))).unwrap();
        }
        output::report(&machine).unwrap();
        // Again, over what is there already.
        output::report(&machine).unwrap();
        let read = |name: String| (fs::read_to_string(machine.join(&name)).unwrap(), name);
        names(&machine).into_iter().map(read).collect::<Vec<_>>()
    });
    assert_eq!(contents[0], contents[1]);
    let written = contents[0].iter().map(|(_, name)| name.as_str());
    let written: Vec<_> = written.filter(|name| !name.ends_with(".svg")).collect();
    assert_eq!(written, ["0.json", "1.json", "2.json", "summary.md", "table.md"]);
    assert!(contents[0].iter().any(|(text, name)| name == "table.md" && text.starts_with("# box\n")));
}

#[test]
fn a_broken_record_is_named() {
    let good = serde_json::to_value(gpu("benches/peers", vec![decode(1, "fla", 3.)])).unwrap();
    let with = |path: &str, value: serde_json::Value| {
        let mut record = good.clone();
        let (parent, key) = path.rsplit_once('/').unwrap();
        record.pointer_mut(parent).unwrap().as_object_mut().unwrap().insert(key.into(), value);
        record.to_string()
    };
    let without_rows = {
        let mut record = good.clone();
        record.as_object_mut().unwrap().remove("rows");
        record.to_string()
    };
    for (text, parts) in [
        (with("/schema", 2.into()), &["schema 2, expected 1"][..]),
        (with("/rows/0/gpu_us", 3.into()), &["benches/README.md", "gpu_us"]),
        (with("/rows/0/gpu", 3.into()), &["benches/README.md"]),
        (without_rows, &["benches/README.md", "missing field `rows`"]),
        ("{}".into(), &["no benchmark record", "schema"]),
        (good.to_string()[..40].into(), &["no benchmark record"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.json"), good.to_string()).unwrap();
        fs::write(dir.path().join("peers.json"), &text).unwrap();
        let error = output::report(dir.path()).expect_err(&text);
        let message = format!("{error:#}");
        for part in [&["peers.json"], parts].concat() {
            assert!(message.contains(part), "no {part:?} in {message:?}");
        }
        // Nothing is written of a folder that cannot be read as a whole.
        assert_eq!(names(dir.path()), ["a.json", "peers.json"]);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_named() {
    let (dir, full) = (tempfile::tempdir().unwrap(), Path::new("/dev/full"));
    let run = gpu("benches/peers", vec![decode(1, "fla", 3.)]);
    run.write(&dir.path().join("peers.json")).unwrap();
    std::os::unix::fs::symlink(full, dir.path().join("table.md")).unwrap();
    let errors = [output::report(dir.path()).map(drop), run.write(full)].map(|e| format!("{:#}", e.unwrap_err()));
    for (message, file) in errors.iter().zip(["table.md", "/dev/full"]) {
        let said = format!("{file}: cannot be written: No space left on device");
        assert!(message.contains(&said), "{message}");
    }
}

#[test]
fn a_folder_without_records_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let error = |path: &Path| format!("{:#}", output::report(path).expect_err("an error"));
    let missing = dir.path().join("nowhere");
    assert_eq!(error(&missing), format!("{}: no such folder", missing.display()));
    assert_eq!(error(dir.path()), format!("{}: no *.json records", dir.path().display()));
}

#[test]
fn two_gpus_do_not_share_a_folder() {
    let mut other = gpu("benches/gpu", vec![]);
    other.machine.device = "B200".into();
    let files = [gpu("benches/peers", vec![]), other, cpu("benches/cpu", 2, vec![])];
    let files = files.into_iter().zip(["a.json", "b.json", "c.json"]);
    let files = files.map(|(run, name)| File { name: name.into(), run }).collect();
    let error = Folder::pool("box".into(), files).err().expect("an error");
    assert_eq!(error.to_string(), "a.json is of H200, b.json of B200");
}
