//! The columns of a product as tensors of their own, in training on the CPU: one pass over memory forward and one backward. Of each
//! `narrow` candle's backward pass makes a matrix of all columns, and adds it to another one.

use candle_core::{bail, CpuStorage, CustomOp1, DType, Layout, Result, Shape, Storage, Tensor, WithDType};
use candle_gdn_core::check::storage_dtype;
use candle_gdn_core::cpu::{parallel, Shared};
use candle_gdn_core::device::SideOutput;
use candle_gdn_core::host;
use std::ops::Range;
use std::sync::Arc;

const OP: &str = "columns";

/// Which columns a part has, in their order.
pub type Runs = Vec<Range<usize>>;

fn width(runs: &Runs) -> usize {
    runs.iter().map(Range::len).sum()
}

/// `x [.., columns]` in parts, each `[.., its columns]`: together all columns, none of them twice. On the CPU, in f32, bf16 or f16.
pub fn columns<const N: usize>(x: &Tensor, parts: [Runs; N]) -> Result<[Tensor; N]> {
    let further: Vec<_> = (1..N).map(|_| Arc::<SideOutput>::default()).collect();
    let op = Columns { parts: parts.to_vec(), further: further.clone() };
    let mut outputs = vec![x.contiguous()?.apply_op1(op)?];
    for side in further {
        outputs.push(side.tensor(&outputs[0])?);
    }
    Ok(outputs.try_into().expect("an output for each part"))
}

/// Of columns that lie side by side for each key head, those of each part; or of the rows of such a matrix.
pub fn by_key_head<const N: usize>(key_heads: usize, sizes: [usize; N]) -> [Runs; N] {
    let head: usize = sizes.iter().sum();
    std::array::from_fn(|part| {
        let start: usize = sizes[..part].iter().sum();
        (0..key_heads).map(|h| h * head + start..h * head + start + sizes[part]).collect()
    })
}

struct Columns {
    parts: Vec<Runs>,
    /// Of all parts but the first.
    further: Vec<Arc<SideOutput>>,
}

impl Columns {
    fn columns(&self) -> usize {
        self.parts.iter().map(width).sum()
    }

    fn part<T: WithDType>(&self, x: &[T], runs: &Runs) -> Vec<T> {
        let (columns, width) = (self.columns(), width(runs));
        let rows = x.len() / columns;
        let mut out = vec![T::zero(); rows * width];
        let shared = Shared::new(&mut out);
        parallel(rows, width, |row| {
            let x = &x[row * columns..][..columns];
            // SAFETY: a row belongs to one task.
            let mut out = unsafe { shared.part(row * width, width) };
            for run in runs {
                let (now, later) = out.split_at_mut(run.len());
                now.copy_from_slice(&x[run.clone()]);
                out = later;
            }
        });
        out
    }

    fn parts<T: WithDType>(&self, x: &[T], lead: &[usize]) -> Result<(CpuStorage, Shape)> {
        let shape = |runs: &Runs| Shape::from([lead, &[width(runs)]].concat());
        for (side, runs) in self.further.iter().zip(&self.parts[1..]) {
            side.put(Storage::Cpu(T::to_cpu_storage_owned(self.part(x, runs))), shape(runs));
        }
        Ok((T::to_cpu_storage_owned(self.part(x, &self.parts[0])), shape(&self.parts[0])))
    }

    /// The gradient of x from those of the parts, of which `None` is zeros.
    fn joined<T: WithDType>(&self, grads: &[Option<&[T]>], rows: usize) -> CpuStorage {
        let columns = self.columns();
        let mut out = vec![T::zero(); rows * columns];
        let shared = Shared::new(&mut out);
        parallel(rows, columns, |row| {
            // SAFETY: a row belongs to one task.
            let out = unsafe { shared.part(row * columns, columns) };
            for (runs, grad) in self.parts.iter().zip(grads) {
                let Some(grad) = grad else { continue };
                let mut grad = &grad[row * width(runs)..];
                for run in runs {
                    out[run.clone()].copy_from_slice(&grad[..run.len()]);
                    grad = &grad[run.len()..];
                }
            }
        });
        T::to_cpu_storage_owned(out)
    }

    fn join<T: WithDType>(&self, grads: &[Option<Tensor>], rows: usize) -> Result<CpuStorage> {
        let guards: Vec<_> = grads.iter().map(|grad| grad.as_ref().map(Tensor::storage_and_layout)).collect();
        let mut slices = vec![];
        for guard in &guards {
            slices.push(match guard {
                Some((storage, layout)) => match &**storage {
                    Storage::Cpu(storage) => Some(&storage.as_slice::<T>()?[layout.start_offset()..]),
                    _ => bail!("{OP}: expected gradients on the CPU"),
                },
                None => None,
            });
        }
        Ok(self.joined(&slices, rows))
    }
}

impl CustomOp1 for Columns {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (dims, columns) = (layout.dims(), self.columns());
        let lead = match dims.split_last() {
            Some((n, lead)) if *n == columns => lead,
            _ => bail!("{OP}: x: expected shape [.., {columns}], got {dims:?}"),
        };
        let range = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
        match x {
            CpuStorage::F32(x) => self.parts(&x[range], lead),
            CpuStorage::BF16(x) => self.parts(&x[range], lead),
            CpuStorage::F16(x) => self.parts(&x[range], lead),
            x => bail!("{OP}: x: expected dtype f32, bf16 or f16, got {:?}", storage_dtype(x)),
        }
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let further = self.further.iter().map(|side| side.take_gradient());
        let grads: Vec<_> = std::iter::once(Some(grad.contiguous()?)).chain(further).collect();
        let rows = x.elem_count() / self.columns();
        let joined = match x.dtype() {
            DType::BF16 => self.join::<half::bf16>(&grads, rows)?,
            DType::F16 => self.join::<half::f16>(&grads, rows)?,
            _ => self.join::<f32>(&grads, rows)?,
        };
        Ok(Some(host::tensor_of(joined, x.shape().clone())))
    }
}
