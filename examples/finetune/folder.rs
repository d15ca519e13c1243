//! The folder of a run. A save is written into a folder inside it and moved out when it is whole.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// One name: what an interrupted save leaves there, the next one replaces.
const PART: &str = ".saving";

/// Writes files by `write` and moves them into `dir`, `last` behind all others.
pub fn save(dir: &Path, last: &str, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let part = begin(dir)?;
    let done = write(&part).and_then(|()| publish(&part, dir, last));
    // Where the disk is full, half of a save would keep it so.
    let removed = std::fs::remove_dir_all(&part);
    done?;
    removed.with_context(|| format!("cannot remove {}", part.display()))
}

/// # Errors
/// When a save could not be written into `dir`, which is made where it is missing.
pub fn check(dir: &Path) -> Result<()> {
    let part = begin(dir)?;
    std::fs::remove_dir(&part).with_context(|| format!("cannot remove {}", part.display()))
}

fn begin(dir: &Path) -> Result<PathBuf> {
    let part = dir.join(PART);
    let begin = || {
        if part.exists() {
            std::fs::remove_dir_all(&part)?;
        }
        std::fs::create_dir_all(&part)
    };
    begin().with_context(|| format!("cannot write into {}", dir.display()))?;
    Ok(part)
}

fn publish(from: &Path, to: &Path, last: &str) -> Result<()> {
    let names = std::fs::read_dir(from)?.map(|entry| Ok(entry?.file_name()));
    let mut names = names.collect::<Result<Vec<_>>>()?;
    names.sort_by_key(|name| name == last);
    for name in names {
        let (from, to) = (from.join(&name), to.join(&name));
        if from.is_dir() {
            std::fs::create_dir_all(&to).with_context(|| format!("cannot make {}", to.display()))?;
            publish(&from, &to, last)?;
        } else {
            std::fs::rename(&from, &to).with_context(|| format!("cannot write {}", to.display()))?;
        }
    }
    Ok(())
}
