//! A progress bar on stderr; nothing is drawn when that is not a terminal.

use crate::is_first;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

pub fn bar(what: &'static str, len: usize, unit: &str) -> ProgressBar {
    let target = if is_first() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(len as u64), target);
    let template = format!("{{msg}} [{{bar:30}}] {{pos}}/{{len}} {unit} {{elapsed}}");
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what);
    bar
}
