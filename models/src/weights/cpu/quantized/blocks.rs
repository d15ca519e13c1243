//! ggml's blocks, their numbers and scales apart.

use candle_core::quantized::GgmlDType;

/// One block of 32 or 256 numbers.
pub(super) struct Block {
    /// Without sign.
    pub q: [u8; 256],
    /// In f16: of the scales, and of the mins.
    pub factors: [[u8; 2]; 2],
    /// Of each group of 16 or 32 numbers, for the K types.
    pub scales: [i8; 16],
    pub mins: [i8; 16],
}

impl Block {
    pub(super) fn new() -> Self {
        Self { q: [0; 256], factors: [[0; 2]; 2], scales: [0; 16], mins: [0; 16] }
    }

    /// Reads a block of a type that has a layout.
    pub(super) fn read(&mut self, dtype: GgmlDType, src: &[u8]) {
        if dtype.block_size() > 32 {
            self.q.fill(0);
        }
        match dtype {
            GgmlDType::Q4_0 => self.nibbles(src, 2, None, &src[2..]),
            GgmlDType::Q4_1 => self.nibbles(src, 4, None, &src[4..]),
            GgmlDType::Q5_0 => self.nibbles(src, 2, Some(&src[2..6]), &src[6..]),
            GgmlDType::Q5_1 => self.nibbles(src, 4, Some(&src[4..8]), &src[8..]),
            GgmlDType::Q8_0 => {
                self.factors[0] = [src[0], src[1]];
                self.q.iter_mut().zip(&src[2..34]).for_each(|(q, byte)| *q = byte ^ 128);
            }
            GgmlDType::Q2K => self.q2k(src),
            GgmlDType::Q3K => self.q3k(src),
            GgmlDType::Q4K => self.q4k(src, None, &src[16..144]),
            GgmlDType::Q5K => self.q4k(src, Some(&src[16..48]), &src[48..176]),
            GgmlDType::Q6K => self.q6k(src),
            dtype => unreachable!("{dtype:?} has no layout"),
        }
    }

    /// 32 numbers of 4 bits, with `bytes` of factors before them; the fifth bits may be in `high`.
    fn nibbles(&mut self, factors: &[u8], bytes: usize, high: Option<&[u8]>, nibbles: &[u8]) {
        self.factors[0] = [factors[0], factors[1]];
        if bytes == 4 {
            self.factors[1] = [factors[2], factors[3]];
        }
        let high = high.map_or(0, |high| u32::from_le_bytes([high[0], high[1], high[2], high[3]]));
        for (i, two) in nibbles[..16].iter().enumerate() {
            self.q[i] = two & 15 | ((high >> i & 1) << 4) as u8;
            self.q[i + 16] = two >> 4 | ((high >> (i + 16) & 1) << 4) as u8;
        }
    }

    fn q2k(&mut self, src: &[u8]) {
        for (i, byte) in src[..16].iter().enumerate() {
            self.scales[i] = (byte & 15) as i8;
            self.mins[i] = (byte >> 4) as i8;
        }
        self.field(2, 0, &src[16..80], |run| (run / 4, run % 4 * 2));
        self.two_factors(&src[80..84]);
    }

    fn q3k(&mut self, src: &[u8]) {
        let scales = &src[96..108];
        for i in 0..16 {
            let low = if i < 8 { scales[i] & 15 } else { scales[i - 8] >> 4 };
            self.scales[i] = (low | (scales[8 + i % 4] >> (2 * (i / 4)) & 3) << 4) as i8 - 32;
        }
        self.field(2, 0, &src[32..96], |run| (run / 4, run % 4 * 2));
        self.field(1, 2, &src[..32], |run| (0, run));
        self.factors[0] = [src[108], src[109]];
    }

    /// Of q4_K, or with the fifth bits of q5_K.
    fn q4k(&mut self, src: &[u8], high: Option<&[u8]>, nibbles: &[u8]) {
        let s = &src[4..16];
        for i in 0..4 {
            self.scales[i] = (s[i] & 63) as i8;
            self.mins[i] = (s[i + 4] & 63) as i8;
            self.scales[i + 4] = (s[i + 8] & 15 | s[i] >> 6 << 4) as i8;
            self.mins[i + 4] = (s[i + 8] >> 4 | s[i + 4] >> 6 << 4) as i8;
        }
        self.field(4, 0, nibbles, |run| (run / 2, run % 2 * 4));
        if let Some(high) = high {
            self.field(1, 4, high, |run| (0, run));
        }
        self.two_factors(&src[..4]);
    }

    fn q6k(&mut self, src: &[u8]) {
        self.field(4, 0, &src[..128], |run| (run / 4 * 2 + run % 2, run % 4 / 2 * 4));
        self.field(2, 4, &src[128..192], |run| (run / 4, run % 4 * 2));
        self.scales.iter_mut().zip(&src[192..208]).for_each(|(scale, byte)| *scale = *byte as i8);
        self.factors[0] = [src[208], src[209]];
    }

    /// Adds bits to all numbers, from bit `dst` on. Each run of 32 numbers has them in 32 bytes: `place` says in which, and from
    /// which bit on.
    fn field(&mut self, bits: u32, dst: u32, src: &[u8], place: impl Fn(usize) -> (usize, usize)) {
        for (run, q) in self.q.chunks_exact_mut(32).enumerate() {
            let (at, from) = place(run);
            for (q, byte) in q.iter_mut().zip(&src[32 * at..][..32]) {
                *q |= (byte >> from & ((1 << bits) - 1)) << dst;
            }
        }
    }

    /// Two factors in f16, of which the K types subtract the second.
    fn two_factors(&mut self, src: &[u8]) {
        self.factors = [[src[0], src[1]], [src[2], src[3] ^ 0x80]];
    }
}
