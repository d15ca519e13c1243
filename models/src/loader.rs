//! How a model is loaded: whole or a rank's shard, from a checkpoint or a GGUF file, quantised on the way or not.

use crate::blocks::attention::Rotary;
use crate::blocks::decoder::DecoderLayer;
use crate::blocks::draft_head::DraftHead;
use crate::blocks::embeddings::Embeddings;
use crate::blocks::norm::RmsNorm;
use crate::causal_lm::{CausalLm, Kernels};
use crate::config::ModelConfig;
use crate::formats::{
    dequantized, place, read_once, Format, Fp8Format, GgufFile, GgufWeights, LoraAdapter, Merge, Prefixes, Quantizer,
    SafetensorsFiles, Source,
};
use crate::parallel::{shard_of_safetensors, Collective, Vocabulary, WeightShards};
use candle_core::quantized::GgmlDType;
use candle_core::{bail, DType, Device, Result, Tensor};
use candle_gdn::Algo;
use candle_nn::VarBuilder;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

impl CausalLm {
    /// Loads the model at the root of a checkpoint, in the dtype (f32, bf16 or f16) and on the
    /// device of `vb`. Weights that the text model does not need (a vision tower; `mtp.*`, unless
    /// [`Loader::draft_head`] asks for it) are never read. On the CPU, matrices in f32 that bf16 or f16 holds exactly are kept in it, which halves
    /// memory and changes no result. Weights are read once: variables are copied, and have no gradients.
    ///
    /// Matrices in fp8 stay as they are stored on CUDA, in bf16 or f16 and with scales of 128 columns or whole rows, if
    /// their width is a multiple of 64 and none of their numbers is NaN; the experts of a layer do if all of them and the shared
    /// expert can. Everywhere else they are dequantised as they are loaded.
    ///
    /// # Errors
    /// A missing or misshapen weight, by its full name.
    pub fn load(config: &ModelConfig, vb: VarBuilder) -> Result<Self> {
        Self::loader(config).load(vb)
    }

    /// Loads the model in a GGUF file that llama.cpp's converter made, with activations in `dtype` (f32, bf16 or f16).
    /// `config` is [`ModelConfig::from_gguf`]'s. Quantised matrices stay as they are, to the bit: kernels of this package
    /// multiply q8_0, q4_K and q6_K on CUDA, and on x86 CPUs with AVX2 q4_0 to q8_0 and q2_K to q6_K; candle's multiply the rest. Both
    /// round activations to 8 bits, but for ours on CUDA. Types that candle does not know are decoded and kept as
    /// [`Q8_0`](GgmlDType::Q8_0) ([`GgufFile::kept_types`]). All else is loaded in `dtype`.
    ///
    /// # Errors
    /// A missing or misshapen tensor: the message names the file, the tensor, and the weight it stands for. Also a tensor of the model's
    /// own layers that it has no use for.
    pub fn load_gguf(config: &ModelConfig, file: &GgufFile, dtype: DType, device: &Device) -> Result<Self> {
        Self::loader(config).load_gguf(file, dtype, device)
    }

    /// The same with options: quantised, a rank's shard, or with progress.
    ///
    /// ```no_run
    /// # fn load(config: &candle_gdn_models::ModelConfig, vb: candle_nn::VarBuilder) -> candle_core::Result<()> {
    /// use candle_core::quantized::GgmlDType;
    /// use candle_gdn_models::CausalLm;
    ///
    /// let progress = |loaded, of| println!("layer {loaded} of {of}");
    /// let model = CausalLm::loader(config).quantize(GgmlDType::Q4K).progress(progress).load(vb)?;
    /// # let _ = model;
    /// # Ok(())
    /// # }
    /// ```
    pub fn loader(config: &ModelConfig) -> Loader<'_> {
        Loader {
            config,
            algo: Algo::Auto,
            quantize: None,
            lora: None,
            group: None,
            draft_head: DraftHeadChoice::Off,
            progress: Box::new(|_, _| ()),
        }
    }
}

/// Whether the draft head of a checkpoint (`mtp.*`, multi-token prediction) is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DraftHeadChoice {
    /// Where the checkpoint has one.
    Auto,
    /// Always: an error where the checkpoint has none.
    On,
    /// Never.
    #[default]
    Off,
}

/// Options of loading a model, made by [`CausalLm::loader`].
pub struct Loader<'a> {
    config: &'a ModelConfig,
    algo: Algo,
    quantize: Option<GgmlDType>,
    lora: Option<&'a LoraAdapter>,
    group: Option<Arc<dyn Collective>>,
    draft_head: DraftHeadChoice,
    progress: Box<dyn FnMut(usize, usize) + 'a>,
}

impl<'a> Loader<'a> {
    /// Sets the kernel that runs the rule in all Gated DeltaNet layers ([`GatedDeltaNet::with_algo`](candle_gdn::GatedDeltaNet::with_algo)).
    pub fn algo(mut self, algo: Algo) -> Self {
        self.algo = algo;
        self
    }

    /// Quantises the matrices of all projections, in fp8 or not and embeddings aside, to this type, one by one as they are read: memory
    /// holds the quantised model and one tensor of the checkpoint at a time. `None`, the default, leaves them as they are.
    /// In a GGUF file it concerns what is not quantised there, or in a type that candle does not know.
    ///
    /// A matrix whose width is not whole blocks of the type (32 values, 256 for the K types) becomes
    /// [`Q8_0`](GgmlDType::Q8_0), or stays dense where 32 does not divide it either;
    /// [`CausalLm::other_types`] lists them. The decay and beta
    /// projections of Gated DeltaNet layers, a few rows that all else hangs on, become `Q8_0` whatever is asked for.
    /// Norms, the convolution and the router of experts are never quantised.
    ///
    /// A rank of several quantises its shard of each matrix, whose width is what counts then.
    pub fn quantize(mut self, dst: impl Into<Option<GgmlDType>>) -> Self {
        self.quantize = dst.into();
        self
    }

    /// Merges an adapter into the weights as they are read: each is the sum `W + s B A` in f32, rounded once to the model's dtype. From
    /// then on the model is one like any other. With [`quantize`](Self::quantize) the sums are quantised; a rank of several
    /// adds to its shard of each weight.
    ///
    /// Loading then has more errors: a tensor of the adapter that no weight of the model belongs to, as of embeddings, or one of another
    /// shape; and a weight that is stored in fp8 or in a quantised type of a GGUF file.
    ///
    /// ```no_run
    /// # fn load(config: &candle_gdn_models::ModelConfig, vb: candle_nn::VarBuilder) -> candle_core::Result<()> {
    /// use candle_gdn_models::{CausalLm, LoraAdapter};
    ///
    /// let adapter = LoraAdapter::open("my-adapter")?;
    /// let model = CausalLm::loader(config).lora(&adapter).load(vb)?;
    /// # let _ = model;
    /// # Ok(())
    /// # }
    /// ```
    pub fn lora(mut self, adapter: impl Into<Option<&'a LoraAdapter>>) -> Self {
        self.lora = adapter.into();
        self
    }

    /// Loads a rank's shard of the model, whose others the other ranks of `group` load at the same time with the same
    /// options: tensor parallelism. The config stays that of the whole model. From then on all ranks make the same calls in
    /// the same order, each on a state or pool of its own, which holds its heads; logits are those of the whole, the same
    /// on all ranks. A model that cannot be divided so ([`ModelConfig::split`]) is an error when it is loaded.
    ///
    /// The weights for [`load`](Self::load) are then what [`shard_of`](crate::shard_of) gives; files are given whole. A shard
    /// of a matrix in fp8 stays in fp8 if its columns are a multiple of 128. A GGUF file is given whole: of each tensor the rank keeps
    /// its rows or columns, quantised as they are. Only where its columns are not whole blocks of their type, as a K type's
    /// 256 values may not divide the width of a shard, they become [`Q8_0`](GgmlDType::Q8_0), or dense where 32 does not
    /// divide it either; [`CausalLm::other_types`] lists them.
    pub fn group(mut self, group: impl Into<Option<Arc<dyn Collective>>>) -> Self {
        self.group = group.into();
        self
    }

    /// Whether the checkpoint's draft head is loaded too, for [`CausalLm::draft`]. It becomes what the layers become:
    /// quantised, or a rank's shard. [`CausalLm::has_draft_head`] returns whether there is one.
    pub fn draft_head(mut self, choice: DraftHeadChoice) -> Self {
        self.draft_head = choice;
        self
    }

    /// Calls `progress(loaded, of)` after every layer.
    pub fn progress(mut self, progress: impl FnMut(usize, usize) + 'a) -> Self {
        self.progress = Box::new(progress);
        self
    }

    /// From the root of a checkpoint; see [`CausalLm::load`].
    ///
    /// # Errors
    /// As [`CausalLm::load`], or a type that matrices cannot be quantised to.
    pub fn load(self, vb: VarBuilder) -> Result<CausalLm> {
        let vb = read_once(vb);
        let vb = match &self.group {
            None => dequantized(vb, self.config.fp8.as_ref(), None, false),
            // `shard_of` has applied the scales of a shard.
            Some(_) => vb,
        };
        self.load_checkpoint(vb, None)
    }

    /// From the files of a checkpoint, as [`load`](Self::load), in `dtype` on `device`. A rank reads its shard alone.
    ///
    /// Tensors that are of no use for the text model, as those of a vision tower, are left unread; [`CausalLm::remarks`] has a line of
    /// them.
    ///
    /// # Errors
    /// As [`load`](Self::load); and a tensor of the model's own layers, of its embeddings, last norm or head that the model does not
    /// read, or one of numbers that are no floats.
    pub fn load_safetensors(self, files: &SafetensorsFiles, dtype: DType, device: &Device) -> Result<CausalLm> {
        let vb = match &self.group {
            None => {
                let vb = VarBuilder::from_backend(Box::new(files), dtype, device.clone());
                dequantized(vb, self.config.fp8.as_ref(), None, true)
            }
            Some(group) => shard_of_safetensors(files, self.config, &**group, dtype, device)?,
        };
        self.load_checkpoint(vb, Some(files))
    }

    fn load_checkpoint(self, vb: VarBuilder, files: Option<&SafetensorsFiles>) -> Result<CausalLm> {
        let in_fp8 = |name: &str| vb.contains_tensor(&format!("{name}_scale_inv")).then(|| "fp8".to_string());
        let (vb, merge) = self.merged(vb.clone(), in_fp8)?;
        let sixteen_bits = matches!(vb.dtype(), DType::BF16 | DType::F16);
        let keeps = vb.device().is_cuda() && sixteen_bits && self.quantize.is_none();
        let fp8 = self.config.fp8.as_ref().filter(|_| keeps);
        let format = fp8.and_then(|fp8| Fp8Format::new(fp8, self.group.is_some()));
        let stored = format.map(|format| Arc::new(format) as Arc<dyn Format>);
        let model = self.load_from(Source { stored, ..Source::new(vb) }, false, files)?;
        merge.map_or(Ok(()), |merge| merge.check_all_read())?;
        Ok(model)
    }

    /// `weights`, the root of a checkpoint or a rank's shard of one, with the adapter if there is one. `stored_as`: how a weight is
    /// stored that is not dense.
    fn merged<'b>(
        &self,
        weights: VarBuilder<'b>,
        stored_as: impl Fn(&str) -> Option<String>,
    ) -> Result<(VarBuilder<'b>, Option<Arc<Merge>>)> {
        let Some(adapter) = self.lora else { return Ok((weights, None)) };
        let shards = self.group.as_ref().map(|group| WeightShards::new(self.config, &**group)).transpose()?;
        let merge = Merge::new(adapter, self.config, &weights, shards, stored_as)?;
        Ok((merge.apply(weights), Some(merge)))
    }

    /// From a GGUF file; see [`CausalLm::load_gguf`].
    ///
    /// # Errors
    /// As [`CausalLm::load_gguf`], or a type that matrices cannot be quantised to.
    pub fn load_gguf(self, file: &GgufFile, dtype: DType, device: &Device) -> Result<CausalLm> {
        let config = self.config;
        let shards = self.group.as_ref().map(|group| WeightShards::new(config, &**group)).transpose()?;
        let tiled = file.tiles_value_heads(config.family)?;
        let weights = GgufWeights::new(file, config, tiled, shards).with_quantizer(self.quantize.is_some());
        let quantized = file.is_quantized(config);
        let dense = VarBuilder::from_backend(Box::new(weights.clone()), dtype, device.clone());
        let (dense, merge) = self.merged(dense, |name| weights.quantized_as(name).map(|dtype| format!("{dtype:?}")))?;
        let source = Source { stored: Some(Arc::new(weights.clone())), is_one_file: true, ..Source::new(dense) };
        let model = self.load_from(source, quantized, None)?;
        weights.check_all_read()?;
        merge.map_or(Ok(()), |merge| merge.check_all_read())?;
        Ok(model)
    }

    /// `quantized`: whether some matrices are, as they are stored. `files`: all that `source` reads from, where it is known.
    fn load_from(mut self, mut source: Source, quantized: bool, files: Option<&SafetensorsFiles>) -> Result<CausalLm> {
        static NEXT_ID: AtomicUsize = AtomicUsize::new(0);
        let (dtype, device) = (source.dense.dtype(), source.device().clone());
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            bail!("dtype: expected F32, BF16 or F16, got {dtype:?}")
        }
        let quantized = quantized || self.quantize.is_some();
        source.quantizer = self.quantize.map(Quantizer::new).transpose()?.map(Arc::new);
        let prefixes = Prefixes::find(|name| source.contains(name));
        let [text, lm_head] = [&prefixes.text, &prefixes.head].map(|prefix| source.pp_some(prefix));
        let lm_head = lm_head.pp("lm_head");
        let (mut whole, group) = (self.config.clone(), self.group);
        let mut remarks: Vec<String> = self.lora.and_then(LoraAdapter::remark).into_iter().collect();
        let mut shard = group.as_ref().map(|group| whole.split(group.size())).transpose()?;
        if whole.tie_word_embeddings && differ(shard.as_ref().unwrap_or(&whole), &text, &lm_head, files)? {
            remarks.push(
                "tie_word_embeddings is true, but lm_head.weight is not the embedding: it is the head".to_string(),
            );
            shard.iter_mut().chain([&mut whole]).for_each(|config| config.tie_word_embeddings = false);
        }
        let config = shard.as_ref().unwrap_or(&whole);
        let (mut embeddings, tied) = Embeddings::load(config, &text)?;
        if group.is_some() {
            embeddings = embeddings.in_group()?;
        }
        let mut layers = Vec::with_capacity(config.layers.len());
        for (i, layer) in config.layers.iter().enumerate() {
            let layer = DecoderLayer::load(config, layer, &text.pp("layers").pp(i), group.clone())?;
            layers.push(layer.with_algo(self.algo));
            (self.progress)(i + 1, config.layers.len());
        }
        let head = match tied {
            Some(tied) => tied,
            None => place::load(&lm_head, config.hidden_size, config.vocab_size)?,
        };
        let of_draft_head = source.pp_some(&prefixes.draft_head);
        let draft_head = match self.draft_head {
            DraftHeadChoice::Off => None,
            DraftHeadChoice::Auto if !DraftHead::is_in(&of_draft_head) => None,
            DraftHeadChoice::On if !DraftHead::is_in(&of_draft_head) => {
                bail!("draft head: the checkpoint has none: there is no weight `mtp.fc.weight`")
            }
            _ => Some(DraftHead::load(config, &of_draft_head, group.clone())?.with_copy_of(&head)?),
        };
        let vocabulary = group.map(|group| Vocabulary::new(group, whole.vocab_size, &device)).transpose()?;
        let uses_candle = head.uses_candle()
            || embeddings.uses_candle()
            || layers.iter().any(|layer| layer.uses_candle)
            || draft_head.as_ref().is_some_and(DraftHead::uses_candle);
        let norm = RmsNorm::load(config.hidden_size, config, text.pp("norm").dense)?;
        if let Some(files) = files {
            remarks.extend(files.unread(|name| prefixes.is_own(name, config.layers.len()))?);
        }
        let model = CausalLm {
            embeddings,
            layers,
            draft_head,
            norm,
            head,
            rotary: Rotary::new(&config.attention.rope_inv_freq, config.max_position_embeddings),
            vocabulary,
            heads: config.attention.num_heads,
            kv_heads: config.attention.num_kv_heads,
            dtype,
            device,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            quantized: quantized.then_some(if uses_candle { Kernels::Candles } else { Kernels::Ours }),
            other_types: source.other_types(),
            remarks,
            config: whole,
        };
        // Overlapping launches read weights early, from any host thread: all of them are written before the first launch.
        model.device.synchronize()?;
        Ok(model)
    }
}

/// Whether there is an `lm_head.weight`, and it is not the embedding.
fn differ(config: &ModelConfig, text: &Source, lm_head: &Source, files: Option<&SafetensorsFiles>) -> Result<bool> {
    if !lm_head.contains("weight") {
        return Ok(false);
    }
    let [table, head] = [(text, "embed_tokens.weight"), (lm_head, "weight")].map(|(at, name)| at.name(name));
    if files.is_some_and(|files| files.same(&table, &head)) {
        return Ok(false);
    }
    let host = |at: &Source, name: &str| -> Result<Tensor> {
        let at = at.dense.clone().set_device(Device::Cpu);
        at.get((config.vocab_size, config.hidden_size), name)
    };
    let differing = host(text, "embed_tokens.weight")?.ne(&host(lm_head, "weight")?)?;
    Ok(differing.flatten_all()?.max(0)?.to_scalar::<u8>()? != 0)
}
