//! What the layers of the models are made of.

pub(crate) mod attention;
pub(crate) mod decoder;
pub(crate) mod draft_head;
pub(crate) mod embeddings;
pub(crate) mod gdn;
pub(crate) mod mlp;
pub(crate) mod moe;
pub(crate) mod norm;
pub(crate) mod routing;
