//! JSON as Python writes it.

use candle_core::{bail, Result};
use serde_json::Value;

/// JSON as Python's `json` writes it, with or without a byte order mark: NaN and infinities come as strings of their names, so that
/// who expects a number there refuses them.
///
/// # Errors
/// Anything else that is not JSON.
pub fn json_as_python(text: &str) -> Result<Value> {
    let text = text.trim_start_matches('\u{feff}');
    match serde_json::from_str(text).or_else(|e| serde_json::from_str(&quoted(text)).map_err(|_| e)) {
        Ok(value) => Ok(value),
        Err(e) => bail!("not valid JSON: {e}"),
    }
}

/// The names of what is no number between quotation marks.
fn quoted(text: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(c) = rest.chars().next() {
        let name = ["NaN", "Infinity", "-Infinity"].into_iter().find(|name| rest.starts_with(name));
        let len = match name {
            _ if c == '"' => string_len(rest),
            Some(name) => name.len(),
            None => c.len_utf8(),
        };
        let (piece, behind) = rest.split_at(len);
        out += &name.map_or_else(|| piece.to_string(), |name| format!("\"{name}\""));
        rest = behind;
    }
    out
}

/// Bytes of the string that `text` begins with, quotation marks and all.
fn string_len(text: &str) -> usize {
    let mut is_escaped = true;
    let end = text.bytes().position(|b| {
        let ends = b == b'"' && !is_escaped;
        is_escaped = b == b'\\' && !is_escaped;
        ends
    });
    end.map_or(text.len(), |end| end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_python_writes_is_read() -> Result<()> {
        let text = "\u{feff}{\"a\": NaN, \"b NaN\": [-Infinity, Infinity, 1], \"c\": \"\\\\\\\" NaN \u{e9}\"}";
        let want = json!({"a": "NaN", "b NaN": ["-Infinity", "Infinity", 1], "c": "\\\" NaN \u{e9}"});
        assert_eq!(json_as_python(text)?, want);
        assert_eq!(json_as_python("\u{feff}[1]")?, json!([1]));
        for broken in ["", "{", "[NaN", "\"a", "[nan]"] {
            let error = json_as_python(broken).unwrap_err().to_string();
            assert!(error.contains("not valid JSON"), "{broken}: {error}");
        }
        Ok(())
    }
}
