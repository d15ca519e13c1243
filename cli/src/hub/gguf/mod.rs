//! Which of a repository's GGUF files make the model.

use super::Name;
use anyhow::{bail, ensure, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The type that is chosen where none is named.
const USUAL: &str = "Q4_K_M";

/// Whether a file has the ending of GGUF.
pub fn is_gguf(file: &str) -> bool {
    file.len() > 5 && file.is_char_boundary(file.len() - 5) && file[file.len() - 5..].eq_ignore_ascii_case(".gguf")
}

/// Whether a file may be a model: not the vision part of one, its draft head, or statistics of activations.
pub fn is_model(file: &str) -> bool {
    let name = base(file).to_lowercase();
    is_gguf(file) && !name.contains("mmproj") && !name.starts_with("mtp-") && !name.contains("imatrix")
}

/// The files to fetch: those of the model, all parts of a split one in order, then its draft head if that is a file of its own.
///
/// # Errors
/// When `name` fits no model or several, or a part is missing.
pub fn choose(listed: &[String], name: &Name) -> Result<Vec<String>> {
    let mut models: BTreeMap<&str, Vec<&String>> = BTreeMap::new();
    let path = name.path.as_deref();
    let is_wanted = |file: &str| match path {
        Some(path) if is_gguf(path) => whole(file) == whole(path) && is_gguf(file),
        Some(path) => is_model(file) && file.strip_prefix(path).is_some_and(|rest| rest.starts_with('/')),
        None => is_model(file),
    };
    for file in listed.iter().filter(|file| is_wanted(file)) {
        models.entry(whole(file)).or_default().push(file);
    }
    let at = format!("{} at revision {}", name.id, name.revision);
    ensure!(!models.is_empty(), "{at} has no GGUF file{}", path.map_or(String::new(), |path| format!(" {path}")));
    let tag = of_tag(name);
    let all: Vec<&str> = models.keys().copied().collect();
    let fits = match (tag, &all[..]) {
        (None, [_]) => all.clone(),
        _ => matching(&all, tag.unwrap_or(USUAL)),
    };
    let [model] = fits[..] else {
        let labels: BTreeSet<&str> = all.iter().map(|model| label(model).unwrap_or(model)).collect();
        let labels = Vec::from_iter(labels).join(", ");
        match (&fits[..], tag) {
            ([], None) => bail!(
                "{at} has GGUF files of several types and no {USUAL}; --model {}:TYPE names one of {labels}",
                name.id
            ),
            ([], Some(tag)) => bail!("{at} has no GGUF file of type {tag}, but {labels}"),
            _ => bail!(
                "{at} has several GGUF files of type {}; --model {}/FILE.gguf names one of {}",
                tag.unwrap_or(USUAL),
                name.id,
                fits.join(", ")
            ),
        }
    };
    let mut files: Vec<String> = models[model].iter().map(|file| file.to_string()).collect();
    files.sort();
    if let Some((_, count)) = part(&files[0]) {
        ensure!(files.len() == count, "{at} has {} of the {count} parts of {model}", files.len());
    }
    let head = format!("{}mtp-{}", &files[0][..files[0].len() - base(&files[0]).len()], base(&files[0]));
    files.extend(listed.iter().find(|file| **file == head).cloned());
    Ok(files)
}

/// Whether `path` is a GGUF file that was chosen among the cached ones, and might not be among all: nothing names it.
pub fn is_guess(name: &Name, path: &Path) -> bool {
    let file = path.to_string_lossy();
    let names_one = of_tag(name).is_some() || name.path.as_deref().is_some_and(is_gguf);
    is_gguf(&file) && !names_one && label(whole(&file)).is_none_or(|label| !label.eq_ignore_ascii_case(USUAL))
}

/// The type that is asked for.
fn of_tag(name: &Name) -> Option<&str> {
    name.tag.as_deref().filter(|tag| !tag.eq_ignore_ascii_case("latest"))
}

/// The models of type `tag`: exactly, else as a variant of it (`UD-`), else those whose file has this name.
fn matching<'a>(models: &[&'a str], tag: &str) -> Vec<&'a str> {
    let is = |a: &str, b: &str| a.eq_ignore_ascii_case(b);
    let tests: [&dyn Fn(&str) -> bool; 3] = [
        &|model| label(model).is_some_and(|label| is(label, tag)),
        &|model| label(model).is_some_and(|label| label.get(..3).is_some_and(|v| is(v, "UD-")) && is(&label[3..], tag)),
        &|model| is(base(model), tag) || is(base(model), whole(tag)),
    ];
    let fitting = |test: &&dyn Fn(&str) -> bool| models.iter().copied().filter(|model| test(model)).collect::<Vec<_>>();
    tests.iter().map(fitting).find(|fits| !fits.is_empty()).unwrap_or_default()
}

/// The type in the name of a model, as in `Q4_K_M` or `UD-Q4_K_XL`: the last word that begins like one.
fn label(model: &str) -> Option<&str> {
    let is_type = |word: &str| {
        let word = word.to_ascii_uppercase();
        let digits = |word: &str| word.starts_with(|c: char| c.is_ascii_digit());
        ["IQ", "TQ", "Q"].iter().any(|start| word.strip_prefix(start).is_some_and(digits))
            || ["F16", "F32", "BF16", "FP16", "MXFP4", "NVFP4"]
                .iter()
                .any(|name| word == *name || word.starts_with(&format!("{name}_")))
    };
    let mut end = model.len();
    while end > 0 {
        let start = model[..end].rfind(['-', '.', '/']).map_or(0, |i| i + 1);
        let word = &model[start..end];
        // Names as in qwen_q4_k_m have no other sign between their words.
        let begins =
            std::iter::once(0).chain(word.match_indices('_').map(|(i, _)| i + 1)).find(|i| is_type(&word[*i..]));
        if let Some(begin) = begins {
            let variant = if begin == 0 && model[..start].to_ascii_uppercase().ends_with("UD-") { 3 } else { 0 };
            return Some(&model[start + begin - variant..end]);
        }
        end = start.saturating_sub(1);
    }
    None
}

/// The name without its ending and the number of a part.
fn whole(file: &str) -> &str {
    let stem = if is_gguf(file) { &file[..file.len() - 5] } else { file };
    if part(file).is_some() {
        &stem[..stem.len() - "-00001-of-00002".len()]
    } else {
        stem
    }
}

/// The number of a part and the count of parts in a name that ends with `-00001-of-00002.gguf`.
fn part(file: &str) -> Option<(usize, usize)> {
    let end = file.get(file.len().checked_sub("-00001-of-00002.gguf".len())?..file.len() - 5)?;
    let (number, count) = end.strip_prefix('-')?.split_once("-of-")?;
    let is_number = |digits: &str| digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
    (is_gguf(file) && is_number(number) && is_number(count)).then_some((number.parse().ok()?, count.parse().ok()?))
}

fn base(file: &str) -> &str {
    file.rsplit('/').next().unwrap_or(file)
}

#[cfg(test)]
mod tests;
