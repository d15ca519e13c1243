//! Methods of Python's values that minijinja's own compatibility lacks or knows in part.

use super::jinja::is_list;
use minijinja::value::{from_args, Kwargs, Tuple, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat;

/// Calls `method` of `value`.
pub fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let found = match (value.as_str(), value.kind()) {
        (Some(text), _) => string(state, text, method, args)?,
        (None, _) if method == "index" && is_list(value) => {
            let (wanted,): (&Value,) = from_args(args)?;
            let position = value.try_iter()?.position(|item| item == *wanted);
            Some(position.ok_or_else(|| wrong(format!("index: {wanted} is not in the list")))?.into())
        }
        (None, kind) if method == "copy" && (kind == ValueKind::Map || is_list(value)) => {
            let () = from_args(args)?;
            Some(value.clone())
        }
        _ => None,
    };
    match found {
        Some(value) => Ok(value),
        None => pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// None where the method is not one of these.
fn string(state: &State, text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "removeprefix" | "removesuffix" => {
            let (affix,): (&str,) = from_args(args)?;
            let rest = if method == "removeprefix" { text.strip_prefix(affix) } else { text.strip_suffix(affix) };
            rest.unwrap_or(text).into()
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let forward = method == "partition";
            let separator = not_empty(separator)?;
            let found = if forward { text.split_once(separator) } else { text.rsplit_once(separator) };
            let parts = match found {
                Some((left, right)) => [left, separator, right],
                None if forward => [text, "", ""],
                None => ["", "", text],
            };
            Tuple::from(parts.map(Value::from)).into()
        }
        "split" | "rsplit" => split(text, args, method == "rsplit")?,
        "splitlines" => {
            let (keep, kwargs): (Option<bool>, Kwargs) = from_args(args)?;
            let keep = keep.or(kwargs.get("keepends")?).unwrap_or(false);
            kwargs.assert_all_used()?;
            lines(text, keep)
        }
        "title" => {
            let () = from_args(args)?;
            title(text).into()
        }
        "ljust" | "rjust" | "center" | "zfill" => {
            let (width, fill): (i64, Option<char>) = from_args(args)?;
            let missing = usize::try_from(width).unwrap_or(0).saturating_sub(text.chars().count());
            state.consume_fuel(missing as u64)?;
            pad(text, method, missing, fill).into()
        }
        "index" | "rindex" => {
            let (part,): (&str,) = from_args(args)?;
            let start = if method == "index" { text.find(part) } else { text.rfind(part) };
            let start = start.ok_or_else(|| wrong(format!("{method}: {part:?} is not in the text")))?;
            text[..start].chars().count().into()
        }
        "format" => {
            // The widths that it asks for.
            let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
            let widths = numbers.map(|digits| digits.parse().unwrap_or(u64::MAX)).fold(0, u64::saturating_add);
            state.consume_fuel(widths)?;
            return Ok(None);
        }
        _ => return Ok(None),
    }))
}

fn wrong(what: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

fn not_empty(separator: &str) -> Result<&str, Error> {
    match separator {
        "" => Err(wrong("expected a separator, got an empty text".into())),
        separator => Ok(separator),
    }
}

/// What Python counts as a space.
fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// At a separator, or at spaces where it is none; at most so many times, from the right with `back`.
fn split(text: &str, args: &[Value], back: bool) -> Result<Value, Error> {
    let (separator, most, kwargs): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = separator.or(kwargs.get("sep")?);
    let most = most.or(kwargs.get("maxsplit")?).and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
    kwargs.assert_all_used()?;
    let parts: Vec<&str> = match separator {
        Some(separator) if back => text.rsplitn(most.saturating_add(1), not_empty(separator)?).collect(),
        Some(separator) => text.splitn(most.saturating_add(1), not_empty(separator)?).collect(),
        None => words(text, most, back),
    };
    Ok(match back {
        true => parts.into_iter().rev().collect(),
        false => parts.into_iter().collect(),
    })
}

/// The words of `text`, from the end with `back`. After `most` of them comes the rest.
fn words(text: &str, most: usize, back: bool) -> Vec<&str> {
    let trim = |rest: &'_ str| -> usize {
        let rest = if back { rest.trim_end_matches(is_space) } else { rest.trim_start_matches(is_space) };
        rest.len()
    };
    let (mut rest, mut parts) = (text, Vec::new());
    loop {
        let left = trim(rest);
        rest = if back { &rest[..left] } else { &rest[rest.len() - left..] };
        if rest.is_empty() {
            return parts;
        }
        if parts.len() == most {
            parts.push(rest);
            return parts;
        }
        let word = if back { rest.rsplit(is_space).next() } else { rest.split(is_space).next() }.unwrap_or(rest);
        parts.push(word);
        rest = if back { &rest[..rest.len() - word.len()] } else { &rest[word.len()..] };
    }
}

/// The lines, with their ends if `keep`; there is no empty one behind the last end.
fn lines(text: &str, keep: bool) -> Value {
    let is_end = |c: char| {
        matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let (mut rest, mut lines) = (text, Vec::new());
    while !rest.is_empty() {
        let stop = rest.find(is_end).unwrap_or(rest.len());
        let end = match &rest[stop..] {
            end if end.starts_with("\r\n") => stop + 2,
            end => stop + end.chars().next().map_or(0, char::len_utf8),
        };
        lines.push(Value::from(&rest[..if keep { end } else { stop }]));
        rest = &rest[end..];
    }
    lines.into()
}

/// A capital wherever letters begin.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        match inside {
            true => out.extend(c.to_lowercase()),
            false => out.extend(c.to_uppercase()),
        }
        inside = c.is_lowercase() || c.is_uppercase();
    }
    out
}

/// `text` with `missing` more characters at the side that `method` says.
fn pad(text: &str, method: &str, missing: usize, fill: Option<char>) -> String {
    let more = |count: usize| fill.unwrap_or(if method == "zfill" { '0' } else { ' ' }).to_string().repeat(count);
    match method {
        "ljust" => text.to_string() + &more(missing),
        "rjust" => more(missing) + text,
        "center" => {
            // An odd one goes to the left where the width is odd.
            let width = missing + text.chars().count();
            let left = missing / 2 + (missing & width & 1);
            more(left) + text + &more(missing - left)
        }
        _ => {
            let sign = text.len() - text.trim_start_matches(['+', '-']).len().max(text.len().saturating_sub(1));
            format!("{}{}{}", &text[..sign], more(missing), &text[sign..])
        }
    }
}
