//! Where the time of a decode or prefill goes inside its CUDA kernel.
//!
//! Built with the `profile` feature, the kernels of the rule stamp named scopes (`load state`, `wait: q/k/v`, `update`
//! and so on) by the clock of their multiprocessor, warp by warp. [`record`] runs some launches and gives back a
//! [`Profile`]: a [`Table`] of cycles per scope, and a trace for <https://ui.perfetto.dev>. `examples/profile` is the
//! command line to it.
//!
//! What the figures mean:
//!
//! * Memory is asynchronous. A load or store costs its scope only what issuing it takes; what is not there when it is
//!   needed is waited for in a `wait: …` scope of its own, where the kernel without stamps would wait too.
//! * A kernel with stamps is slower than one without: read shares and relations, and take times from a benchmark. What
//!   stamping takes lies between the scopes and is counted as unstamped; the scope `empty`, once a warp, holds nothing
//!   and shows what a scope measures by itself.
//! * In the chunk forms, which have no registers to spare, a scope begins where the one before it ended, and contains what
//!   stamping that one cost; arithmetic on registers may have been moved across a border.
//! * Cycles are exact on one multiprocessor. To bring several into one time, each one's clock is aligned by the
//!   device's global timer, which steps every 32 ns to 1 µs depending on the device: see [`Clock`].
//!
//! Convolution and norm have no stamps.

mod clock;
#[cfg(feature = "profile")]
mod record;
mod table;
#[cfg(test)]
mod tests;
mod trace;

pub use clock::Clock;
pub use table::{RoleRow, ScopeRow, Table};

#[cfg(feature = "profile")]
use candle_core::Device;
use candle_core::{bail, Result};
use candle_gdn_core::abi::{ProfileEvent, ProfileWarp, GDN_CHUNK, GDN_PROFILE_CHUNK, GDN_PROFILE_LEAN};
use std::cmp::Reverse;
use std::collections::BTreeMap;

const WARP_BYTES: usize = size_of::<ProfileWarp>();
const EVENT_BYTES: usize = size_of::<ProfileEvent>();

/// How much may be recorded. It is allocated on the device, 64 bytes a warp and 16 an event, and copied back whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Warps of all launches together. A launch that needs more than are left is an error. Default 16384.
    pub warps: usize,
    /// Events a warp; further ones are counted as dropped. A warp of a prefill takes up to about 24 for every 16 tokens
    /// and 16 besides, one of a chunk form 12 for every 64 tokens of each of its block's heads. Default 256.
    pub events_per_warp: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { warps: 1 << 14, events_per_warp: 256 }
    }
}

impl Limits {
    /// The buffer's size in bytes; `None` past `usize`.
    pub fn bytes(&self) -> Option<usize> {
        let warp = self.events_per_warp.checked_mul(EVENT_BYTES)?.checked_add(WARP_BYTES)?;
        self.warps.checked_mul(warp)
    }
}

/// What [`record`] saw.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// In the order in which they were launched.
    pub launches: Vec<Launch>,
}

/// One kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// Ordered by block, then by warp.
    pub warps: Vec<Warp>,
}

/// One warp from its first instruction to its last.
#[derive(Debug, Clone, PartialEq)]
pub struct Warp {
    /// What it does in its block, as `recurrent producer`.
    pub role: &'static str,
    /// The multiprocessor it ran on.
    pub sm: u32,
    /// Its block in the grid.
    pub block: u32,
    /// Its number in the block.
    pub warp: u32,
    /// The multiprocessor's cycle count when it began and when it ended.
    pub cycles: [u64; 2],
    /// The device's global timer, in nanoseconds, at both.
    pub ns: [u64; 2],
    /// Ordered by their begin; of those that begin together, the longer first.
    pub events: Vec<Event>,
    /// Events that found no room; they are the warp's last ones.
    pub dropped: u32,
}

impl Warp {
    /// Its life in cycles.
    pub fn lifetime(&self) -> u64 {
        self.cycles[1] - self.cycles[0]
    }
}

/// One passage through a scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The scope's name.
    pub scope: &'static str,
    /// The first token of the stage or chunk it worked on, in its sequence; in the chunk forms counted from the begin of
    /// what the block ran through. 0 where there is none.
    pub token: u32,
    /// Cycles from the warp's begin.
    pub begin: u64,
    /// Its length.
    pub cycles: u64,
}

impl Event {
    /// Cycles from the warp's begin.
    pub fn end(&self) -> u64 {
        self.begin + self.cycles
    }
}

/// Runs `launches` on this thread, records every kernel of the rule that they launch on `device`, waits for the device,
/// and returns their result beside the profile.
///
/// The first launch of a kernel in a process includes loading it: run once before. Launches of other threads are not
/// recorded, and neither are replays of a CUDA graph; do not capture one here.
///
/// # Errors
/// When `device` is not a CUDA device, when the buffer cannot
/// be allocated, when the launches need more than `limits.warps` warps ("has no room for the warps of this launch"),
/// and with whatever error `launches` returns. Dropped events are not an error: see [`Table::dropped`].
#[cfg(feature = "profile")]
pub fn record<T>(device: &Device, limits: Limits, launches: impl FnOnce() -> Result<T>) -> Result<(T, Profile)> {
    if limits.warps == 0 {
        bail!("profile: limits: expected room for at least one warp, got {limits:?}")
    }
    let Device::Cuda(device) = device else { bail!("profile: expected a CUDA device, got {:?}", device.location()) };
    let Some(bytes) = limits.bytes() else { bail!("profile: limits: a buffer of {limits:?} is too large") };
    let (value, written) = record::record(device, bytes, limits.events_per_warp, launches)?;
    let [scopes, roles] = record::names();
    Ok((value, Profile::decode(&written, limits.events_per_warp, &Names { scopes, roles })?))
}

/// Names by their number in the buffer.
pub(crate) struct Names {
    pub scopes: Vec<&'static str>,
    pub roles: Vec<&'static str>,
}

impl Profile {
    /// From a buffer laid out as `cuda/gdn.h` says, zero where nothing was written.
    pub(crate) fn decode(buffer: &[u8], events_per_warp: usize, names: &Names) -> Result<Self> {
        let mut launches = BTreeMap::<u32, Vec<Warp>>::new();
        for slot in buffer.chunks_exact(WARP_BYTES + EVENT_BYTES * events_per_warp) {
            let (header, events) = slot.split_at(WARP_BYTES);
            let launch = u32_at(header, 0);
            if launch > 0 {
                launches.entry(launch).or_default().push(decode_warp(header, events, names)?);
            }
        }
        let launches = launches.into_values().map(|mut warps| {
            warps.sort_by_key(|w| (w.block, w.warp));
            Launch { warps }
        });
        Ok(Self { launches: launches.collect() })
    }
}

fn decode_warp(header: &[u8], events: &[u8], names: &Names) -> Result<Warp> {
    let [role, sm, block, warp, count, dropped] = [4, 8, 12, 16, 20, 24].map(|place| u32_at(header, place));
    let [begin_ns, begin, end, end_ns] = [32, 40, 48, 56].map(|place| u64_at(header, place));
    let which = || format!("profile: warp {warp} of block {block}");
    if end == 0 {
        bail!("{}: did not end", which())
    }
    // Events hold the low half of the cycle count: longer lives would be ambiguous.
    let life = end.wrapping_sub(begin);
    if life > u64::from(u32::MAX) {
        bail!("{}: from cycle {begin} to {end}: expected a life of less than 2^32 cycles", which())
    }
    let Some(&role) = names.roles.get(role as usize) else { bail!("{}: unknown role {role}", which()) };
    if count as usize > events.len() / EVENT_BYTES {
        bail!("{}: {count} events where {} fit", which(), events.len() / EVENT_BYTES)
    }
    // Of the lean event before.
    let (mut end_before, mut chunk) = (begin as u32, 0);
    let decode = |event: &[u8]| {
        let [mut scope, mut token, mut low, mut cycles] = [0, 4, 8, 12].map(|place| u32_at(event, place));
        if scope & GDN_PROFILE_LEAN != 0 {
            if scope & GDN_PROFILE_CHUNK != 0 {
                chunk = (scope & !(GDN_PROFILE_LEAN | GDN_PROFILE_CHUNK)) >> 8;
            }
            (low, cycles) = (end_before, token.wrapping_sub(end_before));
            (scope, token, end_before) = (scope & 0xff, chunk * GDN_CHUNK as u32, token);
        }
        let Some(&scope) = names.scopes.get(scope as usize) else { bail!("{}: unknown scope {scope}", which()) };
        let begin = low.wrapping_sub(begin as u32).into();
        let event = Event { scope, token, begin, cycles: cycles.into() };
        if event.end() > life {
            bail!("{}: {event:?} lies outside its life of {life} cycles", which())
        }
        Ok(event)
    };
    let mut events: Vec<Event> =
        events.chunks_exact(EVENT_BYTES).take(count as usize).map(decode).collect::<Result<_>>()?;
    events.sort_by_key(|e| (e.begin, Reverse(e.cycles)));
    Ok(Warp { role, sm, block, warp, cycles: [begin, end], ns: [begin_ns, end_ns], events, dropped })
}

fn u32_at(bytes: &[u8], place: usize) -> u32 {
    u32::from_le_bytes(bytes[place..place + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], place: usize) -> u64 {
    u64::from_le_bytes(bytes[place..place + 8].try_into().expect("eight bytes"))
}
