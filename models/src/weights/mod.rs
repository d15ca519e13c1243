//! Weights as kernels read them.
//!
//! A road of four steps, the same for every number format:
//! 1. `formats` reads a matrix as it is stored ([`Stored`](crate::formats::Stored)) and puts its rows in order.
//! 2. [`place`](crate::formats::place) brings it to the device as a [`Weight`], the one enum that says how numbers are stored.
//! 3. [`Weight::multiply`] and [`Weight::swiglu`] multiply it, [`grouped`] the experts of a layer; [`Weight::lookup`] reads rows.
//! 4. [`plan`] chooses the kernel: pure functions of rows, sizes, storage and dtype.
//!
//! # To add a number format
//! A block type of GGUF: a row in `formats/gguf/types.rs`, whose array is then one longer. `Kept::Decoded` keeps it as a `GgmlDType`
//! that candle has, such as q8_0, by a function in `types/decode.rs`, with a row in `types/tests.rs`, and that is all. `--quantize` has
//! lists of its own: `formats/quantize.rs`, `cli/src/load.rs`, `cli/src/memory/advice.rs`. Steps 3 to 5 are for a type that stays as
//! it is and gets kernels of ours; one that candle lacks changes `Kept` and `Blocks` too, which hold candle's types. Any other format:
//! 1. `formats/NAME.rs`: implement [`Format`](crate::formats::Format), so that `matrix` returns a `Stored`, and let the
//!    loader (`loader.rs`) give it to the `Source`. A `quantization_config` that names it: `config/quantization.rs`. If the
//!    format dequantises as it loads, this is all.
//! 2. If its numbers stay as they are: a variant of `Stored`, with its rows in `Stored::select_rows`, and a line in
//!    `formats/place.rs` that makes a `Weight` of it. Experts: a variant of `StoredExperts` (`formats/experts.rs`).
//! 3. A new storage on the device: a variant of [`Weight`] (the compiler then lists the matches in `weight.rs` and
//!    `multiply.rs`), its kernel's launch in `weights/cuda/` or `weights/cpu/`, its line in `plan.rs` and in that table's test.
//!    A type of ggml on the CPU: `with_layout` in `weights/cpu/quantized`.
//! 4. Kernels: a folder in `models/cuda/`, its header beside the others and the header in Rust in `models/src/abi/`. A type of
//!    ggml that packs into units of 4 inputs: `gdn_quantized_type` in the header and `abi/quantized.rs`, its layout in
//!    `cuda/quantized/layout.cuh` and `pack.cu`, and wherever `GDN_Q6_K` stands in `models/cuda` and `weights/cuda`. Its
//!    checks: `models/cuda/tests/ggml.py`, and its number in two places of `cuda/tests/test_shapes.py`. Experts by candle's kernels:
//!    `is_indexed` in `grouped.rs`.
//! 5. What it takes in memory: `memory.rs`, and for the programs `cli/src/memory.rs`. Tests: `models/tests/models/NAME.rs`
//!    against the dequantised numbers.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod e4m3;
pub(crate) mod grouped;
mod multiply;
pub(crate) mod plan;
mod tiles;
mod weight;

pub(crate) use e4m3::{E4m3, BLOCK_COLUMNS};
pub(crate) use tiles::Tiles;
pub(crate) use weight::Weight;
