//! Weights with an adapter's products added as they are read.

use super::products::{find, Product, Products};
use super::LoraAdapter;
use crate::config::ModelConfig;
use crate::formats::Prefixes;
use crate::parallel::{DimRanges, WeightShards};
use candle_core::{bail, CpuStorage, DType, Device, Error, Result, Shape, Storage, Tensor, WithDType};
use candle_gdn_core::cpu::{parallel, Element, Shared};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use half::{bf16, f16};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// What an adapter adds to the weights of one checkpoint.
pub(crate) struct Merge {
    products: HashMap<String, Products>,
    /// What a rank has of each weight, where it has a shard.
    shards: Option<WeightShards>,
    read: Mutex<HashSet<String>>,
}

impl Merge {
    /// Of the checkpoint at the root `weights`, which are a rank's with `shards`. `stored_as`: how a weight is stored that is
    /// not dense.
    ///
    /// # Errors
    /// A product that there is no weight for, or no dense one.
    pub(crate) fn new(
        adapter: &LoraAdapter,
        config: &ModelConfig,
        weights: &VarBuilder,
        shards: Option<WeightShards>,
        stored_as: impl Fn(&str) -> Option<String>,
    ) -> Result<Arc<Self>> {
        let has = |name: &str| weights.contains_tensor(name);
        let products = find(adapter, config, &Prefixes::find(has), &has).map_err(named)?;
        let mut names: Vec<&String> = products.keys().collect();
        names.sort_unstable();
        if let Some((name, stored)) = names.into_iter().find_map(|name| Some((name, stored_as(name)?))) {
            bail!("lora: weight {name}: expected a dense one, which an adapter can be merged into, got it in {stored}")
        }
        Ok(Arc::new(Self { products, shards, read: Mutex::default() }))
    }

    /// `weights` with the products added.
    pub(crate) fn apply<'a>(self: &Arc<Self>, weights: VarBuilder<'a>) -> VarBuilder<'a> {
        let (dtype, device) = (weights.dtype(), weights.device().clone());
        VarBuilder::from_backend(Box::new(Merged { weights, merge: self.clone() }), dtype, device)
    }

    /// # Errors
    /// When the model has read a weight less than the adapter changes.
    pub(crate) fn check_all_read(&self) -> Result<()> {
        let read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        match self.products.iter().filter(|(name, _)| !read.contains(*name)).min_by_key(|(name, _)| *name) {
            Some((name, products)) => {
                let tensor = products.iter().flatten().next().map_or("", |product| &product.tensor);
                bail!("lora: tensor {tensor}: expected the model to read weight {name}, which it does not")
            }
            None => Ok(()),
        }
    }

    /// The weight `base` of `shape` on the CPU in f32 with its products, rounded once.
    fn sum(&self, name: &str, products: &Products, base: &Tensor, dtype: DType) -> Result<Tensor> {
        let kept = self.shards.as_ref().and_then(|shards| shards.ranges_of(name, base.dims()));
        let whole = kept.as_ref().map_or_else(|| base.dims().to_vec(), |kept| kept.whole(base.dims()));
        let [lead @ .., outputs, inputs] = whole.as_slice() else {
            bail!("weight {name}: expected a matrix, got {whole:?}")
        };
        let is_other = |product: &&Product| [product.outputs, product.inputs] != [*outputs, *inputs];
        if let Some(product) = products.iter().flatten().find(is_other) {
            let got = [product.outputs, product.inputs];
            bail!("tensor {}: expected a product [{outputs}, {inputs}] for weight {name}, got {got:?}", product.tensor)
        }
        if lead.iter().product::<usize>() != products.len() {
            bail!("weight {name}: expected {} matrices, got {whole:?}", products.len())
        }
        let taken = Taken::new(kept, lead.len(), [*outputs, *inputs]);
        match dtype {
            DType::BF16 => taken.sum::<bf16>(products, base),
            DType::F16 => taken.sum::<f16>(products, base),
            _ => taken.sum::<f32>(products, base)?.to_dtype(dtype),
        }
    }
}

fn named(e: Error) -> Error {
    Error::msg(format!("lora: {e}"))
}

struct Merged<'a> {
    weights: VarBuilder<'a>,
    merge: Arc<Merge>,
}

impl SimpleBackend for Merged<'_> {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let read = |device: &Device, dtype| {
            self.weights.clone().set_device(device.clone()).get_with_hints_dtype(shape, name, init, dtype)
        };
        let Some(products) = self.merge.products.get(name) else { return read(device, dtype) };
        let base = read(&Device::Cpu, DType::F32)?;
        let sum = self.merge.sum(name, products, &base, dtype).map_err(named)?;
        self.merge.read.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_string());
        sum.to_device(device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.merge.products.contains_key(name) {
            true => bail!("{name}: expected a shape, for a weight that an adapter changes"),
            false => self.weights.clone().set_device(device.clone()).get_unchecked_dtype(name, dtype),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.weights.contains_tensor(name)
    }
}

/// The rows and columns of each matrix that there are to read.
struct Taken {
    rows: Vec<usize>,
    columns: Vec<Range<usize>>,
}

impl Taken {
    /// Of matrices `[outputs, inputs]` after `lead` other dimensions.
    fn new(kept: Option<DimRanges>, lead: usize, [outputs, inputs]: [usize; 2]) -> Self {
        let [mut rows, mut columns] = [outputs, inputs].map(|all| Vec::from([Range { start: 0, end: all }]));
        match kept {
            Some(kept) if kept.dim == lead => rows = kept.ranges,
            Some(kept) => columns = kept.ranges,
            None => (),
        }
        Self { rows: rows.into_iter().flatten().collect(), columns }
    }

    fn sum<T: Element + WithDType>(&self, products: &Products, base: &Tensor) -> Result<Tensor> {
        let (rows, width) = (self.rows.len(), self.columns.iter().map(Range::len).sum::<usize>());
        let of_columns = |product: &Product| -> Vec<f32> {
            let rows = product.a.chunks_exact(product.inputs.max(1));
            rows.flat_map(|row| self.columns.iter().flat_map(|range| &row[range.clone()])).copied().collect()
        };
        let factors: Vec<_> =
            products.iter().map(|product| Some((product.as_ref()?, of_columns(product.as_ref()?)))).collect();
        let rank = products.iter().flatten().map(|product| product.rank).max().unwrap_or(0);
        let base = base.contiguous()?;
        let (storage, layout) = base.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(data)) = &*storage else { bail!("expected a weight in f32 on the CPU") };
        let weight = &data[layout.start_offset()..][..base.elem_count()];
        let mut out = vec![T::ZERO; weight.len()];
        let dst = Shared::new(&mut out);
        parallel(rows * products.len(), width * (rank + 1), |i| {
            // SAFETY: each task has a row of its own.
            let dst = unsafe { dst.part(i * width, width) };
            let mut sum = vec![0f32; width];
            if let Some((product, a)) = &factors[i / rows] {
                let b = &product.b[self.rows[i % rows] * product.rank..][..product.rank];
                for (b, a) in b.iter().zip(a.chunks_exact(width.max(1))) {
                    sum.iter_mut().zip(a).for_each(|(sum, a)| *sum += b * a);
                }
            }
            let weight = &weight[i * width..][..width];
            dst.iter_mut().zip(weight).zip(sum).for_each(|((dst, weight), sum)| *dst = T::from_f32(weight + sum));
        });
        Tensor::from_vec(out, base.shape(), &Device::Cpu)
    }
}
