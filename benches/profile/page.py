"""From the traces of benches/profile/run.sh to benches/profile.md and its pictures:

    python3 benches/profile/page.py benches/results/nvidia-h200/profile

Every figure of the page is worked out from a trace, which is committed beside the picture.
"""
import argparse
import collections
import gzip
import json
import os
import statistics
from xml.sax.saxutils import escape

HERE = os.path.dirname(os.path.abspath(__file__))
PAGE = os.path.join(os.path.dirname(HERE), "profile.md")

INTRO = """# Where the cycles go

Made by `benches/profile/run.sh`; do not edit. Each trace is of one call with a cold L2 cache and four multiprocessors, and opens at
<https://ui.perfetto.dev> with a track for each warp. Stamps make kernels slower: read shares, not times. A share is of the lives
of all warps of a role; cycles are the median of one passage. A table has the largest scope of each role and of all, `all multiprocessors` has every
scope. In the chunk forms a scope contains the cost of the stamp before it; elsewhere that cost is unstamped. The scopes are
explained in `cuda/common/profile.cuh`, commits are in [about.tsv]({folder}/about.tsv).
"""

WIDTH, LABEL, ROW, TOP = 1000, 170, 14, 26
WINDOW_US, MOST_TRACKS, MOST_SCOPES = 12.0, 24, 6
WAIT = "#d9d9d9"
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf", "#393b79",
           "#637939", "#8c6d31", "#843c39", "#7b4173", "#3182bd", "#e6550d", "#31a354", "#756bb1", "#636363")

Warp = collections.namedtuple("Warp", "sm track role launch block number begin end cycles scopes")
Scope = collections.namedtuple("Scope", "name begin end cycles token")


def read(path):
    """The warps of a trace, with their scopes in order."""
    with gzip.open(path, "rt") as file:
        events = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
    warps = []
    for e in events:
        args, begin = e["args"], e["ts"]
        end = begin + e["dur"]
        if "block" in args:
            warps.append(Warp(e["pid"] - 1, e["tid"], e["name"], args["launch"], args["block"], args["warp"], begin, end,
                              args["cycles"], []))
        else:    # after its warp's
            warps[-1].scopes.append(Scope(e["name"], begin, end, args["cycles"], args["token"]))
    return warps


def waits(scope):
    return scope.startswith("wait:") or scope == "barrier"


def by_role(warps):
    """{role: its warps}, in the order in which roles have most warps' numbers first."""
    roles = collections.defaultdict(list)
    for warp in sorted(warps, key=lambda w: w.number):
        roles[warp.role].append(warp)
    return roles


def shares(warps):
    """{scope: (share of the lives of all these warps, median cycles)}, scopes in order of appearance."""
    lives = sum(w.cycles for w in warps) or 1
    lengths = collections.defaultdict(list)
    for warp in warps:
        for scope in warp.scopes:
            lengths[scope.name].append(scope.cycles)
    return {name: (sum(x) / lives, statistics.median_low(x)) for name, x in lengths.items()}


def percent(share):
    return f"{100 * share:.1f} %"


def table(roles):
    """Rows of work, waits and the largest scopes, a column for each role: share, and the median cycles of a passage."""
    found = {role: shares(warps) for role, warps in roles.items()}
    largest = lambda scope: -max(scopes[scope][0] for scopes in found.values() if scope in scopes)
    names = sorted({name for scopes in found.values() for name in scopes}, key=lambda name: (largest(name), name))
    first = {max(scopes, key=lambda name: scopes[name][0]) for scopes in found.values() if scopes}     # of each role
    names = sorted(names, key=lambda name: name not in first)[:MOST_SCOPES]
    lines = ["| scope | " + " | ".join(f"{role}: share | cycles" for role in found) + " |", "|---" * (1 + 2 * len(found)) + "|"]
    for what, waiting in (("all work", False), ("all waits", True)):
        sums = [sum(share for name, (share, _) in scopes.items() if waits(name) == waiting) for scopes in found.values()]
        lines.append(f"| {what} | " + " | ".join(f"{percent(share)} | " for share in sums) + " |")
    for name in names:
        cells = [f"{percent(scopes[name][0])} | {scopes[name][1]}" if name in scopes else " | " for scopes in found.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def window(warps):
    """The longest launch on one multiprocessor: its warps there, the first tracks of them, and a time in its middle."""
    spans = collections.defaultdict(list)
    for warp in warps:
        spans[warp.launch, warp.sm].append(warp)
    length = lambda found: max(w.end for w in found) - min(w.begin for w in found)
    (_, sm), found = max(spans.items(), key=lambda item: (length(item[1]), -item[0][1]))
    tracks = sorted({w.track for w in found})[:MOST_TRACKS]
    begin, end = min(w.begin for w in found), max(w.end for w in found)
    if end - begin > 1.5 * WINDOW_US:
        begin = (begin + end - WINDOW_US) / 2
        end = begin + WINDOW_US
    return sm, [w for w in found if w.track in tracks], tracks, begin, end


def picture(warps):
    """An SVG: a row for each warp, its scopes over time; what waits is grey."""
    sm, warps, tracks, begin, end = window(warps)
    names = dict.fromkeys(s.name for w in warps for s in w.scopes if s.end > begin and s.begin < end and not waits(s.name))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    scale = (WIDTH - LABEL - 10) / max(end - begin, 1e-9)
    legend = TOP + ROW * len(tracks) + 24
    columns = 5
    height = legend + 16 * -(-(len(colours) + 1) // columns) + 8
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="10">',
             f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
             f'<text x="{LABEL}" y="16">multiprocessor {sm}, {end - begin:.1f} µs from {begin:.1f} µs on</text>']
    for i, track in enumerate(tracks):
        row, y = [w for w in warps if w.track == track], TOP + ROW * i
        lines.append(f'<text x="{LABEL - 6}" y="{y + 10}" text-anchor="end">{escape(row[0].role)} {row[0].number}</text>')
        for scope in (s for w in row for s in w.scopes):
            left, right = max(scope.begin, begin), min(scope.end, end)
            if right > left:
                fill = WAIT if waits(scope.name) else colours[scope.name]
                lines.append(f'<rect x="{LABEL + scale * (left - begin):.2f}" y="{y}" width="{scale * (right - left):.2f}" '
                             f'height="{ROW - 3}" fill="{fill}"><title>{escape(scope.name)}, {scope.cycles} cycles, token '
                             f'{scope.token}</title></rect>')
    for i, (name, fill) in enumerate([("waiting", WAIT), *colours.items()]):
        x, y = 20 + i % columns * (WIDTH - 20) // columns, legend + 16 * (i // columns)
        lines.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{fill}"/><text x="{x + 14}" y="{y}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def section(folder, name, device, _commit, command, call):
    """The section of one trace; writes its picture."""
    warps = read(os.path.join(folder, f"{name}.json.gz"))
    with open(os.path.join(folder, f"{name}.svg"), "w") as file:
        file.write(picture(warps))
    link = f"{os.path.relpath(folder, os.path.dirname(PAGE))}/{name}"
    lines = [f"## {name}", "", f"{call}. {device}, `{command}`: [trace]({link}.json.gz), [all multiprocessors]({link}-table.json).", "",
             f"![{name}]({link}.svg)", ""]
    launches = sorted({w.launch for w in warps})
    for launch in launches:
        found = [w for w in warps if w.launch == launch]
        if len(launches) > 1:
            blocks = len({w.block for w in found})
            lines += [f"### Launch {launch + 1} of {len(launches)} ({blocks} blocks in the trace)", ""]
        lines += [*table(by_role(found)), ""]
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="with about.tsv and the traces")
    parser.add_argument("--page", default=PAGE, help="default benches/profile.md")
    args = parser.parse_args()
    with open(os.path.join(args.folder, "about.tsv")) as file:
        about = [line.rstrip("\n").split("\t") for line in file]
    folder = os.path.abspath(args.folder)
    lines = [INTRO.format(folder=os.path.relpath(folder, os.path.dirname(PAGE)))]
    for row in about:
        lines += section(folder, *row)
    with open(args.page, "w") as file:
        file.write("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
