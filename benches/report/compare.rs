//! Who is compared with whom: the rows of a suite by shape, then by work.

use crate::folder::{Entry, Folder, Source};
use crate::record::{Row, Shape, Time};
use crate::stats::{distinct, ratio, sorted};
use std::collections::BTreeMap;

/// This crate among the contenders.
pub const OURS: &str = "candle-gdn";

/// Those that run the rule, or the layer around our kernel of it, in the tensor operations of a framework: a speedup is over
/// them, and they are no peers.
const BASELINES: [&str; 3] = ["candle", "torch", "torch-compile"];

pub fn is_baseline(row: &Row) -> bool {
    BASELINES.contains(&row.contender.as_str()) && ["decode", "prefill", "layer"].contains(&row.suite.as_str())
}

/// A clock. Times of two of them never stand in one column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    Gpu,
    Event,
    Call,
    Wall,
    Host,
}

impl Tier {
    /// Those that rank contenders, best clock first; `host` is a part of `wall`.
    pub const RANKED: [Tier; 4] = [Tier::Gpu, Tier::Event, Tier::Call, Tier::Wall];

    pub fn name(self) -> &'static str {
        match self {
            Tier::Gpu => "gpu",
            Tier::Event => "event",
            Tier::Call => "call",
            Tier::Wall => "wall",
            Tier::Host => "host",
        }
    }

    pub fn time(self, row: &Row) -> Option<&Time> {
        let time = match self {
            Tier::Gpu => &row.gpu,
            Tier::Event => &row.event,
            Tier::Call => &row.call,
            Tier::Wall => &row.wall,
            Tier::Host => &row.host,
        };
        time.as_ref()
    }

    /// The median, if it is one.
    pub fn of(self, row: &Row) -> Option<f64> {
        self.time(row).map(|time| time.median).filter(|t| t.is_finite() && *t > 0.)
    }
}

/// What sets a suite's workloads apart within one shape, and so their order and their labels.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum By {
    Batch,
    Tokens,
    /// `8×1024`, batches apart.
    BatchTokens,
    /// `8×1024`, lengths apart.
    TokensBatch,
    Workload,
}

impl By {
    pub fn header(self) -> &'static str {
        match self {
            By::Batch => "B",
            By::Tokens => "T",
            By::BatchTokens | By::TokensBatch => "B×T",
            By::Workload => "workload",
        }
    }

    fn label(self, shape: &Shape) -> Option<String> {
        match self {
            By::Batch => shape.batch.map(|b| b.to_string()),
            By::Tokens => shape.tokens.or(shape.total_tokens).map(|t| t.to_string()),
            By::BatchTokens | By::TokensBatch => Some(format!("{}×{}", shape.batch?, shape.tokens?)),
            By::Workload => None,
        }
    }

    fn order(self, shape: &Shape) -> (usize, usize) {
        let (batch, tokens) = (shape.batch.unwrap_or(0), shape.tokens.or(shape.total_tokens).unwrap_or(0));
        match self {
            By::Tokens | By::TokensBatch => (tokens, batch),
            _ => (batch, tokens),
        }
    }
}

/// The rows of one suite and source.
pub struct Suite<'a> {
    pub name: &'a str,
    pub source: &'a Source,
    pub by: By,
    pub groups: Vec<Group<'a>>,
}

/// The rows of one shape, apart from batch and tokens.
pub struct Group<'a> {
    /// For a heading; empty where the rows have no shape.
    pub title: String,
    /// For a file name.
    pub slug: String,
    pub works: Vec<Work<'a>>,
}

/// The rows of one work.
pub struct Work<'a> {
    pub label: String,
    pub workload: &'a str,
    pub l2: Option<&'a str>,
    pub shape: Shape,
    pub entries: Vec<&'a Entry>,
}

/// A contender's variant. Where two tools of one source measured the same one, they are two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column<'a> {
    pub contender: &'a str,
    pub variant: Option<&'a str>,
    pub tool: &'a str,
}

impl<'a> Suite<'a> {
    pub fn new(folder: &'a Folder, name: &'a str, source: &'a Source, by: By) -> Suite<'a> {
        let mut groups: BTreeMap<_, Vec<&Entry>> = BTreeMap::new();
        for entry in folder.rows.iter().filter(|e| e.row.suite == name && e.source == *source) {
            let s = &entry.row.shape;
            groups.entry((s.hk, s.hv, s.k, s.v, s.hidden, s.channels)).or_default().push(entry);
        }
        let groups = groups.into_values().map(|entries| Group::new(entries, by)).collect();
        Suite { name, source, by, groups }
    }

    pub fn works(&self) -> impl Iterator<Item = &Work<'a>> {
        self.groups.iter().flat_map(|group| &group.works)
    }

    pub fn entries(&self) -> impl Iterator<Item = &'a Entry> + '_ {
        self.works().flat_map(|work| work.entries.iter().copied())
    }

    /// The tiers in which anything was measured.
    pub fn tiers(&self) -> Vec<Tier> {
        Tier::RANKED.into_iter().filter(|tier| self.entries().any(|e| tier.of(&e.row).is_some())).collect()
    }

    pub fn has(&self, contender: &str) -> bool {
        self.entries().any(|e| e.row.contender == contender)
    }

    /// The others, by name.
    pub fn peers(&self) -> Vec<&'a str> {
        let peers = self.entries().filter(|e| !is_baseline(&e.row)).map(|e| e.row.contender.as_str());
        sorted(peers.filter(|name| *name != OURS))
    }

    /// Those of the baselines.
    pub fn baselines(&self) -> Vec<Column<'a>> {
        in_order(self.entries().filter(|e| is_baseline(&e.row)).map(Column::of))
    }

    /// Those of all shapes.
    pub fn columns(&self) -> Vec<Column<'a>> {
        in_order(self.groups.iter().flat_map(Group::columns))
    }
}

impl<'a> Group<'a> {
    fn new(entries: Vec<&'a Entry>, by: By) -> Group<'a> {
        let shape = entries[0].row.shape;
        let (title, slug) = names(&shape);
        let mut works: Vec<Work> = vec![];
        for entry in entries {
            let row = &entry.row;
            let same = |work: &&mut Work| work.workload == row.workload && work.l2 == row.l2.as_deref();
            match works.iter_mut().find(same) {
                Some(work) => work.entries.push(entry),
                None => works.push(Work {
                    label: by.label(&row.shape).unwrap_or_default(),
                    workload: &row.workload,
                    l2: row.l2.as_deref(),
                    shape: row.shape,
                    entries: vec![entry],
                }),
            }
        }
        // Where the shape does not tell the work, its name does.
        let mut seen: BTreeMap<_, u32> = BTreeMap::new();
        works.iter().for_each(|work| *seen.entry((work.label.clone(), work.l2)).or_default() += 1);
        for work in &mut works {
            if work.label.is_empty() || seen[&(work.label.clone(), work.l2)] > 1 {
                let short = work.workload.strip_prefix(&title).map_or(work.workload, str::trim_start);
                work.label = if short.is_empty() { work.workload } else { short }.into();
            }
        }
        works.sort_by_key(|w| (w.l2.is_some_and(|l2| l2 != "cold"), w.l2, by.order(&w.shape), w.workload));
        Group { title, slug, works }
    }

    pub fn columns(&self) -> Vec<Column<'a>> {
        in_order(self.works.iter().flat_map(|work| &work.entries).map(|entry| Column::of(entry)))
    }
}

impl<'a> Work<'a> {
    pub fn at(&self, column: &Column) -> Option<&'a Entry> {
        self.entries.iter().copied().find(|e| Column::of(e) == *column)
    }

    /// What `Algo::Auto` takes; where nothing says so, our fastest.
    pub fn ours(&self, tier: Tier) -> Option<&'a Entry> {
        let auto = self.entries.iter().any(|e| e.row.contender == OURS && e.is_auto());
        self.fastest(tier, |e| e.row.contender == OURS && (e.is_auto() || !auto))
    }

    /// A contender's fastest variant.
    pub fn best_of(&self, contender: &str, tier: Tier) -> Option<&'a Entry> {
        self.fastest(tier, |e| e.row.contender == contender)
    }

    pub fn best_peer(&self, tier: Tier) -> Option<&'a Entry> {
        self.fastest(tier, |e| e.row.contender != OURS && !is_baseline(&e.row))
    }

    fn fastest(&self, tier: Tier, which: impl Fn(&Entry) -> bool) -> Option<&'a Entry> {
        let timed = self.entries.iter().filter(|e| which(e)).filter_map(|e| Some((*e, tier.of(&e.row)?)));
        timed.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(entry, _)| entry)
    }

    /// Our time over a peer's; below 1 ours is the faster.
    pub fn ratio(&self, contender: &str, tier: Tier) -> Option<f64> {
        ratio(time(self.ours(tier), tier), time(self.best_of(contender, tier), tier))
    }

    pub fn ratio_to_best(&self, tier: Tier) -> Option<f64> {
        ratio(time(self.ours(tier), tier), time(self.best_peer(tier), tier))
    }

    /// Ours if it has one: others may count bytes of their own.
    pub fn floor(&self) -> Option<f64> {
        let ours = self.entries.iter().filter(|e| e.row.contender == OURS);
        let floor = ours.chain(&self.entries).find_map(|e| e.row.floor_us);
        floor.filter(|floor| *floor > 0.)
    }
}

impl<'a> Column<'a> {
    pub fn of(entry: &'a Entry) -> Column<'a> {
        Column { contender: &entry.row.contender, variant: entry.row.variant.as_deref(), tool: &entry.tool }
    }

    /// Contender and variant; the tool too where another of `columns` differs in that alone.
    pub fn name(&self, columns: &[Column]) -> String {
        let mut name = self.contender.to_string();
        if let Some(variant) = self.variant {
            name += &format!(" {variant}");
        }
        let twin = |c: &Column| c.contender == self.contender && c.variant == self.variant && c.tool != self.tool;
        if columns.iter().any(twin) {
            name += &format!(" ({})", self.tool);
        }
        name
    }
}

/// Each column once: ours first, then the others by name; variants as they come.
fn in_order<'a>(columns: impl Iterator<Item = Column<'a>>) -> Vec<Column<'a>> {
    let mut columns = distinct(columns);
    columns.sort_by_key(|c| (c.contender != OURS, c.contender));
    columns
}

/// The states of the cache among the works, in the order of their names: cold first.
pub fn states<'w, 'a: 'w>(works: impl IntoIterator<Item = &'w Work<'a>>) -> Vec<Option<&'a str>> {
    sorted(works.into_iter().map(|work| work.l2))
}

pub fn time(entry: Option<&Entry>, tier: Tier) -> Option<f64> {
    tier.of(&entry?.row)
}

/// For a heading, `16/32` and what else sets the shape apart from Qwen3-Next's usual; and the same for a file name.
fn names(shape: &Shape) -> (String, String) {
    let Shape { hk, hv, k, v, hidden, channels, .. } = *shape;
    let (mut title, mut slug) = (vec![], vec![]);
    match (hk, hv) {
        (Some(hk), Some(hv)) => title.push(format!("{hk}/{hv}")),
        (heads, None) | (None, heads) => title.extend(heads.map(|heads| format!("{heads} heads"))),
    }
    slug.extend([hk, hv].into_iter().flatten().map(|n| n.to_string()));
    if (k, v) != (Some(128), Some(128)) {
        title.extend([("K", k), ("V", v)].into_iter().filter_map(|(name, n)| Some(format!("{name}={}", n?))));
        slug.extend([k, v].into_iter().flatten().map(|n| n.to_string()));
    }
    title.extend(hidden.map(|hidden| format!("hidden {hidden}")));
    slug.extend(hidden.map(|hidden| format!("h{hidden}")));
    title.extend(channels.map(|channels| format!("{channels} channels")));
    slug.extend(channels.map(|channels| format!("c{channels}")));
    (title.join(" "), slug.join("-"))
}
