//! The safetensors files of a checkpoint, mapped, and what of them a model has read.

use super::Prefixes;
use crate::config::ModelConfig;
use candle_core::safetensors::{Load, MmapedSafetensors};
use candle_core::{bail, DType, Device, Error, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::Init;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// The weights of a checkpoint in safetensors files, for [`ModelConfig::from_safetensors`](crate::ModelConfig::from_safetensors) and
/// [`Loader::load_safetensors`](crate::Loader::load_safetensors).
pub struct SafetensorsFiles {
    map: MmapedSafetensors,
    /// Sorted.
    names: Vec<String>,
    read: Mutex<HashSet<String>>,
}

impl SafetensorsFiles {
    /// Maps the files.
    ///
    /// # Safety
    /// The files must not change while the mapping lives.
    ///
    /// # Errors
    /// A file that cannot be opened, or is none; a tensor that is in two of them.
    pub unsafe fn open<P: AsRef<Path>>(files: &[P]) -> Result<Self> {
        let map = MmapedSafetensors::multi(files)?;
        let mut names: Vec<String> = map.tensors().into_iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        if let Some([name, _]) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            // SAFETY: as the caller promises.
            let has = |file: &&P| unsafe { MmapedSafetensors::new(file) }.is_ok_and(|map| map.get(name).is_ok());
            let list: Vec<_> = files.iter().filter(has).map(|file| file.as_ref().display().to_string()).collect();
            bail!("tensor {name}: expected it in one file, got it in {}", list.join(" and "))
        }
        Ok(Self { map, names, read: Mutex::default() })
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Whether there is a draft head where a loader looks for it.
    pub fn has_draft_head(&self) -> bool {
        self.map.get(&of_draft_head(&self.prefixes(), "mtp.fc.weight")).is_ok()
    }

    fn prefixes(&self) -> Prefixes {
        Prefixes::find(|name| self.map.get(name).is_ok())
    }

    /// Numbers of more than 16 bits in the matrices of the text model and its draft head; routers, which are in f32 in any case, and a
    /// table that is not the head are not counted.
    pub fn wide_parameters(&self, config: &ModelConfig) -> u64 {
        let (prefixes, layers) = (self.prefixes(), config.layers.len());
        let head = of_draft_head(&prefixes, "mtp.");
        let is_other = |name: &str| {
            let is_table = !config.tie_word_embeddings && name.ends_with("embed_tokens.weight");
            is_table || name.ends_with("gate.weight") || name.contains("_scale")
        };
        let is_counted = |name: &str| (prefixes.is_own(name, layers) || name.starts_with(&head)) && !is_other(name);
        let wide = |name: &String| {
            let view = self.map.get(name).ok().filter(|view| matches!(view.dtype(), Dtype::F32 | Dtype::F64))?;
            Some(view.shape()).filter(|shape| shape.len() > 1).map(|shape| shape.iter().product::<usize>() as u64)
        };
        self.names.iter().filter(|name| is_counted(name)).filter_map(wide).sum()
    }

    /// The shape of a tensor; `None` where there is none of this name.
    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.map.get(name).ok().map(|view| view.shape().to_vec())
    }

    /// Whether a tensor has a number for each of its elements, not a packed group of them.
    pub(crate) fn is_number(&self, name: &str) -> bool {
        self.map.get(name).is_ok_and(|view| {
            matches!(view.dtype(), Dtype::F64 | Dtype::F32 | Dtype::BF16 | Dtype::F16 | Dtype::F8_E4M3)
        })
    }

    /// A tensor that is read in `dtype`. Numbers of other types than floats stand for something else, and those in e4m3 are multiplied
    /// by a scale: neither is converted.
    pub(crate) fn view(&self, name: &str, dtype: DType) -> Result<TensorView<'_>> {
        let Ok(view) = self.map.get(name) else { return self.missing(name) };
        self.note(name);
        let expected = match (view.dtype(), dtype) {
            (Dtype::F8_E4M3, DType::F8E4M3) => return Ok(view),
            (_, DType::F8E4M3) => "F8_E4M3, since a scale is beside it",
            (Dtype::F64 | Dtype::F32 | Dtype::BF16 | Dtype::F16, _) => return Ok(view),
            _ => "F32, BF16 or F16, or F8_E4M3 with its scale beside it",
        };
        bail!("tensor {name}: expected {expected}, got {:?}", view.dtype())
    }

    fn missing<T>(&self, name: &str) -> Result<T> {
        let module = name.rsplit_once('.').map_or("", |(module, _)| module);
        let in_it = |other: &&String| other.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'));
        let beside: Vec<&str> = self.names.iter().filter(in_it).map(String::as_str).take(4).collect();
        match (beside.is_empty(), self.names.first()) {
            (false, _) => bail!("cannot find tensor {name}: the files have {} in its place", beside.join(", ")),
            (_, Some(first)) => bail!("cannot find tensor {name} among {}, such as {first}", self.names.len()),
            _ => bail!("cannot find tensor {name}: the files have none"),
        }
    }

    fn note(&self, name: &str) {
        self.read.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_string());
    }

    /// Whether two tensors are the same to the bit. Both count as read.
    pub(crate) fn same(&self, a: &str, b: &str) -> bool {
        [a, b].iter().for_each(|name| self.note(name));
        match (self.map.get(a), self.map.get(b)) {
            (Ok(a), Ok(b)) => a.dtype() == b.dtype() && a.shape() == b.shape() && a.data() == b.data(),
            _ => false,
        }
    }

    /// In one line, the tensors that nobody has read; `None` if all are. `is_own`: whether a name is of the model's own layers.
    ///
    /// # Errors
    /// When one of the model's own is among them that would change its results.
    pub(crate) fn unread(&self, is_own: impl Fn(&str) -> bool) -> Result<Option<String>> {
        let read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        // How activations or caches would be rounded, which they are not here.
        let rounds_others = |name: &str| {
            let weight = name.strip_suffix("input_scale").or_else(|| name.strip_suffix("output_scale"));
            let scaled = |weight: &str| {
                ["weight_scale", "weight_scale_inv", "scale_inv", "scale"]
                    .iter()
                    .any(|end| read.contains(&format!("{weight}{end}")))
            };
            weight.is_some_and(scaled) || [".k_scale", ".v_scale", ".q_scale"].iter().any(|end| name.ends_with(end))
        };
        let harmless = |name: &str| name.ends_with("rotary_emb.inv_freq") || rounds_others(name);
        let mut groups: BTreeMap<String, usize> = BTreeMap::new();
        let unread = || self.names.iter().filter(|name| !read.contains(*name) && !harmless(name));
        let own: Vec<&str> = unread().filter(|name| is_own(name)).map(String::as_str).collect();
        if let [first, ..] = own[..] {
            bail!(
                "tensor {first}: expected none of this name in the model, got it and {} more that nobody reads",
                own.len() - 1
            )
        }
        for name in unread() {
            // Up to the number of a layer.
            let parts = name.split('.').take_while(|part| part.parse::<usize>().is_err()).take(2);
            *groups.entry(parts.collect::<Vec<_>>().join(".")).or_default() += 1;
        }
        let total: usize = groups.values().sum();
        let list =
            groups.iter().take(4).map(|(group, count)| format!("{group} ({count})")).collect::<Vec<_>>().join(", ");
        let more = if groups.len() > 4 { ", .." } else { "" };
        Ok((total > 0).then(|| format!("tensors that the text model does not read: {list}{more}")))
    }
}

fn of_draft_head(prefixes: &Prefixes, name: &str) -> String {
    match prefixes.draft_head.as_str() {
        "" => name.to_string(),
        prefix => format!("{prefix}.{name}"),
    }
}

impl std::fmt::Debug for SafetensorsFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SafetensorsFiles({} tensors)", self.names.len())
    }
}

impl SimpleBackend for &SafetensorsFiles {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let view = self.view(name, dtype)?;
        if view.shape() != shape.dims() {
            let got = Shape::from(view.shape());
            return Err(Error::UnexpectedShape { msg: format!("shape mismatch for {name}"), expected: shape, got }.bt());
        }
        view.load(device)?.to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.view(name, dtype)?.load(device)?.to_dtype(dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.map.get(name).is_ok()
    }
}
