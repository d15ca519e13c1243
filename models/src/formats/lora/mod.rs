//! LoRA adapters in PEFT's format, merged into a model's dense weights as these are read.

mod config;
mod merge;
mod products;
mod size;
#[cfg(test)]
mod tests;

pub(crate) use merge::Merge;

use super::prefixes::inside;
use super::SafetensorsFiles;
use candle_core::safetensors::Load;
use candle_core::{bail, DType, Device, Error, Result};
use config::AdapterConfig;
use products::Product;
use safetensors::tensor::TensorView;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// What the names of the two factors of a product end with.
const FACTORS: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];
/// What the names of a vision tower begin with.
const VISION: &str = "visual.";

/// A LoRA adapter as PEFT's `save_pretrained` writes it, for [`Loader::lora`](crate::Loader::lora): a folder with
/// `adapter_model.safetensors` and `adapter_config.json`.
///
/// A module with weight `W [out, in]` becomes `W + s B A`, where `A [r, in]` and `B [out, r]` are the adapter's and
/// `s = alpha / r`, or `alpha / sqrt(r)` with `use_rslora`; `rank_pattern` and `alpha_pattern` give single modules an r and alpha of their
/// own. Adapters of the projections, of routers and of the head are read (not of embeddings, convolutions and norms), and of experts: of each on its own, or of all of a layer
/// as PEFT fuses them (`target_parameters`: `A [experts * r, in]` by expert, `B [out, r * experts]` by rank; before PEFT 0.19.1 the product is that
/// of the transposed matrices, which the shapes tell, and `peft_version` where a matrix is square). Names begin with
/// `base_model.model.` or not, and have `language_model` in them or not, whatever the checkpoint has.
///
/// The formula is that of Hu et al., *LoRA* (arXiv 2106.09685); the scale with `use_rslora` is from arXiv 2312.03732.
#[derive(Debug)]
pub struct LoraAdapter {
    modules: Vec<Module>,
    /// Tensors of a vision tower.
    of_vision: usize,
    /// As [`AdapterConfig::experts_in_out`].
    experts_in_out: bool,
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
    /// Reads the adapter in the folder `dir`, whose files must not change meanwhile. Tensors of a vision tower are left unread.
    ///
    /// # Errors
    /// A file that is missing or broken; a tensor that is none of a LoRA product, is of a convolution, lacks its other half or has not the rank that the
    /// configuration says; tensors of a vision tower alone; and, by its key, whatever in the configuration is not computed: another `peft_type`, DoRA and other variants,
    /// biases, `modules_to_save`, `trainable_token_indices`, `layer_replication`, `fan_in_fan_out`, first values that
    /// change the model's own weights, and keys that are not known and not empty.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let [config, weights] = [CONFIG, WEIGHTS].map(|name| dir.as_ref().join(name));
        let at = |path: &Path, e: Error| Error::msg(format!("{}: {e}", path.display()));
        let text = std::fs::read_to_string(&config).map_err(|e| at(&config, e.into()))?;
        let parsed = AdapterConfig::parse(&text).map_err(|e| at(&config, e))?;
        // SAFETY: the mapping ends with this function, whose caller leaves the file as it is.
        let files = unsafe { SafetensorsFiles::open(&[&weights]) };
        files.and_then(|files| Self::read(&files, &parsed)).map_err(|e| at(&weights, e))
    }

    /// No tensor is read before it is known to be a factor of a product.
    fn read(files: &SafetensorsFiles, config: &AdapterConfig) -> Result<Self> {
        let (of_vision, of_text): (Vec<&String>, Vec<_>) =
            files.names().iter().partition(|name| inside(name).starts_with(VISION));
        if let ([first, ..], []) = (&of_vision[..], &of_text[..]) {
            bail!("tensor {first}: expected tensors of a text model beside those of the vision tower, got none")
        }
        let mut halves: BTreeMap<&str, [bool; 2]> = BTreeMap::new();
        for name in of_text {
            let half = FACTORS.iter().enumerate().find_map(|(i, end)| Some((i, name.strip_suffix(end)?)));
            let Some((half, module)) = half else {
                bail!("tensor {name}: expected one whose name ends with {} or {}", FACTORS[0], FACTORS[1])
            };
            halves.entry(module).or_default()[half] = true;
        }
        let mut modules = Vec::with_capacity(halves.len());
        let mut seen = HashSet::new();
        for (name, halves) in halves {
            if let Some(missing) = halves.iter().position(|is_there| !is_there) {
                bail!("tensor {name}{}: expected {name}{} beside it", FACTORS[1 - missing], FACTORS[missing])
            }
            let module = Module::read(files, name, config)?;
            if !seen.insert(module.path.clone()) {
                bail!("tensor {}: expected one product for {}, got another one", module.product.tensor, module.path)
            }
            modules.push(module);
        }
        Ok(Self { modules, of_vision: of_vision.len(), experts_in_out: config.experts_in_out })
    }

    /// What a user should know of it.
    pub(crate) fn remark(&self) -> Option<String> {
        let count = Some(self.of_vision).filter(|count| *count > 0)?;
        Some(format!("tensors of the adapter that the text model does not have: {VISION}* ({count})"))
    }
}

impl Module {
    fn read(files: &SafetensorsFiles, name: &str, config: &AdapterConfig) -> Result<Self> {
        let tensor = format!("{name}{}", FACTORS[0]);
        let (parameter, is_fused) = parameter(name, config)?;
        let path = inside(&parameter).strip_suffix(".weight").unwrap_or(inside(&parameter)).to_string();
        if path.ends_with("conv1d") {
            bail!("tensor {tensor}: expected one of a projection, got one of a convolution, which adapters are not merged into")
        }
        let (a, [rank, inputs]) = factor(files, &tensor)?;
        let (b, [outputs, columns]) = factor(files, &format!("{name}{}", FACTORS[1]))?;
        if rank != columns || rank == 0 {
            bail!(
                "tensor {name}{}: expected [out, {rank}], since {tensor} has {rank} rows, got [{outputs}, {columns}]",
                FACTORS[1]
            )
        }
        let (each, scale) = config.rank_and_scale(&parameter);
        if !rank.is_multiple_of(each) || !is_fused && rank != each {
            bail!("tensor {tensor}: expected rank {each} by {CONFIG}, got {rank} rows")
        }
        let (a, mut b) = (numbers(&a)?, numbers(&b)?);
        b.iter_mut().for_each(|b| *b *= scale as f32);
        let product = Product { tensor, rank, inputs, outputs, a, b };
        Ok(Self { path, product, experts: is_fused.then_some(rank / each) })
    }
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

/// A matrix of floats, with its rows and columns.
fn factor<'a>(files: &'a SafetensorsFiles, name: &str) -> Result<(TensorView<'a>, [usize; 2])> {
    let view = files.view(name, DType::F32)?;
    match *view.shape() {
        [rows, columns] => Ok((view, [rows, columns])),
        ref other => bail!("tensor {name}: expected a matrix, got {other:?}"),
    }
}

fn numbers(view: &TensorView) -> Result<Vec<f32>> {
    view.load(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}
