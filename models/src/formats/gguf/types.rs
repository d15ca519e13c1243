//! The types of ggml's tensors: those that candle knows, those that are decoded as they are read, and those that no weight has.

mod codebooks;
mod decode;
#[cfg(test)]
mod tests;

use candle_core::quantized::GgmlDType;

/// A type as files name it.
#[derive(Debug)]
pub(crate) struct GgmlType {
    number: u32,
    pub name: &'static str,
    /// Values of a block, and its bytes.
    pub block: usize,
    pub bytes: usize,
    pub kept: Kept,
}

/// In which type a weight is kept.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kept {
    /// In its own, which candle has.
    Same(GgmlDType),
    /// In this one, from the numbers that the function decodes of a block.
    Decoded(GgmlDType, fn(&[u8], &mut [f32])),
    /// In none.
    Refused,
}

impl GgmlType {
    /// The type of a number; `None` for one that came later, or was removed.
    pub fn of(number: u32) -> Option<&'static Self> {
        TYPES.iter().find(|of| of.number == number)
    }

    /// The type that a weight has when it is loaded.
    pub fn dtype(&self) -> Option<GgmlDType> {
        match self.kept {
            Kept::Same(dtype) | Kept::Decoded(dtype, _) => Some(dtype),
            Kept::Refused => None,
        }
    }

    /// The numbers of a row whose type is decoded.
    pub fn decode(&self, src: &[u8], dst: &mut [f32]) {
        if let Kept::Decoded(_, decode) = self.kept {
            src.chunks_exact(self.bytes).zip(dst.chunks_exact_mut(self.block)).for_each(|(src, dst)| decode(src, dst));
        }
    }

    /// Bytes of a row, if it is whole blocks and they can be counted.
    pub fn row_bytes(&self, columns: usize) -> Option<usize> {
        let blocks = columns.is_multiple_of(self.block).then(|| columns / self.block);
        blocks?.checked_mul(self.bytes)
    }
}

const fn of(number: u32, name: &'static str, block: usize, bytes: usize, kept: Kept) -> GgmlType {
    GgmlType { number, name, block, bytes, kept }
}

use GgmlDType::{BF16, F16, F32, Q2K, Q3K, Q4K, Q4_0, Q4_1, Q5K, Q5_0, Q5_1, Q6K, Q8_0};
use Kept::{Decoded, Refused, Same};

const TYPES: [GgmlType; 35] = [
    of(0, "F32", 1, 4, Same(F32)),
    of(1, "F16", 1, 2, Same(F16)),
    of(2, "Q4_0", 32, 18, Same(Q4_0)),
    of(3, "Q4_1", 32, 20, Same(Q4_1)),
    of(6, "Q5_0", 32, 22, Same(Q5_0)),
    of(7, "Q5_1", 32, 24, Same(Q5_1)),
    of(8, "Q8_0", 32, 34, Same(Q8_0)),
    of(9, "Q8_1", 32, 36, Decoded(Q8_0, decode::q8_1)),
    of(10, "Q2_K", 256, 84, Same(Q2K)),
    of(11, "Q3_K", 256, 110, Same(Q3K)),
    of(12, "Q4_K", 256, 144, Same(Q4K)),
    of(13, "Q5_K", 256, 176, Same(Q5K)),
    of(14, "Q6_K", 256, 210, Same(Q6K)),
    of(15, "Q8_K", 256, 292, Decoded(Q8_0, decode::q8_k)),
    of(16, "IQ2_XXS", 256, 66, Decoded(Q8_0, decode::iq2_xxs)),
    of(17, "IQ2_XS", 256, 74, Decoded(Q8_0, decode::iq2_xs)),
    of(18, "IQ3_XXS", 256, 98, Decoded(Q8_0, decode::iq3_xxs)),
    of(19, "IQ1_S", 256, 50, Decoded(Q8_0, decode::iq1_s)),
    of(20, "IQ4_NL", 32, 18, Decoded(Q8_0, decode::iq4_nl)),
    of(21, "IQ3_S", 256, 110, Decoded(Q8_0, decode::iq3_s)),
    of(22, "IQ2_S", 256, 82, Decoded(Q8_0, decode::iq2_s)),
    of(23, "IQ4_XS", 256, 136, Decoded(Q8_0, decode::iq4_xs)),
    of(24, "I8", 1, 1, Refused),
    of(25, "I16", 1, 2, Refused),
    of(26, "I32", 1, 4, Refused),
    of(27, "I64", 1, 8, Refused),
    of(28, "F64", 1, 8, Decoded(F32, decode::f64)),
    of(29, "IQ1_M", 256, 56, Decoded(Q8_0, decode::iq1_m)),
    of(30, "BF16", 1, 2, Same(BF16)),
    of(34, "TQ1_0", 256, 54, Decoded(Q8_0, decode::tq1_0)),
    of(35, "TQ2_0", 256, 66, Decoded(Q8_0, decode::tq2_0)),
    of(39, "MXFP4", 32, 17, Decoded(Q8_0, decode::mxfp4)),
    of(40, "NVFP4", 64, 36, Decoded(Q8_0, decode::nvfp4)),
    of(41, "Q1_0", 128, 18, Decoded(Q8_0, decode::q1_0)),
    of(42, "Q2_0", 64, 18, Decoded(Q8_0, decode::q2_0)),
];
