"""Benchmark records as one pandas frame, and who is compared with whom. The format of a record is in benches/README.md."""
import json
from pathlib import Path

import numpy as np
import pandas as pd

CRATE = "candle-gdn"
CLOCKS = ["gpu", "event", "call", "wall"]       # of which the first that was measured ranks best; host is a part of wall
SHAPE = ["hk", "hv", "k", "v", "hidden", "channels"]
SIZES = ["batch", "tokens", "total_tokens"]
TEXTS = ["variant", "l2", "includes", "note"]
NUMBERS = ["launches", "bytes", "flop", "floor_us", "between_bytes"]
FIELDS = {"suite", "workload", "contender", "auto", "shape", "parts", "error", "host", *CLOCKS, *TEXTS, *NUMBERS}
# A speedup is over these; no ratio to the best peer counts them.
BASELINES = ["candle", "torch", "torch-compile"]
# What sets the workloads of a suite apart, which rate tells their speed, and the clock of the short table where it is not
# the best one: launches of a layer overlap, so its kernel times have no meaningful sum.
SUITES = {"decode": ("B", "copy", None), "prefill": ("B×T", "matmul", None), "contest-decode": ("B", "copy", None),
          "contest-prefill": ("workload", "matmul", None), "harness-decode": ("workload", None, None),
          "harness-prefill": ("workload", None, None), "conv": ("B×T", "copy", None), "norm": ("B×T", "copy", None),
          "backward": ("B×T", "matmul", None), "layer": ("T×B", None, "event"), "projections": ("T", "matmul", None), "rule": ("B×T", "copy", None)}
ON_CPU = {name: SUITES[name] for name in ("rule", "conv", "norm")} | {"backward": ("B×T", None, None), "model": ("T×B", "tokens", None), "gguf": ("workload", "tokens", None)}


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
