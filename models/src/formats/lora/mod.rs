//! LoRA adapters in PEFT's format, merged into a model's dense weights as these are read.

mod config;
mod merge;
mod products;
mod size;
#[cfg(test)]
mod tests;

pub(crate) use merge::Merge;

use super::prefixes::inside;
use candle_core::{bail, DType, Device, Error, Result, Tensor};
use config::AdapterConfig;
use products::Product;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// What the names of the two factors of a product end with.
const FACTORS: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];

/// A LoRA adapter as PEFT's `save_pretrained` writes it, for [`Loader::lora`](crate::Loader::lora): a folder with
/// `adapter_model.safetensors` and `adapter_config.json`.
///
/// A module with weight `W [out, in]` becomes `W + s B A`, where `A [r, in]` and `B [out, r]` are the adapter's and
/// `s = alpha / r`, or `alpha / sqrt(r)` with `use_rslora`; `rank_pattern` and `alpha_pattern` give single modules an r and alpha of their
/// own. Adapters of the projections, of routers and of the head are read (not of embeddings, convolutions and norms), and of experts: of each on its own, or of all of a layer
/// as PEFT fuses them (`target_parameters`: `A [experts * r, in]` by expert, `B [out, r * experts]` by rank). Names begin with
/// `base_model.model.` or not, and have `language_model` in them or not, whatever the checkpoint has.
///
/// The formula is that of Hu et al., *LoRA* (arXiv 2106.09685); the scale with `use_rslora` is from arXiv 2312.03732.
#[derive(Debug)]
pub struct LoraAdapter {
    modules: Vec<Module>,
}

/// What the adapter has for one module, or for one parameter of all experts of a layer.
#[derive(Debug)]
struct Module {
    /// From `layers`, `lm_head` or `mtp` on; of all experts with the parameter's name at the end.
    path: String,
    product: Product,
    /// How many experts the product is of, one rank after the other.
    experts: Option<usize>,
}

impl LoraAdapter {
    /// Reads the adapter in the folder `dir`.
    ///
    /// # Errors
    /// A file that is missing or broken; a tensor that is none of a LoRA product, is of a convolution, lacks its other half or has not the rank that the
    /// configuration says; and, by its key, whatever in the configuration is not computed: another `peft_type`, DoRA and other variants,
    /// biases, `modules_to_save`, `trainable_token_indices`, `layer_replication`, `fan_in_fan_out`, first values that
    /// change the model's own weights, and keys that are not known and not empty.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let [config, weights] = [CONFIG, WEIGHTS].map(|name| dir.as_ref().join(name));
        let at = |path: &Path, e: Error| Error::msg(format!("{}: {e}", path.display()));
        let text = std::fs::read_to_string(&config).map_err(|e| at(&config, e.into()))?;
        let parsed = AdapterConfig::parse(&text).map_err(|e| at(&config, e))?;
        let tensors = candle_core::safetensors::load(&weights, &Device::Cpu).map_err(|e| at(&weights, e))?;
        let modules = modules(tensors, &parsed).map_err(|e| at(&weights, e))?;
        Ok(Self { modules })
    }
}

fn modules(tensors: impl IntoIterator<Item = (String, Tensor)>, config: &AdapterConfig) -> Result<Vec<Module>> {
    let mut found: BTreeMap<String, [Option<Tensor>; 2]> = BTreeMap::new();
    for (name, tensor) in tensors {
        let half = FACTORS.iter().enumerate().find_map(|(i, end)| Some((i, name.strip_suffix(end)?)));
        let Some((half, module)) = half else {
            bail!("tensor {name}: expected one whose name ends with {} or {}", FACTORS[0], FACTORS[1])
        };
        found.entry(module.to_string()).or_default()[half] = Some(tensor);
    }
    let mut seen = HashSet::new();
    let mut modules = Vec::with_capacity(found.len());
    for (name, halves) in found {
        let tensor = format!("{name}{}", FACTORS[0]);
        let factors = match halves {
            [Some(a), Some(b)] => [a, b],
            [None, _] => bail!("tensor {name}{}: expected {tensor} beside it", FACTORS[1]),
            [_, None] => bail!("tensor {tensor}: expected {name}{} beside it", FACTORS[1]),
        };
        let (parameter, is_fused) = parameter(&name, config)?;
        let path = inside(&parameter).strip_suffix(".weight").unwrap_or(inside(&parameter)).to_string();
        if path.ends_with("conv1d") {
            bail!("tensor {tensor}: expected one of a projection, got one of a convolution, which adapters are not merged into")
        }
        let (rank, scale) = config.rank_and_scale(&parameter);
        let product = product(&name, factors, scale)?;
        if !product.rank.is_multiple_of(rank) || !is_fused && product.rank != rank {
            bail!("tensor {tensor}: expected rank {rank} by {CONFIG}, got {} rows", product.rank)
        }
        if !seen.insert(path.clone()) {
            bail!("tensor {tensor}: expected one product for {path}, got another one")
        }
        let experts = is_fused.then_some(product.rank / rank);
        modules.push(Module { path, product, experts });
    }
    Ok(modules)
}

/// The name that the configuration has for a module of the file, where parameters have their own at the end; and whether it is
/// a parameter of all experts.
fn parameter(module: &str, config: &AdapterConfig) -> Result<(String, bool)> {
    let name = module.strip_prefix("base_model.model.").unwrap_or(module);
    let outer = name.strip_suffix(".base_layer").unwrap_or(name);
    if !outer.ends_with(".experts") {
        let weight = format!("{name}.weight");
        return Ok((if config.has_parameter(&weight) { weight } else { name.to_string() }, false));
    }
    let has = ["gate_up_proj", "down_proj"].map(|parameter| config.has_parameter(&format!("{outer}.{parameter}")));
    // PEFT wraps gate_up_proj, and around that down_proj.
    let parameter = match (has, outer != name) {
        ([true, true], true) | ([true, false], false) => "gate_up_proj",
        ([true, true], false) | ([false, true], false) => "down_proj",
        _ => bail!(
            "tensor {module}{}: expected `target_parameters` in {CONFIG} to say whether it is of gate_up_proj or of down_proj",
            FACTORS[0]
        ),
    };
    Ok((format!("{outer}.{parameter}"), true))
}

/// `A [rank, inputs]` and `B [outputs, rank]`.
fn product(name: &str, factors: [Tensor; 2], scale: f64) -> Result<Product> {
    for (tensor, end) in factors.iter().zip(FACTORS) {
        if !matches!(tensor.dtype(), DType::F64 | DType::F32 | DType::BF16 | DType::F16) || tensor.rank() != 2 {
            bail!("tensor {name}{end}: expected a matrix in F32, BF16 or F16, got {tensor:?}")
        }
    }
    let ((rank, inputs), (outputs, columns)) = (factors[0].dims2()?, factors[1].dims2()?);
    if rank != columns || rank == 0 {
        bail!(
            "tensor {name}{}: expected [out, {rank}], since {} has {rank} rows, got [{outputs}, {columns}]",
            FACTORS[1],
            &FACTORS[0][1..]
        )
    }
    let [a, b] = factors.map(|tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>());
    let mut b = b?;
    b.iter_mut().for_each(|b| *b *= scale as f32);
    Ok(Product { tensor: format!("{name}{}", FACTORS[0]), rank, inputs, outputs, a: a?, b })
}
