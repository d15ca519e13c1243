//! The records of one machine, pooled.

use crate::record::{Ceilings, Row, Run};
use crate::stats::{distinct, sorted};
use anyhow::{ensure, Context, Result};
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// One machine's folder.
pub struct Folder {
    pub name: String,
    /// By date, then by name.
    pub files: Vec<File>,
    pub rows: Vec<Entry>,
}

/// A record file; its rows are in the pool.
pub struct File {
    pub name: String,
    pub run: Run,
}

/// A row and what of its file it needs.
#[derive(Clone)]
pub struct Entry {
    pub row: Row,
    pub tool: String,
    pub ceilings: Ceilings,
    pub source: Source,
    /// Which of the folder's files it is from.
    pub file: usize,
}

impl Entry {
    /// Whether it is what `Algo::Auto` takes, by its mark or by name.
    pub fn is_auto(&self) -> bool {
        self.row.auto || self.row.variant.as_deref() == Some("auto")
    }
}

/// What may be compared: rows of one source and no others. The GPU tools measure differently, so each is a source of
/// its own; on the CPU there is one clock, and only the number of threads sets rows apart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    Gpu { tool: String },
    Cpu { threads: Option<usize> },
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Source::Gpu { tool } => write!(f, "{tool}"),
            Source::Cpu { threads: Some(1) } => write!(f, "CPU, 1 thread"),
            Source::Cpu { threads: Some(n) } => write!(f, "CPU, {n} threads"),
            Source::Cpu { threads: None } => write!(f, "CPU"),
        }
    }
}

impl Source {
    fn of(run: &Run) -> Source {
        let gpu = run.machine.cuda.is_some() || run.machine.driver.is_some();
        if gpu || run.rows.iter().any(|row| row.gpu.is_some() || row.event.is_some()) {
            Source::Gpu { tool: run.tool.clone() }
        } else {
            Source::Cpu { threads: run.machine.threads }
        }
    }

    pub fn is_cpu(&self) -> bool {
        matches!(self, Source::Cpu { .. })
    }
}

impl Folder {
    /// Reads every `*.json` of the folder; without one it is an error.
    pub fn read(path: &Path) -> Result<Folder> {
        let shown = path.display();
        ensure!(path.is_dir(), "{shown}: no such folder");
        let listed = path.read_dir().and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
        let mut names: Vec<PathBuf> = listed.with_context(|| format!("{shown}: cannot be listed"))?;
        names.retain(|file| file.extension().is_some_and(|ext| ext == "json"));
        ensure!(!names.is_empty(), "{shown}: no *.json records");
        names.sort();
        let mut files = vec![];
        for path in names {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            files.push(File { run: Run::read(&path)?, name });
        }
        let whole = path.canonicalize().with_context(|| format!("{shown}: has no path"))?;
        let name = whole.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Folder::pool(name, files).with_context(|| format!("{shown}: not one machine"))
    }

    /// Pools the rows: a later file's row takes the place of an earlier one that the same tool measured under the same
    /// key.
    pub fn pool(name: String, mut files: Vec<File>) -> Result<Folder> {
        files.sort_by(|a, b| (&a.run.date, &a.name).cmp(&(&b.run.date, &b.name)));
        let mut rows: Vec<Entry> = vec![];
        let mut places = HashMap::new();
        let mut gpu: Option<(&str, &str)> = None;
        for (file, File { name, run }) in files.iter().enumerate() {
            let source = Source::of(run);
            if !source.is_cpu() {
                let (first, device) = *gpu.get_or_insert((name, &run.machine.device));
                ensure!(device == run.machine.device, "{first} is of {device}, {name} of {}", run.machine.device);
            }
            for row in &run.rows {
                let mut row = row.clone();
                // No name is no variant.
                row.variant = row.variant.filter(|variant| !variant.is_empty());
                let key = (
                    run.tool.clone(),
                    [&row.suite, &row.workload, &row.contender].map(String::clone),
                    [&row.l2, &row.variant].map(Option::clone),
                );
                let entry = Entry { row, tool: run.tool.clone(), ceilings: run.ceilings, source: source.clone(), file };
                let place = *places.entry(key).or_insert(rows.len());
                match rows.get_mut(place) {
                    Some(earlier) => *earlier = entry,
                    None => rows.push(entry),
                }
            }
        }
        Ok(Folder { name, files, rows })
    }

    /// The sources of a suite, in order.
    pub fn sources(&self, suite: &str) -> Vec<&Source> {
        sorted(self.rows.iter().filter(|e| e.row.suite == suite).map(|e| &e.source))
    }

    /// All suites there are, in order of appearance.
    pub fn suites(&self) -> Vec<&str> {
        distinct(self.rows.iter().map(|entry| entry.row.suite.as_str()))
    }
}
