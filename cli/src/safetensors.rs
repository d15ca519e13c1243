//! Whether a safetensors file is whole, checked before it is mapped, so that the error names the file.

use anyhow::{bail, Context, Result};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Bytes of a header, as the crate `safetensors` has it.
const MAX_HEADER: u64 = 100_000_000;

/// By names of tensors, and `__metadata__`.
pub type Header = serde_json::Map<String, serde_json::Value>;

/// The header of a file, its length and that of the file in bytes. A header that exceeds the file or the format's limit is not read.
///
/// # Errors
/// When the file has no such header or cannot be read; the message names the file.
pub fn read_header(path: &Path) -> Result<(Header, u64, u64)> {
    let name = path.display();
    let mut file = File::open(path).with_context(|| format!("cannot open {name}"))?;
    let len = file.metadata().with_context(|| format!("cannot read {name}"))?.len();
    let mut size = [0u8; 8];
    if len < 8 {
        bail!("{name} is truncated: {len} bytes are no safetensors file")
    }
    file.read_exact(&mut size).with_context(|| format!("cannot read {name}"))?;
    let header_len = u64::from_le_bytes(size);
    if header_len > len - 8 {
        bail!("{name} is truncated or no safetensors file: a header of {header_len} bytes in a file of {len}")
    }
    if header_len > MAX_HEADER {
        bail!("{name} is no safetensors file: expected a header of at most {MAX_HEADER} bytes, got {header_len}")
    }
    let mut header = vec![0u8; header_len as usize];
    file.read_exact(&mut header).with_context(|| format!("cannot read {name}"))?;
    let header: Header =
        serde_json::from_slice(&header).with_context(|| format!("{name} is no safetensors file: its header"))?;
    Ok((header, header_len, len))
}

/// Whether the length of `path` is what its header describes.
pub fn check(path: &Path) -> Result<()> {
    let name = path.display();
    let (header, header_len, len) = read_header(path)?;
    let mut end = 0;
    for (tensor, info) in header.iter().filter(|(k, _)| *k != "__metadata__") {
        match info["data_offsets"][1].as_u64() {
            Some(e) => end = e.max(end),
            None => bail!("{name} is no safetensors file: no data_offsets for {tensor}"),
        }
    }
    let expected = end.saturating_add(8 + header_len);
    if len < expected {
        bail!("{name} is truncated: its header describes {expected} bytes, the file has {len}")
    }
    if len > expected {
        bail!("{name} is damaged: its header describes {expected} bytes, the file has {len}")
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Of zeros, which no disk holds.
    #[test]
    fn a_header_is_not_as_long_as_its_file_may_be() -> Result<()> {
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(&(1u64 << 30).to_le_bytes())?;
        file.as_file().set_len(2 << 30)?;
        let message = check(file.path()).expect_err("an error").to_string();
        assert!(message.contains("at most 100000000 bytes, got 1073741824"), "{message}");
        Ok(())
    }
}
