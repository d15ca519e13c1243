//! What the benchmarks share: the record that they write, the baseline in tensor operations, and what a call's time is made of.

pub mod parts;
pub mod record;
pub mod tensor_ops;
