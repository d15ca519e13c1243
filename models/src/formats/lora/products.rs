//! From the modules of an adapter to the weights of a checkpoint, whose experts may be stored in another way.

use super::{LoraAdapter, Module};
use crate::config::ModelConfig;
use crate::formats::Prefixes;
use candle_core::{bail, Result};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// `B A`, to be added to a matrix `[outputs, inputs]`.
#[derive(Debug, Clone)]
pub(super) struct Product {
    /// The adapter's tensor it comes from, for messages.
    pub tensor: String,
    pub rank: usize,
    pub inputs: usize,
    pub outputs: usize,
    /// `[rank, inputs]`
    pub a: Vec<f32>,
    /// `[outputs, rank]`, with the scale.
    pub b: Vec<f32>,
}

/// A product of rows `first..` of a matrix of `of` rows.
struct Placed {
    first: usize,
    of: usize,
    product: Product,
}

/// What is added to one weight: a product for each of its matrices.
pub(super) type Products = Vec<Option<Product>>;

impl Product {
    /// Of some of the outputs.
    fn rows(&self, rows: Range<usize>) -> Self {
        let b = self.b[rows.start * self.rank..rows.end * self.rank].to_vec();
        Self { outputs: rows.len(), b, tensor: self.tensor.clone(), a: self.a.clone(), ..*self }
    }

    /// Of one of `experts`: A has their rows one expert after the other, B their columns one rank after the other.
    pub fn expert(&self, expert: usize, experts: usize) -> Self {
        let (rank, inputs) = (self.rank / experts, self.inputs);
        let a = self.a[expert * rank * inputs..(expert + 1) * rank * inputs].to_vec();
        let b = self.b.iter().copied().skip(expert).step_by(experts).collect();
        Self { tensor: self.tensor.clone(), rank, a, b, ..*self }
    }

    /// That of the transposed matrix.
    fn transposed(self) -> Self {
        let turned = |matrix: &[f32], columns: usize| -> Vec<f32> {
            (0..columns).flat_map(|j| matrix.iter().skip(j).step_by(columns)).copied().collect()
        };
        let (a, b) = (turned(&self.b, self.rank), turned(&self.a, self.inputs));
        Self { inputs: self.outputs, outputs: self.inputs, a, b, ..self }
    }

    /// The sum of products, each at its rows.
    fn sum(parts: Vec<Placed>) -> Result<Self> {
        let Some(Placed { of, product, .. }) = parts.first() else { bail!("expected a product") };
        let (of, inputs, tensor) = (*of, product.inputs, product.tensor.clone());
        let rank = parts.iter().map(|part| part.product.rank).sum();
        let (mut a, mut b, mut column) = (Vec::with_capacity(rank * inputs), vec![0.; of * rank], 0);
        for Placed { first, of: other, product } in parts {
            if other != of || product.inputs != inputs {
                let [want, got] = [[of, inputs], [other, product.inputs]];
                bail!("tensor {}: expected a product {want:?} as that of {tensor}, got {got:?}", product.tensor)
            }
            a.extend(product.a);
            for (i, row) in product.b.chunks_exact(product.rank).enumerate() {
                b[(first + i) * rank + column..][..product.rank].copy_from_slice(row);
            }
            column += product.rank;
        }
        Ok(Self { tensor, rank, inputs, outputs: of, a, b })
    }
}

/// The products of each weight, by its name in a checkpoint that `has` weights.
struct Found<'a> {
    config: &'a ModelConfig,
    prefixes: &'a Prefixes,
    experts_in_out: bool,
    has: &'a dyn Fn(&str) -> bool,
    weights: HashMap<String, BTreeMap<usize, Vec<Placed>>>,
}

/// # Errors
/// A module that the checkpoint has no weight for.
pub(super) fn find(
    adapter: &LoraAdapter,
    config: &ModelConfig,
    prefixes: &Prefixes,
    has: &dyn Fn(&str) -> bool,
) -> Result<HashMap<String, Products>> {
    let experts_in_out = adapter.experts_in_out;
    let mut found = Found { config, prefixes, experts_in_out, has, weights: HashMap::new() };
    adapter.modules.iter().try_for_each(|module| found.add(module))?;
    let experts = config.moe.as_ref().map_or(0, |moe| moe.num_experts);
    let weights = found.weights.into_iter().map(|(name, mut parts)| {
        let matrices = if name.ends_with(".weight") { 1 } else { experts };
        let products = (0..matrices).map(|i| parts.remove(&i).map(Product::sum).transpose());
        Ok((name, products.collect::<Result<Products>>()?))
    });
    weights.collect()
}

impl Found<'_> {
    fn add(&mut self, module: &Module) -> Result<()> {
        let Module { path, product, experts } = module;
        let prefix = match path.split_once('.').map_or(path.as_str(), |(first, _)| first) {
            "layers" => &self.prefixes.text,
            "lm_head" => &self.prefixes.head,
            "mtp" => &self.prefixes.draft_head,
            // The table may be the head too, which an adapter of embeddings does not change.
            _ => bail!("tensor {}: expected one of a layer's projections or of lm_head", product.tensor),
        };
        let full = if prefix.is_empty() { path.clone() } else { format!("{prefix}.{path}") };
        if let Some(experts) = experts {
            return self.add_fused(&full, *experts, product);
        }
        match expert(&full) {
            Some((experts, index, name)) => self.add_expert(experts, index, name, product.clone()),
            None => self.push(format!("{full}.weight"), 0, 0, product.outputs, product.clone()),
        }
    }

    /// `parameter` is that of all `experts`.
    fn add_fused(&mut self, parameter: &str, experts: usize, product: &Product) -> Result<()> {
        let Some((at, name)) = parameter.rsplit_once('.') else { bail!("expected a parameter, got {parameter}") };
        let (own, inner) = self.config.moe.as_ref().map_or((0, 0), |moe| (moe.num_experts, moe.intermediate_size));
        if experts != own {
            bail!("tensor {}: expected a product of {own} experts, got one of {experts}", product.tensor)
        }
        let hidden = self.config.hidden_size;
        let shape = if name == "down_proj" { [hidden, inner] } else { [2 * inner, hidden] };
        let is_transposed = [product.inputs, product.outputs] == shape && (self.experts_in_out || shape[0] != shape[1]);
        (0..experts).try_for_each(|index| {
            let product = product.expert(index, experts);
            self.add_expert(at, index, name, if is_transposed { product.transposed() } else { product })
        })
    }

    /// `experts`: up to `..experts`.
    fn add_expert(&mut self, experts: &str, index: usize, name: &str, product: Product) -> Result<()> {
        let (all, rows) = (format!("{experts}.gate_up_proj"), product.outputs);
        let one = |name: &str| format!("{experts}.{index}.{name}.weight");
        let is_one = !(self.has)(&all);
        if !is_one && self.config.moe.as_ref().is_none_or(|moe| index >= moe.num_experts) {
            bail!("tensor {}: expected one of the model's experts, got number {index}", product.tensor)
        }
        if name == "gate_up_proj" && !rows.is_multiple_of(2) {
            bail!("tensor {}: expected as many rows for gates as for ups, got {rows}", product.tensor)
        }
        match (name, is_one) {
            ("gate_up_proj", true) => {
                self.push(one("gate_proj"), 0, 0, rows / 2, product.rows(0..rows / 2))?;
                self.push(one("up_proj"), 0, 0, rows / 2, product.rows(rows / 2..rows))
            }
            ("gate_up_proj", false) => self.push(all, index, 0, rows, product),
            ("gate_proj", false) => self.push(all, index, 0, 2 * rows, product),
            ("up_proj", false) => self.push(all, index, rows, 2 * rows, product),
            (name, true) => self.push(one(name), 0, 0, rows, product),
            (name, false) => self.push(format!("{experts}.{name}"), index, 0, rows, product),
        }
    }

    fn push(&mut self, weight: String, matrix: usize, first: usize, of: usize, product: Product) -> Result<()> {
        if !(self.has)(&weight) {
            bail!("tensor {}: the model has no weight {weight} for it", product.tensor)
        }
        self.weights.entry(weight).or_default().entry(matrix).or_default().push(Placed { first, of, product });
        Ok(())
    }
}

/// `..experts`, number and matrix of the module of one expert.
fn expert(module: &str) -> Option<(&str, usize, &str)> {
    let (at, name) = module.rsplit_once('.')?;
    let (experts, index) = at.rsplit_once('.')?;
    let is_matrix = matches!(name, "gate_proj" | "up_proj" | "down_proj");
    (is_matrix && experts.ends_with(".experts")).then_some((experts, index.parse().ok()?, name))
}
