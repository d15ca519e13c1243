"""Tests of report.py on small records: `python3 -m unittest discover benches`. Skipped where pandas or matplotlib is missing."""
import contextlib
import io
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
try:
    import report
except ImportError as e:
    raise unittest.SkipTest(f"report.py: {e}: pip install -r benches/requirements.txt")

GPU = {"device": "H200", "host": "Xeon", "threads": 8, "driver": "580.1", "cuda": "13.0"}
CPU = {"device": "EPYC", "threads": 2}


def row(suite, workload, contender, time=None, clock="gpu", batch=1, tokens=1, heads=(16, 32), **fields):
    """4,000,000 bytes a sequence and, in prefill, 800 MFLOP a token: 1 µs each at the ceilings of `run`."""
    us = lambda x: {"median": x, "min": x, "max": x}
    shape = {"hk": heads[0], "hv": heads[1], "k": 128, "v": 128, "batch": batch, "tokens": tokens, "total_tokens": batch * tokens}
    work = {"flop": 800_000_000 * batch * tokens} if suite == "prefill" else {"bytes": 4_000_000 * batch}
    times = {clock: us(time)} if time else {}
    times |= {c: us(fields.pop(c)) for c in (*report.CLOCKS, "host") if c in fields}
    return {"suite": suite, "workload": workload, "contender": contender, "l2": "cold", "shape": shape, **work, **times, **fields}


def decode(batch, contender, time=None, **fields):
    return row("decode", f"16/32 B={batch}", contender, time, batch=batch, **fields)


def run(tool, rows, machine=GPU, **head):
    return {"schema": 1, "tool": tool, "commit": "0123abc", "date": "2026-11-21", "command": f"measure {tool}", "machine": machine,
            "ceilings": {"copy_gb_s": 4000.0, "matmul_tflop_s": 800.0}, "contenders": {"fla": "0.6"}, **head, "rows": rows}


class Report(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def folder(self, *runs):
        folder = self.root / f"box{len(list(self.root.iterdir()))}"
        folder.mkdir()
        for i, one in enumerate(runs):
            (folder / f"{i}.json").write_text(one if isinstance(one, str) else json.dumps(one))
        return folder

    def program(self, *argv):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            status = report.main([str(arg) for arg in argv])
        return status, out.getvalue(), err.getvalue()

    def page(self, *runs, full=True):
        folder = self.folder(*runs)
        self.assertEqual(self.program(folder, "--out", self.root / "out", *["--full"] * full)[0], 0)
        return (self.root / "out" / folder.name / "table.md").read_text()

    def lines(self, page, *wanted):
        """`wanted` are lines of the page, whatever the widths of their cells."""
        for line in wanted:
            self.assertIn(line, [" ".join(found.split()) for found in page.splitlines()])

    def test_comparison(self):
        crate = [decode(8, "candle-gdn", 11, variant="a"), decode(8, "candle-gdn", 12, variant="b", auto=True),
                decode(1, "candle-gdn", 4, variant="a", auto=True, launches=1, error={"o": 1.2e-3}),
                decode(1, "candle-gdn", 5, variant="b", launches=2, error={"o": None}), decode(1, "candle-gdn", 3, l2="warm", variant="a")]
        page = self.page(run("benches/peers", crate + [
            decode(8, "fi", 10, host=20, wall=30), decode(1, "fi", 5, includes="gates", error={"o": 2e-3}),
            decode(1, "fla", note="not installed\nbacktrace"), decode(1, "torch", 100)]))
        self.lines(page, "# box0", "16/32, gpu, µs:", "16/32, host, µs:", "- fla: not installed (1 of 1 rows)",
                   "| B | L2 | floor | candle-gdn a | candle-gdn b | GB/s | % of copy | % of floor | fi | torch | / fi | / best | × torch |",
                   "| 1 | cold | 1.00 | 4.00* | 5.00 | 1000 | 25 % | 25 % | 5.00 | 100 | 0.80 | 0.80 | 25.0 |",
                   "| 8 | cold | 8.00 | 11.0 | 12.0* | 2667 | 67 % | 67 % | 10.0 | – | 1.20 | 1.20 | – |",
                   "| 1 | warm | 1.00 | 3.00 | – | 1333 | 33 % | 33 % | – | – | – | – | – |",
                   "| candle-gdn b | – | 2 | nan |", "| fi | gates | – | 2.0e-03 |", "| all | cold | 0.98 (2) | 0.98 (2) |",
                   "| decode | benches/peers | 16/32 B=8 | cold | gpu | 12.0 | 10.0 | 1.20 | fi |",
                   "| 0.json | `0123abc` | 2026-11-21 | 9 | 4000 | 800 | `measure benches/peers` |")
        self.assertNotIn("/ torch", page)

    def test_short(self):
        rows = [row("prefill", f"{heads[0]}/{heads[1]} 1x64", c, t, tokens=64, heads=heads, l2=l2)
                for heads in ((16, 32), (4, 8), (2, 8)) for c, t in (("candle-gdn", 90), ("fla", 80)) for l2 in ("cold", "warm")]
        page = self.page(run("benches/peers", rows), run("benches/gpu", rows[:1]), full=False)
        self.lines(page, "4/8, gpu, µs:", "Plots: [prefill-16-32](prefill-16-32.svg)", "| 2/8 | cold | 1.12 (1) | 1.12 (1) |")
        self.assertFalse([absent for absent in ("2/8, gpu", "warm", "by benches/gpu\n") if absent in page])

    def test_sources_stay_apart_and_later_rows_replace(self):
        old = run("benches/peers", [decode(1, "candle-gdn", 9), decode(1, "fla", 2)], date="2026-11-20")
        page = self.page(run("benches/peers", [decode(1, "candle-gdn", 4)]), old, run("benches/gpu", [decode(1, "candle-gdn", 1)]))
        self.lines(page, "| 1 | cold | 1.00 | 4.00 | 1000 | 25 % | 25 % | 2.00 | 2.00 |", "| 1 | cold | 1.00 | 1.00 | 4000 | 100 % | 100 % |")
        rule = lambda c, t: row("rule", "1x1", c, t, "wall")
        two = lambda n: self.page(run("benches/cpu", [rule("candle-gdn", 8)], CPU), run("llama", [rule("llama.cpp", 16)], {**CPU, "threads": n}))
        self.lines(two(2), "## rule, by CPU, 2 threads", "| 1×1 | cold | 1.00 | 8.00 | 500 | 12 % | 12 % | 16.0 | 0.50 |")
        self.assertNotIn("/ llama.cpp", two(1))

    def test_contest(self):
        work = lambda i, c, t=None, **f: row("contest-decode", f"#{i} B=4", c, t, batch=4, heads=(4, 8), **f)
        rows = [work(0, "candle-gdn", 4, error={"o": 1e-3}), work(1, "candle-gdn", error={"o": 1e-3}, note="timed as #0"),
                work(0, "fi", 8), work(1, "fi", note="not timed, over its bound: o 2e-1", error={"o": 0.2}), work(2, "fi", note="not run")]
        self.lines(self.page(run("benches/peers", rows)), "| 4 | cold | 3 | 4.00 | 4.00 | 8.00 | 0.50 |",
                   "Workloads: candle-gdn 2 passed, fi 1 passed, fi 1 failed, fi 1 not run.", "| #1 B=4 | fi | not timed, over its bound: o 2e-1 |")

    def test_other_suites(self):
        part = lambda name, us, size: {"name": name, "launches": 2, "us": us, "bytes": size}
        step = row("model", "4b step B=1, rings", "candle-gdn", 75, variant="graph", wall=100, launches=65,
                   parts=[part("projections", 60, 160_000_000), part("sampler", 15, None)])
        hard = [row("hard", "usual", c, error={"o": 3e-3}) for c in ("candle-gdn", "fla")]
        layer = row("layer", "T=1", "candle-gdn", 20, "event", launches=3, between_bytes=40_000)
        self.lines(self.page(run("benches/gpu", [step, layer, *hard, row("novel", "a|b", "x", 3)])), "| projections | 60.0 (40.0) |",
                   "| no kernel | 25.0 |", "| all, wall | 100 (1.00) |", "| usual | o 3.0e-03 | o 3.0e-03 |", "| 1×1 | 3 / 0.04 |",
                   "| a\\|b | cold | x | 3.00 | 1.00 | 1333 |")

    def test_clocks_rank_the_kernels(self):
        rows = [decode(1, "candle-gdn", 3, event=4, call=9, wall=14), decode(1, "fla", 4, event=5, call=30, wall=12),
                decode(1, "fi", 5, event=6, call=8, wall=40), decode(8, "candle-gdn", 9, event=9, call=9, wall=9), decode(8, "fla", 10, call=10)]
        self.lines(self.page(run("benches/peers", rows)),
                   "- `event` against `gpu`: another fastest kernel in 0 of 1 works, another order in 0 of 1",
                   "- `call` against `gpu`: another fastest kernel in 1 of 2 works, another order in 1 of 2")

    def test_plots(self):
        rows = [decode(b, c, t * b) for b in (1, 8) for c, t in (("candle-gdn", 4), ("a<b", 5))]
        layer = [row("layer", f"T={t}", c, 10 * t, "event", tokens=t, variant=v) for t in (1, 2) for c, v in (("candle-gdn", "auto"), ("torch", "six"))]
        folder, texts = self.folder(run("benches/peers", rows + layer)), []
        for out in (self.root / "a", self.root / "b"):
            self.assertEqual(self.program(folder, "--full", "--out", out)[0], 0)
            texts.append({path.name: path.read_text() for path in (out / folder.name).iterdir()})
        self.assertEqual(*texts)
        self.assertEqual(sorted(texts[0]), [f"{name}-16-32.svg" for name in ("chain", "decode", "layer-batch", "layer-tokens")] + ["table.md"])
        words = "".join(ElementTree.fromstring(texts[0]["decode-16-32.svg"]).itertext())
        self.assertTrue(all(word in words for word in ("candle-gdn", "a<b", "floor", "time, µs", "L2 cold")), words)

    def test_compare(self):
        before, after = (self.folder(run("benches/gpu", [decode(1, "candle-gdn", a, wall=9), decode(8, "candle-gdn", b),
                                                             decode(64, "candle-gdn", c, wall=8)]))
                         for a, b, c in ((10, 20, 5), (10.05, 22, None)))       # of the last the wall alone is in both
        status, out, _ = self.program("--compare", before, after)
        self.assertEqual(status, 0)
        self.lines(out, "| benches/gpu | decode | candle-gdn | 3 | 1.034 | 1.000 | 1.100 |",
                   "| decode | 16/32 B=8 | candle-gdn | cold | gpu | 20.0 | 22.0 | 1.100 |")

    def test_errors(self):
        good = run("benches/peers", [decode(1, "fla", 3)])
        for text, expected in (({**good, "schema": 2}, "schema 2, expected 1"), ({**good, "rows": [{**good["rows"][0], "gpu_us": 3}]}, "gpu_us"),
                               ({"schema": 1}, "no benchmark record"), (json.dumps(good)[:40], "no benchmark record"),
                               (run("x", [], {**GPU, "device": "B200"}), "records of two GPUs: 0.json of H200, 1.json of B200")):
            folder = self.folder(good, text)
            status, _, err = self.program(folder)
            self.assertEqual((status, len(list(folder.iterdir()))), (1, 2), "nothing is written")
            self.assertIn(expected, err)
        self.assertIn("no *.json records", self.program(self.root / "nowhere")[2])
        with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit):
            report.main(["--full"])
        text = (Path(report.__file__).parent / "README.md").read_text().split("```json")[1].split("```")[0]
        self.lines(self.page(text), "## decode, by benches/gpu")    # the example of the format


if __name__ == "__main__":
    unittest.main()
