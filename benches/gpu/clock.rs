//! The clocks of benches/README.md: `gpu` (CUPTI), `event` (CUDA events around a graph replay), `call` (CUDA events around
//! each call), `wall` (the host).

use crate::cupti;
use anyhow::{bail, Context, Result};
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUdevice_attribute, CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream};
use candle_core::{CudaDevice, Device};
use candle_gdn_benches::parts::{added_us, Activity};
use candle_gdn_benches::record::{Row, Time};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// One call of what is timed. The calls of a measurement do the same work on different memory.
pub type Call<'a> = Box<dyn Fn() -> candle_core::Result<()> + 'a>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Tier {
    /// Kernel time by CUPTI
    Gpu,
    /// CUDA events around the replay of a CUDA graph
    Event,
    /// CUDA events around a call on an idle GPU, launch included
    Call,
    /// The host's clock around a call and a synchronisation
    Wall,
}

/// Makes `n` calls, one after another and around again.
fn run(calls: &[Call], n: usize) -> candle_core::Result<()> {
    calls.iter().cycle().take(n).try_for_each(|call| call())
}

/// How long a tier samples, in µs of estimated work.
const BUDGET: f64 = 40_000.;
/// The same of `event`, which is as in `cuda/tests/timing.py`: a graph is at least this long, and its calls this many.
const EVENT_BUDGET: f64 = 120_000.;
const GRAPH_US: f64 = 1000.;
const GRAPH_CALLS: f64 = 8.;
const MAX_GRAPH_CALLS: f64 = 512.;

pub struct Clock {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    tiers: Vec<Tier>,
}

/// A row with its times. A clock that was not asked for or failed is `None`; the row's note says which failed.
pub struct Sample {
    pub row: Row,
    /// What ran, call after call; empty without CUPTI.
    pub activities: Vec<Activity>,
}

/// What one kernel takes in a call, on average.
pub struct Kernel<'a> {
    pub name: &'a str,
    pub launches: f64,
    /// [`added_us`] of its launches.
    pub added_us: f64,
    /// From its launches' begins to their ends.
    pub us: f64,
}

impl Sample {
    /// Each call's activities.
    pub fn calls(&self) -> impl Iterator<Item = &[Activity]> {
        self.activities.chunks(self.row.launches.map_or(1, |n| n as usize).max(1))
    }

    /// Those that add most come first.
    pub fn kernels(&self) -> Vec<Kernel<'_>> {
        let calls = self.calls().count() as f64;
        let mut kernels = BTreeMap::new();
        for (activity, added) in self.calls().flat_map(|call| call.iter().zip(added_us(call))) {
            let name = activity.name.as_str();
            let kernel = kernels.entry(name).or_insert(Kernel { name, launches: 0., added_us: 0., us: 0. });
            kernel.launches += 1. / calls;
            kernel.added_us += added / calls;
            kernel.us += activity.us() / calls;
        }
        let mut kernels: Vec<_> = kernels.into_values().collect();
        kernels.sort_by(|a, b| b.added_us.total_cmp(&a.added_us));
        kernels
    }
}

impl Clock {
    pub fn new(device: &Device, tiers: &[Tier]) -> Result<Self> {
        if tiers.contains(&Tier::Gpu) {
            cupti::check()?;
        }
        let device = device.as_cuda_device()?.clone();
        Ok(Self { stream: device.cuda_stream(), device, tiers: tiers.to_vec() })
    }

    /// What it reads.
    pub fn tiers(&self) -> &[Tier] {
        &self.tiers
    }

    /// Bytes of the L2 cache.
    pub fn l2_bytes(&self) -> Result<usize> {
        Ok(self.stream.context().attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize)
    }

    /// As many sets of `bytes` as it takes for a call to find nothing of its own in the L2 cache.
    pub fn cold_sets(&self, bytes: u64) -> Result<usize> {
        let enough = 3 * self.l2_bytes()? as u64;
        Ok((enough.div_ceil(bytes.max(1)) as usize + 1).clamp(2, 256))
    }

    pub fn synchronize(&self) -> Result<()> {
        Ok(self.stream.synchronize()?)
    }

    /// Times the calls, one after another and around again.
    pub fn time(&self, row: Row, calls: &[Call<'_>]) -> Result<Sample> {
        run(calls, calls.len().max(3))?;
        self.synchronize()?;
        let start = Instant::now();
        run(calls, 3)?;
        self.synchronize()?;
        let estimate = start.elapsed().as_secs_f64() * 1e6 / 3.;
        let reps = ((BUDGET / estimate) as usize).clamp(5, 200);
        let mut sample = Sample { row, activities: vec![] };
        for tier in [Tier::Gpu, Tier::Event, Tier::Call, Tier::Wall] {
            if !self.tiers.contains(&tier) {
                continue;
            }
            let done = match tier {
                Tier::Gpu => self.gpu(calls, reps, &mut sample),
                Tier::Event => self.event(calls, estimate, &mut sample.row),
                Tier::Call => self.call(calls, reps, &mut sample.row),
                Tier::Wall => self.wall(calls, reps, &mut sample.row),
            };
            if let Err(e) = done {
                // The other tiers are still worth having.
                self.synchronize().with_context(|| format!("{tier:?}: {e:#}"))?;
                sample.row = sample.row.note(&format!("{tier:?}: {e:#}"));
            }
        }
        Ok(sample)
    }

    fn gpu(&self, calls: &[Call<'_>], reps: usize, sample: &mut Sample) -> Result<()> {
        let activities = cupti::record(|| {
            run(calls, reps)?;
            self.synchronize()
        })?;
        if activities.is_empty() || activities.len() % reps != 0 {
            bail!("CUPTI saw {} activities in {reps} calls", activities.len());
        }
        let launches = activities.len() / reps;
        let mut busy: Vec<f64> = activities.chunks(launches).map(|call| added_us(call).iter().sum()).collect();
        sample.activities = activities;
        sample.row.launches = Some(launches as u32);
        sample.row.gpu = Some(Time::of(&mut busy));
        Ok(())
    }

    fn event(&self, calls: &[Call<'_>], estimate: f64, row: &mut Row) -> Result<()> {
        let us = row.gpu.as_ref().map_or(estimate, |gpu| gpu.median).max(0.5);
        let least = (EVENT_BUDGET / (10. * us)).clamp(1., GRAPH_CALLS);
        let wanted = (GRAPH_US / us).max(least).min(MAX_GRAPH_CALLS);
        // Whole rounds, so that the replays' seams are as cold as the rest.
        let n = calls.len() * (wanted / calls.len() as f64).ceil() as usize;
        let graph = self.capture(|| run(calls, n))?;
        graph.upload()?;
        graph.launch()?;
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        let mut times = vec![];
        for _ in 0..(EVENT_BUDGET / (2. * n as f64 * us)).clamp(5., 20.) as usize {
            self.synchronize()?;
            // One ahead hides the time that the host needs.
            graph.launch()?;
            let start = self.stream.record_event(flags)?;
            graph.launch()?;
            let end = self.stream.record_event(flags)?;
            end.synchronize()?;
            times.push(f64::from(start.elapsed_ms(&end)?) * 1e3 / n as f64);
        }
        row.event = Some(Time::of(&mut times));
        Ok(())
    }

    fn capture(&self, work: impl Fn() -> candle_core::Result<()>) -> Result<CudaGraph> {
        // candle uploads some kernels' shapes; under this guard from a cache, which the first round fills.
        let _cached = self.device.enable_cuda_graph_htod_cache();
        work()?;
        self.synchronize()?;
        self.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        let done = work();
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = self.stream.end_capture(flags);
        done.context("capture")?;
        graph?.context("the capture was empty")
    }

    fn call(&self, calls: &[Call<'_>], reps: usize, row: &mut Row) -> Result<()> {
        let mut times = vec![];
        for call in calls.iter().cycle().take(reps) {
            self.synchronize()?;
            times.push(self.stream_us(1, call)?);
        }
        row.call = Some(Time::of(&mut times));
        Ok(())
    }

    fn wall(&self, calls: &[Call<'_>], reps: usize, row: &mut Row) -> Result<()> {
        let (mut walls, mut hosts) = (vec![], vec![]);
        for call in calls.iter().cycle().take(reps) {
            let start = Instant::now();
            call()?;
            hosts.push(start.elapsed().as_secs_f64() * 1e6);
            self.synchronize()?;
            walls.push(start.elapsed().as_secs_f64() * 1e6);
        }
        row.wall = Some(Time::of(&mut walls));
        row.host = Some(Time::of(&mut hosts));
        Ok(())
    }

    /// µs of `n` calls together, by events on the stream: for long calls such as the ceilings'.
    pub fn stream_us(&self, n: usize, mut call: impl FnMut() -> candle_core::Result<()>) -> Result<f64> {
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        let start = self.stream.record_event(flags)?;
        for _ in 0..n {
            call()?;
        }
        let end = self.stream.record_event(flags)?;
        end.synchronize()?;
        Ok(f64::from(start.elapsed_ms(&end)?) * 1e3)
    }
}
