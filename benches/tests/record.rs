//! The record that benchmarks write, and what a call's time is made of.

use candle_gdn_benches::parts::{added_us, parts, Activity, ATTENTION, EXPERTS, GDN, HEAD, PROJECTIONS};
use candle_gdn_benches::record::{cargo_command, Ceilings, Machine, Part, Row, Run, Time, SCHEMA};
use serde_json::Value;

#[test]
fn a_time_is_of_its_samples() {
    assert_eq!(Time::of(&mut [3., 1., 2.]), Time { median: 2., min: 1., max: 3. });
    assert_eq!(Time::of(&mut [4., 1., 2., 3.]), Time { median: 2.5, min: 1., max: 4. });
    assert_eq!(Time::of(&mut [0.12344, 0.12346]), Time { median: 0.1235, min: 0.1234, max: 0.1235 });
}

#[test]
fn a_record_comes_back_as_it_was_written() {
    let row = |contender: &str| Row::new("decode", "16/32 B=1", contender).gpu(Time::of(&mut [4.]));
    let rows = vec![
        row("candle-gdn").work(4_000_000, 0).auto(true).error("o", 1e-3).error("state", f64::NAN),
        row("fla").event(Time::of(&mut [6.])).wall(None).includes("gates").launches(2).note("slow").note("no wall"),
    ];
    let mut run = Run::new("benches/gpu", Machine { device: "NVIDIA H200".into(), ..Machine::default() });
    run.ceilings.copy_gb_s = Some(4000.);
    rows.into_iter().for_each(|row| run.push(row));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a/b/peers.json");
    run.write(&path).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json, serde_json::to_value(&run).unwrap());
    let rows = &json["rows"];
    assert_eq!((&rows[0]["floor_us"], &rows[0]["error"]["state"]), (&Value::from(1.), &Value::Null));
    assert_eq!(&rows[1]["note"], &Value::from("slow; no wall"));
    assert!(json["date"].as_str().is_some_and(|date| date.len() == 10 && date.starts_with("20")), "{json}");
    assert_eq!(text.lines().filter(|line| line.contains("\"suite\":\"decode\"")).count(), 2, "{text}");
    let empty = Run { rows: vec![], ..run };
    let json: Value = serde_json::from_str(&empty.to_json().unwrap()).unwrap();
    assert_eq!(json["rows"], Value::Array(vec![]));
}

/// Every field of the example is one that is written, so that a misspelt one is seen.
#[test]
fn the_example_of_the_readme_is_a_record() {
    let readme = include_str!("../README.md");
    let example = readme.split("```json").nth(1).and_then(|rest| rest.split("```").next()).expect("an example");
    let example: Value = serde_json::from_str(example).unwrap();
    assert_eq!((&example["schema"], &example["tool"]), (&Value::from(SCHEMA), &Value::from("benches/gpu")));
    let time = Time::of(&mut [1.]);
    let part = Part { name: String::new(), launches: 1, us: 1., bytes: Some(1) };
    let row = Row { parts: vec![part], between_bytes: Some(1), ..Row::new("", "", "").gpu(time).error("o", 0.) };
    let mut run = Run::new("", Machine::default());
    run.push(row);
    let run = serde_json::to_value(&run).unwrap();
    let known = |example: &Value, written: &Value| {
        let fields = example.as_object().expect("an object").keys();
        fields.filter(|name| written.get(name.as_str()).is_none()).cloned().collect::<Vec<_>>()
    };
    for place in ["", "/machine", "/ceilings", "/rows/0", "/rows/0/shape", "/rows/0/gpu", "/rows/0/parts/0"] {
        let (example, written) = (example.pointer(place).expect(place), run.pointer(place).expect(place));
        assert_eq!(known(example, written), Vec::<String>::new(), "{place}");
    }
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
    let found = parts(calls.iter().map(|call| &call[..]));
    let of = |name: &str| found.iter().filter(|part| part.name == name).map(|p| (p.launches, p.us)).collect::<Vec<_>>();
    // The first of a call ends half a microsecond later in the second call, and so do all others.
    assert_eq!(of("residuals, norms, gates"), [(1, 1.25)]);
    for name in [PROJECTIONS, GDN, EXPERTS, ATTENTION, HEAD, "copies, casts", "others"] {
        assert_eq!(of(name), [(1, 1.)], "{name}");
    }
    assert_eq!(found.len(), 8);
    assert_eq!(found.iter().map(|part| part.us).sum::<f64>(), 8.25);
    assert!(parts([].into_iter()).is_empty());
}
