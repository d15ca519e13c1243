//! `models/cuda/gdn_scaled.h`, field for field.

use std::ffi::c_void;

candle_gdn_core::c_header! {
    "gdn_scaled.h";
    constants {
        pub(crate) GDN_SCALE_COLUMNS: usize = 128;
        pub(crate) GDN_SCALED_ROWS: usize = 64;
        pub(crate) GDN_SCALED_FEW_ROWS: usize = 16;
        pub(crate) GDN_SWIGLU_ROWS: usize = 8;
    }
    structs {
        #[derive(Clone, Copy)]
        pub(crate) struct Scales = gdn_scales {
            pub ptr: *const f32,
            pub stride: i64,
            pub rows: i32,
        }
        pub(crate) struct ScaledParams = gdn_scaled_params {
            pub x: *const c_void,
            pub w: *const c_void,
            pub below: *const c_void,
            pub y: *mut c_void,
            pub scales: Scales,
            pub x_stride: i64,
            pub w_stride: i64,
            pub below_stride: i64,
            pub y_stride: i64,
            pub rows: i32,
            pub inputs: i32,
            pub outputs: i32,
            pub outputs_below: i32,
            pub swiglu: i32,
            pub dtype: i32,
            pub overlap: i32,
        }
        pub(crate) struct DequantizeParams = gdn_dequantize_params {
            pub w: *const c_void,
            pub scales: Scales,
            pub y: *mut c_void,
            pub w_stride: i64,
            pub y_stride: i64,
            pub outputs: i32,
            pub inputs: i32,
            pub dtype: i32,
        }
    }
}

/// The scales of a matrix that is not in e4m3.
#[cfg(feature = "cuda")]
pub(crate) const NO_SCALES: Scales = Scales { ptr: std::ptr::null(), stride: 0, rows: 0 };

#[cfg(feature = "cuda")]
extern "C" {
    /// `options`: null, as Rust never chooses how a product is divided.
    pub(crate) fn gdn_scaled(
        params: *const ScaledParams,
        options: *const c_void,
        stream: *mut c_void,
    ) -> std::ffi::c_int;
    pub(crate) fn gdn_dequantize(params: *const DequantizeParams, stream: *mut c_void) -> std::ffi::c_int;
}
