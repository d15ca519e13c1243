//! Ops and layer against the f64 reference and the golden files, on the CPU and, built with `--features cuda` on a machine
//! with a GPU, on CUDA: one binary, the same cases.
//!
//! `CANDLE_GDN_TEST_DEVICE=cpu|cuda` picks one device; `cuda` fails where there is none.
//! `CANDLE_GDN_GOLDENS` names the folder of the full golden files (default: the thinned ones of this repository).
//! `CANDLE_GDN_SOAK` sets the number of calls of the soak tests.

mod conv_norm;
mod errors;
mod faults;
mod goldens;
mod grad_case;
mod gradients;
mod layer;
mod pool;
#[cfg(feature = "profile")]
mod profile;
#[cfg(feature = "profile")]
mod profile_more;
mod projections;
mod properties;
mod random_layer;
mod readme;
mod ready_gates;
mod ring;
mod rule_case;
mod rule_constants;
mod rule_drawn;
mod semantics;
mod shared_ring;
mod sixteen_bits;
mod sizes;
mod slot_pool;
mod slots;
mod soak;
mod step;
mod step_args;
mod step_case;
mod stored_state;
mod strong_decays;
mod support;
mod tensor_cores;
mod threads;
mod train_faults;
#[cfg(feature = "cuda")]
mod train_graph;
mod train_layer;
mod train_layouts;
mod train_ops;
mod train_packed_state;
mod training;
mod verify;

use candle_gdn_testing::skipped;
