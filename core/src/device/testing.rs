//! What the unit tests of CUDA code run on.

use candle_core::Device;

/// The first CUDA device, if there is one; `CANDLE_GDN_TEST_DEVICE` is `cpu` where none is to be used, and `cuda` where it
/// must be there.
pub fn device() -> Option<Device> {
    match std::env::var("CANDLE_GDN_TEST_DEVICE").as_deref() {
        Ok("cpu") => None,
        Ok("cuda") => Some(Device::new_cuda(0).expect("CANDLE_GDN_TEST_DEVICE=cuda, but there is no CUDA device")),
        _ => Device::new_cuda(0).ok(),
    }
}
