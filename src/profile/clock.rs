//! One time for all multiprocessors of a launch.

use super::{Launch, Warp};
use std::collections::HashMap;

/// The multiprocessors' clock as the device's global timer sees it.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Clock {
    /// Cycles a nanosecond.
    pub ghz: f64,
    /// By how much `ghz` may be off either way, relative to it: the timer's step over the time that was measured. Much
    /// for a launch of a few microseconds.
    pub relative_error: f64,
    /// The step of the global timer, as far as this launch shows it. Multiprocessors are aligned to about this much.
    pub step_ns: u64,
}

/// Turns cycles of any multiprocessor into nanoseconds of the global timer.
pub(super) struct Time {
    pub clock: Option<Clock>,
    /// Nanoseconds a cycle.
    slope: f64,
    /// The earliest time that the launch read from the global timer.
    pub first_ns: u64,
    /// By multiprocessor: the first cycle count that it gave, and the nanoseconds since `first_ns` at that count.
    sms: HashMap<u32, (u64, f64)>,
}

impl Time {
    pub fn new(launch: &Launch) -> Self {
        let warps = &launch.warps;
        let first_ns = warps.iter().map(|w| w.ns[0]).min().unwrap_or(0);
        let mut by_sm = HashMap::<u32, Vec<&Warp>>::new();
        for warp in warps {
            by_sm.entry(warp.sm).or_default().push(warp);
        }
        let clock = clock(warps, by_sm.values().map(Vec::as_slice), first_ns);
        // Without a clock, as good as any.
        let slope = clock.map_or(1.0, |c| 1.0 / c.ghz);
        let sms = by_sm.iter().map(|(&sm, warps)| {
            let base = base(warps);
            // The timer is read before the clock and rounds down, so that no estimate is late: the latest is the best.
            let begins = warps.iter().map(|w| (w.ns[0] - first_ns) as f64 - slope * (w.cycles[0] - base) as f64);
            (sm, (base, begins.fold(f64::NEG_INFINITY, f64::max)))
        });
        Self { clock, slope, first_ns, sms: sms.collect() }
    }

    /// Nanoseconds from `zero_ns` of the global timer to a cycle count of a warp.
    pub fn ns(&self, warp: &Warp, cycles: u64, zero_ns: u64) -> f64 {
        let (base, at) = self.sms[&warp.sm];
        (self.first_ns - zero_ns) as f64 + at + self.slope * (cycles - base) as f64
    }
}

fn base(warps: &[&Warp]) -> u64 {
    warps.iter().map(|w| w.cycles[0]).min().unwrap_or(0)
}

/// The slope that fits begins and ends of all warps best, each multiprocessor with an offset of its own.
fn clock<'a>(warps: &[Warp], sms: impl Iterator<Item = &'a [&'a Warp]>, first_ns: u64) -> Option<Clock> {
    let (mut xx, mut xy, mut yy, mut longest) = (0.0, 0.0, 0.0, 0.0f64);
    for sm in sms {
        let base = base(sm);
        let points = || {
            let both = sm.iter().flat_map(|w| w.cycles.into_iter().zip(w.ns));
            both.map(|(cycles, ns)| ((cycles - base) as f64, (ns - first_ns) as f64))
        };
        let n = 2.0 * sm.len() as f64;
        let (sum_x, sum_y) = points().fold((0.0, 0.0), |(a, b), (x, y)| (a + x, b + y));
        for (x, y) in points() {
            let (x, y) = (x - sum_x / n, y - sum_y / n);
            xx += x * x;
            xy += x * y;
            yy += y * y;
        }
        let (low, high) = points().fold((f64::INFINITY, 0.0f64), |(low, high), (_, y)| (low.min(y), high.max(y)));
        longest = longest.max(high - low);
    }
    let mut times: Vec<u64> = warps.iter().flat_map(|w| w.ns).collect();
    times.sort_unstable();
    let step_ns = times.windows(2).map(|t| t[1] - t[0]).filter(|&step| step > 0).min()?;
    let ghz = xx / xy;
    (yy > 0.0 && ghz.is_finite() && ghz > 0.0).then(|| Clock { ghz, relative_error: step_ns as f64 / longest, step_ns })
}
