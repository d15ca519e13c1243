//! `models/cuda/gdn_round.h`, field for field.

use super::sampling::SamplingRow;

candle_gdn::c_header! {
    "gdn_round.h";
    constants {}
    structs {
        pub(crate) struct RoundParams = gdn_round_params {
            pub ids: *mut u32,
            pub rows: *mut SamplingRow,
            pub chosen: *mut u32,
            pub drawn: *mut u32,
            pub recent: *mut u32,
            pub stayed: *mut u32,
            pub last: *mut u32,
            pub positions: *mut u32,
            pub head: *mut u32,
            pub behind: *mut u32,
            pub out: *mut u32,
            pub seqs: i32,
            pub tokens: i32,
            pub history: i32,
            pub forced: f32,
        }
    }
}

#[cfg(feature = "cuda")]
extern "C" {
    pub(crate) fn gdn_round_begin(params: *const RoundParams, stream: *mut std::ffi::c_void) -> std::ffi::c_int;
    pub(crate) fn gdn_round_end(params: *const RoundParams, stream: *mut std::ffi::c_void) -> std::ffi::c_int;
}
