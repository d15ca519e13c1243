"""Tests of the benchmark itself, without a GPU: `python3 -m unittest discover benches/peers`. Needs torch; the kernels
and the peers are stood in for by host code of the same interfaces."""
import contextlib
import io
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types
import unittest
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
CUDA = os.path.join(os.path.dirname(os.path.dirname(HERE)), "cuda")
sys.path[:0] = [HERE, os.path.join(CUDA, "tests")]

import bench
import child
import children
import contenders
import contest
import data
import llama_cpp
import records
import reference
import timing
import torch
import workloads
from workloads import DIM, Workload

torch.set_num_threads(1)      # the tensors are small
CEILINGS = {"copy_gb_s": 4000.0, "matmul_tflop_s": 800.0}


def work(lens, hk=1, hv=2, suite="prefill", decode=False, **kw):
    return Workload(suite, f"{hk}/{hv} test", hk, hv, tuple(lens), decode, **kw)


class Arguments(unittest.TestCase):
    def refused(self, *argv):
        text = io.StringIO()
        with contextlib.redirect_stderr(text), self.assertRaises(SystemExit) as e:
            bench.main(list(argv))
        self.assertEqual(e.exception.code, 2)
        self.assertEqual(text.getvalue().count("\n"), 1, text.getvalue())
        self.assertTrue(text.getvalue().startswith("bench.py: "))
        return text.getvalue()

    def test_bad_input_is_one_sentence(self):
        self.assertIn("unknown suite 'dcode'", self.refused("dcode"))
        self.assertIn("unknown algo 'fast'", self.refused("decode", "--algo", "auto,fast"))
        self.assertIn("unknown contender 'x'", self.refused("--contenders", "x"))
        self.assertIn("no kernel takes 16/24", self.refused("--shapes", "16/24"))
        self.assertIn("not a pair", self.refused("--shapes", "16"))
        self.assertIn("not a positive number", self.refused("--batches", "0"))
        self.assertIn("SEQUENCESxTOKENS", self.refused("--lengths", "2048"))
        self.assertIn("not a positive number of seconds", self.refused("--limit", "-3"))
        self.assertIn("nothing to time", self.refused("layer", "--shapes", "4/8"))
        self.assertIn("nothing to time", self.refused("projections", "--contenders", "fla"))
        self.assertIn("not a tag", self.refused("--tag", "../x"))
        with mock.patch("shutil.which", return_value=None):
            self.assertIn("no nvcc", self.refused("decode"))
        with mock.patch("children.probe", return_value=(None, "torch sees no CUDA GPU")):
            self.assertIn("no CUDA GPU", self.refused("projections"))

    def test_probe_without_a_gpu(self):
        info, why = children.probe(None, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        self.assertIsNone(info)
        self.assertEqual(why, "torch sees no CUDA GPU")

    def plan(self, *argv):
        return {suite: dict(parts) for suite, parts in bench.plan(bench.arguments(list(argv))[0])}

    def test_plan(self):
        todo = self.plan()
        self.assertEqual(list(todo), workloads.SUITES)
        self.assertEqual({n: len(items) for n, items in todo["decode"].items()},
                         {"candle-gdn": 108, "flashinfer": 108, "fla": 108})
        self.assertEqual({n: len(items) for n, items in todo["prefill"].items()},
                         {"candle-gdn": 54, "flashinfer": 108, "flashqla": 54, "fla": 54})
        self.assertEqual(len(todo["contest-prefill"]["candle-gdn"]), 100)
        self.assertEqual(len(todo["contest-decode"]["fla"]), 54)
        self.assertEqual({n: len(items) for n, items in todo["projections"].items()}, {"torch": 42})
        todo = self.plan("decode", "layer", "--no-peers", "--algo", "all", "--shapes", "16/32", "--batches", "1,8")
        self.assertEqual([v for w, v in todo["decode"]["candle-gdn"] if w.name == "16/32 B=8" and w.l2 == "cold"],
                         contenders.DECODE_ALGOS)
        self.assertEqual(list(todo["layer"]), ["candle-gdn"])
        for suite, parts in self.plan("--quick").items():
            self.assertLessEqual({w.name for items in parts.values() for w, _ in items}, workloads.QUICK[suite])
            self.assertEqual({w.name for items in parts.values() for w, _ in items}, workloads.QUICK[suite])


class Work(unittest.TestCase):
    def test_costs(self):
        decode = workloads.select("decode", ["16/32"], [1])[0]
        self.assertEqual(workloads.cost(decode), (4194304, 0))
        self.assertEqual(decode.shape(), {"hk": 16, "hv": 32, "k": 128, "v": 128, "batch": 1, "tokens": 1,
                                          "total_tokens": 1})
        self.assertEqual(workloads.rule_flop(1, 1), 163840)
        nbytes, flop = workloads.cost(work([8192], 16, 32))
        self.assertAlmostEqual(records.floor_us(0, flop, {"copy_gb_s": 1, "matmul_tflop_s": 790}), 54, delta=0.5)
        self.assertAlmostEqual(records.floor_us(nbytes, 0, {"copy_gb_s": 4260, "matmul_tflop_s": 1}), 48.5, delta=0.5)
        layer = {w.name: w for w in workloads.select("layer")}
        self.assertAlmostEqual(records.floor_us(*workloads.cost(layer["B=1"]), {"copy_gb_s": 4260,
                                                                               "matmul_tflop_s": 790}), 16.8, delta=0.1)

    def test_seeds_differ_by_shape_and_draw_alone(self):
        cold, warm = workloads.select("decode", ["4/8"], [4])
        self.assertEqual(cold.seed, warm.seed)
        seeds = {w.seed for w in workloads.select("contest-decode")}
        self.assertEqual(len(seeds), 54)

    def test_json(self):
        for suite in workloads.SUITES:
            for w in workloads.select(suite):
                self.assertEqual(Workload.from_json(json.loads(json.dumps(w.to_json()))), w)

    def test_contest(self):
        self.assertEqual((len(contest.DECODE), len(contest.PREFILL)), (54, 100))
        sizes = [(len(lens), sum(lens)) for lens in contest.PREFILL]
        self.assertTrue(all(min(lens) > 0 for lens in contest.PREFILL))
        self.assertEqual((sizes[0], sizes[10], max(sizes)), ((1, 6), (38, 8192), (57, 8192)))
        self.assertEqual((sum(n for n, _ in sizes), sum(t for _, t in sizes)), (797, 183065))    # of the contest's set
        works = workloads.select("contest-prefill")
        first = {w.lens for w in works if not w.draw}
        self.assertEqual(len(first), len({w.lens for w in works}))
        self.assertEqual(len({w.name for w in works}), 100)

    def test_contest_tolerance_is_loose(self):
        small = torch.full((4, 2, 8), 0.004, dtype=torch.float64)
        self.assertTrue(contest.passes(torch.zeros_like(small), small))
        self.assertFalse(contest.passes(small + 0.02, small))
        self.assertFalse(contest.passes(small * math.nan, small))


def by_tokens(q, k, v, a, b, a_log, dt_bias, state, lens, scale):
    """The definition, a sequence at a time; the arguments of rule_by_chunks, and raw gates."""
    o, states, start = [], [], 0
    for n, length in enumerate(lens):
        parts = (x[None, start:start + length] for x in (q, k, v, a, b))
        y, s = reference.rule(*parts, a_log, dt_bias, state[n:n + 1], torch.tensor([length]), False, 0.0, scale, 1.0)
        o, states, start = [*o, y[0]], [*states, s], start + length
    return torch.cat(o), torch.cat(states)


class Reference(unittest.TestCase):
    def inputs(self, lens, hk, hv, k_dim, v_dim):
        torch.manual_seed(1)
        randn = lambda *shape: torch.randn(*shape, dtype=torch.float64)
        t = sum(lens)
        return dict(q=reference.unit(randn(t, hk, k_dim)), k=reference.unit(randn(t, hk, k_dim)),
                    v=randn(t, hv, v_dim), a=randn(t, hv), b=randn(t, hv), dt_bias=randn(hv) - 4,
                    a_log=(torch.rand(hv) * 15 + 1).log().double(), state=randn(len(lens), hv, v_dim, k_dim))

    def test_chunks_equal_tokens(self):
        for lens in ([1] * 5, [64], [130, 0, 3, 64, 65, 1], [200], [0, 0]):
            for hk, hv in ((2, 4), (3, 3), (1, 4)):
                x = self.inputs(lens, hk, hv, 24, 40)
                want = by_tokens(**x, lens=lens, scale=24 ** -0.5)
                for limit in (1 << 27, 1):          # all heads at once, and one by one
                    with mock.patch.object(reference, "LIMIT", limit):
                        got = reference.rule_by_chunks(x["q"], x["k"], x["v"],
                                             reference.log_decay(x["a"], x["a_log"], x["dt_bias"]), x["b"].sigmoid(),
                                             x["state"], lens, 24 ** -0.5)
                    for g, w in zip(got, want):
                        self.assertLess(reference.relative(g, w), 1e-12, (lens, hk, hv, limit))

    def test_hard_cases(self):
        """Equal keys with beta 1 and no decay; decays of e^-60."""
        lens = [150]
        x = self.inputs(lens, 1, 1, 16, 16)
        x["k"][:] = x["k"][0]
        for a, b in ((-1e3, 40.0), (60.0, 0.0)):
            x["a"], x["b"] = torch.full_like(x["a"], a), torch.full_like(x["b"], b)
            want = by_tokens(**x, lens=lens, scale=1.0)
            got = reference.rule_by_chunks(x["q"], x["k"], x["v"], reference.log_decay(x["a"], x["a_log"], x["dt_bias"]),
                                 x["b"].sigmoid(), x["state"], lens, 1.0)
            for g, w in zip(got, want):
                self.assertLess(reference.relative(g, w), 1e-10)

    def test_relative(self):
        x = torch.tensor([3.0, 4.0])
        self.assertEqual(reference.relative(x, x), 0)
        self.assertEqual(reference.relative(torch.zeros(2), x), 1)
        self.assertEqual(reference.relative(x * math.nan, x), math.inf)


class Timing(unittest.TestCase):
    def test_spans(self):
        events = [(i * 10.0, 1.0 + i % 2) for i in range(8)]
        random.Random(0).shuffle(events)
        self.assertEqual(timing.spans(events, 4), (2, [12.0] * 4))
        self.assertEqual(timing.spans(events, 3), (None, [4.0]))
        # Kernels that overlap, also those of two calls, and one within another.
        events = [(0.0, 5.0), (4.0, 4.0), (7.0, 5.0), (8.0, 2.0)]
        self.assertEqual(timing.spans(events, 2), (2, [8.0, 4.0]))
        self.assertEqual(timing.spans(events, 3), (None, [4.0]))
        self.assertEqual(timing.spans(events[:1], 2), (None, [2.5]))

    def test_sets(self):
        self.assertEqual(timing.sets_for(1000, "warm", 60e6), 1)
        self.assertEqual(timing.sets_for(1 << 30, "cold", 60 << 20), 2)
        self.assertEqual(timing.sets_for(2 << 20, "cold", 60 << 20), 90)
        self.assertEqual(timing.sets_for(1, "cold", 60 << 20), timing.MAX_SETS)

    def test_measure(self):
        """With the GPU's part stood in for: the buffers rotate over all tiers."""
        order = []
        calls = [lambda i=i: order.append(i) for i in range(7)]

        def activities(run, ahead):
            n = len(order)
            run()
            return [(10.0 * i, 5.0) for i in range(2 * (len(order) - n))]

        with mock.patch.multiple(timing, device_activities=activities, capture=lambda calls: mock.Mock(),
                                 event_us=lambda graph: 12.0, WARM_UP=0.0), mock.patch("torch.cuda.synchronize"):
            row = timing.measure(calls)
        self.assertEqual([b - a for a, b in zip(order, order[1:]) if (b - a) % 7 != 1], [])
        self.assertEqual((row["launches"], row["gpu"]["median"]), (2, 15.0))
        self.assertEqual(row["note"], "")
        self.assertGreaterEqual(row["wall"]["median"], row["host"]["median"])

        def broken(calls):
            raise RuntimeError("operation not permitted when stream is capturing")
        with mock.patch.multiple(timing, device_activities=lambda *_: [(0, 1.0)] * 3, capture=broken, WARM_UP=0.0), \
                mock.patch("torch.cuda.synchronize"):
            row = timing.measure(calls)
        self.assertIsNone(row["event"])
        self.assertIn("no CUDA graph (RuntimeError: operation not permitted", row["note"])
        self.assertIn("gpu is a mean", row["note"])


STUB = """
import json, os, signal, sys, time
spec = json.load(open(sys.argv[1]))
out = open(spec["out"], "a")
def say(**line): print(json.dumps(line), file=out, flush=True)
if spec["contender"] == "absent":
    say(fatal="absent is not usable here"); sys.exit(1)
if spec["contender"] == "stillborn":
    print("no such library", file=sys.stderr); sys.exit(5)
say(info={"version": "1.2"})
for i, item in enumerate(spec["items"]):
    say(start=i)
    batch = len(item["workload"]["lens"])
    if batch in BAD.get("segfault", []): os.kill(os.getpid(), signal.SIGSEGV)
    if batch in BAD.get("hang", []): time.sleep(60)
    if batch in BAD.get("slow", []): time.sleep(0.5)
    out.write('{"row": '); out.flush(); time.sleep(0.02)      # lines may be seen half written
    out.write('%d, "gpu": {"median": %d, "min": 1, "max": 9}, "note": ""}\\n' % (i, batch)); out.flush()
    if batch in BAD.get("lost", []): sys.exit(3)
"""


class Children(unittest.TestCase):
    def run_stub(self, bad, contender="stub", batches=(1, 2, 3, 4, 5), silence=5, limit=60):
        said = []
        items = [(w, "") for w in workloads.select("decode", ["1/2"], list(batches)) if w.l2 == "cold"]
        with tempfile.TemporaryDirectory() as folder:
            stub = os.path.join(folder, "stub.py")
            with open(stub, "w") as f:
                f.write(f"BAD = {bad}\n" + STUB)
            starter = lambda spec, env, log: subprocess.Popen([sys.executable, stub, spec], env=env, stdout=log,
                                                              stderr=log, start_new_session=True)
            results, version = children.run_items("time", contender, items, None, silence, time.monotonic() + limit,
                                                  starter=starter, complain=said.append)
        return [r["gpu"]["median"] if "gpu" in r else r["note"] for r in results], version, said

    def test_all_well(self):
        self.assertEqual(self.run_stub({}), ([1, 2, 3, 4, 5], "1.2", []))

    def test_crash_costs_one_item(self):
        rows, version, said = self.run_stub({"segfault": [2, 5]})
        self.assertEqual(rows, [1, "failed: its process died of SIGSEGV", 3, 4, "failed: its process died of SIGSEGV"])
        self.assertEqual(version, "1.2")
        self.assertIn("1/2 B=2", said[0])

    def test_hang_costs_one_item(self):
        rows, _, _ = self.run_stub({"hang": [3]}, silence=0.6)
        self.assertEqual(rows, [1, 2, "failed: no result within 0.6 s", 4, 5])

    def test_lost_gpu_goes_on_in_a_new_process(self):
        self.assertEqual(self.run_stub({"lost": [1, 4]})[0], [1, 2, 3, 4, 5])

    def test_gives_up_in_the_end(self):
        rows, _, _ = self.run_stub({"segfault": list(range(1, 9))}, batches=range(1, 9))
        self.assertEqual(rows[:5], ["failed: its process died of SIGSEGV"] * 5)
        self.assertEqual(rows[5:], ["not run: its process had died 5 times"] * 3)

    def test_time_limit(self):
        rows, _, _ = self.run_stub({"slow": [1, 2, 3, 4, 5]}, limit=1.4)
        self.assertEqual(rows[0], 1)
        self.assertEqual(rows[-1], "not run: the time limit was reached")
        self.assertEqual(self.run_stub({}, limit=-1)[0], ["not run: the time limit was reached"] * 5)

    def test_absent_peer(self):
        """The real child process, without the package."""
        items = [(work([4]), "")]
        env = {**os.environ, "PYTHONPATH": ""}
        results, version = children.run_items("time", "flashqla", items, None, 60, time.monotonic() + 60, env)
        self.assertIn("flashqla is not usable here: ModuleNotFoundError", results[0]["note"])
        self.assertIsNone(version)

    def test_absent(self):
        self.assertEqual(self.run_stub({}, "absent")[0], ["absent is not usable here"] * 5)
        rows, _, said = self.run_stub({}, "stillborn")
        self.assertEqual(rows, ["not run: its process ended with status 5"] * 5)
        self.assertIn("no such library", said[-1])


class Records(unittest.TestCase):
    def rows(self):
        times = lambda us: {"gpu": timing.spread([us, us + 1, us + 2]), "event": timing.spread([us + 2]),
                            "error": {"o": 1e-3, "state": 1e-7}, "launches": 1, "includes": "gates"}
        works = [w for w in workloads.select("decode", ["4/8"], [1, 4]) if w.l2 == "cold"]
        return [records.row(works[0], "candle-gdn", "auto", times(3), CEILINGS),
                records.row(works[1], "candle-gdn", "auto", times(7), CEILINGS),
                records.row(works[0], "fla", "", times(7), CEILINGS),
                records.row(works[1], "fla", "", {"note": "failed: x"}, CEILINGS)]

    def test_rows(self):
        r = self.rows()
        self.assertTrue(r[0]["auto"])
        self.assertFalse(r[2]["auto"])
        self.assertEqual((r[2]["variant"], r[0]["variant"]), (None, "auto"))
        self.assertEqual((r[3]["gpu"], r[3]["error"], r[3]["note"]), (None, None, "failed: x"))
        self.assertEqual(r[0]["floor_us"], round(2 * 8 * 128 * 128 * 4 / 4e6, 3))
        nan = records.row(work([1]), "fla", "", {"error": {"o": math.nan, "state": 0.1}}, CEILINGS)
        self.assertEqual(nan["error"], {"o": None, "state": 0.1})

    def test_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "a", "peers-decode.json")
            versions = {"fla": "0.6", "flashqla": None}
            head = records.header("benches/peers", "x", HERE, {"device": "GPU"}, CEILINGS, versions)
            records.save(path, head, self.rows())
            with open(path) as f:
                saved = json.load(f, parse_constant=lambda x: self.fail(x))
            self.assertEqual(saved, {**head, "rows": self.rows()})
            self.assertEqual(saved["contenders"], {"fla": "0.6"})
            records.save(path, head, [])
            with open(path) as f:
                self.assertEqual(json.load(f)["rows"], [])
            self.assertEqual(os.listdir(os.path.dirname(path)), ["peers-decode.json"])

    def test_summary(self):
        text = records.summary("decode", self.rows())
        self.assertIn("(0.50)", text)
        self.assertIn("our gpu time over theirs, geometric mean (works): fla 0.500 (1)", text)
        self.assertIn("gap: fla, 4/8 B=4 cold: failed: x", text)
        self.assertLessEqual(max(map(len, text.splitlines())), 120)

    def test_commit(self):
        with mock.patch.dict(os.environ, CANDLE_GDN_COMMIT="abc"):
            self.assertEqual(records.commit(HERE), "abc")
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, CANDLE_GDN_COMMIT=""):
            self.assertEqual(records.commit(folder), "unknown")
        self.assertEqual(records.slug("NVIDIA H200"), "nvidia-h200")

    def test_shared_times(self):
        works = [w for w in workloads.select("contest-decode") if len(w.lens) == 4][:4]
        fine, bad = {"error": {"o": 1e-3}, "note": "passes"}, {"error": {"o": 1.0}, "note": "not timed, over"}
        results = [{**fine, "gpu": timing.spread([3.0])}, fine, bad, {"note": "not usable"}]
        rows = [records.row(w, "fla", "", r, CEILINGS) for w, r in zip(works, results)]
        records.share_times(rows, works)
        self.assertEqual([r["gpu"] is not None for r in rows], [True, True, False, False])
        self.assertIn("timed as #10 B=4, the same shape", rows[1]["note"])


class Whole(unittest.TestCase):
    """bench.main with the processes stood in for."""

    def run_all(self, *argv, times=lambda *args, **kw: None):
        info = {"device": "NVIDIA H200", "cuda": "13.0", "ceilings": CEILINGS}
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        text = io.StringIO()
        with mock.patch("children.probe", return_value=(info, None)), mock.patch("children.run_items", times), \
                contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
            code = bench.main([*argv, "--lib", __file__, "--out", folder.name])
        files = {}
        for name in os.listdir(folder.name):
            with open(os.path.join(folder.name, name), encoding="utf-8") as f:
                files[name] = json.load(f)
        return code, text.getvalue(), files

    @staticmethod
    def fake(task, contender, items, lib, silence, deadline, env=None, complain=None, results=None):
        for i, (w, _) in enumerate(items):
            us = records.floor_us(*workloads.cost(w), CEILINGS) * (1.1 + len(contender) / 20) + 2
            tiers = {} if w.draw else {"gpu": timing.spread([us]), "event": timing.spread([us + 1]), "launches": 1}
            results[i] = {**tiers, "error": {"o": 1e-3, "state": 1e-7}, "note": "", "includes": "gates"}
        if contender == "flashqla":
            results[:] = [{"note": "flashqla is not usable here: ModuleNotFoundError"}] * len(items)
            return results, None
        return results, "1.0"

    def test_all_suites(self):
        code, text, files = self.run_all(times=self.fake)
        self.assertEqual(code, 0)
        self.assertEqual(sorted(files), sorted(f"peers-{suite}.json" for suite in workloads.SUITES))
        fields = set(files["peers-decode.json"]["rows"][0])
        for name, run in files.items():
            self.assertNotIn("flashqla", run["contenders"])
            for r in run["rows"]:
                self.assertEqual(set(r), fields)
                self.assertEqual(r["gpu"] is None, r["contender"] == "flashqla", r)
            keys = [(r["workload"], r["l2"], r["contender"], r["variant"]) for r in run["rows"]]
            self.assertEqual(len(keys), len(set(keys)), name)
        self.assertEqual([r["contender"] for r in files["peers-prefill.json"]["rows"][:5]],
                         ["candle-gdn", "flashinfer", "flashinfer", "flashqla", "fla"])
        self.assertIn("gap: flashqla, 54 rows: flashqla is not usable here", text)

    def test_compiling_ahead(self):
        jobs = {}

        def compiled(task, contender, items, lib, silence, deadline, env):
            jobs[contender, items[0][0].suite, items[0][0].hk, items[0][0].hv] = items, env
            return [{"note": "failed: x"}] + [{}] * (len(items) - 1), None
        args = bench.arguments(["decode", "prefill", "contest-prefill", "layer", "--shapes", "4/8,16/32"])[0]
        said = []
        with mock.patch("children.run_items", compiled):
            bench.compile_ahead(bench.plan(args), math.inf, args, said.append)
        self.assertEqual(sorted(jobs), sorted(
            [("flashinfer", "decode", 4, 8), ("flashinfer", "decode", 16, 32), ("fla", "decode", 4, 8),
             ("fla", "decode", 16, 32), ("fla", "layer", 16, 32), ("fla", "contest-prefill", 4, 8),
             ("flashqla", "contest-prefill", 4, 8)] +
            [(name, "prefill", *heads) for name in ("fla", "flashqla") for heads in ((4, 8), (16, 32))]))
        items, env = jobs["fla", "contest-prefill", 4, 8]
        self.assertEqual((len(items), env["FLA_CACHE_RESULTS"]), (90, "0"))
        self.assertEqual(len(jobs["flashinfer", "decode", 4, 8][0]), 9)
        self.assertIn(f"in 0 s, {len(jobs)} processes", said[0])

    def test_command_without_folders(self):
        self.assertEqual(bench.without_folders(["decode", "--lib", "/a/b.so", "--quick", "--out=/c", "--limit", "5"]),
                         ["decode", "--quick", "--limit", "5"])

    def test_interruption_keeps_what_there_is(self):
        def stopped(task, contender, items, lib, silence, deadline, results=None, **kw):
            results[0] = {"gpu": timing.spread([3.0]), "note": ""}
            raise KeyboardInterrupt
        code, _, files = self.run_all("decode", "--quick", "--tag", "part", times=stopped)
        self.assertEqual(code, 130)
        rows = files["peers-decode-part.json"]["rows"]
        self.assertEqual([r["gpu"] is not None for r in rows], [True] + [False] * 5)
        self.assertEqual(rows[1]["note"], "not run: interrupted")


class LlamaCpp(unittest.TestCase):
    OP = ("  GATED_DELTA_NET(type=f32,head_count=32,head_size=128,n_seq_tokens=%d,n_seqs=1,v_repeat=1,permuted=0,"
          "kda=%d,K=1):   1023 runs -  3282.37 us/run -     8208 kB/run - \x1b[1;34m   2.39 GB/s\x1b[0m\n")

    def test_op_output(self):
        self.assertEqual(llama_cpp.parse_op(self.OP % (64, 0) + self.OP % (1, 1) + "Backend CPU: OK\n"), {64: 3282.37})
        other = "  GATED_DELTA_NET(type=f32,head_count=4,head_size=128,n_seq_tokens=64): 10 runs - 1.00 us/run"
        self.assertEqual(llama_cpp.parse_op(other), {})

    def test_model_output(self):
        text = json.dumps([{"n_prompt": 512, "n_gen": 0, "samples_ns": [512e6, 1024e6]},
                           {"n_prompt": 0, "n_gen": 128, "samples_ns": [128e3]}])
        self.assertEqual(llama_cpp.parse_model(text), {(512, 0): [512000.0, 1024000.0], (0, 128): [128.0]})

    def test_shared_cpus_are_noted(self):
        said = []
        self.assertEqual(llama_cpp.judge("x", 2, 1.9, said.append), "")
        self.assertIn("only 1.10 CPUs", llama_cpp.judge("x", 2, 1.1, said.append))

    def test_bad_input(self):
        for argv in (["--threads", "100000"], ["--threads", "0"], ["--gguf", "/no/such/file"], ["--llama", HERE],
                     ["--repeats", "0"], ["--nonsense"]):
            text = io.StringIO()
            with contextlib.redirect_stderr(text), self.assertRaises(SystemExit) as e:
                llama_cpp.main(argv)
            self.assertEqual((e.exception.code, text.getvalue().count("\n")), (2, 1), argv)


# ---- contenders, on the host ----

HOST_KERNELS = r"""
#include "gdn.h"
#include <cmath>
#include <cstring>
#include <vector>

static double f(uint16_t x) {
  uint32_t u = (uint32_t)x << 16;
  float y;
  memcpy(&y, &u, 4);
  return y;
}

static uint16_t h(double x) {
  float y = (float)x;
  uint32_t u;
  memcpy(&u, &y, 4);
  return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

static double silu(double x) { return x / (1 + exp(-x)); }

static uint16_t *at(const gdn_heads &x, int64_t n, int64_t t, int64_t head) {
  return (uint16_t *)x.ptr + n * x.seq_stride + t * x.token_stride + head * x.head_stride;
}

struct Range {
  int64_t n, first, end;
};

static Range range(const gdn_sequences &s, int n) {
  if (!s.cu_seqlens) return {n, 0, s.tokens_per_seq};
  return {0, s.cu_seqlens[n], s.cu_seqlens[n + 1]};
}

extern "C" const char *gdn_status_string(int s) { return s == GDN_BAD_ALGO ? "no such kernel" : "bad"; }

extern "C" int gdn_rule_workspace(const gdn_rule_params *p, int64_t *bytes) {
  if (p->algo == GDN_RECURRENT) return GDN_BAD_ALGO;
  const int64_t tokens = p->seqs.cu_seqlens ? p->seqs.total_tokens : p->seqs.num_seqs * p->seqs.tokens_per_seq;
  *bytes = tokens > p->seqs.num_seqs ? 8 * tokens : 0;
  return GDN_OK;
}

extern "C" int gdn_rule(const gdn_rule_params *p, cudaStream_t) {
  int64_t bytes;
  if (int status = gdn_rule_workspace(p, &bytes)) return status;
  if (bytes && (!p->workspace || (uintptr_t)p->workspace % 256 || p->workspace_bytes < bytes)) return GDN_BAD_WORKSPACE;
  if (bytes) memset(p->workspace, 0, bytes);
  if (p->io_dtype != GDN_BF16 || p->gate_dtype != GDN_BF16 || p->state_dtype != GDN_F32) return GDN_BAD_DTYPE;
  if (p->in_slots.slots || p->out_slots.slots || p->in_slots.num_slots != p->seqs.num_seqs) return GDN_NULL_POINTER;
  const int K = p->head_k, V = p->head_v, ratio = p->num_v_heads / p->num_k_heads;
  for (int n = 0; n < p->seqs.num_seqs; n++) {
    Range r = range(p->seqs, n);
    if (r.end - r.first > p->seqs.max_tokens_per_seq) return GDN_BAD_LENGTH;
    for (int hv = 0; hv < p->num_v_heads; hv++) {
      const float *in = (const float *)p->state_in + n * p->in_slots.slot_stride + (int64_t)hv * V * K;
      float *out = (float *)p->state_out + n * p->out_slots.slot_stride + (int64_t)hv * V * K;
      std::vector<double> S(in, in + V * K), q(K), k(K);
      for (int64_t t = r.first; t < r.end; t++) {
        double qq = p->l2_eps, kk = p->l2_eps;
        for (int i = 0; i < K; i++) {
          q[i] = f(at(p->q, r.n, t, hv / ratio)[i]);
          k[i] = f(at(p->k, r.n, t, hv / ratio)[i]);
          qq += q[i] * q[i];
          kk += k[i] * k[i];
        }
        for (int i = 0; i < K; i++) {
          q[i] *= p->scale / (p->l2norm ? sqrt(qq) : 1);
          k[i] /= p->l2norm ? sqrt(kk) : 1;
        }
        double g = exp(-exp(p->a_log[hv]) * log1p(exp(f(*at(p->a, r.n, t, hv)) + p->dt_bias[hv])));
        double beta = p->beta_scale / (1 + exp(-f(*at(p->b, r.n, t, hv))));
        for (int v = 0; v < V; v++) {
          double *s = &S[v * K], d = 0, o = 0;
          for (int i = 0; i < K; i++) d += (s[i] *= g) * k[i];
          d = beta * (f(at(p->v, r.n, t, hv)[v]) - d);
          for (int i = 0; i < K; i++) o += (s[i] += d * k[i]) * q[i];
          at(p->o, r.n, t, hv)[v] = h(o);
        }
      }
      for (int i = 0; i < V * K; i++) out[i] = S[i];
    }
  }
  return GDN_OK;
}

extern "C" int gdn_conv(const gdn_conv_params *p, cudaStream_t) {
  if (p->io_dtype != GDN_BF16 || p->weight_dtype != GDN_BF16) return GDN_BAD_DTYPE;
  const int past = p->width - 1;
  const uint16_t *w = (const uint16_t *)p->weight;
  for (int n = 0; n < p->seqs.num_seqs; n++) {
    const uint16_t *in = (const uint16_t *)p->state_in + n * p->in_slots.slot_stride;
    uint16_t *out = (uint16_t *)p->state_out + n * p->out_slots.slot_stride;
    for (int c = 0; c < p->channels; c++) {
      std::vector<uint16_t> x;
      for (int j = 0; j < past; j++) x.push_back(in[j * p->channels + c]);
      for (int t = 0; t < p->seqs.tokens_per_seq; t++) {
        x.push_back(at(p->x, n, t, 0)[c]);
        double y = 0;
        for (int j = 0; j <= past; j++) y += f(w[c * p->width + j]) * f(x[t + j]);
        at(p->y, n, t, 0)[c] = h(p->silu ? silu(y) : y);
      }
      for (int j = 0; j < past; j++) out[j * p->channels + c] = x[x.size() - past + j];
    }
  }
  return GDN_OK;
}

extern "C" int gdn_norm(const gdn_norm_params *p, cudaStream_t) {
  if (p->io_dtype != GDN_BF16 || p->weight_dtype != GDN_BF16 || p->sigmoid) return GDN_BAD_DTYPE;
  for (int64_t t = 0; t < p->tokens; t++) {
    for (int i = 0; i < p->heads; i++) {
      const uint16_t *x = at(p->x, 0, t, i), *z = at(p->z, 0, t, i), *w = (const uint16_t *)p->weight;
      double sum = 0;
      for (int v = 0; v < p->head_v; v++) sum += f(x[v]) * f(x[v]);
      double scale = 1 / sqrt(sum / p->head_v + p->eps);
      for (int v = 0; v < p->head_v; v++) at(p->out, 0, t, i)[v] = h(f(x[v]) * scale * f(w[v]) * silu(f(z[v])));
    }
  }
  return GDN_OK;
}

extern "C" int gdn_linear(const gdn_linear_params *p, cudaStream_t) {
  if (p->dtype != GDN_BF16) return GDN_BAD_DTYPE;
  for (int r = 0; r < p->rows; r++)
    for (int o = 0; o < p->outputs; o++) {
      float sum = 0;
      for (int i = 0; i < p->inputs; i++)
        sum += f(((const uint16_t *)p->x)[r * p->x_stride + i]) * f(((const uint16_t *)p->w)[o * p->w_stride + i]);
      ((uint16_t *)p->y)[r * p->y_stride + o] = h(sum);
    }
  return GDN_OK;
}

// What it stands for, one after the other. One token.
extern "C" int gdn_step(const gdn_step_params *p, cudaStream_t stream) {
  const int keys = p->num_k_heads * p->head_k, values = p->num_v_heads * p->head_v, n = p->seqs.num_seqs;
  std::vector<uint16_t> y(n * (2 * keys + values)), o(n * values);
  gdn_slots slots = p->in_slots;
  slots.slot_stride = p->conv_in_stride;
  auto rows = [&](uint16_t *x, int64_t row, int64_t head) { return gdn_heads{x, row, row, head}; };
  gdn_conv_params conv = {p->x, rows(y.data(), 2 * keys + values, 0), p->conv_weight, p->conv_in, p->conv_out, slots, slots,
                          p->seqs, 2 * keys + values, p->conv_width, p->io_dtype, p->conv_dtype, 1};
  if (int status = gdn_conv(&conv, stream)) return status;
  gdn_rule_params rule = {};
  rule.q = rows(y.data(), 2 * keys + values, p->head_k);
  rule.k = rows(y.data() + keys, 2 * keys + values, p->head_k);
  rule.v = rows(y.data() + 2 * keys, 2 * keys + values, p->head_v);
  rule.a = p->a, rule.b = p->b, rule.a_log = p->a_log, rule.dt_bias = p->dt_bias;
  rule.o = rows(o.data(), values, p->head_v);
  rule.state_in = p->state_in, rule.state_out = p->state_out;
  rule.in_slots = p->in_slots, rule.out_slots = p->out_slots, rule.seqs = p->seqs;
  rule.num_k_heads = p->num_k_heads, rule.num_v_heads = p->num_v_heads, rule.head_k = p->head_k, rule.head_v = p->head_v;
  rule.io_dtype = p->io_dtype, rule.gate_dtype = p->gate_dtype, rule.state_dtype = p->state_dtype, rule.l2norm = p->l2norm;
  rule.l2_eps = p->l2_eps, rule.scale = p->scale, rule.beta_scale = p->beta_scale;
  if (int status = gdn_rule(&rule, stream)) return status;
  gdn_norm_params norm = {rows(o.data(), values, p->head_v), p->z, p->out, p->norm_weight, n, p->num_v_heads, p->head_v,
                          p->io_dtype, p->norm_dtype, p->sigmoid, p->norm_eps};
  norm.z.token_stride = p->z.seq_stride, norm.out.token_stride = p->out.seq_stride;
  return gdn_norm(&norm, stream);
}
"""


def host_library(folder):
    """The C ABI on the host: what gdn.h says, in plain loops; what is not timed is there and does nothing."""
    with open(os.path.join(CUDA, "gdn.h"), encoding="utf-8") as f:
        declared = re.findall(r"^(?:int|const char \*) ?(gdn_\w+)\(", f.read(), re.M)
    rest = [f'extern "C" int {name}() {{ return 1; }}' for name in declared if f" {name}(" not in HOST_KERNELS
            and f"*{name}(" not in HOST_KERNELS]
    files = {"host.cpp": HOST_KERNELS, "rest.cpp": "\n".join(rest)}
    for name, text in files.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
            f.write(text)
    lib = os.path.join(folder, "host.so")
    sources = [os.path.join(folder, name) for name in ("host.cpp", "rest.cpp")]
    subprocess.run(["c++", "-O2", "-shared", "-fPIC", "-I", CUDA, *sources, "-o", lib], check=True)
    return lib


def check(contender, w, variant, sets=2):
    """The errors that child.py would report."""
    case = child.case_of(contender, w, variant, sets)
    for call in case.calls:
        call()
    with mock.patch("torch.cuda.synchronize"):
        return child.errors(contender, w, case)


@unittest.skipUnless(shutil.which("c++"), "no C++ compiler")
class CandleGdn(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.patch = mock.patch("abi.stream", return_value=None)
        cls.patch.start()
        cls.contender = contenders.load("candle-gdn")(host_library(cls.folder.name), "cpu")

    @classmethod
    def tearDownClass(cls):
        cls.patch.stop()
        cls.folder.cleanup()

    def test_version(self):
        self.assertRegex(self.contender.version, r"^\d+\.\d+")

    def test_rule(self):
        for w in (work([1] * 3, 2, 4, "decode", True), work([5, 70, 1], 1, 2), work([64], 2, 2),
                  work([1] * 2, 4, 8, "contest-decode", True, l2norm=False),
                  work([3, 20], 4, 8, "contest-prefill", l2norm=False, draw=1)):
            found, note = check(self.contender, w, "auto")
            self.assertLess(found["o"], 4e-3, w)
            self.assertLess(found["state"], 1e-6, w)
            self.assertEqual(note, "passes the contest's tolerance" if w.suite.startswith("contest") else "")

    def test_layer(self):
        # The real layer's width, 16/32, so that the projection's rows are what they are.
        for w in (work([1, 1], 16, 32, "layer", True), work([3], 16, 32, "layer")):
            found, _ = check(self.contender, w, "auto")
            self.assertLess(found["o"], 2e-2, w)
            self.assertLess(found["state"], 2e-2, w)

    def test_a_refused_shape_says_so(self):
        with self.assertRaisesRegex(RuntimeError, "gdn_rule: no such kernel"):
            check(self.contender, work([4]), "recurrent")

    def test_untouched_outputs_are_found(self):
        with mock.patch.object(self.contender, "launch"):
            found, _ = check(self.contender, work([4]), "auto")
        self.assertEqual((found["o"], found["state"]), (math.inf, math.inf))

    def test_child_process(self):
        """child.run as it is, the GPU's part stood in for."""
        again = work([4], 1, 2, "contest-prefill", l2norm=False, draw=2)
        items = [{"workload": w.to_json(), "variant": v}
                 for w, v in ((work([4]), "auto"), (work([4]), "recurrent"), (again, "auto"))]
        lines = []
        props = types.SimpleNamespace(L2_cache_size=1 << 20)
        with mock.patch.multiple("torch.cuda", synchronize=mock.DEFAULT, empty_cache=mock.DEFAULT), \
                mock.patch("torch.cuda.get_device_properties", return_value=props), \
                mock.patch.object(contenders, "load", return_value=lambda lib: self.contender), \
                mock.patch.object(timing, "measure", return_value={"gpu": timing.spread([1.0]), "note": ""}):
            code = child.run({"contender": "candle-gdn", "lib": "", "task": "time", "items": items},
                             lambda **line: lines.append(line))
        self.assertEqual(code, 0)
        rows = [line for line in lines if "row" in line]
        self.assertEqual([r["row"] for r in rows], [0, 1, 2])
        self.assertEqual(rows[0]["gpu"]["median"], 1.0)
        self.assertEqual(rows[1]["note"], "failed: RuntimeError: gdn_rule: no such kernel")
        self.assertNotIn("gpu", rows[2])
        self.assertEqual(rows[2]["note"], "passes the contest's tolerance")
        self.assertEqual(lines[0], {"info": {"version": self.contender.version}})


def rule_f32(q, k, v, g, beta, state, lens, scale):
    o, s = reference.rule_by_chunks(q, k, v, g, beta, state, lens, scale)
    return o.bfloat16(), s.float()


class Peers(unittest.TestCase):
    """Each peer's interface, as its documentation has it, on the host: the layouts and what is computed beforehand."""
    SHAPES = [work([5, 70, 1], 1, 2), work([30], 2, 2), work([7, 9], 4, 8, "contest-prefill", l2norm=False)]
    DECODES = [work([1] * 3, 2, 4, "decode", True), work([1] * 2, 4, 8, "contest-decode", True, l2norm=False)]

    def modules(self, **found):
        made = {}
        for name, content in found.items():
            parts = name.split("__")
            for i in range(1, len(parts) + 1):
                made.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
            vars(made[".".join(parts)]).update(content)
        return mock.patch.dict(sys.modules, made)

    def agree(self, contender, works, variant=""):
        for w in works:
            found, _ = check(contender, w, variant)
            self.assertLess(found["o"], 3e-3, w)
            self.assertLess(found["state"], 1e-5, w)

    def test_flashinfer(self):
        seen = []

        def decode(q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True):
            n = q.shape[0]
            self.assertEqual(q.shape[1], 1)
            x, y = (reference.unit(t[:, 0]) if use_qk_l2norm else t[:, 0] for t in (q, k))
            o, s = rule_f32(x, y, v[:, 0], reference.log_decay(a[:, 0], A_log, dt_bias), b[:, 0].double().sigmoid(),
                            state, [1] * n, scale)
            output.copy_(o[:, None])
            state.copy_(s)

        def prefill(q, k, v, g, beta, scale, initial_state, output_final_state, cu, output=None, output_state=None,
                    use_cp="auto", max_seqlen=None):
            lens = cu.diff().tolist()
            self.assertEqual((cu.dtype, max_seqlen, g.dtype), (torch.int32, max(lens), torch.float32))
            seen.append(use_cp)
            o, s = rule_f32(q, k, v, g.double().log(), beta, initial_state, lens, scale)
            output.copy_(o)
            output_state.copy_(s)

        with self.modules(flashinfer__gdn_decode={"gated_delta_rule_decode_pretranspose": decode},
                          flashinfer__gdn_prefill={"chunk_gated_delta_rule": prefill}), \
                mock.patch("contenders.peer_flashinfer.version", return_value="0"):
            contender = contenders.load("flashinfer")(None, "cpu")
            self.agree(contender, self.DECODES)
            self.agree(contender, self.SHAPES, "cp")
            self.agree(contender, self.SHAPES, "nocp")
        self.assertEqual(set(map(str, seen)), {"auto", "False"})

    def chunk(self, q, k, v, g, beta, scale, initial_state, cu_seqlens):
        o, s = rule_f32(q[0], k[0], v[0], g[0], beta[0], initial_state.mT, cu_seqlens.diff().tolist(), scale)
        return o[None], s.mT.contiguous()

    def test_flashqla(self):
        def prefill(q, k, v, g, beta, scale=None, initial_state=None, cu_seqlens=None, output_final_state=True,
                    output_h=False):
            o, s = self.chunk(q, k, v, g, beta, scale, initial_state, cu_seqlens)
            return g, None, o, None, s, None
        with self.modules(flash_qla={"chunk_gated_delta_rule_fwd": prefill}), \
                mock.patch("contenders.peer_flashqla.version", return_value="0"):
            self.agree(contenders.load("flashqla")(None, "cpu"), self.SHAPES)

    def test_fla(self):
        self.fla(self.SHAPES, self.DECODES)

    def test_fla_layer(self):
        self.fla([], [work([1, 1], 16, 32, "layer", True), work([1], 16, 32, "layer", True),
                      work([5], 16, 32, "layer")])

    def fla(self, prefills, others):
        def gated(q, k, v, g, beta, scale, state, lens, norm, a_log, dt_bias):
            x, y = (reference.unit(t) if norm else t for t in (q, k))
            return rule_f32(x, y, v, reference.log_decay(g, a_log, dt_bias), beta.double().sigmoid(), state, lens,
                            scale or DIM ** -0.5)

        def recurrent(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                      use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None,
                      use_beta_sigmoid_in_kernel=False, state_v_first=False):
            self.assertTrue(use_gate_in_kernel and use_beta_sigmoid_in_kernel and state_v_first and output_final_state)
            o, s = gated(*(t[:, 0] for t in (q, k, v, g, beta)), scale, initial_state, [1] * q.shape[0],
                         use_qk_l2norm_in_kernel, A_log, dt_bias)
            return o[:, None], s

        def chunk(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
                  use_gate_in_kernel=False, A_log=None, dt_bias=None, use_qk_l2norm_in_kernel=False,
                  use_beta_sigmoid_in_kernel=False, state_v_first=False):
            if not use_gate_in_kernel:
                return self.chunk(q, k, v, g, beta, scale, initial_state, cu_seqlens)
            o, s = gated(*(t[0] for t in (q, k, v, g, beta)), scale, initial_state, [q.shape[1]],
                         use_qk_l2norm_in_kernel, A_log, dt_bias)
            return o[None], s

        def convolve(past, weight):
            t = past.shape[1] - 3
            return torch.nn.functional.silu(sum(past[:, j:j + t].double() * weight[:, j].double() for j in range(4)))

        def conv(x, weight, initial_state=None, output_final_state=False, activation=None):
            past = torch.cat([initial_state[:, :, 1:].mT, x], 1)
            return convolve(past, weight).bfloat16(), past[:, -4:].mT

        def conv_update(x, cache, weight=None, activation=None):
            past = torch.cat([cache[:, :, 1:].mT, x], 1)
            cache.copy_(past.mT)
            return convolve(past, weight).bfloat16(), cache

        def norm(x, g, weight, bias, activation="swish", eps=1e-6):
            x, g = x.double(), g.double()
            return (x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double() * g * g.sigmoid()).bfloat16()

        with self.modules(fla__ops__gated_delta_rule={"chunk_gated_delta_rule": chunk,
                                                      "fused_recurrent_gated_delta_rule": recurrent},
                          fla__modules__causal_conv1d={"causal_conv1d": conv, "causal_conv1d_update": conv_update},
                          fla__modules__norm__fused_norm_gate={"rms_norm_gated": norm}), \
                mock.patch("contenders.peer_fla.version", return_value="0"):
            contender = contenders.load("fla")(None, "cpu")
            self.agree(contender, prefills)
            for w in others:
                found, _ = check(contender, w, "")
                for error, bound in zip(found.values(), contender.bounds(w)):
                    self.assertLess(error, bound, w)

    def test_fla_must_run_its_own_kernels(self):
        import contenders.peer_fla as peer
        self.assertEqual(os.environ["FLA_FLASH_QLA"], "0")
        with self.modules(flash_qla={}), self.assertRaisesRegex(RuntimeError, "FlashQLA"):
            peer.Fla.must_be_own(None)

    def test_projections(self):
        contender = contenders.load("torch")(None, "cpu")
        for variant in ("one", "two", "six"):
            found, _ = check(contender, work([3], 16, 32, "projections"), variant)
            self.assertLess(found["o"], 4e-3)

    def test_same_numbers_for_all(self):
        w = work([3, 4])
        a, b = data.draw(w, 3, "cpu"), data.draw(w, 3, "cpu")
        self.assertTrue(torch.equal(a.q, b.q) and torch.equal(a.state, b.state) and torch.equal(a.dt_bias, b.dt_bias))
        self.assertFalse(torch.equal(a.q[0], a.q[1]))


if __name__ == "__main__":
    unittest.main()
