use super::super::super::Blocks;
use super::*;
use candle_core::Result;

/// gguf-py's numbers for `blocks` of each type: the bits of the first three, and a hash of those of all.
#[rustfmt::skip]
const GGUF_PY: [(&str, [u32; 3], u64); 13] = [
    ("IQ2_XXS", [0x3ed783e0, 0xbe09ee00, 0x3f3957d0], 0xf4a6375b2c1af679),
    ("IQ2_XS", [0xbb634e00, 0xbb634e00, 0x3c3194f0], 0x78089646ae8dca59),
    ("IQ3_XXS", [0x40451e00, 0x40451e00, 0x40451e00], 0xb166282acdb4bf95),
    ("IQ1_S", [0x3ae15000, 0xbc452600, 0x3ae15000], 0xc1d20df828c72565),
    ("IQ4_NL", [0xb99e2000, 0x37fd0000, 0x3b2fea00], 0x01238500400dd625),
    ("IQ3_S", [0xc0577900, 0xbfef6a00, 0x40577900], 0x1576dd1e78e02a05),
    ("IQ2_S", [0xbc995d00, 0xbd6fa150, 0xbd6fa150], 0x530e930066ca8f8d),
    ("IQ4_XS", [0x44cd2660, 0xc4881bec, 0xc17c7e00], 0x9b502c8571ff14a5),
    ("IQ1_M", [0x395bf000, 0x395bf000, 0xbac07200], 0x5f17acd084171185),
    ("TQ1_0", [0x3ef92000, 0x3ef92000, 0xbef92000], 0x20e22c5b3680c325),
    ("TQ2_0", [0x39208000, 0x39208000, 0xb8a08000], 0x8c90d2bdf6396325),
    ("MXFP4", [0x0, 0x0, 0xc5400000], 0x3c8d4592e36ec325),
    ("NVFP4", [0xc2400000, 0x42c00000, 0x42000000], 0x7f8abc2fbeff6325),
];

const BLOCKS: usize = 64;

/// Blocks of random bytes, their scale below 2.
fn blocks(of: &GgmlType) -> Vec<u8> {
    let mut state = u64::from(of.number);
    let mut byte = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    let mut bytes: Vec<u8> = (0..BLOCKS * of.bytes).map(|_| byte()).collect();
    let high = match of.name {
        "IQ1_M" => 55,
        "TQ1_0" => 53,
        "TQ2_0" => 65,
        "Q8_K" => 3,
        "F64" => 7,
        _ => 1,
    };
    if !of.name.contains("FP4") {
        bytes.chunks_exact_mut(of.bytes).for_each(|block| block[high] &= 0xbf);
    }
    bytes
}

fn decoded(of: &GgmlType, src: &[u8]) -> Vec<f32> {
    let mut values = vec![f32::NAN; BLOCKS * of.block];
    of.decode(src, &mut values);
    values
}

#[test]
fn numbers_are_those_of_gguf_py() {
    for (name, first, hash) in GGUF_PY {
        let of = TYPES.iter().find(|of| of.name == name).unwrap();
        let bits: Vec<u32> = decoded(of, &blocks(of)).into_iter().map(f32::to_bits).collect();
        assert_eq!(bits[..3], first, "{name}");
        let all = bits
            .iter()
            .fold(0xcbf29ce484222325, |hash: u64, bits| (hash ^ u64::from(*bits)).wrapping_mul(0x100000001b3));
        assert_eq!(all, hash, "{name}");
    }
}

/// What is kept of a type is as near to it as activations of eight bits are to theirs.
#[test]
fn kept_types_lose_little() -> Result<()> {
    for of in &TYPES {
        let Decoded(dtype, _) = of.kept else { continue };
        let mut src = blocks(of);
        if of.name == "MXFP4" {
            src.iter_mut().step_by(of.bytes).for_each(|exponent| *exponent = 112 | *exponent & 15);
        }
        let want = decoded(of, &src);
        let kept = Blocks::of_rows(dtype, 1, want.len(), |_, wide| wide.copy_from_slice(&want))?.tensor()?;
        let got: Vec<f32> = kept.flatten_all()?.to_vec1()?;
        let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let error = norm(&mut got.iter().zip(&want).map(|(x, y)| x - y)) / norm(&mut want.iter().copied());
        assert!(error < 0.01, "{}: {error:e}", of.name);
    }
    Ok(())
}

/// Bytes of a block are those of candle where it has the type.
#[test]
fn sizes_are_those_of_candle() {
    for of in &TYPES {
        if let Same(dtype) = of.kept {
            assert_eq!((of.block, of.bytes), (dtype.block_size(), dtype.type_size()), "{}", of.name);
        }
    }
}
