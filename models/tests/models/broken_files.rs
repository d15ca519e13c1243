//! Files that cannot be, and files that end too early: each is an error that names it.

use crate::gguf_writer::{load, GgufOfTiny, Layout};
use crate::support::refused;
use crate::tiny::Tiny;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{DType, DeviceLocation, Result};
use candle_gdn_models::{CausalLm, GgufFile, ModelConfig};
use std::collections::BTreeSet;
use std::path::Path;

/// Files and configurations that made the process panic, or take all memory, before they were refused.
#[test]
fn files_that_cannot_be_are_refused() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let tiny = Tiny::qwen3_next();
    let whole = || GgufOfTiny::new(&tiny, Layout::Qwen3Next);
    let open = |file: &GgufOfTiny, name: &str| -> Result<CausalLm> {
        let path = dir.path().join(name);
        file.write(&path)?;
        load(&path)
    };
    let refused = |file: &GgufOfTiny, parts: &[&str]| refused(open(file, "file.gguf"), parts);
    // A name that is nearly that of a part.
    open(&whole()?, "my-best-of-3.gguf")?;
    assert!(GgufFile::open(dir.path().join("m-1-of-99999999999.gguf")).is_err());

    for value in [Value::U8(0), Value::U16(0), Value::U32(0)] {
        let mut file = whole()?;
        file.metadata.insert("general.alignment".into(), value);
        refused(&file, &["file.gguf", "general.alignment", "got 0"]);
    }
    for key in ["attention.head_count", "attention.key_length", "ssm.time_step_rank", "ssm.state_size"] {
        let mut file = whole()?;
        file.metadata.insert(format!("qwen3next.{key}"), Value::U32(2147483646));
        refused(&file, &["file.gguf", key, "up to 65536"]);
    }
    for name in ["blk.0.attn_gate.weight", "blk.0.ssm_out.weight", "blk.3.attn_k.weight"] {
        let mut file = whole()?;
        let (tensor, _) = file.tensors.get_mut(name).expect("a tensor");
        *tensor = tensor.unsqueeze(2)?;
        refused(&file, &["file.gguf", name]);
    }
    // A row of 2^62 values of four bytes, whose bytes cannot be counted.
    let mut header = b"GGUF\x03\0\0\0".to_vec();
    header.extend([1u64, 0, 1].iter().flat_map(|n| n.to_le_bytes())); // tensors, entries, letters of the name
    header.extend(b"t\x02\0\0\0");
    header.extend([1u64 << 62, 1].iter().flat_map(|n| n.to_le_bytes()));
    header.extend([0; 64]); // f32, at the beginning
    let path = dir.path().join("row.gguf");
    std::fs::write(&path, header)?;
    let message = GgufFile::open(&path).expect_err("an error").to_string();
    assert!(message.contains("row.gguf") && message.contains("cannot be"), "{message}");
    let parts = ["p-00001-of-00002.gguf", "p-00002-of-00002.gguf"].map(|name| dir.path().join(name));
    parts.iter().try_for_each(|path| whole()?.write(path))?;
    let message = GgufFile::open(&parts[0]).expect_err("an error").to_string();
    assert!(message.contains("both have a tensor"), "{message}");
    for path in &parts {
        let first = path == &parts[0];
        whole()?.write_some(path, |name| name.starts_with("blk.0.") == first)?;
    }
    let single = dir.path().join("single.gguf");
    whole()?.write(&single)?;
    let bytes = |path: &Path| -> Result<u64> {
        let file = GgufFile::open(path)?;
        let config = ModelConfig::from_gguf(&file)?;
        Ok(file.weight_bytes(&config, DType::F32, None, DeviceLocation::Cpu, 1))
    };
    assert_eq!(bytes(&parts[1])?, bytes(&single)?);
    Ok(())
}

/// A file cut off at any length is an error that names it: at every length of the header, at both sides of where each
/// tensor begins and ends, and at some between.
#[test]
fn a_file_may_end_anywhere() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("cut.gguf");
    GgufOfTiny::new(&Tiny::qwen3_next(), Layout::Qwen3_5)?.write(&path)?;
    load(&path)?;
    let mut file = std::fs::File::options().read(true).write(true).open(&path)?;
    let (content, whole) = (Content::read(&mut file)?, file.metadata()?.len());
    let header = content.tensor_data_offset;
    let borders = content.tensor_infos.values().flat_map(|info| {
        let (begin, of) = (header + info.offset, info.ggml_dtype);
        [begin, begin + (info.shape.elem_count() / of.block_size() * of.type_size()) as u64]
    });
    let beside = borders.flat_map(|border| [border - 1, border, border + 1]);
    let lengths: BTreeSet<u64> = (0..header).chain((header..whole).step_by(997)).chain(beside).collect();
    assert!(lengths.contains(&(whole - 1)), "the last tensor ends with the file");
    // A file is cut where it is, the longest length first.
    for len in lengths.into_iter().rev().filter(|len| *len < whole) {
        file.set_len(len)?;
        let message = load(&path).expect_err("an error").to_string();
        assert!(message.contains("cut.gguf"), "{len} bytes: {message}");
    }
    Ok(())
}
