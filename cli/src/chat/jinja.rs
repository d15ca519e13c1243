//! Jinja as transformers sets it up, which chat templates are written for.

use super::{json, methods, source::sets_from_itself, source::source, watch::bounded};
use anyhow::{ensure, Context, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Tuple, Value, ValueKind};
use minijinja::{filters, Environment, Error, ErrorKind, State};

const NAME: &str = "chat";

/// Steps that a template may run, of which it needs some hundreds a message. Each 64 bytes of text that it makes are a step too.
const FUEL: u64 = 4_000_000;
/// Bytes that it may write, more than any model reads.
const MAX_BYTES: usize = 64 << 20;
/// Bytes of a template, and of the stack for reading it: an operator is a byte at least and takes up to 2 KiB of stack, without optimisation more.
const MAX_SOURCE: usize = 64 << 10;
const STACK: usize = 512 << 20;

/// A template that was read.
pub struct Jinja(Environment<'static>);

impl Jinja {
    /// # Errors
    /// When the text is no Jinja; the message names the line.
    pub fn new(text: &str) -> Result<Self> {
        let mut env = Environment::new();
        env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        env.set_fuel(Some(FUEL));
        env.set_unknown_method_callback(methods::call);
        minijinja_contrib::add_to_environment(&mut env);
        env.add_function("raise_exception", |message: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        env.add_function("strftime_now", |format: &str| {
            let failed = |e: jiff::Error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}"));
            jiff::fmt::strtime::format(format, &jiff::Zoned::now()).map_err(failed)
        });
        env.add_filter("tojson", json::tojson);
        env.add_filter("percent", |state: &mut State, text: Value, value: Value| {
            let values = value.downcast_object_ref::<Tuple>().map_or(std::slice::from_ref(&value), |tuple| tuple);
            state.apply_filter("format", &[std::slice::from_ref(&text), values].concat())
        });
        env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        // A text that is no number gives 0, and there may be spaces around a number.
        env.add_filter("int", |state: &State, x: Value, default: Option<Value>, base: Option<u32>, more: Kwargs| {
            let default = default.or(more.get("default")?).unwrap_or(Value::from(0));
            filters::int(state, &trimmed(x), Some(default), base, more)
        });
        env.add_filter("float", |state: &State, x: Value, default: Option<Value>, more: Kwargs| {
            let default = default.or(more.get("default")?).unwrap_or(Value::from(0.));
            filters::float(state, &trimmed(x), Some(default), more)
        });
        env.add_test("sequence", |value: &Value| {
            is_list(value) || matches!(value.kind(), ValueKind::Map | ValueKind::String | ValueKind::Undefined)
        });
        let text = source(text);
        ensure!(text.len() <= MAX_SOURCE, "the chat template: expected at most {MAX_SOURCE} bytes, got {}", text.len());
        deep(|| env.add_template_owned(NAME, text))?.context("the chat template")?;
        Ok(Self(env))
    }

    /// Whether it reads `name` from its context. minijinja takes a name for the template's own where the tag that reads it sets it too.
    pub fn reads(&self, name: &str) -> Result<bool> {
        let template = self.0.get_template(NAME)?;
        let undeclared = deep(|| template.undeclared_variables(false))?;
        Ok(undeclared.contains(name) || sets_from_itself(template.source(), name))
    }

    /// The text for `context`.
    ///
    /// # Errors
    /// What the template raises, and a text or work without bound. Lists without bound end the program.
    pub fn render(&self, context: Value) -> Result<String> {
        let (mut text, template) = (Limited(Vec::new()), self.0.get_template(NAME)?);
        bounded(|| template.render_captured_to(context, &mut text).map(drop)).context("the chat template")?;
        String::from_utf8(text.0).context("the chat template")
    }
}

/// Runs minijinja's parser, which calls itself for each operator of an expression, where the stack has room for any template.
fn deep<T: Send>(read: impl FnOnce() -> T + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread =
            std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, read).context("the chat template")?;
        Ok(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// A list, or a slice of one.
pub fn is_list(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Seq => true,
        ValueKind::Iterable => value.len().is_some(),
        _ => false,
    }
}

/// A text without the spaces around it; any other value as it is.
fn trimmed(value: Value) -> Value {
    value.as_str().map(|text| text.trim().into()).unwrap_or(value)
}

/// What a template wrote, up to [`MAX_BYTES`].
struct Limited(Vec<u8>);

impl std::io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_BYTES {
            return Err(std::io::Error::other(format!("expected at most {MAX_BYTES} bytes of text")));
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
