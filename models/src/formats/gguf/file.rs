//! GGUF files: their metadata, and rows of their tensors.

use super::super::blocks::Blocks;
use super::header::{self, Header, TensorInfo};
use super::types::Kept;
use crate::config::ModelConfig;
use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::GgmlDType;
use candle_core::{bail, DType, Result};
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A GGUF file, or all files of one that was split (`..-00001-of-00003.gguf`): what
/// [`ModelConfig::from_gguf`](crate::ModelConfig::from_gguf) and
/// [`CausalLm::load_gguf`](crate::CausalLm::load_gguf) read.
///
/// Opening reads the headers only, and checks that all that they describe is there.
#[derive(Debug)]
pub struct GgufFile {
    files: Vec<OneFile>,
}

#[derive(Debug)]
struct OneFile {
    path: PathBuf,
    file: File,
    header: Header,
}

/// What a draft head has in its block, and a layer has not.
const EH_PROJ: &str = ".nextn.eh_proj.weight";

impl GgufFile {
    /// Whether a file begins as GGUF files do, whatever its name; false where it cannot be read.
    pub fn is_gguf(path: impl AsRef<Path>) -> bool {
        let mut magic = [0; header::MAGIC.len()];
        File::open(path).is_ok_and(|mut file| file.read_exact(&mut magic).is_ok()) && magic == header::MAGIC
    }

    /// Opens a file. Of a split one any part will do; the others are looked for beside it.
    ///
    /// # Errors
    /// A file that is not there, is no GGUF file, or is cut off. The message names the file. Also where two parts have a
    /// tensor of one name.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let files: Vec<OneFile> = parts(path.as_ref()).iter().map(|path| OneFile::open(path)).collect::<Result<_>>()?;
        let mut part_of = HashMap::new();
        for file in &files {
            for tensor in file.header.tensors.keys() {
                if let Some(other) = part_of.insert(tensor.as_str(), file.path.display()) {
                    bail!("{} and {other} both have a tensor `{tensor}`", file.path.display())
                }
            }
        }
        let file = Self { files };
        match file.integer("split.count") {
            Some(count) if count > file.files.len() as i64 => bail!(
                "{}: `split.count`: expected a file of {count}, named ..-00001-of-{count:05}.gguf with the others beside it",
                file.path().display()
            ),
            _ => Ok(file),
        }
    }

    /// Adds the draft head of a file of its own, as llama.cpp's converter writes it with `--mtp`: the tensors that this one has not.
    ///
    /// # Errors
    /// As [`open`](Self::open), or where the file is of another architecture or width, or has no draft head.
    pub fn add_draft_head(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let head = Self::open(&path)?;
        let architecture =
            |file: &Self| file.value("general.architecture").and_then(|name| name.to_string().ok().cloned());
        let (own, other) = (architecture(self), architecture(&head));
        if own != other {
            bail!("{}: expected a draft head of architecture {own:?}, got one of {other:?}", head.path().display())
        }
        let Some((name, projection)) = head.infos().find(|(name, _)| name.ends_with(EH_PROJ)) else {
            bail!("{}: expected a draft head, got a file without a tensor `blk.N{EH_PROJ}`", head.path().display())
        };
        let width = self.shape("token_embd.weight").and_then(|dims| dims.last().copied()).unwrap_or(0);
        let want = [width, width.saturating_mul(2)];
        if projection.dims != want {
            let file = head.path().display();
            bail!("{file}: tensor `{name}`: expected {want:?}, as the model is wide, got {:?}", projection.dims)
        }
        for mut file in head.files {
            file.header.tensors.retain(|name, _| !self.contains(name));
            self.files.push(file);
        }
        Ok(())
    }

    /// The path of the file, or of its first part.
    pub fn path(&self) -> &Path {
        &self.files[0].path
    }

    /// The names of all entries of the metadata.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.files[0].header.metadata.keys().map(String::as_str)
    }

    /// An entry of the metadata.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.files[0].header.metadata.get(key)
    }

    /// An entry of the metadata that is an integer of any width; `None` where there is none, or of another type.
    pub fn integer(&self, key: &str) -> Option<i64> {
        header::integer(self.value(key)?)
    }

    /// An entry that is a finite number of any type: of an f32 the shortest decimal that rounds to it, as in a config.json.
    pub fn number(&self, key: &str) -> Option<f64> {
        let number = match self.value(key)? {
            Value::F32(x) => x.to_string().parse().ok()?,
            Value::F64(x) => *x,
            other => header::integer(other)? as f64,
        };
        number.is_finite().then_some(number)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, tensor: &str) -> bool {
        self.find(tensor).is_some()
    }

    /// Whether the block behind the layers of `config`, the file's own, is a draft head.
    pub fn has_draft_head(&self, config: &ModelConfig) -> bool {
        self.contains(&format!("blk.{}{EH_PROJ}", config.layers.len()))
    }

    /// The first block from `block` on that has tensors of a layer, and is no draft head.
    pub(crate) fn layer_from(&self, block: usize) -> Option<usize> {
        let of_layer = |name: &str| {
            let (block, tensor) = name.strip_prefix("blk.")?.split_once('.')?;
            block.parse().ok().filter(|_| !tensor.starts_with("nextn."))
        };
        let is_head = |block: usize| self.contains(&format!("blk.{block}{EH_PROJ}"));
        self.tensors().filter_map(of_layer).filter(|found| *found >= block && !is_head(*found)).min()
    }

    /// The shape of a tensor, the fastest dimension last.
    pub fn shape(&self, tensor: &str) -> Option<&[usize]> {
        self.find(tensor).map(|(_, info)| info.dims.as_slice())
    }

    /// The names of all tensors.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &str> {
        self.infos().map(|(name, _)| name)
    }

    pub(super) fn infos(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.files.iter().flat_map(|file| file.header.tensors.iter().map(|(name, info)| (name.as_str(), info)))
    }

    /// Whether a tensor is decoded as it is read.
    pub(super) fn is_decoded(&self, tensor: &str) -> bool {
        self.find(tensor).and_then(|(_, info)| info.of).is_some_and(|of| matches!(of.kept, Kept::Decoded(..)))
    }

    /// The type that a tensor has once it is read.
    pub(super) fn dtype(&self, tensor: &str) -> Option<GgmlDType> {
        self.find(tensor)?.1.of?.dtype()
    }

    fn find(&self, tensor: &str) -> Option<(&OneFile, &TensorInfo)> {
        self.files.iter().find_map(|file| Some((file, file.header.tensors.get(tensor)?)))
    }

    /// Rows of a tensor: all, or some, in the order of the ranges, and nothing else is read. A vector has rows of one
    /// value, and a tensor of more dimensions those of all its matrices.
    pub(super) fn rows(&self, tensor: &str, ranges: Option<&[Range<usize>]>) -> Result<Blocks> {
        let Some((file, info)) = self.find(tensor) else {
            bail!("{}: there is no tensor `{tensor}`", self.path().display())
        };
        let (rows, columns) = info.rows_and_columns();
        let name = file.path.display();
        let of = match info.of {
            Some(of) if of.dtype().is_some() => of,
            Some(of) => {
                bail!("{name}: tensor `{tensor}`: expected numbers of a weight, got some of ggml's type {}", of.name)
            }
            None => {
                bail!("{name}: tensor `{tensor}` is of ggml's type number {}, which is not known here", info.number)
            }
        };
        let Some(row) = of.row_bytes(columns) else {
            bail!("{name}: tensor `{tensor}`: expected rows of whole blocks of {}, got {columns}", of.name)
        };
        let all = 0..rows;
        let ranges = ranges.unwrap_or(std::slice::from_ref(&all));
        if let Some(range) = ranges.iter().find(|range| range.end > rows) {
            bail!("{name}: tensor `{tensor}`: expected at least {} rows, got {rows}", range.end)
        }
        let start = file.header.data + info.offset;
        let rows = ranges.iter().map(Range::len).sum();
        let mut data = vec![0u8; rows * row];
        let mut rest = &mut data[..];
        for range in joined(ranges) {
            let (dst, behind) = rest.split_at_mut(range.len() * row);
            if let Err(e) = file.read(start + (range.start * row) as u64, dst) {
                bail!("{name}: cannot read tensor `{tensor}`: {e}")
            }
            rest = behind;
        }
        let scales = self.scales(tensor, all.end, ranges)?;
        match (of.kept, &scales) {
            (Kept::Same(dtype), None) => Blocks::new(dtype, rows, columns, data),
            (Kept::Decoded(dtype, _), _) => Blocks::of_rows(dtype, rows, columns, |i, wide| {
                of.decode(&data[i * row..][..row], wide);
                scales.iter().for_each(|scales| wide.iter_mut().for_each(|x| *x *= scales[i]));
            }),
            _ => bail!("{name}: tensor `{tensor}`: expected no `.scale` beside one of {}", of.name),
        }
    }

    /// What the numbers of each of the rows are to be multiplied by, where the file has it beside the tensor: one number (as NVFP4
    /// has it), or one for each expert.
    fn scales(&self, tensor: &str, all: usize, ranges: &[Range<usize>]) -> Result<Option<Vec<f32>>> {
        let name = tensor.strip_suffix(".weight").map(|stem| format!("{stem}.scale"));
        let Some(name) = name.filter(|name| self.contains(name)) else { return Ok(None) };
        let scales: Vec<f32> = self.rows(&name, None)?.tensor()?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        if scales.is_empty() || !all.is_multiple_of(scales.len()) {
            let file = self.path().display();
            bail!("{file}: tensor `{name}`: expected as many numbers as divide {all} rows, got {}", scales.len())
        }
        let each = all / scales.len();
        Ok(Some(ranges.iter().cloned().flatten().map(|row| scales[row / each.max(1)]).collect()))
    }
}

/// Bytes read at a time where columns are left out; few in tests, so that there are several times.
const PIECE_BYTES: usize = if cfg!(test) { 2000 } else { 8 << 20 };

impl GgufFile {
    /// [`rows`](Self::rows) in pieces, one after the other, of which `take` keeps some: of columns that are left out no more
    /// than a piece is held. (They are read: a row is seldom more than the pages of the disk.)
    pub(super) fn in_pieces(
        &self,
        tensor: &str,
        ranges: Option<&[Range<usize>]>,
        mut take: impl FnMut(Blocks) -> Result<()>,
    ) -> Result<()> {
        let Some((_, info)) = self.find(tensor) else { return self.rows(tensor, ranges).map(|_| ()) };
        let (rows, columns) = info.rows_and_columns();
        let at_once = (PIECE_BYTES / info.of.and_then(|of| of.row_bytes(columns)).unwrap_or(0).max(1)).max(1);
        let all = 0..rows;
        for range in joined(ranges.unwrap_or(std::slice::from_ref(&all))) {
            for first in range.clone().step_by(at_once) {
                let piece = first..range.end.min(first + at_once);
                take(self.rows(tensor, Some(std::slice::from_ref(&piece)))?)?;
            }
        }
        Ok(())
    }
}

impl OneFile {
    fn open(path: &Path) -> Result<Self> {
        let name = path.display();
        let file = match File::open(path) {
            Ok(file) => file,
            Err(e) => bail!("cannot open {name}: {e}"),
        };
        let len = match file.metadata() {
            Ok(metadata) => metadata.len(),
            Err(e) => bail!("cannot read {name}: {e}"),
        };
        let header = match header::read(BufReader::with_capacity(1 << 20, &file), len) {
            Ok(header) => header,
            Err(e) => bail!("{name} is no GGUF file that can be read, or is cut off: {e}"),
        };
        let mut places = Vec::with_capacity(header.tensors.len());
        for (tensor, info) in &header.tensors {
            // Where the type is not known, so is its length: an error if the tensor is read.
            let bytes = if info.of.is_some() { info.bytes() } else { Some(0) };
            let start = header.data.checked_add(info.offset);
            let Some((start, end)) = start.and_then(|start| Some((start, start.checked_add(bytes?)?))) else {
                let of = info.of.map_or("an unknown type", |of| of.name);
                bail!("{name}: tensor `{tensor}` cannot be: {:?} of {of}", info.dims)
            };
            if end > len {
                bail!("{name} is cut off: tensor `{tensor}` ends at byte {end}, the file at {len}")
            }
            places.push((start, end, tensor));
        }
        places.sort_unstable();
        // As of a type whose blocks have other sizes than here.
        if let Some([(_, end, tensor), (next, _, other)]) = places.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            bail!("{name}: tensor `{tensor}` ends at byte {end}: expected that before tensor `{other}`, from {next} on")
        }
        Ok(Self { path: path.to_path_buf(), file, header })
    }

    /// Ranks read at the same time.
    #[cfg(unix)]
    fn read(&self, place: u64, dst: &mut [u8]) -> std::io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, dst, place)
    }

    #[cfg(not(unix))]
    fn read(&self, place: u64, dst: &mut [u8]) -> std::io::Result<()> {
        use std::io::{Read, Seek, SeekFrom};
        // A handle has one position.
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(place))?;
        file.read_exact(dst)
    }
}

/// Ranges that follow each other as one.
pub(super) fn joined(ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range.clone()),
        }
    }
    joined
}

/// All files of a split one, in their order.
fn parts(path: &Path) -> Vec<PathBuf> {
    let split = || {
        let (stem, end) = path.file_name()?.to_str()?.rsplit_once('.')?;
        let (stem, of) = Some(stem).filter(|_| end.eq_ignore_ascii_case("gguf"))?.rsplit_once("-of-")?;
        let (stem, number) = stem.rsplit_once('-')?;
        let digits = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
        let name = |i: usize| path.with_file_name(format!("{stem}-{i:05}-of-{of}.{end}"));
        (digits(number) && digits(of)).then(|| (1..=of.parse().unwrap_or(0)).map(name).collect::<Vec<_>>())
    };
    match split() {
        Some(parts) if !parts.is_empty() => parts,
        _ => vec![path.to_path_buf()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_split_file() {
        let of = |path: &str| parts(Path::new(path)).iter().map(|p| p.display().to_string()).collect::<Vec<_>>();
        let three = ["a/m-Q4-00001-of-00003.gguf", "a/m-Q4-00002-of-00003.gguf", "a/m-Q4-00003-of-00003.gguf"];
        assert_eq!(of("a/m-Q4-00001-of-00003.gguf"), three);
        assert_eq!(of("a/m-Q4-00002-of-00003.gguf"), three);
        for single in ["m.gguf", "m-1-of-3.gguf", "m-00001-of-00000.gguf", "m-00001-of-00003.bin"] {
            assert_eq!(of(single), [single]);
        }
    }

    #[test]
    fn joins_what_follows() {
        assert_eq!(joined(&[0..2, 2..5, 7..8, 3..4, 4..5]), [0..5, 7..8, 3..5]);
    }
}
