//! The public ops on the CPU: shapes, dtypes, strides, slots and boundaries from the input's bytes, most of them such as
//! the op takes, some not. Whatever comes is a result or an error.
#![no_main]

use candle_core::{DType, Device, Result, Tensor};
use candle_gdn::ops::{causal_conv1d, gated_rms_norm, Gates, GdnDecode, GdnPrefill, GdnStep, RuleOptions, StepOptions};
use candle_gdn::{CuSeqlens, GateActivation, Slots, NO_SLOT};
use libfuzzer_sys::fuzz_target;

/// The input's bytes, zeros behind its end.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn below(&mut self, n: usize) -> usize {
        self.byte() as usize % n
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// A tensor of this shape and dtype, or nearly: one byte in eight makes a view or something wrong of it.
    fn tensor(&mut self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let change = self.byte();
        let mut shape = shape.to_vec();
        let dim = self.below(shape.len().max(1)).min(shape.len().saturating_sub(1));
        match change {
            230..=233 => shape[dim] += 1,
            234..=236 => shape[dim] = 0,
            237..=238 => shape.push(1),
            239 => shape.truncate(dim),
            _ => {}
        }
        let dtype = if change == 240 { self.of(&[DType::U32, DType::I64, DType::F64, DType::F16]) } else { dtype };
        let make = |shape: &[usize]| -> Result<Tensor> {
            let n: usize = shape.iter().product();
            let x: Vec<f32> = (0..n).map(|i| ((i * 37 + n) % 29) as f32 / 8. - 1.7).collect();
            Tensor::from_vec(x, shape, &Device::Cpu)?.to_dtype(dtype)
        };
        match change {
            241..=246 if !shape.is_empty() => {
                // A view of a larger one.
                let mut large = shape.clone();
                large[dim] += 3;
                make(&large)?.narrow(dim, 2, shape[dim])
            }
            247..=249 if shape.len() > 1 => {
                let last = shape.len() - 1;
                shape.swap(last, last - 1);
                make(&shape)?.transpose(last, last - 1)
            }
            250..=252 if !shape.is_empty() => {
                let mut one = shape.clone();
                one[dim] = 1;
                make(&one)?.broadcast_as(shape)
            }
            _ => make(&shape),
        }
    }

    fn slots(&mut self, sequences: usize, capacity: usize) -> Result<Slots> {
        let map = |bytes: &mut Self| -> Vec<u32> {
            (0..sequences)
                .map(|i| match bytes.byte() {
                    0..=30 => NO_SLOT,
                    31..=40 => bytes.byte().into(),
                    _ => ((i * 3 + 1) % capacity.max(1)) as u32,
                })
                .collect()
        };
        let read = map(self);
        match self.below(4) {
            0 => Slots::new(&read, &Device::Cpu),
            1 => Slots::from_to(&read, &map(self), &Device::Cpu),
            2 => {
                let wide: Vec<i64> = read.iter().map(|slot| i64::from(*slot as i32)).collect();
                let wide = Tensor::from_vec(wide, read.len(), &Device::Cpu)?;
                Ok(Slots::from_tensors(&wide, &wide))
            }
            _ => {
                let slots = Tensor::from_vec(read.clone(), read.len(), &Device::Cpu)?;
                let write = map(self);
                Ok(Slots::from_tensors(&slots, &Tensor::from_vec(write.clone(), write.len(), &Device::Cpu)?))
            }
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let _ = run(&mut Bytes(data));
});

fn run(b: &mut Bytes<'_>) -> Result<()> {
    let io = b.of(&[DType::F32, DType::BF16, DType::F16]);
    let state_dtype = b.of(&[DType::F32, DType::F32, DType::BF16]);
    let sizes = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 128];
    let (keys, vals, heads, ratio) = (b.of(&sizes), b.of(&sizes), 1 + b.below(4), 1 + b.below(3));
    let (sequences, tokens, packed) = (b.below(5), b.of(&[0, 1, 1, 2, 3, 5, 16, 17, 66]), b.below(2) == 1);
    let lengths: Vec<usize> = (0..sequences).map(|_| b.below(9)).collect();
    let cu = packed.then(|| CuSeqlens::from_lengths(&lengths, &Device::Cpu)).transpose()?;
    let lead = if packed { vec![lengths.iter().sum()] } else { vec![sequences, tokens] };
    let hv = heads * ratio;
    let of = |rest: &[usize]| [&lead[..], rest].concat();
    let pooled = b.below(2) == 1;
    let capacity = if pooled { sequences * 3 + 2 } else { sequences };
    let (width, channels) = (2 + b.below(7), 2 * heads * keys + hv * vals);
    match b.below(5) {
        0 => {
            let (x, weight) = (b.tensor(&of(&[channels]), io)?, b.tensor(&[channels, width], io)?);
            let state = b.tensor(&[capacity, width - 1, channels], io)?;
            causal_conv1d(&x, &weight, &state, cu.as_ref(), b.below(2) == 1)?;
        }
        1 => {
            let (x, z) = (b.tensor(&of(&[hv, vals]), io)?, b.tensor(&of(&[hv, vals]), io)?);
            let weight = b.tensor(&[vals], io)?;
            gated_rms_norm(&x, &z, &weight, 1e-6, b.of(&[GateActivation::Silu, GateActivation::Sigmoid]))?;
        }
        2 => {
            let (q, k) = (b.tensor(&of(&[heads, keys]), io)?, b.tensor(&of(&[heads, keys]), io)?);
            let v = b.tensor(&of(&[hv, vals]), io)?;
            let gates = gates(b, &of(&[hv]), hv, io)?;
            let state = b.tensor(&[capacity, hv, vals, keys], state_dtype)?;
            let mut op = GdnPrefill::new(gates, &state, cu.as_ref(), RuleOptions::default())?;
            if pooled {
                op = op.with_slots(b.slots(sequences, capacity)?);
            }
            op.forward(&q, &k, &v)?;
        }
        3 => {
            let (q, k) = (b.tensor(&[sequences, heads, keys], io)?, b.tensor(&[sequences, heads, keys], io)?);
            let v = b.tensor(&[sequences, hv, vals], io)?;
            let gates = gates(b, &[sequences, hv], hv, io)?;
            let state = b.tensor(&[capacity, hv, vals, keys], state_dtype)?;
            let mut op = GdnDecode::new(gates, &state, RuleOptions::default())?;
            if pooled {
                op = op.with_slots(b.slots(sequences, capacity)?);
            }
            op.forward(&q, &k, &v)?;
        }
        _ => {
            let lead = if tokens == 1 { vec![sequences] } else { vec![sequences, tokens] };
            let of = |rest: &[usize]| [&lead[..], rest].concat();
            let (qkv, z) = (b.tensor(&of(&[channels]), io)?, b.tensor(&of(&[hv * vals]), io)?);
            let (weight, norm) = (b.tensor(&[channels, width], io)?, b.tensor(&[vals], io)?);
            let gates = gates(b, &of(&[hv]), hv, io)?;
            let conv = b.tensor(&[capacity, width - 1, channels], io)?;
            let state = b.tensor(&[capacity, hv, vals, keys], state_dtype)?;
            let mut op = GdnStep::new(gates, &norm, &conv, &state, StepOptions::default())?;
            if pooled {
                op = op.with_slots(b.slots(sequences, capacity)?);
            }
            op.forward(&qkv, &z, &weight)?;
        }
    }
    Ok(())
}

fn gates(b: &mut Bytes<'_>, shape: &[usize], heads: usize, dtype: DType) -> Result<Gates> {
    Ok(Gates {
        a: b.tensor(shape, dtype)?,
        b: b.tensor(shape, dtype)?,
        a_log: b.tensor(&[heads], DType::F32)?,
        dt_bias: b.tensor(&[heads], DType::F32)?,
    })
}
