use super::{StopTexts, TextStream};
use candle_gdn_models::SplitMix64;
use serde_json::{json, Value};
use tokenizers::Tokenizer;

fn byte_level() -> Tokenizer {
    let mut names: Vec<String> = (0..=255).map(|byte| sign(byte).to_string()).collect();
    // The ends and beginnings of neighbouring characters, as pairs.
    let all: Vec<String> = names.iter().filter(|name| !name.is_ascii()).cloned().collect();
    names.extend(all.iter().flat_map(|a| all.iter().map(move |b| format!("{a}{b}"))).step_by(7));
    names.push("word".into());
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    tokenizer(names, level.clone(), level)
}

/// The character that stands for a byte.
fn sign(byte: u8) -> char {
    let is_itself = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match is_itself(byte) {
        true => byte.into(),
        false => char::from_u32(256 + (0..byte).filter(|byte| !is_itself(*byte)).count() as u32).expect("a character"),
    }
}

fn byte_fallback() -> Tokenizer {
    let mut names: Vec<String> = (0..256).map(|byte| format!("<0x{byte:02X}>")).collect();
    names.extend(["▁", "▁the", "é", "你", "x"].map(String::from));
    let decoders = json!([
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]);
    tokenizer(names, Value::Null, json!({"type": "Sequence", "decoders": decoders}))
}

fn tokenizer(names: Vec<String>, pre_tokenizer: Value, decoder: Value) -> Tokenizer {
    let special = json!({
        "id": names.len(), "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true
    });
    let vocab: serde_json::Map<_, _> = names.into_iter().enumerate().map(|(id, name)| (name, id.into())).collect();
    let text = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [special], "normalizer": null,
        "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": decoder,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    Tokenizer::from_bytes(text.to_string()).expect("a tokenizer")
}

/// Random tokens, and texts as their bytes, which are cut anywhere.
#[test]
fn a_stream_is_the_text_of_all() {
    let mut rng = SplitMix64::new(7);
    let mut pick = |most: usize| (rng.next() % most as u64) as usize;
    for tokenizer in [byte_level(), byte_fallback()] {
        let vocab = tokenizer.get_vocab_size(true);
        let bytes: Vec<u32> = (0..=255u8)
            .map(|byte| {
                let ids = [format!("<0x{byte:02X}>"), sign(byte).to_string()].map(|name| tokenizer.token_to_id(&name));
                ids.into_iter().flatten().next().expect("each byte is a token")
            })
            .collect();
        for _ in 0..400 {
            let mut ids = Vec::new();
            for _ in 0..pick(12) {
                match pick(3) {
                    0 => ids.push(pick(vocab) as u32),
                    1 => ids.extend((0..pick(6)).map(|_| bytes[pick(256)])),
                    _ => ids.extend("a你é👍".bytes().skip(pick(3)).take(pick(11)).map(|byte| bytes[byte as usize])),
                }
            }
            let mut stream = TextStream::new(Some(&tokenizer));
            let mut text: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
            text += &stream.finish().unwrap();
            let whole = tokenizer.decode(&ids, true).unwrap();
            assert_eq!(text.trim_end_matches('\u{FFFD}'), whole.trim_end_matches('\u{FFFD}'), "{ids:?}");
        }
    }
}

#[test]
fn text_goes_out_as_soon_as_it_is_sure() {
    let tokenizer = byte_level();
    let ids = tokenizer.encode("aé", false).unwrap().get_ids().to_vec();
    let mut stream = TextStream::new(Some(&tokenizer));
    assert_eq!([0, 1, 2].map(|i| stream.push(ids[i]).unwrap()), ["a", "", "é"]);
}

#[test]
fn a_text_ends_before_a_stop_text() {
    let stops = ["stop".to_string(), "top!".into(), "\n\n".into()];
    let run = |parts: &[&str]| {
        let mut texts = StopTexts::new(&stops);
        let mut out: Vec<String> = parts.iter().map(|part| texts.push(part)).collect();
        out.push(texts.finish());
        (out.concat(), texts.found())
    };
    for (parts, want, found) in [
        (&["a st", "op b"][..], "a ", true),
        (&["a s", "t", "o", "p"], "a ", true),
        (&["a st", "ep"], "a step", false),
        (&["a sto"], "a sto", false),
        (&["ssto", "p"], "s", true),
        (&["xtop! stop"], "x", true),
        (&["a\n", "b\n", "\nc"], "a\nb", true),
        (&["é", "stop", "more"], "é", true),
        (&[""], "", false),
    ] {
        assert_eq!(run(parts), (want.to_string(), found), "{parts:?}");
    }
    // Nothing is held back that begins none.
    let mut texts = StopTexts::new(&stops);
    assert_eq!([texts.push("abc s"), texts.push("x"), texts.push("s")], ["abc ", "sx", ""]);
}
