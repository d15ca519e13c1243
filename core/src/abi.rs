//! `cuda/gdn.h` in Rust, field for field. It is plain data, compiled on every machine, so that the tests compare it with the
//! header wherever there is a C compiler.

use std::ffi::c_void;

/// Declares the constants and the `#[repr(C)]` structs of a header, each field once, and a test that compares all of them
/// with the C compiler's (`candle_gdn_testing::c_layout`).
#[macro_export]
macro_rules! c_header {
    (
        $header:literal;
        constants { $($const_vis:vis $constant:ident: $const_type:ty = $value:expr;)* }
        structs {
            $(
                $(#[$attribute:meta])*
                $struct_vis:vis struct $name:ident = $c_name:ident { $($field_vis:vis $field:ident: $type:ty,)* }
            )*
        }
    ) => {
        $(
            #[doc = concat!("`", stringify!($constant), "`")]
            #[allow(dead_code)]
            $const_vis const $constant: $const_type = $value;
        )*
        $(
            #[doc = concat!("`", stringify!($c_name), "`")]
            #[repr(C)]
            #[allow(dead_code)]
            $(#[$attribute])*
            $struct_vis struct $name { $($field_vis $field: $type,)* }
        )*

        #[cfg(test)]
        #[test]
        #[allow(clippy::vec_init_then_push)] // a header has any number of constants, none among them
        fn is_what_the_header_says() {
            use std::mem::{offset_of, size_of};
            let mut lines = vec![];
            $(lines.push((stringify!($constant).to_owned(), vec![$constant as i64]));)*
            $(
                lines.push((concat!("struct ", stringify!($c_name)).to_owned(), vec![size_of::<$name>() as i64]));
                $(
                    let place = vec![offset_of!($name, $field) as i64, size_of::<$type>() as i64];
                    lines.push((concat!(stringify!($c_name), ".", stringify!($field)).to_owned(), place));
                )*
            )*
            candle_gdn_testing::c_layout::compare($header, &lines);
        }
    };
}

c_header! {
    "gdn.h";
    constants {
        pub GDN_F32: i32 = 0;
        pub GDN_BF16: i32 = 1;
        pub GDN_F16: i32 = 2;
        pub GDN_OK: i32 = 0;
        pub GDN_BAD_ALGO: i32 = 7;
        pub GDN_CUDA_ERROR: i32 = 1000;
        pub GDN_NO_SLOT: u32 = u32::MAX;
        pub GDN_AUTO: i32 = 0;
        pub GDN_RECURRENT: i32 = 1;
        pub GDN_RECURRENT_128: i32 = 2;
        pub GDN_DECODE: i32 = 3;
        pub GDN_CHUNKED_SM80: i32 = 4;
        pub GDN_CHUNKED_SM90: i32 = 5;
        pub GDN_GATES_RAW: i32 = 0;
        pub GDN_GATES_READY: i32 = 1;
        pub GDN_CHUNK: usize = 64;
        pub GDN_STEP_AUTO: i32 = 0;
        pub GDN_STEP_WHOLE: i32 = 1;
        pub GDN_STEP_SPLIT: i32 = 2;
        pub GDN_STEP_HEADS: i32 = 3;
        pub GDN_RING_ENTRIES: usize = 16;
        pub GDN_RING_CAPACITY: usize = 32;
        pub GDN_RING_STEP_TOKENS: usize = 16;
        pub GDN_RING_AUTO: i32 = 0;
        pub GDN_LINEAR_ROWS: usize = 32;
        pub GDN_OVERLAP: i32 = 1;
        pub GDN_PROFILE_LEAN: u32 = 1 << 31;
        pub GDN_PROFILE_CHUNK: u32 = 1 << 30;
    }
    structs {
        #[derive(Clone, Copy)]
        pub struct Heads = gdn_heads {
            pub ptr: *const c_void,
            pub seq_stride: i64,
            pub token_stride: i64,
            pub head_stride: i64,
        }
        #[derive(Clone, Copy)]
        pub struct Sequences = gdn_sequences {
            pub cu_seqlens: *const u32,
            pub num_seqs: i32,
            pub tokens_per_seq: i32,
            pub max_tokens_per_seq: i32,
            pub total_tokens: i32,
        }
        #[derive(Clone, Copy)]
        pub struct Slots = gdn_slots {
            pub slots: *const u32,
            pub num_slots: i64,
            pub slot_stride: i64,
        }
        #[derive(Clone, Copy)]
        pub struct Common = gdn_common {
            pub a: Heads,
            pub b: Heads,
            pub a_log: *const f32,
            pub dt_bias: *const c_void,
            pub state_in: *const c_void,
            pub state_out: *mut c_void,
            pub in_slots: Slots,
            pub out_slots: Slots,
            pub seqs: Sequences,
            pub num_k_heads: i32,
            pub num_v_heads: i32,
            pub head_k: i32,
            pub head_v: i32,
            pub io_dtype: i32,
            pub gate_dtype: i32,
            pub state_dtype: i32,
            pub l2norm: i32,
            pub l2_eps: f32,
            pub scale: f32,
            pub beta_scale: f32,
        }
        pub struct RuleParams = gdn_rule_params {
            pub common: Common,
            pub q: Heads,
            pub k: Heads,
            pub v: Heads,
            pub o: Heads,
            pub workspace: *mut c_void,
            pub workspace_bytes: i64,
            pub head_stride: i64,
            pub counts: *const u32,
            pub dt_bias_dtype: i32,
            pub gates: i32,
            pub algo: i32,
            pub segments: i32,
        }
        pub struct ConvParams = gdn_conv_params {
            pub x: Heads,
            pub y: Heads,
            pub weight: *const c_void,
            pub state_in: *const c_void,
            pub state_out: *mut c_void,
            pub in_slots: Slots,
            pub out_slots: Slots,
            pub seqs: Sequences,
            pub channels: i32,
            pub width: i32,
            pub io_dtype: i32,
            pub weight_dtype: i32,
            pub silu: i32,
        }
        pub struct NormParams = gdn_norm_params {
            pub x: Heads,
            pub z: Heads,
            pub out: Heads,
            pub weight: *const c_void,
            pub tokens: i64,
            pub heads: i32,
            pub head_v: i32,
            pub io_dtype: i32,
            pub weight_dtype: i32,
            pub sigmoid: i32,
            pub eps: f32,
        }
        #[derive(Clone, Copy)]
        pub struct ReadyGatesParams = gdn_ready_gates_params {
            pub a: Heads,
            pub b: Heads,
            pub log_decay: Heads,
            pub beta: Heads,
            pub a_log: *const f32,
            pub dt_bias: *const f32,
            pub num_seqs: i64,
            pub tokens_per_seq: i64,
            pub heads: i32,
            pub gate_dtype: i32,
            pub beta_scale: f32,
        }
        pub struct ReadyGatesBackwardParams = gdn_ready_gates_backward_params {
            pub gates: ReadyGatesParams,
            pub d_log_decay: Heads,
            pub d_beta: Heads,
            pub d_a: Heads,
            pub d_b: Heads,
            pub d_a_log: *mut f32,
            pub d_dt_bias: *mut f32,
            pub workspace: *mut c_void,
            pub workspace_bytes: i64,
        }
        pub struct RuleBackwardParams = gdn_rule_backward_params {
            pub common: Common,
            pub q: Heads,
            pub k: Heads,
            pub v: Heads,
            pub d_o: Heads,
            pub d_state_out: *const f32,
            pub d_q: Heads,
            pub d_k: Heads,
            pub d_v: Heads,
            pub d_log_decay: Heads,
            pub d_beta: Heads,
            pub d_state_in: *mut f32,
            pub workspace: *mut c_void,
            pub workspace_bytes: i64,
            pub segments: i32,
            pub recompute: i32,
            pub algo: i32,
        }
        pub struct ConvBackwardParams = gdn_conv_backward_params {
            pub x: Heads,
            pub d_y: Heads,
            pub d_x: Heads,
            pub weight: *const c_void,
            pub state_in: *const c_void,
            pub d_weight: *mut f32,
            pub d_state_in: *mut c_void,
            pub seqs: Sequences,
            pub workspace: *mut c_void,
            pub workspace_bytes: i64,
            pub channels: i32,
            pub width: i32,
            pub io_dtype: i32,
            pub weight_dtype: i32,
            pub silu: i32,
        }
        pub struct NormBackwardParams = gdn_norm_backward_params {
            pub x: Heads,
            pub z: Heads,
            pub d_out: Heads,
            pub d_x: Heads,
            pub d_z: Heads,
            pub weight: *const c_void,
            pub d_weight: *mut f32,
            pub workspace: *mut c_void,
            pub workspace_bytes: i64,
            pub tokens: i64,
            pub heads: i32,
            pub head_v: i32,
            pub io_dtype: i32,
            pub weight_dtype: i32,
            pub sigmoid: i32,
            pub eps: f32,
        }
        #[derive(Clone, Copy)]
        pub struct Layer = gdn_layer {
            pub x: Heads,
            pub z: Heads,
            pub out: Heads,
            pub conv_weight: *const c_void,
            pub norm_weight: *const c_void,
            pub conv_width: i32,
            pub conv_dtype: i32,
            pub norm_dtype: i32,
            pub sigmoid: i32,
            pub norm_eps: f32,
            pub overlap: i32,
        }
        pub struct StepParams = gdn_step_params {
            pub common: Common,
            pub layer: Layer,
            pub conv_in: *const c_void,
            pub conv_out: *mut c_void,
            pub conv_in_stride: i64,
            pub conv_out_stride: i64,
            pub algo: i32,
        }
        #[derive(Clone, Copy)]
        pub struct Ring = gdn_ring {
            pub keys: *mut c_void,
            pub updates: *mut f32,
            pub decays: *mut f32,
            pub spans: *const u32,
            pub keys_stride: i64,
            pub updates_stride: i64,
            pub decays_stride: i64,
            pub capacity: i32,
            pub max_entries: i32,
        }
        pub struct RingStepParams = gdn_ring_step_params {
            pub common: Common,
            pub layer: Layer,
            pub ring: Ring,
            pub inputs: *mut c_void,
            pub inputs_stride: i64,
            pub algo: i32,
        }
        pub struct RingFlushParams = gdn_ring_flush_params {
            pub common: Common,
            pub ring: Ring,
        }
        pub struct RingAdvanceParams = gdn_ring_advance_params {
            pub spans: *mut u32,
            pub accepted: *const u32,
            pub in_slots: Slots,
            pub out_slots: Slots,
            pub seqs: Sequences,
            pub capacity: i32,
            pub max_entries: i32,
            pub flushed: i32,
        }
        pub struct RingInputsParams = gdn_ring_inputs_params {
            pub inputs: *mut c_void,
            pub conv_state: *mut c_void,
            pub spans: *const u32,
            pub in_slots: Slots,
            pub out_slots: Slots,
            pub inputs_stride: i64,
            pub num_seqs: i32,
            pub channels: i32,
            pub conv_width: i32,
            pub capacity: i32,
            pub io_dtype: i32,
            pub to_ring: i32,
        }
        pub struct LinearParams = gdn_linear_params {
            pub x: *const c_void,
            pub w: *const c_void,
            pub y: *mut c_void,
            pub x_stride: i64,
            pub w_stride: i64,
            pub y_stride: i64,
            pub rows: i32,
            pub inputs: i32,
            pub outputs: i32,
            pub dtype: i32,
            pub overlap: i32,
        }
        pub struct ProfileWarp = gdn_profile_warp {
            pub launch: u32,
            pub role: u32,
            pub sm: u32,
            pub block: u32,
            pub warp: u32,
            pub count: u32,
            pub dropped: u32,
            pub reserved: u32,
            pub begin_ns: u64,
            pub begin_cycles: u64,
            pub end_cycles: u64,
            pub end_ns: u64,
        }
        pub struct ProfileEvent = gdn_profile_event {
            pub scope: u32,
            pub token: u32,
            pub begin: u32,
            pub cycles: u32,
        }
    }
}

/// The gates and their strides where a launch reads none.
#[allow(dead_code)]
pub const NO_HEADS: Heads = Heads { ptr: std::ptr::null(), seq_stride: 0, token_stride: 0, head_stride: 0 };

#[cfg(feature = "cuda")]
extern "C" {
    pub fn gdn_rule(params: *const RuleParams, stream: *mut c_void) -> std::ffi::c_int;
    pub fn gdn_rule_choice(params: *const RuleParams, algo: *mut i32) -> std::ffi::c_int;
    pub fn gdn_rule_workspace(params: *const RuleParams, bytes: *mut i64) -> std::ffi::c_int;
    pub fn gdn_conv(params: *const ConvParams, stream: *mut c_void) -> std::ffi::c_int;
    pub fn gdn_norm(params: *const NormParams, stream: *mut c_void) -> std::ffi::c_int;
    pub fn gdn_ready_gates(params: *const ReadyGatesParams, stream: *mut c_void) -> std::ffi::c_int;
    pub fn gdn_ready_gates_backward(params: *const ReadyGatesBackwardParams, stream: *mut c_void) -> std::ffi::c_int;
    pub fn gdn_ready_gates_backward_workspace(
        params: *const ReadyGatesBackwardParams,
        bytes: *mut i64,
    ) -> std::ffi::c_int;
    pub fn gdn_rule_backward(params: *const RuleBackwardParams, stream: *mut c_void) -> std::ffi::c_int;
    pub fn gdn_rule_backward_workspace(params: *const RuleBackwardParams, bytes: *mut i64) -> std::ffi::c_int;
    pub fn gdn_conv_backward(params: *const ConvBackwardParams, stream: *mut c_void) -> std::ffi::c_int;
    pub fn gdn_conv_backward_workspace(params: *const ConvBackwardParams, bytes: *mut i64) -> std::ffi::c_int;
    pub fn gdn_norm_backward(params: *const NormBackwardParams, stream: *mut c_void) -> std::ffi::c_int;
    pub fn gdn_norm_backward_workspace(params: *const NormBackwardParams, bytes: *mut i64) -> std::ffi::c_int;
    pub fn gdn_step(params: *const StepParams, stream: *mut c_void) -> std::ffi::c_int;
    pub fn gdn_step_choice(params: *const StepParams, algo: *mut i32) -> std::ffi::c_int;
    pub fn gdn_ring_step(params: *const RingStepParams, stream: *mut c_void) -> std::ffi::c_int;
    pub fn gdn_ring_flush(params: *const RingFlushParams, stream: *mut c_void) -> std::ffi::c_int;
    pub fn gdn_ring_advance(params: *const RingAdvanceParams, stream: *mut c_void) -> std::ffi::c_int;
    pub fn gdn_ring_inputs(params: *const RingInputsParams, stream: *mut c_void) -> std::ffi::c_int;
    pub fn gdn_linear(params: *const LinearParams, stream: *mut c_void) -> std::ffi::c_int;
    pub fn gdn_profile_set(buffer: *mut c_void, bytes: u64, events_per_warp: u32) -> std::ffi::c_int;
    pub fn gdn_profile_scope(scope: u32) -> *const std::ffi::c_char;
    pub fn gdn_profile_role(role: u32) -> *const std::ffi::c_char;
}
