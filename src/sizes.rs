//! Head counts and head sizes.

/// Heads of the rule: value head `h` reads key head `h / (value_heads / key_heads)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadSizes {
    /// Key (and query) heads, HK.
    pub key_heads: usize,
    /// Value heads, HV: a multiple of HK.
    pub value_heads: usize,
    /// Size of a key head, K.
    pub key_dim: usize,
    /// Size of a value head, V.
    pub value_dim: usize,
}
