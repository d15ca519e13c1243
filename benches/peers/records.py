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


def label(column):
    return " ".join(filter(None, column))


def own_column(columns):
    """Our column: Algo::Auto where it ran; for the projections the one wide product, which is what the layer does."""
    known = ("candle-gdn", "auto"), ("torch", "one")
    return next((c for c in (*known, *columns) if c in columns and (c[0] == "candle-gdn" or c[0] == "torch" and c[1])), None)


def done(suite, r):
    """Whether a row has what its suite is for."""
    return r["error"] if suite == "hard" else r["gpu"]


def summary(suite, rows):
    """The geometric means of our gpu time over the time of each other column, and the gaps. benches/report.py makes tables."""
    works, ratios, gaps = {}, {}, {}
    for r in rows:
        column = r["contender"], r["variant"]
        works.setdefault((r["workload"], r["l2"]), {})[column] = median(r, "gpu")
        if not done(suite, r):
            gaps.setdefault((label(column), r["note"]), []).append(f"{r['workload']} {r['l2']}")
    own = own_column(list(dict.fromkeys((r["contender"], r["variant"]) for r in rows)))
    for times in works.values():
        for column, us in times.items():
            if us and times.get(own) and column[0] != "candle-gdn" and column != own:
                ratios.setdefault(column, []).append(times[own] / us)
    means = [f"{label(c)} {statistics.geometric_mean(v):.3f} ({len(v)})" for c, v in ratios.items()]
    lines = [f"{suite}: our gpu time over theirs, geometric mean (works): {', '.join(means) or 'none'}"]
    return "\n".join(lines + [f"  gap: {who}, {names[0] if len(names) == 1 else f'{len(names)} rows'}: {note}"
                              for (who, note), names in gaps.items()])
