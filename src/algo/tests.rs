//! Names of kernels.

use super::*;

#[test]
fn an_algo_has_one_name() {
    for algo in Algo::all() {
        assert_eq!(algo.name().parse::<Algo>().unwrap(), algo);
        let camel: String = format!("{algo:?}").to_lowercase();
        assert_eq!(algo.name().replace('_', ""), camel);
    }
    for name in ["", "fast", "Recurrent", "recurrent128", " auto", "all"] {
        let error = name.parse::<Algo>().unwrap_err();
        let names = "auto, recurrent, recurrent_128, decode, chunked_sm80, chunked_sm90, step_whole, step_split, \
                     step_heads, unfused";
        assert_eq!(error, format!("expected {names}, got {name:?}"));
    }
}

#[test]
fn they_are_those_of_the_header() {
    let header = include_str!("../../cuda/gdn.h");
    let names = |kind: &str| -> Vec<String> {
        let lines = header.split(&format!("typedef enum {kind} {{")).nth(1).unwrap();
        let lines = lines.split(&format!("}} {kind};")).next().unwrap().lines();
        lines
            .filter_map(|line| Some(line.trim().strip_prefix("GDN_")?.split([' ', ',']).next()?.to_lowercase()))
            .collect()
    };
    assert_eq!(names("gdn_algo"), Algo::RULE.map(Algo::name));
    assert_eq!(names("gdn_step_algo")[1..], Algo::STEP.map(Algo::name)[1..4]);
}

#[test]
fn the_variable_is_a_name_or_nothing() {
    let of = |value: Option<&str>| Algo::from_value(value.map(OsString::from));
    assert_eq!(of(None).unwrap(), Algo::Auto);
    assert_eq!(of(Some("")).unwrap(), Algo::Auto);
    assert_eq!(of(Some("chunked_sm80")).unwrap(), Algo::ChunkedSm80);
    let error = of(Some("fast")).unwrap_err().to_string();
    assert!(error.starts_with("CANDLE_GDN_ALGO: expected auto, recurrent, "), "{error}");
    assert!(error.contains("got \"fast\""), "{error}");
}
