//! In the place of the crate `dynamo-memory`, of which `dynamo-llm` needs the few names below for a frontend that decodes
//! images and hands them on by RDMA. A worker does neither. That crate pins cudarc 0.19.8, and candle-core with `cuda` asks for
//! 0.19.10: Cargo takes one of the two, so without this one there are no workers with a GPU. It would also bring NIXL, and
//! with it libclang.
//!
//! Host memory is host memory here. Agents for RDMA cannot be made ([`nixl::NixlAgent`] has no values).

#![forbid(unsafe_code)]

use std::fmt;

/// What is not to be had here.
#[derive(Debug)]
pub struct Unsupported;

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "this worker is built without NIXL: it decodes no media and has no RDMA")
    }
}

impl std::error::Error for Unsupported {}

/// A region of memory.
pub trait MemoryDescriptor {
    /// In bytes.
    fn size(&self) -> usize;
}

/// Host memory.
#[derive(Debug)]
pub struct SystemStorage(Vec<u8>);

impl SystemStorage {
    /// So many bytes, all 0.
    ///
    /// # Errors
    /// Never.
    pub fn new(len: usize) -> Result<Self, Unsupported> {
        Ok(Self(vec![0; len]))
    }

    /// Its first byte.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }
}

impl MemoryDescriptor for SystemStorage {
    fn size(&self) -> usize {
        self.0.len()
    }
}

/// Access to bytes.
pub mod actions {
    use super::{SystemStorage, Unsupported};

    /// What bytes can be read of.
    pub trait Slice {
        /// The bytes.
        ///
        /// # Errors
        /// Never.
        fn as_slice(&self) -> Result<&[u8], Unsupported>;
    }

    impl Slice for SystemStorage {
        fn as_slice(&self) -> Result<&[u8], Unsupported> {
            Ok(&self.0)
        }
    }
}

/// RDMA, which is not to be had here.
pub mod nixl {
    use super::Unsupported;
    use serde::{Deserialize, Serialize};

    /// Options of an agent.
    #[derive(Clone, Debug, Default)]
    pub struct AgentConfig {
        /// Microseconds between looks for progress.
        pub pthr_delay_us: u64,
    }

    /// An agent for RDMA: it has no values.
    #[derive(Clone, Debug)]
    pub enum NixlAgent {}

    impl NixlAgent {
        /// # Errors
        /// Always.
        pub fn new_with_config(_name: &str, _config: &AgentConfig) -> Result<Self, Unsupported> {
            Err(Unsupported)
        }

        /// Of no agent.
        ///
        /// # Errors
        /// There is none to call it on.
        pub fn add_backend(&mut self, _name: &str) -> Result<(), Unsupported> {
            match *self {}
        }

        /// Of no agent.
        pub fn raw_agent(&self) -> &Self {
            match *self {}
        }

        /// Of no agent.
        ///
        /// # Errors
        /// There is none to call it on.
        pub fn get_local_md(&self) -> Result<Vec<u8>, Unsupported> {
            match *self {}
        }

        /// Of no agent.
        ///
        /// # Errors
        /// There is none to call it on.
        pub fn get_notifications(&self, _into: &mut NotificationMap, _options: Option<()>) -> Result<(), Unsupported> {
            match *self {}
        }
    }

    /// What peers told an agent.
    #[derive(Debug)]
    pub struct NotificationMap(());

    impl NotificationMap {
        /// # Errors
        /// Always.
        pub fn new() -> Result<Self, Unsupported> {
            Err(Unsupported)
        }
    }

    /// Where a registered region lies.
    #[derive(Clone, Debug, Serialize, Deserialize)]
    pub struct NixlDescriptor {
        addr: u64,
        size: usize,
    }

    /// A region that an agent knows: it has no values, as no agent has.
    #[derive(Debug)]
    pub struct NixlRegistered<S> {
        storage: S,
        descriptor: NixlDescriptor,
    }

    impl<S> NixlRegistered<S> {
        /// The region.
        pub fn storage(&self) -> &S {
            &self.storage
        }
    }

    /// What is known of a registered region.
    pub trait RegisteredView {
        /// Where it lies.
        fn descriptor(&self) -> NixlDescriptor;
    }

    impl<S> RegisteredView for NixlRegistered<S> {
        fn descriptor(&self) -> NixlDescriptor {
            self.descriptor.clone()
        }
    }

    /// # Errors
    /// There is no agent to call it with.
    pub fn register_with_nixl<S>(_storage: S, agent: &NixlAgent, _options: Option<()>) -> Result<NixlRegistered<S>, S> {
        match *agent {}
    }
}
