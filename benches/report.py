#!/usr/bin/env python3
"""Tables and plots of the benchmark records, and the comparison of two records.

    python3 benches/report.py                              # table.md and plots of every folder in benches/results
    python3 benches/report.py benches/results/nvidia-h200  # of one
    python3 benches/report.py DIR --full --out FOLDER      # every shape, clock, cache state and plot
    python3 benches/report.py --compare BEFORE AFTER       # two records or folders, row by row

Needs pandas and matplotlib (pip install -r benches/requirements.txt). The format of a record is in benches/README.md. table.md
has the shapes of 16/32 and 4/8 heads, a cold cache and one clock a suite; --full has everything. The same records give the
same files. Rows are compared within one source alone: a GPU tool, or one number of threads on the CPU.

One file above the 400 lines of CONTRIBUTING, so that a program that users copy beside their records stays one.
"""
import argparse
import functools
import json
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd

matplotlib.rcParams.update({"backend": "Agg", "svg.hashsalt": "candle-gdn", "svg.fonttype": "none", "font.family": "sans-serif"})
from matplotlib import pyplot

RESULTS = Path(__file__).resolve().parent / "results"
CRATE = "candle-gdn"
GAP = "–"
CLOCKS = ["gpu", "event", "call", "wall"]       # of which the first that was measured ranks best; host is a part of wall
SHAPE = ["hk", "hv", "k", "v", "hidden", "channels"]
SIZES = ["batch", "tokens", "total_tokens"]
TEXTS = ["variant", "l2", "includes", "note"]
NUMBERS = ["launches", "bytes", "flop", "floor_us", "between_bytes"]
FIELDS = {"suite", "workload", "contender", "auto", "shape", "parts", "error", "host", *CLOCKS, *TEXTS, *NUMBERS}
# A speedup is over these; no ratio to the best peer counts them.
BASELINES = ["candle", "torch", "torch-compile", "reference"]
# What sets the workloads of a suite apart, which rate tells their speed, and the clock of the short table where it is not
# the best one: launches of a layer overlap, so its kernel times have no meaningful sum.
SUITES = {"decode": ("B", "copy", None), "prefill": ("B×T", "matmul", None), "contest-decode": ("B", "copy", None),
          "contest-prefill": ("workload", "matmul", None), "harness-decode": ("workload", None, None),
          "harness-prefill": ("workload", None, None), "conv": ("B×T", "copy", None), "norm": ("B×T", "copy", None),
          "backward": ("B×T", "matmul", None), "layer": ("T×B", None, "event"), "projections": ("T", "matmul", None), "rule": ("B×T", "copy", None)}
ON_CPU = {name: SUITES[name] for name in ("rule", "conv", "norm")} | {"backward": ("B×T", None, None), "model": ("T×B", "tokens", None), "gguf": ("workload", "tokens", None)}
SHORT_HEADS = ["16/32", "4/8"]
BUCKETS = [64, 128, 256, 1024, 8192]            # upper ends, of total tokens


class Broken(Exception):
    """A record or folder that cannot be read; the message names it."""


# ---- records ----

def read(path):
    """One record: its head and its rows, checked."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        rows = run.pop("rows") if run["schema"] == 1 else None
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise Broken(f"{path}: no benchmark record: {e!r}") from e
    if rows is None:
        raise Broken(f"{path}: schema {run['schema']}, expected 1")
    for row in rows:
        unknown = set(row) - FIELDS
        wrong = [c for c in [*CLOCKS, "host"] if row.get(c) and set(row[c]) != {"median", "min", "max"}]
        if unknown or wrong or not {"suite", "workload", "contender"} <= set(row):
            raise Broken(f"{path}: not as benches/README.md says: {sorted(unknown) or wrong or row}")
    return run, rows


def source_of(run, rows):
    """GPU tools measure differently, so each is a source of its own; the CPU has one clock for all."""
    machine = run["machine"]
    if machine.get("cuda") or machine.get("driver") or any(r.get("gpu") or r.get("event") for r in rows):
        return run["tool"]
    n = machine.get("threads")
    return "CPU" + (f", {n} thread{'s' * (n > 1)}" if n else "")


def flat(row, run, source, number):
    """A row of the frame; what was not measured is NaN or an empty string."""
    positive = lambda x: x if x is not None and np.isfinite(x) and x > 0 else np.nan
    median = lambda clock: positive((row.get(clock) or {}).get("median"))
    shape, ceilings = row.get("shape") or {}, run.get("ceilings") or {}
    copy, matmul = (positive(ceilings.get(c)) for c in ("copy_gb_s", "matmul_tflop_s"))
    work = [row.get("bytes") and row["bytes"] / copy / 1e3, row.get("flop") and row["flop"] / matmul / 1e6]
    floor = row.get("floor_us") or np.nanmax([positive(x) for x in work] + [0])
    return {**{name: row[name] for name in ("suite", "workload", "contender")}, **{t: row.get(t) or "" for t in TEXTS},
            **{n: np.nan if shape.get(n) is None else shape[n] for n in SHAPE + SIZES},
            **{n: positive(row.get(n)) for n in NUMBERS}, **{c: median(c) for c in [*CLOCKS, "host"]},
            "floor_us": positive(floor), "auto": bool(row.get("auto")) or row.get("variant") == "auto",
            "error": row.get("error") or {}, "parts": row.get("parts") or [], "tool": run["tool"], "source": source,
            "cpu": source.startswith("CPU"), "copy": copy, "matmul": matmul, "file": number}


def load(path):
    """The heads of a folder's records (or of one file) in order of date, and the frame of their rows. A later row replaces an
    earlier one of the same tool, suite, workload, contender, variant and cache state."""
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.glob("*.json"))
    if not files:
        raise Broken(f"{path}: no such folder, or no *.json records in it")
    runs = sorted(((*read(file), file.name) for file in files), key=lambda r: (r[0]["date"], r[2]))
    found, gpu = {}, None
    for number, (run, rows, name) in enumerate(runs):
        source, device = source_of(run, rows), run["machine"]["device"]
        if not source.startswith("CPU"):
            gpu = gpu or (name, device)
            if gpu[1] != device:
                raise Broken(f"{path}: records of two GPUs: {gpu[0]} of {gpu[1]}, {name} of {device}")
        for row in rows:
            key = run["tool"], *(row.get(k) or "" for k in ("suite", "workload", "contender", "l2", "variant"))
            found[key] = flat(row, run, source, number)
    return [{**run, "file": name, "rows": len(rows)} for run, rows, name in runs], arranged(pd.DataFrame(found.values()))


def arranged(df):
    """Adds what identifies and labels a work and a column, and sorts by shape, cache state and size."""
    df["title"], df["slug"] = zip(*(names(row) for row in df.itertuples()))
    known = [(ON_CPU if cpu else SUITES).get(suite) for suite, cpu in zip(df.suite, df.cpu)]
    df["by"] = [k[0] if k else "workload" for k in known]
    df["peer"] = (df.contender != CRATE) & ~(df.contender.isin(BASELINES) & df.suite.isin(set(SUITES) - {"projections"}))
    tokens = df.tokens.fillna(df.total_tokens)
    by_tokens = df.by.isin(["T", "T×B"])
    df["size"], df["size2"] = tokens.where(by_tokens, df.batch).fillna(0), df.batch.where(by_tokens, tokens).fillna(0)
    labels = {"B": df.batch.map("{:g}".format), "T": tokens.map("{:g}".format), "workload": df.workload,
              **{by: df.batch.map("{:g}".format) + "×" + df.tokens.map("{:g}".format) for by in ("B×T", "T×B")}}
    df["label"] = [labels[by][i] for i, by in df.by.items()]
    df["work"] = df.groupby(["suite", "source", "title", "workload", "l2"], sort=False).ngroup()
    same = df.groupby(["suite", "source", "title", "label", "l2"]).work.transform("nunique") > 1
    own = [w.removeprefix(t).strip() or w for w, t in zip(df.workload, df.title)]
    df["label"] = df.label.mask(same | df.label.str.contains("nan"), pd.Series(own, df.index))
    twins = df.groupby(["suite", "source", "contender", "variant"]).tool.transform("nunique") > 1
    df["name"] = (df.contender + " " + df.variant).str.strip() + (" (" + df.tool + ")").where(twins, "")
    df["has_auto"] = (df.auto & (df.contender == CRATE)).groupby(df.work).transform("any")
    return df.sort_values([*SHAPE, "l2", "size", "size2", "workload"], na_position="first", kind="stable", ignore_index=True)


def names(row):
    """For a heading, `16/32` and what else sets a shape apart from K = V = 128; and the same for a file name."""
    heads = [f"{n:g}" for n in (row.hk, row.hv) if n == n]
    rest = [] if (row.k, row.v) == (128, 128) else [("K=", "", "", row.k), ("V=", "", "", row.v)]
    rest += [("hidden ", "", "h", row.hidden), ("", " channels", "c", row.channels)]
    rest = [(f"{before}{n:g}{after}", f"{short}{n:g}") for before, after, short, n in rest if n == n]
    title = ["/".join(heads) + " heads" * (len(heads) == 1)] if heads else []
    return " ".join(title + [t for t, _ in rest]), "-".join(heads + [s for _, s in rest])


# ---- who is compared with whom ----

def standing(s, clock):
    """A row for each work of `s`: our time (`Algo::Auto`'s, where it is marked), the fastest of each contender, the best peer's
    time and name, and the floor."""
    timed = s[s[clock].notna()]
    fastest = lambda rows: rows.loc[rows.groupby("work", sort=False)[clock].idxmin()].set_index("work")
    works = s.drop_duplicates("work").set_index("work")[["suite", "title", "label", "l2", "workload", *SIZES]].copy()
    crate = fastest(timed[(timed.contender == CRATE) & (timed.auto | ~timed.has_auto)])
    works["crate"] = crate[clock]
    for name in sorted(set(s.contender) - {CRATE}):
        works[name] = fastest(timed[timed.contender == name])[clock]
    best = fastest(timed[timed.peer])
    works["best"], works["best_name"] = best[clock], best["name"]
    # Ours if it has one: others may count bytes of their own.
    works["floor"] = s.sort_values("contender", key=lambda c: c != CRATE, kind="stable").groupby("work").floor_us.first()
    row = crate if (s.contender == CRATE).any() else best
    works["copy_rate"], works["matmul_rate"], works["rated"] = row.bytes / row[clock] / 1e3, row.flop / row[clock] / 1e6, row[clock]
    works["of_copy"], works["of_matmul"] = works.copy_rate / row["copy"], works.matmul_rate / row.matmul
    return works


def peers(s):
    return sorted(s[s.peer].contender.unique())


def columns(s):
    """{name: contender}, ours first."""
    found = s.drop_duplicates("name")[["name", "contender"]]
    return dict(found.sort_values("contender", key=lambda c: c.map(lambda x: (x != CRATE, x)), kind="stable").values)


def clocks(s, crate=False):
    return [c for c in CLOCKS if s.loc[(s.contender == CRATE) | (not crate), c].notna().any()]


def best_clock(s):
    """The best clock by which ours was timed, else any was."""
    return next(iter(clocks(s, True) or clocks(s)), None)


def geomean(x):
    x = x.dropna()
    return np.exp(np.log(x).mean()) if len(x) else np.nan


# ---- markdown ----

def digits(x):
    """Three digits, as far as a time deserves them."""
    return GAP if pd.isna(x) else f"{x:.2f}" if x < 9.995 else f"{x:.1f}" if x < 99.95 else f"{x:.0f}"


def ratio(x):
    return GAP if pd.isna(x) else f"{x:.2f}"


def percent(x):
    return GAP if pd.isna(x) else f"{100 * x:.1f} %" if x < 0.0995 else f"{100 * x:.0f} %"


def table(frame, title=""):
    """A frame of texts as an aligned table under its title, without columns and rows that hold nothing but gaps."""
    clean = lambda x: " ".join(str(x).split()).replace("|", "\\|") or GAP
    frame = frame.map(clean)
    frame = frame.loc[:, (frame != GAP).any()]
    if frame.empty:
        return ""
    right = [all(x == GAP or x[0].isdigit() for x in frame[c]) for c in frame]
    widths = [max(3, len(c), *map(len, frame[c])) for c in frame]
    pad = lambda cells: "| " + " | ".join(x.rjust(w) if r else x.ljust(w) for x, w, r in zip(cells, widths, right)) + " |"
    rule = "| " + " | ".join("-" * (w - r) + ":" * r for w, r in zip(widths, right)) + " |"
    return "\n".join([f"\n{title}:\n"] * bool(title) + [pad(frame.columns), rule, *map(pad, frame.values)]) + "\n"


def grid(s, rate, only=None):
    """A table for each shape and clock: a row a work, a column a contender, then rates and ratios."""
    out = ""
    for title, g in s.groupby("title", sort=False):
        timed = [c for c in [*CLOCKS, "host"] if g[c].notna().any() and (only is None or c == only)]
        for clock in timed:
            out += table(grid_of(g, clock, rate), ", ".join(filter(None, [title, clock, "µs"])))
        if not timed:
            out += f"\n{title}: nothing was timed.\n"
    return out


def grid_of(g, clock, rate):
    works, named = standing(g, clock), columns(g)
    crate, others = ([n for n, c in named.items() if (c == CRATE) == own] for own in (True, False))
    times, autos = (g.pivot(index="work", columns="name", values=v).reindex(works.index) for v in (clock, "auto"))
    out = pd.DataFrame({g.by.iloc[0].replace("T×B", "B×T"): works.label, "L2": works.l2})
    # A clock that counts the host's work says nothing of the kernel's rate.
    rated = clock in ("gpu", "event") or g.cpu.iloc[0]
    if rated:
        out["floor"] = works.floor.map(digits)
    for name in crate:
        star = (autos[name].fillna(False).astype(bool) & times[name].notna()).map({True: "*" * (len(crate) > 1), False: ""})
        out[name] = times[name].map(digits) + star
    if rated and rate in ("copy", "matmul"):
        out["GB/s" if rate == "copy" else "TFLOP/s"] = works[f"{rate}_rate"].map(digits)
        out[f"% of {rate}"] = works[f"of_{rate}"].map(percent)
    if rate == "tokens":
        out["tokens/s"] = (works.total_tokens.fillna(works.tokens) / works.rated * 1e6).map(digits)
    if rated:
        out["% of floor"] = (works.floor / works.rated).map(percent)
    for name in others:
        out[name] = times[name].map(digits)
    if clock != "host" and crate:
        for name in peers(g):
            out[f"/ {name}"] = (works.crate / works[name]).map(ratio)
        if len(peers(g)) > 1:
            out["/ best"] = (works.crate / works.best).map(ratio)
        for name in (n for n in others if named[n] not in peers(g)):
            out[f"× {name}"] = (times[name] / works.crate).map(digits)
    return out


def contenders(s):
    """What a call of each contender includes and how exact it was, then each different note once."""
    rows, notes = [], ""
    for name in columns(s):
        group, errors = s[s["name"] == name], {}
        for output, e in (item for found in group.error for item in found.items()):
            errors.setdefault(f"worst error of {output}", []).append(np.nan if e is None else e)
        least, most = group.launches.min(), group.launches.max()
        rows.append({"contender": name, "includes": " / ".join(sorted(set(group.includes) - {""})),
                     "launches": "" if pd.isna(least) else f"{least:g}" if most == least else f"{least:g} to {most:g}",
                     **{output: f"{np.max(e):.1e}" for output, e in errors.items()}})
        lines = group.note[group.note != ""].str.split("\n").str[0].value_counts().sort_index()
        notes += "".join(f"- {name}: {note} ({n} of {len(group)} rows)\n" for note, n in lines.items())
    out = table(pd.DataFrame(rows).fillna(""), "A call of each, and its worst errors")
    return out + f"\nNotes:\n\n{notes}" * bool(notes)


def includes(s):
    """What a call of each contender includes, where they differ."""
    groups = s[s.includes != ""].groupby("includes").contender.unique()
    text = "; ".join(f"{what} ({', '.join(who)})" for what, who in groups.items())
    return f"\nA call includes: {text}.\n" * (len(groups) > 1)


def geomeans(s, only):
    """Geometric means of our time over each peer's and over the best, by shape and of all works; a table a clock."""
    out = ""
    for clock in (c for c in clocks(s) if only is None or c == only):
        works, rows = standing(s, clock), []
        for l2, group in works.groupby("l2"):
            shapes = list(group.groupby("title", sort=False)) if works.title.nunique() > 1 else []
            for title, g in [*shapes, ("all", group)]:
                ratios = {p: g.crate / g[p] for p in peers(s)} | {"best peer": g.crate / g.best}
                means = {p: f"{geomean(r):.2f} ({r.count()})" if r.count() else "" for p, r in ratios.items()}
                rows += [{"heads": title, "L2": l2, **means}] * any(means.values())
        out += table(pd.DataFrame(rows), f"Geometric means of ours over each peer's (number of works), {clock}")
    return out


def between(s):
    """How many launches a call has, and how much memory it passes between them."""
    cell = lambda r: "" if pd.isna(r.between_bytes) else f"{r.launches:g} / {digits(r.between_bytes / 1e6)}"
    cells = s.assign(cell=[cell(r) for r in s.itertuples()])
    frame = cells.pivot(index="work", columns="name", values="cell").reindex(s.work.unique())[list(columns(s))].fillna("")
    frame.insert(0, "B×T", s.drop_duplicates("work").set_index("work").label)
    return table(frame[frame.iloc[:, 1:].ne("").any(axis=1)], "Launches / MB between them at the peak, outputs included")


def generic(s, tokens=False):
    """All that the rows say; where nothing but errors was measured, a column a contender."""
    errors = [", ".join(f"{o} {np.nan if e is None else e:.1e}" for o, e in found.items()) for found in s.error]
    if not clocks(s) and any(errors):
        frame = s.assign(cell=errors).pivot(index="workload", columns="name", values="cell").reindex(s.workload.unique())
        return table(frame[list(columns(s))].fillna("").reset_index(), "Relative RMS errors")
    us = s[CLOCKS].bfill(axis=1).iloc[:, 0]
    frame = {"workload": s.workload, "L2": s.l2, "contender": s["name"], **{c: s[c].map(digits) for c in [*CLOCKS, "host"]},
             "floor": s.floor_us.map(digits), "GB/s": (s.bytes / us / 1e3).map(digits),
             "tokens/s": (s.total_tokens / s.wall * 1e6).map(digits) if tokens else "",
             "launches": s.launches.map(lambda n: GAP if pd.isna(n) else f"{n:g}"),
             "errors": errors, "note": s.note.str.split("\n").str[0]}
    return table(pd.DataFrame(frame), "µs")


def parts(s):
    """Where the time of each step goes: µs of each part, in brackets its bytes at the copy rate."""
    found, cell = {}, lambda us, floor: digits(us) + f" ({digits(floor)})" * (floor == floor)
    for row in s[s.parts.map(bool)].itertuples():
        busy = sum(part["us"] for part in row.parts)
        whole = max(busy, np.nan_to_num(row.wall))
        column = {part["name"]: cell(part["us"], (part.get("bytes") or np.nan) / row.copy / 1e3) for part in row.parts}
        column |= {"no kernel": digits(whole - busy), "all, wall": cell(whole, row.floor_us)}
        found[row.workload.replace(" step", "")] = column
    if not found:
        return ""
    frame, last = pd.DataFrame(found).fillna(""), ["no kernel", "all, wall"]
    frame = frame.reindex([i for i in frame.index if i not in last] + last).rename_axis("part").reset_index()
    return table(frame, "Where a step's time goes, µs; in brackets the bytes of the part at the copy rate")


def status(row):
    """Of a row: failed, passed or not run. A row with errors and no times was only checked if its note says so."""
    failed = any(word in row.note.lower() for word in ("over its bound", "over the", "failed")) or None in row.error.values()
    timed = any(getattr(row, c) == getattr(row, c) for c in CLOCKS)
    if failed or not timed and row.error and not row.note:
        return "failed"
    return "passed" if timed or row.error else "not run"


def contest(s, only):
    """Medians and geometric means by size, clock by clock; how many workloads passed; what failed."""
    decode, out = s.suite.iloc[0].endswith("decode"), ""
    for clock in (c for c in clocks(s) if only is None or c == only):
        works, rows = standing(s, clock), []
        ends = works.batch if decode else works.total_tokens.map(lambda n: next((end for end in BUCKETS if n <= end), np.inf))
        for (l2, end), g in works.groupby([works.l2, ends]):
            others = [c for c in [*peers(s), "reference"] if c in g]
            times = {"floor": g.floor, CRATE: g.crate, **{p: g[p] for p in others}}
            ratios = {f"/ {p}": g.crate / g[p] for p in others} | ({"/ best": g.crate / g.best} if len(others) > 1 else {})
            size = f"{end:g}" if decode else f"≤ {end}" if end < np.inf else f"> {BUCKETS[-1]}"
            rows.append({"B" if decode else "tokens": size, "L2": l2, "workloads": len(g),
                         **{n: digits(x.median()) for n, x in times.items()}, **{n: ratio(geomean(x)) for n, x in ratios.items()}})
        out += table(pd.DataFrame(rows), f"{clock}, medians in µs and geometric means of the ratios")
    rows = s.assign(status=list(map(status, s.itertuples())))
    worst = lambda x: next(k for k in ("failed", "passed", "not run") if (x == k).any())
    found = rows.groupby(["contender", "workload"]).status.agg(worst)
    counts = [f"{c} {n} {k}" for c in dict.fromkeys(columns(s).values()) for k, n in found[c].value_counts().items()]
    failed = rows[rows.status == "failed"]
    frame = pd.DataFrame({"failed": failed.workload, "contender": failed["name"], "note": failed.note})
    return f"{out}\nWorkloads: {', '.join(counts)}.\n" + table(frame, "Over their bounds")


def ranks(s):
    """How each clock ranks the same kernels. benches/timing.md says what that means."""
    crate, auto = s.contender == CRATE, s.variant == "auto"
    again = (crate & ~auto).groupby(s.work).transform("any") & crate & auto
    rows = s[s.l2.isin(["", "cold"]) & s.gpu.notna() & s.call.notna() & ~again]
    rows = rows[rows.groupby("work").gpu.transform("count") > 1]
    if rows.empty:
        return ""
    out = "\nThe same kernels by four clocks (cold cache):\n\n"
    orders = {c: {work: list(g.sort_values(c, kind="stable").index) for work, g in rows.groupby("work") if g[c].notna().all()}
              for c in CLOCKS}
    for clock in CLOCKS[1:]:
        pairs = [(orders["gpu"][work], order) for work, order in orders[clock].items()]
        first, differ = sum(a[0] != b[0] for a, b in pairs), sum(a != b for a, b in pairs)
        out += (f"- `{clock}` against `gpu`: another fastest kernel in {first} of {len(pairs)} works, "
                f"another order in {differ} of {len(pairs)}\n")
    return out


def gaps(df, full):
    """Where ours is slowest against the best peer, by each suite's best clock; in short only where it is slower."""
    suites = [standing(g, best_clock(g)).assign(source=source, clock=best_clock(g))
              for (source, _), g in df.groupby(["source", "suite"], sort=False) if g.peer.any() and clocks(g, True)]
    if not suites:
        return ""
    works = pd.concat(suites)
    works["factor"] = works.crate / works.best
    worst = works[works.factor.notna() & (full | (works.factor > 1.005))].sort_values("factor", ascending=False, kind="stable")
    worst = worst.groupby(["source", "suite"]).head(4).head(16)
    frame = {**{name: worst[name] for name in ("suite", "source", "workload")}, "L2": worst.l2, "clock": worst.clock,
             "ours": worst.crate.map(digits), "best peer": worst.best.map(digits), "ours / best": worst.factor.map(ratio),
             "peer": worst.best_name}
    return "\n## Largest gaps\n" + table(pd.DataFrame(frame), "µs") if len(worst) else ""


def head(name, runs):
    """What was measured, on what and by what."""
    machine = lambda m: ", ".join([m["device"], *(f"{k} {m[k]}" for k in ("host", "threads", "driver", "cuda") if m.get(k))])
    machines = dict.fromkeys(machine(run["machine"]) for run in runs)
    versions = dict.fromkeys(f"{n} {v}" for run in runs for n, v in (run.get("contenders") or {}).items())
    ceiling = lambda run, key: digits((run.get("ceilings") or {}).get(key))
    files = [{"file": run["file"], "commit": f"`{run['commit']}`", "date": run["date"], "rows": run["rows"],
              "copy, GB/s": ceiling(run, "copy_gb_s"), "matmul, TFLOP/s": ceiling(run, "matmul_tflop_s"),
              "command": f"`{run['command']}`"} for run in runs]
    return (f"# {name}\n\nMade by `benches/report.py`. Machine: {'; '.join(machines)}. Contenders: {', '.join(versions)}.\n\n"
            f"{table(pd.DataFrame(files))}\nTimes are medians in µs a call. Clocks and columns: `benches/README.md`.\n")


def section(name, s, everything, full):
    """All tables of one suite and source; `everything` has the shapes that the short table leaves out."""
    known = (ON_CPU if s.cpu.iloc[0] else SUITES).get(name)
    only = None if full else (known and known[2]) or best_clock(s)
    if known is None:
        if not full and name == "hard":
            s = s[s.batch > 1]
        elif not full and name == "model":
            s = s[s.workload.str.contains(" step .*rings$") & (s.variant == "graph") | s.workload.str.contains(" prompt ")]
        return generic(s, name == "model") + parts(s)
    if name.startswith(("contest", "harness")):
        return contest(s, only) + (grid(s, known[1]) + contenders(s) if full else "")
    out = grid(s, known[1], only)
    out += contenders(s) + (between(s) if name == "layer" else "") if full else includes(s)
    out += geomeans(everything, only) if full or everything.title.nunique() > 1 else ""
    return out + (ranks(everything) if name in ("decode", "prefill") else "")


def shown(s, full):
    """What the short table has of a suite: one source where several measured the same, a cold cache and the usual heads."""
    if full:
        return s
    order = sorted(s.source.unique(), key=lambda x: (-len(peers(s[s.source == x])), -len(s[s.source == x])))
    s = s[(s.cpu | s.source.isin(order[:1])) & (s.l2 != "warm")]
    usual = s.title.isin(SHORT_HEADS)
    return s[usual | ~usual.any()]


def page(name, runs, df, full, plots):
    out = head(name, runs)
    # What the short table leaves out altogether: the layer's products again, and a ceiling that the head names.
    order = [n for n in [*SUITES, *ON_CPU, *df.suite.unique()] if full or n not in ("projections", "copy")]
    for suite, cpu in dict.fromkeys((n, c) for n in order for c in (False, True)):
        s = df[(df.suite == suite) & (df.cpu == cpu)]
        for source, g in shown(s, full).groupby("source"):
            drawn = ", ".join(f"[{file[:-4]}]({file})" for file, plot in plots.items() if plot[-1] == (suite, source))
            out += f"\n## {suite}, by {source}\n" + f"\nPlots: {drawn}\n" * bool(drawn)
            out += section(suite, g, s[(s.source == source) & ((s.l2 != "warm") | full)], full)
    return out + gaps(df if full else df[df.l2 != "warm"], full)


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
