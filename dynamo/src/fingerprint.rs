//! What a state is the state of: weights, number format and tokens.

use anyhow::{ensure, Context, Result};
use blake3::Hasher;
use candle_core::DType;
use candle_gdn_cli::{Checkpoint, LoadFormat, ModelArgs};
use candle_gdn_models::ModelConfig;
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Places of a weight file that are read, and bytes of each. Finetuned weights differ nearly everywhere.
const PLACES: u64 = 256;
const BYTES: u64 = 64;

/// The part that all states of a model share.
#[derive(Clone, Debug)]
pub struct ModelFingerprint {
    model: String,
    dtype: String,
}

/// All of a state's.
#[derive(Debug)]
pub struct Fingerprint {
    model: ModelFingerprint,
    tokens: String,
}

impl ModelFingerprint {
    /// # Errors
    /// When a weight file cannot be read.
    pub fn new(args: &ModelArgs, checkpoint: &Checkpoint, config: &ModelConfig, dtype: DType) -> Result<Self> {
        let mut hasher = Hasher::new();
        hasher.update(format!("{config:?} {:?} {:?}", args.quantize, args.load_format).as_bytes());
        match checkpoint.gguf() {
            Some(file) => sample(file.path(), &mut hasher)?,
            None if args.load_format == LoadFormat::Dummy => {}
            None => checkpoint.weights()?.iter().try_for_each(|path| sample(path, &mut hasher))?,
        }
        if let Some(dir) = &args.lora {
            ["adapter_config.json", "adapter_model.safetensors"]
                .iter()
                .try_for_each(|name| sample(&dir.join(name), &mut hasher))?;
        }
        Ok(Self { model: hasher.finalize().to_hex().to_string(), dtype: format!("{dtype:?}") })
    }

    /// That of the state after `tokens`.
    pub fn after(&self, tokens: &[u32]) -> Fingerprint {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        Fingerprint { model: self.clone(), tokens: blake3::hash(&bytes).to_hex().to_string() }
    }
}

impl Fingerprint {
    /// By name, as a state carries them.
    pub fn entries(&self) -> impl Iterator<Item = (String, String)> {
        let ModelFingerprint { model, dtype } = self.model.clone();
        [("model", model), ("dtype", dtype), ("tokens", self.tokens.clone())]
            .into_iter()
            .map(|(name, value)| (name.to_string(), value))
    }

    /// # Errors
    /// When a state that carries `entries` is of another model, dtype or prompt.
    pub fn check(&self, entries: Option<&HashMap<String, String>>) -> Result<()> {
        for (name, want) in self.entries() {
            let got = entries.and_then(|entries| entries.get(&name)).map_or("none", String::as_str);
            ensure!(got == want, "the state's {name}: expected {want}, got {got}");
        }
        Ok(())
    }
}

/// Hashes the length of a file and bytes from all over it.
fn sample(path: &Path, hasher: &mut Hasher) -> Result<()> {
    let name = || format!("cannot read {}", path.display());
    let mut file = File::open(path).with_context(name)?;
    let len = file.metadata().with_context(name)?.len();
    hasher.update(&len.to_le_bytes());
    let mut bytes = Vec::new();
    for place in 0..=PLACES {
        let start = len.saturating_sub(BYTES) as u128 * u128::from(place) / u128::from(PLACES);
        file.seek(SeekFrom::Start(start as u64)).with_context(name)?;
        (&mut file).take(BYTES).read_to_end(&mut bytes).with_context(name)?;
    }
    hasher.update(&bytes);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_difference_is_named() {
        let of = |model: &str, dtype: &str| ModelFingerprint { model: model.into(), dtype: dtype.into() };
        let want = of("a", "F32").after(&[1, 2, 3]);
        let check = |other: Fingerprint| want.check(Some(&other.entries().collect()));
        check(of("a", "F32").after(&[1, 2, 3])).unwrap();
        for (other, name) in [
            (of("b", "F32").after(&[1, 2, 3]), "model"),
            (of("a", "BF16").after(&[1, 2, 3]), "dtype"),
            (of("a", "F32").after(&[1, 2]), "tokens"),
            (of("a", "F32").after(&[1, 2, 4]), "tokens"),
        ] {
            assert!(check(other).unwrap_err().to_string().contains(&format!("{name}: expected")), "{name}");
        }
        assert!(want.check(None).is_err());
    }

    #[test]
    fn one_changed_matrix_changes_the_sample() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        let of = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let mut hasher = Hasher::new();
            sample(&path, &mut hasher).unwrap();
            hasher.finalize()
        };
        let mut bytes = vec![1; 100_000];
        let first = of(&bytes);
        bytes[50_000..52_000].fill(2);
        assert_ne!(of(&bytes), first);
        assert_ne!(of(&[1; 99_999]), first);
        assert_ne!(of(&[]), of(&[1]));
    }
}
