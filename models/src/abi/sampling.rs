//! `models/cuda/gdn_sampling.h`, field for field.

use std::ffi::c_void;

candle_gdn_core::c_header! {
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
            pub window: u32,
            pub seen: u32,
            pub penalty: f32,
            pub repeats: u32,
            pub own: u32,
            pub presence: f32,
            pub frequency: f32,
            pub likeliest: u32,
            pub gap: f32,
        }
        pub(crate) struct SamplingParams = gdn_sampling_params {
            pub logits: *mut c_void,
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
            pub dtype: i32,
        }
    }
}

impl SamplingRow {
    /// The most likely token, without a penalty.
    pub(crate) const GREEDY: Self = Self {
        scale: 0.,
        top_p: 1.,
        seed: 0,
        index: 0,
        top_k: 0,
        window: 0,
        seen: 0,
        penalty: 1.,
        repeats: 0,
        own: 0,
        presence: 0.,
        frequency: 0.,
        likeliest: 0,
        gap: f32::INFINITY,
    };

    /// A row of padding.
    #[cfg(feature = "cuda")]
    pub(crate) const PADDING: Self = Self { scale: -1., ..Self::GREEDY };

    #[cfg(all(test, feature = "cuda"))]
    pub(crate) fn from_words(words: &[u32; ROW_WORDS]) -> Self {
        // SAFETY: any bits are a row, which is numbers without gaps.
        unsafe { std::mem::transmute(*words) }
    }

    /// The row as it lies in memory, here and on the device.
    #[cfg(feature = "cuda")]
    pub(crate) fn words(&self) -> [u32; ROW_WORDS] {
        // SAFETY: a row is numbers without gaps.
        unsafe { std::mem::transmute(*self) }
    }
}

/// u32 of a [`SamplingRow`], as it lies on a device.
#[cfg(feature = "cuda")]
pub(crate) const ROW_WORDS: usize = size_of::<SamplingRow>() / 4;

#[cfg(feature = "cuda")]
extern "C" {
    pub(crate) fn gdn_sampling(params: *const SamplingParams, stream: *mut c_void) -> std::ffi::c_int;
    pub(crate) fn gdn_sampling_workspace(rows: i32, bytes: *mut i64) -> std::ffi::c_int;
}
