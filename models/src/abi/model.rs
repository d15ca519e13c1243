//! `models/cuda/gdn_model.h`, field for field.

use std::ffi::c_void;

candle_gdn_core::c_header! {
    "gdn_model.h";
    constants {}
    structs {
        pub(crate) struct ResidualParams = gdn_residual_params {
            pub x: *const c_void,
            pub h: *const c_void,
            pub sum: *mut c_void,
            pub y: *mut c_void,
            pub weight: *const f32,
            pub x_stride: i64,
            pub h_stride: i64,
            pub sum_stride: i64,
            pub y_stride: i64,
            pub rows: i64,
            pub dim: i32,
            pub dtype: i32,
            pub overlap: i32,
            pub eps: f32,
        }
        pub(crate) struct SwigluParams = gdn_swiglu_params {
            pub gate: *const c_void,
            pub up: *const c_void,
            pub out: *mut c_void,
            pub gate_stride: i64,
            pub up_stride: i64,
            pub out_stride: i64,
            pub rows: i64,
            pub columns: i32,
            pub dtype: i32,
            pub overlap: i32,
        }
    }
}

#[cfg(feature = "cuda")]
extern "C" {
    pub(crate) fn gdn_residual(params: *const ResidualParams, stream: *mut c_void) -> std::ffi::c_int;
    pub(crate) fn gdn_swiglu(params: *const SwigluParams, stream: *mut c_void) -> std::ffi::c_int;
}
