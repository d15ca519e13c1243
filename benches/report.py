#!/usr/bin/env python3
"""Tables and plots of the benchmark records, and the comparison of two records.

    python3 benches/report.py                              # table.md and plots of every folder in benches/results
    python3 benches/report.py benches/results/nvidia-h200  # of one
    python3 benches/report.py DIR --full --out FOLDER      # every shape, clock, cache state and plot
    python3 benches/report.py --compare BEFORE AFTER       # two records or folders, row by row

Needs pandas and matplotlib (pip install -r benches/requirements.txt). The format of a record is in benches/README.md. table.md
has the shapes of 16/32 and 4/8 heads, a cold cache and one clock a suite; --full has everything. The same records give the
same files. Rows are compared within one source alone: a GPU tool, or one number of threads on the CPU.
"""
import argparse
import functools
import sys
from pathlib import Path

import matplotlib
import pandas as pd

matplotlib.rcParams.update({"backend": "Agg", "svg.hashsalt": "candle-gdn", "svg.fonttype": "none", "font.family": "sans-serif"})
from matplotlib import pyplot

from frame import CLOCKS, CRATE, Broken, best_clock, columns, geomean, load, peers, standing
from tables import digits, page, table

RESULTS = Path(__file__).resolve().parent / "results"


# ---- plots ----

def plots(df, full):
    """{file: (title, subtitle, x, y, {series: values by place}, (suite, source))} of all plots that have data."""
    found, sequence = {}, lambda rows: rows[rows.batch.fillna(1) == 1].set_index("tokens")
    token = lambda rows: rows[rows.tokens == 1].set_index("batch")
    # Suite, file, title, x, the rows with their places on the x axis, the series, and whether the short report has it.
    kinds = [("decode", "decode", "Decode, one token of each sequence", "sequences", token, times, True),
             ("prefill", "prefill", "Prefill of one sequence", "tokens", sequence, times, True),
             ("layer", "layer-tokens", "The whole layer, one sequence", "tokens", sequence, times, False),
             ("layer", "layer-batch", "The whole layer, one token of each sequence", "sequences", token, times, False),
             ("layer", "chain", "The layer, time over that of six products in PyTorch", "tokens", sequence, chain, True),
             ("rule", "cpu-rule", "The rule on the CPU, one sequence", "tokens", sequence, times, True)]
    for suite, file, title, x, place, series, short in kinds:
        if not (full or short):
            continue
        named = df[(df.suite == suite) & (df.cpu == (suite == "rule"))]
        sources = sorted(named.source.unique(), key=lambda n: -len(peers(named[named.source == n])))
        for source in sources[:len(sources) if suite == "layer" else 1]:
            for (slug, shape), g in named[named.source == source].groupby(["slug", "title"], sort=False):
                clock = "event" if file == "chain" else best_clock(g)
                if clock is None or not full and not shape.startswith(("16/32", "32/32")):
                    continue
                g = g[g.l2 == g[g[clock].notna()].l2.min()]
                y, lines = series(g, clock, place)
                lines = {n: v[~v.index.duplicated()].dropna().sort_index() for n, v in lines.items() if v.notna().any()}
                name = "-".join(filter(None, [file, slug, "" if source == sources[0] else source.split("/")[-1]]))
                if lines:
                    subtitle = f"{clock} time{', L2 cold' * (g.l2.iloc[0] == 'cold')}; {source}"
                    found[name + ".svg"] = (", ".join(filter(None, [title, shape])), subtitle, x, y, lines, (suite, source))
    return found


def times(g, clock, place):
    works = place(standing(g, clock))
    return "time, µs", {CRATE: works.crate, **{p: works[p] for p in peers(g)}, "floor": works.floor}


def chain(g, clock, place):
    """The layer's forms over PyTorch's operations one by one: a line a form."""
    lines = {name: place(g[g["name"] == name])[clock] for name, c in columns(g).items() if c not in peers(g)}
    base = lines.pop("torch six", None)
    return "% of torch six", {} if base is None else {name: 100 * us / base for name, us in lines.items()}


def draw(path, title, subtitle, x, y, lines):
    figure, axes = pyplot.subplots(figsize=(9, 5.6))
    colours, marks, number = pyplot.get_cmap("tab10"), "os^Dv", 0
    for name, values in lines.items():
        # The bound is dashed and grey. Marks differ in form, for readers who do not see the colours.
        style = {"color": "grey", "ls": "--"}
        if not name.endswith("floor"):
            style = {"color": colours(number), "marker": marks[number % 5], "lw": 2.5 if number == 0 else 1.5}
            number += 1
        axes.plot(values.index, values.values, label=name, zorder=10 - number, **style)
    axes.set_xscale("log", base=2)
    ticks = sorted({v for values in lines.values() for v in values.index})
    ticks = ticks[::-(-len(ticks) // 14)]
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    if y.startswith("%"):
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(f"{title}\n", loc="left", fontweight="bold")
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, color="grey")
    axes.grid(color="0.9")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


# ---- the program ----

def report(path, out, full):
    """Writes everything there is to say about a folder; the files."""
    runs, df = load(path)
    drawn = plots(df, full)
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(page(path.resolve().name, runs, df, full, drawn), encoding="utf-8")
    for file, plot in drawn.items():
        draw(out / file, *plot[:-1])
    return [out / name for name in ("table.md", *drawn)]


def compare(before, after, over):
    """By the best clock that both have: a line a suite and contender, then the rows that differ by more than `over` percent."""
    key = ["tool", "suite", "workload", "contender", "variant", "l2"]
    both = load(before)[1].merge(load(after)[1], on=key, suffixes=("", "_after"))
    pairs = [both[[c, f"{c}_after"]].where(both[[c, f"{c}_after"]].notna().all(axis=1)).set_axis(["before", "after"], axis=1)
             .assign(clock=c) for c in CLOCKS]
    rows = both[key].join(functools.reduce(lambda a, b: a.where(a.before.notna(), b), pairs)).dropna(subset="before")
    if rows.empty:
        return "No row is in both.\n"
    rows["change"] = rows.after / rows.before
    third = "{:.3f}".format
    lines = [{"tool": tool, "suite": suite, "contender": contender, "rows": len(g), "geometric mean": third(geomean(g.change)),
              "least": third(g.change.min()), "most": third(g.change.max())}
             for (tool, suite, contender), g in rows.groupby(key[:2] + ["contender"], sort=False)]
    moved = rows[(rows.change - 1).abs() > over / 100].sort_values("change", ascending=False)
    moved = moved.assign(before=moved.before.map(digits), after=moved.after.map(digits), change=moved.change.map(third))
    return table(pd.DataFrame(lines), "After over before") + table(moved[[*key[1:], "clock", "before", "after", "change"]],
                                                                  f"Rows that differ by more than {over:g} %")


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folders", nargs="*", type=Path, metavar="DIR", help="records of one machine; default: all of benches/results")
    p.add_argument("--full", action="store_true", help="every shape, clock, cache state and plot; needs --out")
    p.add_argument("--out", type=Path, help="folder to write to, one folder in it for each DIR; default: DIR")
    p.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="print how the rows of two records or folders differ")
    p.add_argument("--over", type=float, default=1, metavar="PERCENT", help="list rows that differ by more; default 1")
    args = p.parse_args(argv)
    if args.full and not args.out:
        p.error("--full needs --out: the folders in benches/results hold the short tables")
    jobs = [lambda: [compare(*args.compare, args.over).strip("\n")]] if args.compare else [
        lambda folder=folder: report(folder, args.out / folder.resolve().name if args.out else folder, args.full)
        for folder in args.folders or sorted(path for path in RESULTS.iterdir() if path.is_dir())]
    status = 0
    for job in jobs:    # one broken folder does not keep the others from their tables
        try:
            print(*job(), sep="\n")
        except (Broken, OSError) as e:
            print(f"error: {e}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
