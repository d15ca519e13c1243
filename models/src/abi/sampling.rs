//! `models/cuda/gdn_sampling.h`, field for field.

use std::ffi::c_void;

candle_gdn::c_header! {
    "gdn_sampling.h";
    constants {
        pub(crate) GDN_NO_TOKEN: u32 = u32::MAX;
    }
    structs {
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub(crate) struct SamplingRow = gdn_sampling_row {
            pub scale: f64,
            pub top_p: f64,
            pub seed: u64,
            pub index: u64,
            pub top_k: u32,
            pub penalty: f32,
            pub window: u32,
            pub seen: u32,
        }
        pub(crate) struct SamplingParams = gdn_sampling_params {
            pub logits: *mut f32,
            pub ids: *mut u32,
            pub drawn: *mut u32,
            pub state: *mut SamplingRow,
            pub recent: *mut u32,
            pub kept: *mut f32,
            pub workspace: *mut c_void,
            pub workspace_bytes: i64,
            pub logits_stride: i64,
            pub rows: i32,
            pub vocab: i32,
            pub history: i32,
        }
    }
}

impl SamplingRow {
    /// The most likely token, without a penalty.
    pub(crate) const GREEDY: Self =
        Self { scale: 0., top_p: 1., seed: 0, index: 0, top_k: 0, penalty: 1., window: 0, seen: 0 };
}

#[cfg(feature = "cuda")]
extern "C" {
    pub(crate) fn gdn_sampling(params: *const SamplingParams, stream: *mut c_void) -> std::ffi::c_int;
    pub(crate) fn gdn_sampling_workspace(rows: i32, bytes: *mut i64) -> std::ffi::c_int;
}
