//! Progress bars on stderr; nothing is drawn when that is not a terminal.

use crate::is_first;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

pub fn bar(what: &'static str, len: usize, unit: &str) -> ProgressBar {
    styled(what.into(), len as u64, &format!("{{pos}}/{{len}} {unit} {{elapsed}}"))
}

/// For a file of `len` bytes.
pub(crate) fn download_bar(file: &str, len: u64) -> ProgressBar {
    styled(file.into(), len, "{bytes}/{total_bytes} {bytes_per_sec} {eta}")
}

fn styled(what: String, len: u64, numbers: &str) -> ProgressBar {
    let target = if is_first() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(len), target);
    if let Ok(style) = ProgressStyle::with_template(&format!("{{msg}} [{{bar:30}}] {numbers}")) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what);
    bar
}
