//! A machine's files: the records in, tables and plots out.

use crate::compare::{By, Suite};
use crate::folder::Folder;
use crate::{plots, summary, tables, timing};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// Writes everything there is to say about a folder into it; the files.
pub fn report(path: &Path) -> Result<Vec<PathBuf>> {
    let folder = Folder::read(path)?;
    let write = |(name, text)| {
        let file = path.join::<String>(name);
        std::fs::write::<_, String>(&file, text).with_context(|| format!("{}: cannot be written", file.display()))?;
        Ok(file)
    };
    files(&folder)?.into_iter().map(write).collect()
}

/// Names and texts; the same for the same records.
pub fn files(folder: &Folder) -> Result<Vec<(String, String)>> {
    let suites = tables::suites(folder);
    let mut files = vec![("table.md".to_string(), tables::table(folder))];
    files.extend(tables::contest(folder).map(|text| ("contest.md".to_string(), text)));
    files.extend(timing::page(folder, &suites).map(|text| ("timing.md".to_string(), text)));
    files.push(("summary.md".into(), summary::summary(folder, &suites)));
    // They compare nothing, and so are in no table of ratios.
    let models = folder.sources("model").into_iter().filter(|source| !source.is_cpu());
    let models = models.map(|source| Suite::new(folder, "model", source, By::Workload));
    files.extend(plots::plots(&suites.into_iter().chain(models).collect::<Vec<_>>())?);
    Ok(files)
}
