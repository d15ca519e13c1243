//! Markdown tables that read well raw: padded columns, numbers to the right.

use crate::stats::sorted;
use std::fmt::Write;

/// What stands where nothing was measured.
pub const GAP: &str = "–";

#[derive(Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(header: impl IntoIterator<Item = impl Into<String>>) -> Table {
        Table { rows: vec![header.into_iter().map(cell).collect()] }
    }

    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        let row: Vec<_> = cells.into_iter().map(cell).collect();
        assert_eq!(row.len(), self.rows[0].len(), "cells of {row:?}");
        self.rows.push(row);
    }

    /// Under a title; nothing where there are no rows.
    pub fn titled(&self, title: &str) -> String {
        match self.rows.len() {
            1 => String::new(),
            _ => format!("\n{title}:\n\n{}", self.render()),
        }
    }

    /// Names the rows instead of the columns: the first heading stays empty.
    pub fn of_rows(header: impl IntoIterator<Item = impl Into<String>>) -> Table {
        let mut table = Table::new(header);
        table.rows[0].insert(0, String::new());
        table
    }

    /// Leaves out the columns of these indices that hold nothing but gaps.
    pub fn without_empty(mut self, columns: impl IntoIterator<Item = usize>) -> Table {
        let empty = columns.into_iter().filter(|&c| self.rows[1..].iter().all(|row| row[c] == GAP));
        for c in sorted(empty).into_iter().rev() {
            self.rows.iter_mut().for_each(|row| drop(row.remove(c)));
        }
        self
    }

    pub fn render(&self) -> String {
        let columns = self.rows[0].len();
        let width = |c: usize| self.rows.iter().map(|row| row[c].chars().count()).max().unwrap_or(0).max(3);
        let widths: Vec<_> = (0..columns).map(width).collect();
        let right: Vec<_> = (0..columns).map(|c| self.rows[1..].iter().all(|row| is_number(&row[c]))).collect();
        let mut out = String::new();
        for (i, row) in self.rows.iter().enumerate() {
            for (c, cell) in row.iter().enumerate() {
                let pad = " ".repeat(widths[c] - cell.chars().count());
                let _ = if right[c] { write!(out, "| {pad}{cell} ") } else { write!(out, "| {cell}{pad} ") };
            }
            out += "|\n";
            if i == 0 {
                for c in 0..columns {
                    let dashes = "-".repeat(widths[c] - usize::from(right[c]));
                    let _ = write!(out, "| {dashes}{} ", if right[c] { ":" } else { "" });
                }
                out += "|\n";
            }
        }
        out
    }
}

/// A cell's text must not end the cell or the line.
fn cell(text: impl Into<String>) -> String {
    let text: String = text.into();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
    if text.is_empty() {
        GAP.into()
    } else {
        text
    }
}

fn is_number(cell: &str) -> bool {
    cell == GAP || cell.starts_with(|c: char| c.is_ascii_digit())
}

/// The state of the cache in a title.
pub fn comma_l2(l2: Option<&str>) -> String {
    l2.map(|l2| format!(", L2 {l2}")).unwrap_or_default()
}

/// Formats what is there.
pub fn or_gap(value: Option<f64>, format: fn(f64) -> String) -> String {
    value.map_or(GAP.into(), format)
}

/// Three digits, as far as a time deserves them; also for rates.
pub fn digits(x: f64) -> String {
    match x {
        x if x < 9.995 => format!("{x:.2}"),
        x if x < 99.95 => format!("{x:.1}"),
        x => format!("{x:.0}"),
    }
}

pub fn ratio(x: f64) -> String {
    format!("{x:.2}")
}

/// A part of one as a percentage.
pub fn percent(x: f64) -> String {
    match x * 100. {
        x if x < 9.95 => format!("{x:.1} %"),
        x => format!("{x:.0} %"),
    }
}

/// A relative error.
pub fn error(x: f64) -> String {
    format!("{x:.1e}")
}
