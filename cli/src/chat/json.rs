//! The filter `tojson`: Python's `json.dumps` with the defaults of transformers.

use super::jinja::is_list;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use std::fmt::Write;

/// Spaces of an indentation at most.
const MOST_SPACES: usize = 64;
/// Lists within lists at most.
const MOST_DEPTH: usize = 128;

/// `x|tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`
pub fn tojson(
    state: &State,
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let indent = match indent {
        None => kwargs.get::<Option<Value>>("indent")?,
        given => given,
    };
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_string),
        Some(spaces) => {
            Some(" ".repeat(i64::try_from(spaces)?.max(0).try_into().unwrap_or(usize::MAX).min(MOST_SPACES + 1)))
        }
    };
    if indent.as_ref().is_some_and(|indent| indent.len() > MOST_SPACES) {
        return Err(failed(format!("indent: expected at most {MOST_SPACES} spaces")));
    }
    let separators = match kwargs.get::<Option<Vec<String>>>("separators")? {
        Some(pair) => pair,
        None => [if indent.is_some() { "," } else { ", " }, ": "].map(String::from).into(),
    };
    let Ok([item, key]) = <[String; 2]>::try_from(separators) else {
        return Err(failed("separators: expected two texts".into()));
    };
    let ascii = ensure_ascii.or(kwargs.get("ensure_ascii")?).unwrap_or(false);
    let sorted = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let mut dump = Dump { state, out: String::new(), indent, item, key, ascii, sorted };
    dump.value(value, 0)?;
    Ok(dump.out)
}

fn failed(what: String) -> Error {
    Error::new(ErrorKind::BadSerialization, format!("tojson: {what}"))
}

struct Dump<'a> {
    state: &'a State<'a, 'a>,
    out: String,
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sorted: bool,
}

impl Dump<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.state.consume_fuel(1)?;
        if depth > MOST_DEPTH {
            return Err(failed(format!("expected at most {MOST_DEPTH} lists within lists")));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Map => {
                let mut entries = Vec::new();
                for key in value.try_iter()? {
                    entries.push((self.name(&key)?, value.get_item(&key)?));
                }
                if self.sorted {
                    entries.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.list("{}", entries.iter(), depth, |dump, (key, value)| {
                    dump.string(key);
                    dump.out.push_str(&dump.key.clone());
                    dump.value(value, depth + 1)
                })?;
            }
            _ if is_list(value) => {
                self.list("[]", value.try_iter()?, depth, |dump, value| dump.value(&value, depth + 1))?;
            }
            kind => return Err(failed(format!("a value of kind {kind} has no JSON"))),
        }
        Ok(())
    }

    /// The items between brackets, each on a line of its own where there is an indentation.
    fn list<T>(
        &mut self,
        brackets: &str,
        items: impl Iterator<Item = T>,
        depth: usize,
        mut write: impl FnMut(&mut Self, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push_str(&brackets[..1]);
        let mut any = false;
        for item in items {
            if any {
                self.out.push_str(&self.item);
            }
            any = true;
            self.line(depth + 1)?;
            write(self, item)?;
        }
        if any {
            self.line(depth)?;
        }
        self.out.push_str(&brackets[1..]);
        Ok(())
    }

    fn line(&mut self, depth: usize) -> Result<(), Error> {
        if let Some(indent) = &self.indent {
            self.state.consume_fuel((indent.len() * depth / 64) as u64)?;
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
        Ok(())
    }

    /// The name of an entry: Python writes these keys as text.
    fn name(&self, key: &Value) -> Result<String, Error> {
        match key.kind() {
            ValueKind::String => Ok(key.as_str().unwrap_or_default().to_string()),
            ValueKind::None => Ok("null".into()),
            ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
            ValueKind::Number => Ok(number(key)),
            kind => Err(failed(format!("a key of kind {kind}"))),
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// As Python writes it: the shortest decimals, with an exponent of two digits from 1e16 and below 1e-4.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let x = f64::try_from(value.clone()).unwrap_or(f64::NAN);
    match x {
        _ if x.is_nan() => "NaN".into(),
        _ if x.is_infinite() => if x > 0. { "Infinity" } else { "-Infinity" }.into(),
        _ if x != 0. && !(1e-4..1e16).contains(&x.abs()) => {
            let text = format!("{x:e}");
            let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
            let exponent: i32 = exponent.parse().unwrap_or_default();
            format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
        }
        _ => format!("{x:?}"),
    }
}
