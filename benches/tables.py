"""The tables of a report, in Markdown."""
import numpy as np
import pandas as pd

from frame import CLOCKS, CRATE, ON_CPU, SUITES, best_clock, clocks, columns, geomean, peers, standing

GAP = "–"
SHORT_HEADS = ["16/32", "4/8"]
BUCKETS = [64, 128, 256, 1024, 8192]            # upper ends, of total tokens


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
            others = [c for c in peers(s) if c in g]
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
