//! What the time of a call is made of. Launches overlap, and one that waits for another lasts as long: so the durations of
//! kernels have no meaningful sum. What each adds to the end of those that began before it does.

use crate::record::{rounded, Part};
use std::collections::BTreeMap;

/// One kernel, copy or fill. Times are nanoseconds on the device's clock.
#[derive(Clone, Debug)]
pub struct Activity {
    pub name: String,
    pub start: u64,
    pub end: u64,
}

impl Activity {
    pub fn us(&self) -> f64 {
        (self.end - self.start) as f64 / 1e3
    }
}

/// By how many µs each activity, in order of starting, ends after all before it, without the gap if there was one. Their sum is
/// the time during which at least one ran.
pub fn added_us(call: &[Activity]) -> Vec<f64> {
    let mut until = 0;
    let added = call.iter().map(|a| {
        let added = a.end.max(until) - a.start.max(until);
        until = until.max(a.end);
        added as f64 / 1e3
    });
    added.collect()
}

/// The parts of a model's step by the namespaces of their kernels; of the products the last is the head. Those that take most
/// come first. `calls` made the same launches.
pub fn parts<'a>(calls: impl Iterator<Item = &'a [Activity]>) -> Vec<Part> {
    let (mut found, mut number) = (BTreeMap::<&str, (f64, usize)>::new(), 0);
    for call in calls {
        let head = call.iter().rposition(|a| part(&a.name) == PROJECTIONS);
        for (i, (activity, us)) in call.iter().zip(added_us(call)).enumerate() {
            let part = found.entry(if Some(i) == head { HEAD } else { part(&activity.name) }).or_default();
            part.0 += us;
            part.1 += 1;
        }
        number += 1;
    }
    let part = |(name, (us, launches)): (&str, (f64, usize))| Part {
        name: name.into(),
        launches: (launches / number) as u32,
        us: rounded(us / number as f64),
        bytes: None,
    };
    let mut parts: Vec<_> = found.into_iter().map(part).collect();
    parts.sort_by(|a, b| b.us.total_cmp(&a.us));
    parts
}

pub const PROJECTIONS: &str = "projections";
pub const HEAD: &str = "head";
pub const EXPERTS: &str = "experts";
pub const GDN: &str = "Gated DeltaNet";
pub const ATTENTION: &str = "attention";

/// Of a mangled name, as `_ZN3gdn6linear13linear_kernelI…`.
fn part(kernel: &str) -> &'static str {
    let Some(own) = kernel.strip_prefix("_ZN3gdn") else {
        // cuBLAS' kernels of Hopper, and those that sum what they split.
        return if ["nvjet", "cublas", "gemm", "gemv"].iter().any(|of| kernel.contains(of)) {
            PROJECTIONS
        } else {
            "copies, casts"
        };
    };
    let digits = own.find(|c: char| !c.is_ascii_digit()).unwrap_or(0);
    let length = own[..digits].parse().unwrap_or(0);
    match own[digits..].get(..length).unwrap_or_default() {
        "linear" | "scaled" | "quantized" => PROJECTIONS,
        "moe" => EXPERTS,
        "conv" | "step" | "ring" | "rule" | "chunk" | "norm" => GDN,
        "attention" => ATTENTION,
        "residual" | "swiglu" => "residuals, norms, gates",
        "sampling" | "logprobs" | "speculate" => "sampler",
        _ => "others",
    }
}
