//! A look at the metadata of a GGUF file before candle reads it.

use std::io::{Error, ErrorKind, Read, Result, Seek};

/// Arrays in arrays.
const MAX_DEPTH: usize = 8;

/// `general.alignment`, if there is one of a type that candle takes. Errors are candle's to name: whoever gets one here
/// gets a better one there.
pub(super) fn alignment<R: Read + Seek>(reader: &mut R) -> Result<Option<u64>> {
    let mut header = Header { reader, wide: true };
    header.number(4)?;
    // Version 1 counts in 32 bits.
    header.wide = header.number(4)? > 1;
    header.count()?; // of tensors
    let mut alignment = None;
    for _ in 0..header.count()? {
        let len = header.count()?;
        let mut key = Vec::new();
        header.reader.by_ref().take(len).read_to_end(&mut key)?;
        let kind = header.number(4)?;
        // candle leaves out zeros behind a string.
        match (size(kind), key.strip_prefix(b"general.alignment")) {
            (Some(size), Some(rest)) if rest.iter().all(|b| *b == 0) => alignment = Some(header.number(size)?),
            _ => header.skip(kind, 1, 0)?,
        }
    }
    Ok(alignment)
}

struct Header<'a, R> {
    reader: &'a mut R,
    wide: bool,
}

/// Bytes of a number of this type.
fn size(kind: u64) -> Option<usize> {
    Some(match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        _ => return None,
    })
}

impl<R: Read + Seek> Header<'_, R> {
    fn number(&mut self, bytes: usize) -> Result<u64> {
        let mut number = [0; 8];
        self.reader.read_exact(&mut number[..bytes])?;
        Ok(u64::from_le_bytes(number))
    }

    fn count(&mut self) -> Result<u64> {
        self.number(if self.wide { 8 } else { 4 })
    }

    /// Goes past `count` values of a type.
    fn skip(&mut self, kind: u64, count: u64, depth: usize) -> Result<()> {
        let invalid = || Error::from(ErrorKind::InvalidData);
        if let Some(size) = size(kind) {
            let bytes = count.checked_mul(size as u64).and_then(|bytes| i64::try_from(bytes).ok());
            return self.reader.seek_relative(bytes.ok_or_else(invalid)?);
        }
        if !matches!(kind, 8 | 9) || depth == MAX_DEPTH {
            return Err(invalid());
        }
        for _ in 0..count {
            match kind {
                8 => {
                    let len = self.count()?;
                    self.reader.seek_relative(i64::try_from(len).map_err(|_| invalid())?)?;
                }
                _ => {
                    let (kind, count) = (self.number(4)?, self.count()?);
                    self.skip(kind, count, depth + 1)?;
                }
            }
        }
        Ok(())
    }
}
