"""Rows and files of the record format (benches/README.md), and the table printed from them."""
import json
import math
import os
import platform
import re
import statistics
import subprocess
import time

from workloads import cost

TIERS = ["gpu", "event", "call", "wall", "host"]
EMPTY = {"includes": None, "launches": None, **{tier: None for tier in TIERS}, "error": None, "note": ""}


def floor_us(nbytes, flop, ceilings):
    """The larger of the bytes at the copy rate and the operations at the matmul rate."""
    return round(max(nbytes / (ceilings["copy_gb_s"] * 1e3), flop / (ceilings["matmul_tflop_s"] * 1e6)), 3)


def row(work, contender, variant, result, ceilings):
    """A result of child.py as a row. One without times is a gap, and its note says why."""
    nbytes, flop = cost(work)
    filled = {**EMPTY, **result}
    if filled["error"]:         # JSON has no NaN
        filled["error"] = {k: e if math.isfinite(e) else None for k, e in filled["error"].items()}
    return {"suite": work.suite, "workload": work.name, "contender": contender, "variant": variant or None,
            "auto": contender == "candle-gdn" and variant == "auto", "l2": work.l2, "shape": work.shape(), **filled,
            "bytes": nbytes, "flop": flop, "floor_us": floor_us(nbytes, flop, ceilings)}


def share_times(rows, works):
    """Gives the rows of a shape's further draws the times of its first: `works` are those of the rows."""
    timed = {}
    for r, work in zip(rows, works):
        key = r["suite"], work.lens, r["contender"], r["variant"]
        if work.timed:
            timed[key] = r
        elif key in timed and timed[key]["gpu"] and r["error"] and not r["note"].startswith("not timed"):
            first = timed[key]
            r.update({name: first[name] for name in [*TIERS, "launches"]})
            r["note"] = "; ".join(n for n in (r["note"], f"timed as {first['workload']}, the same shape") if n)


def commit(top):
    """CANDLE_GDN_COMMIT, or git's short hash with + where the tree differs, or "unknown"."""
    if os.environ.get("CANDLE_GDN_COMMIT"):
        return os.environ["CANDLE_GDN_COMMIT"]
    git = lambda *args: subprocess.run(["git", "-C", top, *args], capture_output=True, text=True, check=True).stdout
    try:
        return git("rev-parse", "--short", "HEAD").strip() + ("+" if git("status", "--porcelain").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_model():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return " ".join(re.search(r"^model name\s*:(.*)$", f.read(), re.M).group(1).split())
    except (OSError, AttributeError):
        return platform.processor() or "unknown"


def driver():
    try:
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def threads():
    return len(os.sched_getaffinity(0))


def slug(device):
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def header(tool, command, top, machine, ceilings, contenders):
    """All of a file but its rows. `contenders`: {name: version, None where it did not run}."""
    return {"schema": 1, "tool": tool, "commit": commit(top), "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "command": command, "machine": machine, "ceilings": ceilings,
            "contenders": {name: version for name, version in contenders.items() if version}}


def save(path, head, rows):
    """Whole or not at all: a run may be ended while it writes."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path + ".new", "w", encoding="utf-8") as f:
        head = json.dumps(head, indent=2, ensure_ascii=False)
        lines = ",\n    ".join(json.dumps(r, ensure_ascii=False) for r in rows)
        f.write(f'{head[:-2]},\n  "rows": [\n    {lines}\n  ]\n}}\n')
    os.replace(path + ".new", path)


# ---- the printed summary ----

def median(r, tier):
    return r[tier]["median"] if r and r.get(tier) else None


def label(col):
    return " ".join(filter(None, col))


def ours(cols):
    """Our column: Algo::Auto where it ran; for the projections the one wide product, which is what the layer does."""
    known = ("candle-gdn", "auto"), ("torch", "one")
    return next((c for c in (*known, *cols) if c in cols and (c[0] == "candle-gdn" or c[0] == "torch" and c[1])), None)


def done(suite, r):
    """Whether a row has what its suite is for."""
    return r["error"] if suite == "hard" else r["gpu"]


def summary(suite, rows):
    """A table of gpu / event times with our gpu time over each peer's, then the geometric means of these. Further draws of
    a shape are left out of the table and counted in the means. Of the hard suite the errors. The tables of `cargo bench
    --bench report` tell more."""
    works, ratios, gaps, hard = {}, {}, {}, suite == "hard"
    for r in rows:
        col = r["contender"], r["variant"]
        works.setdefault((r["workload"], r["l2"]), {})[col] = r
        if not done(suite, r):
            gaps.setdefault((label(col), r["note"]), []).append(f"{r['workload']} {r['l2']}")
    cols = list(dict.fromkeys((r["contender"], r["variant"]) for r in rows))
    mine = ours(cols)
    body = [["", "floor", *map(label, cols)]]
    for (name, l2), cells in works.items():
        line = [f"{name} {l2}", f"{next(iter(cells.values()))['floor_us']:.1f}"]
        us = median(cells.get(mine), "gpu")
        for col in cols:
            if hard:
                error = (cells.get(col) or {}).get("error") or {}
                line.append(", ".join(f"{name} {e:.1e}" for name, e in error.items() if e is not None) or "-")
                continue
            gpu, event = (median(cells.get(col), tier) for tier in ("gpu", "event"))
            line.append(f"{gpu:.2f} / " + (f"{event:.2f}" if event else "-") if gpu else "-")
            if gpu and us and col != mine and col[0] != "candle-gdn":
                line[-1] += f" ({us / gpu:.2f})"
                ratios.setdefault(col, []).append(us / gpu)
        if not all("the same shape" in r["note"] for r in cells.values()):
            body.append(line)
    widths = [max(map(len, column)) for column in zip(*body)]
    lines = [f"{suite}: relative RMS errors" if hard else
             f"{suite}: µs a call, kernels (CUPTI) / CUDA graph; in brackets our kernels' time over theirs"]
    lines += ["  " + "  ".join(x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths)))
              for line in body]
    means = [f"{label(c)} {statistics.geometric_mean(v):.3f} ({len(v)})" for c, v in ratios.items()]
    if means:
        lines.append("  our gpu time over theirs, geometric mean (works): " + ", ".join(means))
    for (who, note), names in gaps.items():
        lines.append(f"  gap: {who}, {names[0] if len(names) == 1 else f'{len(names)} rows'}: {note}")
    return "\n".join(lines)
