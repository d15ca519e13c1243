//! The files of a checkpoint, cut off at every length: an error names the file, and a part is never taken for the whole.

use crate::cli::Copy;
use crate::generate::sharded;
use anyhow::Result;
use candle_gdn_cli::args::Args;
use candle_gdn_cli::chat::Template;
use candle_gdn_cli::settings::Settings;
use candle_gdn_cli::Checkpoint;
use clap::Parser;
use std::collections::BTreeSet;
use std::fs::{read, File};

/// Reads a file of a checkpoint as `generate` does.
type Read = fn(&Args, &Checkpoint) -> Result<()>;

/// The whole file is read, and of shorter ones those that lack nothing but white space at the end.
fn cut(copy: &Copy, name: &str, lengths: impl IntoIterator<Item = usize>, read_it: Read) {
    let args = Args::parse_from(["generate", "--cpu", "--model", &copy.arg()]);
    let try_it = || Checkpoint::find(&args.model).and_then(|checkpoint| read_it(&args, &checkpoint));
    try_it().expect("the whole file");
    let whole = read(copy.file(name)).expect("the file");
    let file = File::options().write(true).open(copy.file(name)).expect("the file");
    // A file is cut where it is, the longest length first.
    let lengths: BTreeSet<usize> = lengths.into_iter().filter(|len| *len < whole.len()).collect();
    for len in lengths.into_iter().rev() {
        file.set_len(len as u64).expect("a shorter file");
        match try_it() {
            Err(e) => assert!(format!("{e:#}").contains(name), "{name}, {len} bytes: {e:#}"),
            Ok(()) => {
                assert!(whole[len..].iter().all(u8::is_ascii_whitespace), "{name}, {len} bytes are taken for all")
            }
        }
    }
}

#[test]
fn small_files_at_every_length() {
    let files: [(&str, Read); 3] = [
        ("config.json", |_, checkpoint| checkpoint.config().map(drop)),
        ("generation_config.json", |args, checkpoint| {
            Settings::new(&args.sampling, checkpoint, &checkpoint.config()?, None).map(drop)
        }),
        ("tokenizer_config.json", |args, checkpoint| Template::load(checkpoint, &args.chat).map(drop)),
    ];
    for (name, read_it) in files {
        cut(&Copy::new(), name, 0..4096, read_it);
    }
    cut(&sharded(), "model.safetensors.index.json", 0..1 << 20, |_, checkpoint| checkpoint.weights().map(drop));
}

/// What comes before the vocabulary at every length, the vocabulary at some.
#[test]
fn the_tokenizer() {
    let lengths = (0..4096).chain((4096..1 << 20).step_by(13));
    cut(&Copy::new(), "tokenizer.json", lengths, |_, checkpoint| checkpoint.tokenizer().map(drop));
}

/// Every length of the header, both sides of where each tensor begins and ends, and some between.
#[test]
fn the_weights() {
    let copy = Copy::new();
    let whole = read(copy.file("model.safetensors")).expect("the file");
    let (len, header) = whole.split_first_chunk().expect("a length");
    let start = 8 + u64::from_le_bytes(*len) as usize;
    let header: serde_json::Value = serde_json::from_slice(&header[..start - 8]).expect("a header");
    let offsets = header.as_object().expect("tensors").values().filter_map(|tensor| tensor["data_offsets"].as_array());
    let borders = offsets.flatten().map(|offset| start + offset.as_u64().expect("an offset") as usize);
    let beside = borders.flat_map(|border| [border - 1, border, border + 1]);
    let lengths: Vec<usize> = (0..start).chain((start..whole.len()).step_by(9973)).chain(beside).collect();
    assert!(lengths.contains(&(whole.len() - 1)));
    cut(&copy, "model.safetensors", lengths, |_, checkpoint| checkpoint.weights().map(drop));
}
