//! Devices, random numbers, the error measure, and errors that are wanted.

use crate::skipped::skipped;
use candle_core::{DType, Device, Result, Tensor};
use std::cell::RefCell;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The devices to test on.
pub fn devices() -> Vec<Device> {
    TURN.with_borrow_mut(|turn| {
        turn.get_or_insert_with(|| Turn::Shared(GPU.read().unwrap_or_else(PoisonError::into_inner)));
    });
    devices_with(Device::new_cuda)
}

/// The same, the GPU with one stream for all host threads: what graphs need. No other test has the GPU until this thread
/// ends.
pub fn single_stream_devices() -> Vec<Device> {
    TURN.with_borrow_mut(|turn| {
        if !matches!(turn, Some(Turn::Alone(_))) {
            *turn = None; // before it waits for others to give up theirs
            *turn = Some(Turn::Alone(GPU.write().unwrap_or_else(PoisonError::into_inner)));
        }
    });
    devices_with(candle_gdn::single_stream_device)
}

/// While a stream is captured nobody may wait for the whole device: both fail then, and what follows with them.
static GPU: RwLock<()> = RwLock::new(());

/// What a test's thread holds of it, until the thread ends.
#[expect(dead_code, reason = "a guard is held, not read")]
enum Turn {
    Shared(RwLockReadGuard<'static, ()>),
    Alone(RwLockWriteGuard<'static, ()>),
}

thread_local! {
    static TURN: RefCell<Option<Turn>> = const { RefCell::new(None) };
}

/// Those of `devices` that are GPUs, for tests of what nothing else has.
pub fn gpus(devices: Vec<Device>) -> Vec<Device> {
    let gpus: Vec<Device> = devices.into_iter().filter(Device::is_cuda).collect();
    if gpus.is_empty() {
        skipped("no GPU");
    }
    gpus
}

/// What `CANDLE_GDN_SOAK` says: how much the tests do that may go on for as long as one likes.
pub fn soak() -> Option<usize> {
    std::env::var("CANDLE_GDN_SOAK").ok().map(|n| n.parse().expect("CANDLE_GDN_SOAK: a number"))
}

/// Resident bytes of this process, where the system says so.
pub fn resident() -> Option<usize> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(pages.split_whitespace().nth(1)?.parse::<usize>().ok()? * 4096)
}

fn devices_with(cuda: fn(usize) -> Result<Device>) -> Vec<Device> {
    let wanted = std::env::var("CANDLE_GDN_TEST_DEVICE").unwrap_or_default();
    // Without the feature `cuda` of the package under test there is no such device.
    let cuda = || cuda(0).ok().inspect(candle_gdn_core::device::testing::fill_memory_with_nan);
    match wanted.as_str() {
        "cpu" => vec![Device::Cpu],
        "cuda" => vec![cuda().expect("CANDLE_GDN_TEST_DEVICE=cuda, but there is no CUDA device")],
        "" => std::iter::once(Device::Cpu).chain(cuda()).collect(),
        other => panic!("CANDLE_GDN_TEST_DEVICE: expected cpu or cuda, got {other}"),
    }
}

/// Relative RMS error `||x - want|| / ||want||`; NaN anywhere is infinite. Two empty or zero tensors agree.
pub fn rel_rms<T: Copy + Into<f64>>(x: &[T], want: &[T]) -> f64 {
    assert_eq!(x.len(), want.len(), "lengths differ");
    let (mut error, mut norm) = (0.0, 0.0);
    for (x, w) in x.iter().zip(want) {
        let (x, w): (f64, f64) = ((*x).into(), (*w).into());
        error += (x - w) * (x - w);
        norm += w * w;
    }
    if error == 0.0 {
        0.0
    } else if error.is_nan() {
        f64::INFINITY
    } else {
        (error / norm).sqrt()
    }
}

/// Fails unless it is an error that says all `parts`.
#[track_caller]
pub fn refused<T>(result: Result<T>, parts: &[&str]) {
    let Err(error) = result else { panic!("accepted, expected an error with {parts:?}") };
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "expected {part:?} in: {message}");
    }
}

/// The values of a tensor of any float dtype, in f64.
pub fn values(tensor: &Tensor) -> Vec<f64> {
    if tensor.elem_count() == 0 {
        return vec![];
    }
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// `exact` with random errors of at most `relative`: what a result does under them, no arithmetic that precise avoids.
pub fn noisy(exact: &[f64], relative: f64, rng: &mut Rng) -> Vec<f64> {
    exact.iter().map(|x| x * (1.0 + relative * (2.0 * rng.uniform() - 1.0))).collect()
}

/// A tensor of `dtype` from f64 values, and the values after rounding to it.
pub fn rounded(values: &[f64], shape: &[usize], dtype: DType) -> Result<(Tensor, Vec<f64>)> {
    let tensor = Tensor::from_slice(values, shape, &Device::Cpu)?.to_dtype(DType::F32)?.to_dtype(dtype)?;
    let back = self::values(&tensor);
    Ok((tensor, back))
}

/// `tensor` on `device`. candle cannot move an empty one to a GPU: that becomes an empty view there.
pub fn to_device(tensor: &Tensor, device: &Device) -> Result<Tensor> {
    if tensor.elem_count() > 0 || device.is_cpu() {
        return tensor.to_device(device);
    }
    let padded: Vec<usize> = tensor.dims().iter().map(|&n| n.max(1)).collect();
    let view = Tensor::zeros(padded, tensor.dtype(), device)?;
    tensor.dims().iter().enumerate().try_fold(view, |view, (dim, &n)| view.narrow(dim, 0, n))
}

/// A small generator (xorshift64*), so that a failing case is its seed.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn uniform(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn normal(&mut self) -> f64 {
        let (u, v) = (1.0 - self.uniform(), self.uniform());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }

    pub fn normals(&mut self, n: usize) -> Vec<f64> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// Fills freed memory with NaN, so that an output element no kernel wrote is seen: the allocator is likely to hand the
/// same block to the next tensor of this size.
pub fn poison(elements: usize, dtype: DType, device: &Device) -> Result<()> {
    if elements > 0 {
        drop(Tensor::full(f32::NAN, elements, device)?.to_dtype(dtype)?);
        device.synchronize()?;
    }
    Ok(())
}
