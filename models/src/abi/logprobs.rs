//! `models/cuda/gdn_logprobs.h`, field for field.

#[cfg(any(feature = "cuda", test))]
use super::sampling::SamplingRow;
#[cfg(any(feature = "cuda", test))]
use std::ffi::c_void;

candle_gdn_core::c_header! {
    "gdn_logprobs.h";
    constants {
        pub(crate) GDN_MOST_LIKELIEST: usize = 20;
    }
    structs {
        pub(crate) struct LogprobsRow = gdn_logprobs_row {
            pub likeliest: u32,
            pub drawn: f32,
            pub ids: [u32; GDN_MOST_LIKELIEST],
            pub logprobs: [f32; GDN_MOST_LIKELIEST],
        }
        #[cfg(any(feature = "cuda", test))]
        pub(crate) struct LogprobsParams = gdn_logprobs_params {
            pub logits: *const c_void,
            pub state: *const SamplingRow,
            pub ids: *const u32,
            pub drawn: *const u32,
            pub recent: *const u32,
            pub out: *mut LogprobsRow,
            pub raw: *mut f32,
            pub parts: *mut u32,
            pub logits_stride: i64,
            pub rows: i32,
            pub vocab: i32,
            pub history: i32,
            pub dtype: i32,
        }
    }
}

/// u32 of a [`LogprobsRow`], as it lies on a device.
#[cfg(feature = "cuda")]
pub(crate) const LOGPROBS_WORDS: usize = size_of::<LogprobsRow>() / 4;

#[cfg(feature = "cuda")]
extern "C" {
    pub(crate) fn gdn_logprobs_begin(params: *const LogprobsParams, stream: *mut c_void) -> std::ffi::c_int;
    pub(crate) fn gdn_logprobs_end(params: *const LogprobsParams, stream: *mut c_void) -> std::ffi::c_int;
    pub(crate) fn gdn_logprobs_words(rows: i32, vocab: i32, words: *mut i64) -> std::ffi::c_int;
}
