//! The header of a GGUF file: metadata, and where its tensors are. No length in it is believed that the file has no bytes for.

use super::types::GgmlType;
use candle_core::quantized::gguf_file::Value;
use candle_core::{bail, Result};
use std::collections::HashMap;
use std::io::Read;

/// The first bytes of every file.
pub(super) const MAGIC: [u8; 4] = *b"GGUF";
/// Arrays in arrays.
const MAX_DEPTH: usize = 8;
/// Values of all arrays: some ten times those of the largest vocabularies.
const MAX_VALUES: u64 = 1 << 24;
/// Bytes of a text.
const MAX_TEXT: u64 = 1 << 26;
/// Between tensors, where the file does not say.
const ALIGNMENT: i64 = 32;

#[derive(Debug)]
pub(super) struct Header {
    pub metadata: HashMap<String, Value>,
    pub tensors: HashMap<String, TensorInfo>,
    /// Where the tensors' data begins.
    pub data: u64,
}

#[derive(Debug)]
pub(super) struct TensorInfo {
    /// The number of its type, and the type if it is known.
    pub number: u32,
    pub of: Option<&'static GgmlType>,
    /// The fastest dimension last.
    pub dims: Vec<usize>,
    /// From where the data begins.
    pub offset: u64,
}

impl TensorInfo {
    /// Those of all matrices as one; a vector has rows of one value.
    pub fn rows_and_columns(&self) -> (usize, usize) {
        match self.dims.as_slice() {
            [rows @ .., columns] if !rows.is_empty() => {
                (rows.iter().fold(1usize, |n, dim| n.saturating_mul(*dim)), *columns)
            }
            [n] => (*n, 1),
            _ => (1, 1),
        }
    }

    /// If they can be counted.
    pub fn bytes(&self) -> Option<u64> {
        let (rows, columns) = self.rows_and_columns();
        Some(self.of?.row_bytes(columns)?.checked_mul(rows)? as u64)
    }
}

/// An integer of any width, if an i64 has it.
pub(crate) fn integer(value: &Value) -> Option<i64> {
    match *value {
        Value::I8(n) => Some(n.into()),
        Value::I16(n) => Some(n.into()),
        Value::I32(n) => Some(n.into()),
        Value::I64(n) => Some(n),
        Value::U8(n) => Some(n.into()),
        Value::U16(n) => Some(n.into()),
        Value::U32(n) => Some(n.into()),
        Value::U64(n) => n.try_into().ok(),
        _ => None,
    }
}

/// Reads the header of a file of `len` bytes.
pub(super) fn read(reader: impl Read, len: u64) -> Result<Header> {
    let mut r = Reader { reader, wide: true, left: len, values: MAX_VALUES };
    if r.bytes()? != MAGIC {
        bail!("expected the magic letters GGUF at its beginning")
    }
    let version = r.u32()?;
    // Version 1 counts in 32 bits.
    r.wide = version > 1;
    match version {
        1..=3 => {}
        _ if matches!(version.swap_bytes(), 1..=3) => {
            bail!("its numbers are big-endian: expected a file made for little-endian machines")
        }
        _ => bail!("expected version 1, 2 or 3, got {version}"),
    }
    let (tensors, entries) = (r.count()?, r.count()?);
    let mut header = Header { metadata: HashMap::new(), tensors: HashMap::new(), data: 0 };
    for _ in 0..entries {
        let key = r.text()?;
        let kind = r.u32()?;
        let value = match r.value(kind, 0) {
            Ok(value) => value,
            Err(e) => bail!("`{key}`: {e}"),
        };
        header.metadata.insert(key, value);
    }
    for _ in 0..tensors {
        let name = r.text()?;
        let dims = r.u32()?;
        if dims > 4 {
            bail!("tensor `{name}`: expected up to 4 dimensions, got {dims}")
        }
        let mut dims = (0..dims).map(|_| Ok(r.count()? as usize)).collect::<Result<Vec<_>>>()?;
        dims.reverse();
        let number = r.u32()?;
        let info = TensorInfo { number, of: GgmlType::of(number), dims, offset: r.u64()? };
        if header.tensors.insert(name.clone(), info).is_some() {
            bail!("it has two tensors `{name}`")
        }
    }
    let alignment = match header.metadata.get("general.alignment") {
        None => ALIGNMENT,
        Some(value) => match integer(value) {
            Some(n) if n > 0 => n,
            Some(n) => bail!("`general.alignment`: expected a positive number, got {n}"),
            None => bail!("`general.alignment`: expected a positive number, got {value:?}"),
        },
    };
    header.data = (len - r.left).checked_next_multiple_of(alignment as u64).unwrap_or(u64::MAX);
    Ok(header)
}

struct Reader<R> {
    reader: R,
    wide: bool,
    /// Bytes that the file still has.
    left: u64,
    /// Values that its arrays may still have.
    values: u64,
}

impl<R: Read> Reader<R> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.has(bytes.len() as u64)?;
        self.reader.read_exact(bytes)?;
        self.left -= bytes.len() as u64;
        Ok(())
    }

    fn has(&self, bytes: u64) -> Result<()> {
        if bytes > self.left {
            bail!("expected {bytes} bytes more, got {} remaining", self.left)
        }
        Ok(())
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    fn count(&mut self) -> Result<u64> {
        if self.wide {
            self.u64()
        } else {
            Ok(self.u32()?.into())
        }
    }

    /// Some files have zeros behind a text, and some bytes that are no UTF-8.
    fn text(&mut self) -> Result<String> {
        let len = self.count()?;
        self.has(len)?;
        if len > MAX_TEXT {
            bail!("expected a text of up to {MAX_TEXT} bytes, got {len}")
        }
        let mut text = vec![0; len as usize];
        self.fill(&mut text)?;
        Ok(String::from_utf8_lossy(&text).trim_end_matches('\0').to_string())
    }

    fn value(&mut self, kind: u32, depth: usize) -> Result<Value> {
        Ok(match kind {
            0 => Value::U8(u8::from_le_bytes(self.bytes()?)),
            1 => Value::I8(i8::from_le_bytes(self.bytes()?)),
            2 => Value::U16(u16::from_le_bytes(self.bytes()?)),
            3 => Value::I16(i16::from_le_bytes(self.bytes()?)),
            4 => Value::U32(self.u32()?),
            5 => Value::I32(i32::from_le_bytes(self.bytes()?)),
            6 => Value::F32(f32::from_le_bytes(self.bytes()?)),
            7 => match self.bytes()? {
                [byte @ (0 | 1)] => Value::Bool(byte == 1),
                [byte] => bail!("expected a boolean, 0 or 1, got {byte}"),
            },
            8 => Value::String(self.text()?),
            9 if depth < MAX_DEPTH => {
                let (kind, count) = (self.u32()?, self.count()?);
                // No value has fewer bytes.
                self.has(count)?;
                let Some(left) = self.values.checked_sub(count) else {
                    bail!(
                        "expected lists of up to {MAX_VALUES} values in all, got one of {count} with {} left",
                        self.values
                    )
                };
                self.values = left;
                Value::Array((0..count).map(|_| self.value(kind, depth + 1)).collect::<Result<_>>()?)
            }
            9 => bail!("expected lists up to {MAX_DEPTH} deep, got a deeper one"),
            10 => Value::U64(self.u64()?),
            11 => Value::I64(i64::from_le_bytes(self.bytes()?)),
            12 => Value::F64(f64::from_le_bytes(self.bytes()?)),
            _ => bail!("expected a value of type 0 to 12, got type {kind}"),
        })
    }
}

#[cfg(test)]
#[test]
fn lists_are_bounded_in_all() {
    // `a` has a value, and with those of `b` there would be one too many.
    let mut bytes = [&MAGIC[..], &3u32.to_le_bytes(), &0u64.to_le_bytes(), &2u64.to_le_bytes()].concat();
    for (key, count, values) in [(b'a', 1, &[0u8][..]), (b'b', MAX_VALUES, &[])] {
        let list = [&1u64.to_le_bytes()[..], &[key], &9u32.to_le_bytes(), &0u32.to_le_bytes(), &count.to_le_bytes()];
        bytes.extend([list.concat(), values.to_vec()].concat());
    }
    let error = read(std::io::Cursor::new(bytes).chain(std::io::repeat(0)), 1 << 30).unwrap_err().to_string();
    assert!(error.contains("expected lists of up to 16777216 values in all"), "{error}");
}
