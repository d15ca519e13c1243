//! How an op's kernel is launched: what it may overlap, and where it writes.

/// How a kernel is launched. It changes no result; the CPU ignores it.
#[derive(Debug, Clone, Default)]
pub struct Launch {
    /// The kernel may begin while the one before it on the stream still runs (programmatic dependent launch), and read
    /// what no kernel of a pass writes: weights, and what the op's own docs name. It waits for the kernel before it
    /// reads anything else.
    pub overlap: bool,
    /// Where the op writes its output; without one, a new allocation.
    pub arena: Option<Arena>,
}

impl Launch {
    /// The same, overlapping the kernel before it.
    pub fn overlapping(&self) -> Self {
        Self { overlap: true, ..self.clone() }
    }

    /// The next layer of a pass begins: see [`Arena`].
    pub fn next_layer(&self) {
        #[cfg(feature = "cuda")]
        if let Some(arena) = &self.arena {
            arena.next_layer();
        }
    }
}

#[cfg(feature = "cuda")]
pub use super::arena::Arena;

/// Outputs that stay where they are from pass to pass, on CUDA.
#[cfg(not(feature = "cuda"))]
#[derive(Debug, Clone)]
pub enum Arena {}
