//! The table as text.

use candle_gdn::profile::Table;
use std::io::{Result, Write};

pub fn table(table: &Table, out: &mut impl Write) -> Result<()> {
    let Table { blocks, warps, multiprocessors, .. } = table;
    write!(out, "{blocks} blocks, {warps} warps on {multiprocessors} multiprocessors")?;
    if let (Some(us), Some(cycles), Some(clock)) = (table.span_us, table.span_cycles, table.clock) {
        let step = 2.0 * clock.step_ns as f64 / 1e3;
        writeln!(out, ", first begin to last end {us:.2} µs (± {step:.2}) or {cycles:.0} cycles")?;
        let (ghz, percent) = (clock.ghz, 100.0 * clock.relative_error);
        writeln!(out, "clock {ghz:.3} GHz (± {percent:.1} %), by a timer in steps of {} ns", clock.step_ns)?;
    } else {
        writeln!(out, "; too short for the timer to tell its time")?;
    }
    for role in &table.roles {
        writeln!(out, "\n{}: {} warps, median life {} cycles", role.role, role.warps, role.median_lifetime)?;
        writeln!(out, "  {:<14} {:>8} {:>9} {:>9} {:>9} {:>7}", "scope", "count", "median", "p95", "max", "share")?;
        for row in &role.scopes {
            let share = 100.0 * row.share;
            let (count, median, p95, max) = (row.count, row.median, row.p95, row.max);
            writeln!(out, "  {:<14} {count:>8} {median:>9} {p95:>9} {max:>9} {share:>5.1} %", row.scope)?;
        }
        writeln!(out, "  {:<14} {:>44.1} %", "(unstamped)", 100.0 * role.unstamped)?;
    }
    Ok(())
}
