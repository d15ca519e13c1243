//! The devices of tests.

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

/// The device's next allocations, 256 MiB in all, find NaN in each float and not a new page's zeros: what no kernel wrote shows.
/// compute-sanitizer's `initcheck` cannot replace this: it misses what a kernel stores by bulk copies, cuBLAS' kernels too.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub fn fill_memory_with_nan(device: &Device) {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        use candle_core::cuda_backend::cudarc::driver::{
            result, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
        };
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| {
            let mut bytes = 256u64 << 20;
            let stream = device.cuda_stream();
            // SAFETY: the pool is the device's own, the attribute a u64; the memory is written where it was allocated, in the stream's order.
            unsafe {
                let pool = result::device::get_default_mem_pool(stream.context().cu_device()).expect("the memory pool");
                result::mem_pool::set_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, (&raw mut bytes).cast())
                    .expect("its threshold");
                let memory = result::malloc_async(stream.cu_stream(), bytes as usize).expect("256 MiB");
                result::memset_d8_async(memory, 0xff, bytes as usize, stream.cu_stream()).expect("a launch");
                result::free_async(memory, stream.cu_stream()).expect("memory that is freed");
            }
        });
    }
}
