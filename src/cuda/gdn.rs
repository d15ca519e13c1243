//! `cuda/gdn.h`, field for field.

use std::ffi::{c_char, c_int, c_void};

/// `gdn_heads`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Heads {
    pub ptr: *const c_void,
    pub seq_stride: i64,
    pub token_stride: i64,
    pub head_stride: i64,
}

/// `gdn_sequences`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Sequences {
    pub cu_seqlens: *const u32,
    pub num_seqs: i32,
    pub tokens_per_seq: i32,
    pub max_tokens_per_seq: i32,
    pub total_tokens: i32,
}

/// `gdn_slots`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Slots {
    pub slots: *const u32,
    pub num_slots: i64,
    pub slot_stride: i64,
}

/// `gdn_rule_params`
#[repr(C)]
pub struct RuleParams {
    pub q: Heads,
    pub k: Heads,
    pub v: Heads,
    pub a: Heads,
    pub b: Heads,
    pub a_log: *const f32,
    pub dt_bias: *const f32,
    pub o: Heads,
    pub state_in: *const c_void,
    pub state_out: *mut c_void,
    pub token_states: *mut c_void,
    pub checkpoints: *mut c_void,
    pub workspace: *mut c_void,
    pub workspace_bytes: i64,
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
    pub algo: i32,
    pub checkpoint_tokens: i32,
    pub segments: i32,
    pub l2_eps: f32,
    pub scale: f32,
    pub beta_scale: f32,
}

/// `gdn_conv_params`
#[repr(C)]
pub struct ConvParams {
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

/// `gdn_norm_params`
#[repr(C)]
pub struct NormParams {
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

/// `gdn_step_params`
#[repr(C)]
pub struct StepParams {
    pub x: Heads,
    pub z: Heads,
    pub a: Heads,
    pub b: Heads,
    pub out: Heads,
    pub conv_weight: *const c_void,
    pub norm_weight: *const c_void,
    pub a_log: *const f32,
    pub dt_bias: *const f32,
    pub conv_in: *const c_void,
    pub conv_out: *mut c_void,
    pub state_in: *const c_void,
    pub state_out: *mut c_void,
    pub token_states: *mut c_void,
    pub in_slots: Slots,
    pub out_slots: Slots,
    pub conv_in_stride: i64,
    pub conv_out_stride: i64,
    pub seqs: Sequences,
    pub num_k_heads: i32,
    pub num_v_heads: i32,
    pub head_k: i32,
    pub head_v: i32,
    pub conv_width: i32,
    pub io_dtype: i32,
    pub gate_dtype: i32,
    pub state_dtype: i32,
    pub conv_dtype: i32,
    pub norm_dtype: i32,
    pub l2norm: i32,
    pub sigmoid: i32,
    pub algo: i32,
    pub overlap: i32,
    pub l2_eps: f32,
    pub scale: f32,
    pub beta_scale: f32,
    pub norm_eps: f32,
}

/// `gdn_linear_params`
#[repr(C)]
pub struct LinearParams {
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

/// `gdn_linear_options`
#[repr(C)]
#[derive(Default)]
pub struct LinearOptions {
    pub swiglu: i32,
    pub warps: i32,
    pub groups: i32,
    pub cluster: i32,
    pub blocks: i32,
}

extern "C" {
    pub fn gdn_rule(params: *const RuleParams, stream: *mut c_void) -> c_int;
    pub fn gdn_rule_choice(params: *const RuleParams, algo: *mut i32) -> c_int;
    pub fn gdn_rule_workspace(params: *const RuleParams, bytes: *mut i64) -> c_int;
    pub fn gdn_conv(params: *const ConvParams, stream: *mut c_void) -> c_int;
    pub fn gdn_norm(params: *const NormParams, stream: *mut c_void) -> c_int;
    pub fn gdn_step(params: *const StepParams, stream: *mut c_void) -> c_int;
    pub fn gdn_step_choice(params: *const StepParams, algo: *mut i32) -> c_int;
    pub fn gdn_linear_with(params: *const LinearParams, options: *const LinearOptions, stream: *mut c_void) -> c_int;
    pub fn gdn_status_string(status: c_int) -> *const c_char;
    #[cfg(feature = "profile")]
    pub fn gdn_profile_set(buffer: *mut c_void, bytes: u64, events_per_warp: u32) -> c_int;
    #[cfg(feature = "profile")]
    pub fn gdn_profile_scope(scope: u32) -> *const c_char;
    #[cfg(feature = "profile")]
    pub fn gdn_profile_role(role: u32) -> *const c_char;
}
