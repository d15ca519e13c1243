#!/usr/bin/env python3
"""The tables of README.md and models/README.md, from the records: `python3 benches/figures.py` writes them where they stand."""
import re
import sys
from pathlib import Path

import frame
import tables

TOP = Path(__file__).resolve().parent.parent
RESULTS = "benches/results/nvidia-h200"
# Suite, workload, what it is called; then the mean of all that the suite has at 16/32 heads.
WORKS = [
    ("decode", "16/32 B=1", "decode, 1 sequence"), ("decode", "16/32 B=64", "decode, 64 sequences"),
    ("decode", None, "decode, 1 to 256 sequences"), ("prefill", "16/32 1x2048", "prefill, 1 x 2048 tokens"),
    ("prefill", "16/32 4x8192", "prefill, 4 x 8192 tokens"), ("prefill", None, "prefill, 1 x 64 to 8 x 1024 and 1 x 32768 tokens"),
    ("backward", "16/32 1x8192", "backward, 1 x 8192 tokens"), ("backward", None, "backward, 1 x 512 to 8 x 4096 and 1 x 32768 tokens"),
    ("layer", "B=1", "whole layer, decode, 1 sequence, hidden size 2048")]
MODELS = [("qwen3.5-4b", "Qwen3.5-4B"), ("qwen3.5-35b-a3b", "Qwen3.5-35B-A3B"), ("qwen3.5-35b-a3b-fp8", "Qwen3.5-35B-A3B in fp8")]
BATCHES = [1, 8, 32, 64]


def lines(rows):
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def kernels(df):
    """Ours beside the best peer by both clocks. Launches of a layer overlap: its kernel times have no meaningful sum."""
    rows = [["work", "kernels: ours", "best peer", "in a CUDA graph: ours", "best peer", "floor"], ["---"] + ["--:"] * 5]
    for suite, workload, name in WORKS:
        of_suite = df[(df.suite == suite) & (df.tool == "benches/peers") & (df.l2 == "cold") & (df.hk == 16) & (df.hv == 32)]
        cells, floor = [], ""
        for clock in ("gpu", "event"):
            works = frame.standing(of_suite, clock)
            ratios = works.crate / works.best
            if suite == "layer" and clock == "gpu":
                cells += [tables.GAP] * 2
            elif workload is None:
                cells += [f"x {frame.geomean(ratios):.2f}", f"worst x {ratios.max():.2f}"]
            else:
                work = works[works.workload == workload].iloc[0]
                cells += [tables.digits(work.crate), tables.digits(work.best)]
                floor = tables.digits(work.floor)
        rows.append([name if workload else f"*all {len(works)}: {name}*", *cells, floor])
    return lines(rows)


def models(df):
    """Steps and prompts in ms. A floor of experts needs those that were chosen: of a record that does not say so, one sequence."""
    ms = lambda us: tables.digits(us / 1e3)
    rows = [["sequences", *map(str, BATCHES), "prompt of 8,192 tokens"], ["---"] + ["--:"] * 5]
    df = df[df.suite == "model"]
    for model, name in MODELS:
        steps = [df[(df.workload == f"{model} step B={n}, rings") & (df.variant == "graph")].iloc[0] for n in BATCHES]
        prompt = df[df.workload == f"{model} prompt T=8192"].iloc[0]
        rows.append([name, *(ms(step.gpu) for step in steps), f"{prompt.gpu / 1e3:.0f}"])
        counted = lambda n, step: n == 1 or "a3b" not in model or "experts chosen" in step.note
        rows.append(["floor", *(ms(step.floor_us) if counted(n, step) else tables.GAP for n, step in zip(BATCHES, steps)), ""])
    return lines(rows)


def pages():
    """{page: its text as it should be}: the first table of a page whose head begins as ours does is replaced."""
    df = frame.load(TOP / RESULTS)[1]
    found = {}
    for page, table in (("README.md", kernels(df)), ("models/README.md", models(df))):
        text, head = (TOP / page).read_text(encoding="utf-8"), re.escape(table[:table.index("|", 2)])
        found[page], count = re.subn(rf"^{head}.*\n(?:\|.*\n)+", lambda _: table, text, count=1, flags=re.M)
        if not count:
            raise SystemExit(f"{page}: no table that begins with {table.splitlines()[0]}")
    return found


if __name__ == "__main__":
    for page, text in pages().items():
        (TOP / page).write_text(text, encoding="utf-8")
    sys.exit()
