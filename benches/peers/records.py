"""Rows and files of the record format (benches/README.md), and the table printed from them."""
import json
import math
import os
import platform
import re
import subprocess
import time

from workloads import cost

TIERS = ["gpu", "event", "wall", "host"]
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
        if not work.draw:
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


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def columns(rows):
    """(contender, variant) in the order they first appear."""
    return list(dict.fromkeys((r["contender"], r["variant"]) for r in rows))


def ours(cols):
    """Our column: Algo::Auto where it ran; for the projections the one wide product, which is what the layer does."""
    for col in (("candle-gdn", "auto"), ("torch", "one")):
        if col in cols:
            return col
    return next((c for c in cols if c[0] == "candle-gdn"), None)


def ratios(rows, tier):
    """{column: [our time / its time, ...]} over the works that both were timed on; "best peer" is the fastest one."""
    table, cols = by_work(rows), columns(rows)
    mine, found = ours(cols), {}
    for cells in table.values():
        us = median(cells.get(mine), tier)
        peers = {c: median(cells.get(c), tier) for c in cols if c[0] != (mine or [""])[0] or c[0] == "torch"}
        peers = {c: t for c, t in peers.items() if t and c != mine}
        for c, t in peers.items() if us else ():
            found.setdefault(c, []).append(us / t)
        if us and len(peers) > 1:
            found.setdefault(("best peer", None), []).append(us / min(peers.values()))
    return found


def by_work(rows):
    table = {}
    for r in rows:
        table.setdefault((r["workload"], r["l2"]), {})[r["contender"], r["variant"]] = r
    return table


def label(col):
    return col[0] if not col[1] else f"{col[0]} {col[1]}"


def summary(suite, rows):
    """A table of gpu / event times with our time over each peer's, then the geometric means. Further draws of a shape
    are left out of the table and counted in the means."""
    cols = columns(rows)
    mine = ours(cols)
    lines = [f"{suite}: µs a call, kernels (CUPTI) / CUDA graph; in brackets our kernels' time over theirs"]
    for col in cols:
        kinds = sorted({r["includes"] for r in rows if (r["contender"], r["variant"]) == col and r["includes"]})
        if kinds:
            lines.append(f"  {label(col)} includes {' | '.join(kinds)}")
    cells_of = lambda cells: [cell(cells.get(c), cells.get(mine) if c[0] != "candle-gdn" and c != mine else None)
                              for c in cols]
    body = [["", "floor", *map(label, cols)]]
    for (name, l2), cells in by_work(rows).items():
        if all("the same shape" in r["note"] for r in cells.values()):
            continue
        body.append([f"{name} {l2}", f"{next(iter(cells.values()))['floor_us']:.1f}", *cells_of(cells)])
    widths = [max(len(line[i]) for line in body) for i in range(len(body[0]))]
    lines += ["  " + "  ".join(x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths)))
              for line in body]
    for tier in ("gpu", "event", "wall"):
        means = [f"{label(c)} {geometric_mean(v):.3f} ({len(v)})" for c, v in ratios(rows, tier).items()]
        if means:
            lines.append(f"  our {tier} time over theirs, geometric mean (works): " + ", ".join(means))
    gaps = {}
    for r in rows:
        if not r["gpu"]:
            gaps.setdefault((label((r["contender"], r["variant"])), r["note"]), []).append(f"{r['workload']} {r['l2']}")
    for (who, note), names in gaps.items():
        lines.append(f"  gap: {who}, {names[0] if len(names) == 1 else f'{len(names)} rows'}: {note}")
    return "\n".join(lines)


def cell(r, us):
    if not median(r, "gpu"):
        return "-"
    event = median(r, "event")
    text = f"{median(r, 'gpu'):.2f} / " + (f"{event:.2f}" if event else "-")
    return text + (f" ({median(us, 'gpu') / median(r, 'gpu'):.2f})" if median(us, "gpu") else "")
