//! The C ABI of the CUDA kernels in Rust. It is plain data, compiled on every machine, so that the tests compare it with the
//! header wherever there is a C compiler.
#![allow(missing_docs)]

#[cfg(test)]
#[path = "../../tests/support/c_layout.rs"]
mod c_layout;
pub mod gdn;

#[cfg(all(test, feature = "cuda"))]
#[test]
fn statuses_have_the_same_text_in_rust() {
    for status in (-1..=12).chain([gdn::GDN_CUDA_ERROR]) {
        // SAFETY: the function returns a static string for every status.
        let c = unsafe { std::ffi::CStr::from_ptr(gdn::gdn_status_string(status)) };
        assert_eq!(candle_gdn_core::abi::status_text(status), c.to_string_lossy(), "{status}");
    }
}
