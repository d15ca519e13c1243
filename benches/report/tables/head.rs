//! What was measured, on what, by what, and how to read it.

use crate::compare::OURS;
use crate::folder::Folder;
use crate::markdown::{digits, or_gap, Table};
use std::collections::BTreeSet;

const LEGEND: &str = "\
Times are medians in microseconds a call; each table is of one clock. `gpu`: what the kernels ran (CUPTI), `event`: CUDA
events around a replayed graph, `call`: CUDA events around each call on an idle GPU, `wall`: host clock with a synchronisation, `host`: the part of it until the call
returned. L2 `cold`: buffers rotate past the cache, `warm`: one set of them. `floor`: the work at the measured ceilings.
`*`: the variant that `Algo::Auto` takes; rates and percentages are its. `/ peer`: its time over that of the peer's
fastest variant, so below 1 ours is the faster. `× torch`: the speedup over it. `–`: not measured. `benches/README.md` says more.
";

pub fn head(folder: &Folder) -> String {
    let mut machine = Table::new(["machine", "host", "threads", "driver", "CUDA"]);
    let machines = folder.files.iter().map(|file| {
        let m = &file.run.machine;
        let threads = m.threads.map(|n| n.to_string());
        let some = |x: &Option<String>| x.clone().unwrap_or_default();
        let cells = [m.device.clone(), m.host.clone(), threads.unwrap_or_default(), some(&m.driver), some(&m.cuda)];
        // The GPU first.
        (m.cuda.is_none(), cells)
    });
    machines.collect::<BTreeSet<_>>().into_iter().for_each(|(_, cells)| machine.row(cells));

    let mut files = Table::new(["file", "by", "commit", "date", "rows", "copy, GB/s", "matmul, TFLOP/s"]);
    let mut commands = String::new();
    let mut contenders = BTreeSet::new();
    for file in &folder.files {
        let run = &file.run;
        let ceilings = [run.ceilings.copy_gb_s, run.ceilings.matmul_tflop_s].map(|c| or_gap(c, digits));
        let [copy, matmul] = ceilings;
        let rows = run.rows.len().to_string();
        files.row([file.name.clone(), run.tool.clone(), run.commit.clone(), run.date.clone(), rows, copy, matmul]);
        commands += &format!("{}  # {}\n", run.command, file.name);
        contenders.extend(run.contenders.iter().map(|(name, version)| (name != OURS, name, version)));
    }
    let contenders: Vec<_> = contenders.into_iter().map(|(_, name, version)| format!("{name} {version}")).collect();
    let contenders = match contenders.as_slice() {
        [] => String::new(),
        all => format!("\nContenders: {}.\n", all.join(", ")),
    };
    format!(
        "# {}\n\n{}\n{}{contenders}\n```sh\n{commands}```\n\n{LEGEND}",
        folder.name,
        machine.render(),
        files.render()
    )
}
