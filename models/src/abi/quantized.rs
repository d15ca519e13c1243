//! `models/cuda/gdn_quantized.h`, field for field.

use std::ffi::c_void;

candle_gdn_core::c_header! {
    "gdn_quantized.h";
    constants {
        pub(crate) GDN_Q8_0: i32 = 0;
        pub(crate) GDN_Q4_K: i32 = 1;
        pub(crate) GDN_Q6_K: i32 = 2;
        pub(crate) GDN_QUANTIZED_PARTS: usize = 4;
    }
    structs {
        pub(crate) struct PackParams = gdn_quantized_pack_params {
            pub from: *const c_void,
            pub to: *mut c_void,
            pub r#type: i32,
            pub outputs: i32,
            pub inputs: i32,
            pub paired: i32,
        }
        pub(crate) struct QuantizedPart = gdn_quantized_part {
            pub w: *const c_void,
            pub r#type: i32,
            pub outputs: i32,
        }
        pub(crate) struct QuantizedParams = gdn_quantized_params {
            pub x: *const c_void,
            pub parts: *const QuantizedPart,
            pub y: *mut c_void,
            pub x_stride: i64,
            pub y_stride: i64,
            pub rows: i32,
            pub num_parts: i32,
            pub inputs: i32,
            pub swiglu: i32,
            pub groups: i32,
            pub per_group: i32,
            pub dtype: i32,
            pub overlap: i32,
        }
        pub(crate) struct RowsParams = gdn_quantized_rows_params {
            pub w: *const c_void,
            pub ids: *const u32,
            pub y: *mut c_void,
            pub y_stride: i64,
            pub r#type: i32,
            pub outputs: i32,
            pub inputs: i32,
            pub rows: i32,
            pub paired: i32,
            pub dtype: i32,
        }
    }
}

#[cfg(feature = "cuda")]
extern "C" {
    pub(crate) fn gdn_quantized_pack(params: *const PackParams, stream: *mut c_void) -> std::ffi::c_int;
    pub(crate) fn gdn_quantized_size(params: *const PackParams, bytes: *mut i64) -> std::ffi::c_int;
    pub(crate) fn gdn_quantized(params: *const QuantizedParams, stream: *mut c_void) -> std::ffi::c_int;
    pub(crate) fn gdn_quantized_many(params: *const QuantizedParams, stream: *mut c_void) -> std::ffi::c_int;
    pub(crate) fn gdn_quantized_rows(params: *const RowsParams, stream: *mut c_void) -> std::ffi::c_int;
}
