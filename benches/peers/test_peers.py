"""Tests of the benchmark itself, without a GPU: `python3 -m unittest discover benches/peers`. Needs torch; the kernels
and the peers are stood in for by host code of the same interfaces."""
import contextlib
import ctypes as C
import io
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import time
import types
import unittest
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(os.path.dirname(HERE)), "cuda", "tests")]

import abi
import clocks
import bench
import child
import children
import contenders
import contest
import data
import gguf
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


def refused(test, program, *argv):
    """What a program says of arguments that it does not take: one sentence."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text), test.assertRaises(SystemExit) as e:
        program.main(list(argv))
    test.assertEqual((e.exception.code, text.getvalue().count("\n")), (2, 1), text.getvalue())
    test.assertTrue(text.getvalue().startswith(f"{program.__name__}.py: "))
    return text.getvalue()


class Arguments(unittest.TestCase):
    def test_bad_input_is_one_sentence(self):
        for line, sentence in (("dcode", "unknown suite 'dcode'"), ("decode --algo auto,fast", "unknown algo 'fast'"),
                               ("--contenders x", "unknown contender 'x'"), ("--shapes 16/24", "no kernel takes 16/24"),
                               ("--shapes 16", "not a pair"), ("--batches 0", "not a positive number"),
                               ("--lengths 2048", "SEQUENCESxTOKENS"), ("--limit -3", "not a positive number of seconds"),
                               ("layer --shapes 4/8", "nothing to time"), ("--workload 100", "nothing to time"),
                               ("decode --workload 1", "nothing to time"), ("--workload x", "not a number from 0 on"),
                               ("projections --contenders fla", "nothing to time")):
            self.assertIn(sentence, refused(self, bench, *line.split()))
        with mock.patch("shutil.which", return_value=None):
            self.assertIn("no nvcc", refused(self, bench, "decode"))
        with mock.patch("children.probe", return_value=(None, "torch sees no CUDA GPU")):
            self.assertIn("no CUDA GPU", refused(self, bench, "projections"))

    def test_probe_without_a_gpu(self):
        info, why = children.probe(None, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        self.assertIsNone(info)
        self.assertEqual(why, "torch sees no CUDA GPU")

    def plan(self, *argv):
        return {suite: dict(parts) for suite, parts in bench.plan(bench.arguments(list(argv))[0])}

    def test_plan(self):
        counts = {suite: {name: len(items) for name, items in parts.items()} for suite, parts in self.plan().items()}
        self.assertEqual(list(counts), workloads.SUITES)
        baselines = lambda n: {"torch": n, "torch-compile": n}
        self.assertEqual(counts["decode"], {"candle-gdn": 108, "flashinfer": 108, "fla": 108, **baselines(6)})
        self.assertEqual(counts["prefill"], {"candle-gdn": 54, "flashinfer": 108, "flashqla": 54, "fla": 54, **baselines(3)})
        self.assertEqual((counts["contest-prefill"]["candle-gdn"], counts["contest-decode"]["fla"]), (100, 54))
        self.assertEqual(counts["projections"], {"torch": 42})
        self.assertEqual(counts["layer"], {"candle-gdn": 17 + 4 + 4 + 7, "fla": 17, "torch": 34, "torch-compile": 12})
        todo = self.plan("decode", "layer", "--no-peers", "--algo", "all", "--shapes", "16/32", "--batches", "1,8")
        self.assertEqual([v for w, v in todo["decode"]["candle-gdn"] if w.name == "16/32 B=8" and w.l2 == "cold"],
                         contenders.ALGOS)
        self.assertEqual({v for _, v in todo["layer"]["candle-gdn"]}, {*contenders.ALGOS, *contenders.APART})
        self.assertEqual(list(todo["layer"]), ["candle-gdn", "torch", "torch-compile"])
        todo = self.plan("--workload", "5", "--no-peers")
        self.assertEqual([(suite, [(w.name, w.draw > 0, w.timed) for w, _ in parts["candle-gdn"]])
                          for suite, parts in todo.items()],
                         [("contest-decode", [("#5 B=1", True, True)]), ("contest-prefill", [("#5 34:8192", False, True)])])
        self.assertEqual(list(self.plan("--workload", "99")), ["contest-prefill"])
        for suite, parts in self.plan("--quick").items():
            self.assertEqual({w.name for items in parts.values() for w, _ in items}, workloads.QUICK[suite])


    def test_algos_are_those_of_the_header(self):
        self.assertEqual(contenders.ALGOS, abi.ALGO_NAMES)

    def test_the_option_goes_before_the_variable(self):
        algo = lambda *argv: bench.arguments(list(argv))[0].algo
        for value, argv, want in ((None, (), ["auto"]), ("", (), ["auto"]), ("recurrent", (), ["recurrent"]),
                                  ("recurrent", ("--algo", "auto,decode_128"), ["auto", "decode_128"]),
                                  ("nonsense", ("--algo", "all"), contenders.ALGOS)):
            with mock.patch.dict(os.environ, {} if value is None else {"CANDLE_GDN_ALGO": value}):
                self.assertEqual(algo(*argv), want, (value, argv))
        for value in ("fast", "all"):
            with mock.patch.dict(os.environ, {"CANDLE_GDN_ALGO": value}):
                said = refused(self, bench, "decode")
            self.assertIn(f"CANDLE_GDN_ALGO: expected auto, recurrent, recurrent_128, decode_128, chunked_sm80, "
                          f"chunked_sm90, got '{value}'", said)


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
        first = {w.lens for w in works if w.timed}
        self.assertEqual(len(first), len({w.lens for w in works}))
        self.assertEqual(len({w.name for w in works}), 100)

    def test_contest_tolerance_is_loose(self):
        small = torch.full((4, 2, 8), 0.004, dtype=torch.float64)
        self.assertTrue(contest.passes(torch.zeros_like(small), small))
        self.assertFalse(contest.passes(small + 0.02, small))
        self.assertFalse(contest.passes(small * math.nan, small))


def by_tokens(q, k, v, a, b, a_log, dt_bias, state, lens, options):
    """The definition, a sequence at a time; packed inputs and raw gates. `options`: l2norm, eps, scale, beta_scale."""
    o, states, start = [], [], 0
    for n, length in enumerate(lens):
        parts = (x[None, start:start + length] for x in (q, k, v, a, b))
        y, s = reference.rule(*parts, a_log, dt_bias, state[n:n + 1].double(), torch.tensor([length]), *options)
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

    def compare(self, x, lens, bound):
        scale = x["k"].shape[-1] ** -0.5
        want = by_tokens(**x, lens=lens, options=(False, 0.0, scale, 1.0))
        g = reference.log_decay(x["a"], x["a_log"], x["dt_bias"])
        got = reference.packed_recurrence(x["q"], x["k"], x["v"], g, x["b"].sigmoid(), x["state"], lens, scale)
        for part, wanted in zip(got, want):
            self.assertLess(reference.relative(part, wanted), bound, (lens, x["k"].shape))

    def test_packed_equals_one_by_one(self):
        for lens in ([1] * 5, [64], [130, 0, 3, 64, 65, 1], [200], [0, 0]):
            for hk, hv in ((2, 4), (3, 3), (1, 4)):
                self.compare(self.inputs(lens, hk, hv, 24, 40), lens, 1e-12)

    def test_hard_cases(self):
        """Equal keys with beta 1 and no decay; decays of e^-60."""
        x = self.inputs([150], 1, 1, 16, 16)
        x["k"][:] = x["k"][0]
        for a, b in ((-1e3, 40.0), (60.0, 0.0)):
            x["a"], x["b"] = torch.full_like(x["a"], a), torch.full_like(x["b"], b)
            self.compare(x, [150], 1e-10)

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
        self.assertEqual(clocks.sets_for(1000, "warm", 60e6), 1)
        self.assertEqual(clocks.sets_for(1 << 30, "cold", 60 << 20), 2)
        self.assertEqual(clocks.sets_for(2 << 20, "cold", 60 << 20), 90)
        self.assertEqual(clocks.sets_for(1, "cold", 60 << 20), clocks.MAX_SETS)

    def test_measure(self):
        """With the GPU's part stood in for: the buffers rotate over all tiers."""
        order = []
        calls = [lambda i=i: order.append(i) for i in range(7)]

        def activities(run, ahead):
            n = len(order)
            run()
            return [(10.0 * i, 5.0) for i in range(2 * (len(order) - n))]

        def elapsed(run):
            n = len(order)
            run()
            self.assertEqual(len(order), n + 1, "events around each single call")
            return 20.0

        with mock.patch.multiple(clocks, device_activities=activities, capture=lambda calls: mock.Mock(),
                                 event_us=lambda graph: 12.0, elapsed_us=elapsed, WARM_UP=0.0), \
                mock.patch("torch.cuda.synchronize"):
            row = clocks.measure(calls)
        self.assertEqual(row["call"], {"median": 20.0, "min": 20.0, "max": 20.0})
        self.assertEqual([b - a for a, b in zip(order, order[1:]) if (b - a) % 7 != 1], [])
        self.assertEqual((row["launches"], row["gpu"]["median"]), (2, 15.0))
        self.assertEqual(row["note"], "")
        self.assertGreaterEqual(row["wall"]["median"], row["host"]["median"])

        def broken(calls):
            raise RuntimeError("operation not permitted when stream is capturing")
        with mock.patch.multiple(clocks, device_activities=lambda *_: [(0, 1.0)] * 3, capture=broken, elapsed_us=elapsed,
                                 WARM_UP=0.0), \
                mock.patch("torch.cuda.synchronize"):
            row = clocks.measure(calls)
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

    def test_what_each_item_costs(self):
        died, late = "failed: its process died of SIGSEGV", "not run: the time limit was reached"
        for bad, options, want in (
                ({}, {}, [1, 2, 3, 4, 5]),
                ({"segfault": [2, 5]}, {}, [1, died, 3, 4, died]),
                ({"hang": [3]}, {"silence": 0.6}, [1, 2, "failed: no result within 0.6 s", 4, 5]),
                ({"lost": [1, 4]}, {}, [1, 2, 3, 4, 5]),        # goes on in a new process
                ({"segfault": list(range(1, 9))}, {"batches": range(1, 9)},
                 [died] * 5 + ["not run: its process had died 5 times"] * 3),
                ({}, {"limit": -1}, [late] * 5)):
            with self.subTest(bad, **options):
                rows, version, said = self.run_stub(bad, **options)
                self.assertEqual((rows, version), (want, None if "limit" in options else "1.2"))
                self.assertEqual(any("1/2 B=2" in line for line in said), 2 in bad.get("segfault", []))
        rows, _, _ = self.run_stub({"slow": [1, 2, 3, 4, 5]}, limit=1.4)
        self.assertEqual((rows[0], rows[-1]), (1, late))

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
        times = lambda us: {"gpu": clocks.spread([us, us + 1, us + 2]), "event": clocks.spread([us + 2]),
                            "error": {"o": 1e-3, "state": 1e-7}, "launches": 1, "includes": "gates"}
        works = [w for w in workloads.select("decode", ["4/8"], [1, 4]) if w.l2 == "cold"]
        return [records.row(works[0], "candle-gdn", "auto", times(3), CEILINGS),
                records.row(works[1], "candle-gdn", "auto", times(7), CEILINGS),
                records.row(works[0], "fla", "", times(7), CEILINGS),
                records.row(works[1], "fla", "", {"note": "failed: x"}, CEILINGS)]

    def test_rows(self):
        r = self.rows()
        self.assertEqual([(row["auto"], row["variant"]) for row in (r[0], r[2])], [(True, "auto"), (False, None)])
        self.assertEqual((r[3]["gpu"], r[3]["error"], r[3]["note"]), (None, None, "failed: x"))
        self.assertEqual(r[0]["floor_us"], round(2 * 8 * 128 * 128 * 4 / 4e6, 3))
        nan = records.row(work([1]), "fla", "", {"error": {"o": math.nan, "state": 0.1}}, CEILINGS)
        self.assertEqual(nan["error"], {"o": None, "state": 0.1})

    def test_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "a", "peers-decode.json")
            versions = {"fla": "0.6", "flashqla": None}
            head = records.header("benches/peers", "x", HERE, {"device": "GPU"}, CEILINGS, versions)
            self.assertEqual(head["contenders"], {"fla": "0.6"})
            for rows in (self.rows(), []):
                records.save(path, head, rows)
                with open(path) as f:
                    saved = json.load(f, parse_constant=lambda x: self.fail(x))
                self.assertEqual(saved, {**head, "rows": rows})
            self.assertEqual(os.listdir(os.path.dirname(path)), ["peers-decode.json"])

    def test_summary(self):
        text = records.summary("decode", self.rows())
        self.assertIn("(0.50)", text)
        self.assertIn("our gpu time over theirs, geometric mean (works): fla 0.500 (1)", text)
        self.assertIn("gap: fla, 4/8 B=4 cold: failed: x", text)
        self.assertLessEqual(max(map(len, text.splitlines())), 120)

    def test_summary_of_hard_inputs_has_errors_alone(self):
        rows = [{**row, "gpu": None, "event": None, "error": {"o": 4e-3, "state": None}, "note": ""} for row in self.rows()[:1]]
        text = records.summary("hard", rows)
        self.assertIn("o 4.0e-03", text)
        self.assertNotIn("state", text)
        self.assertNotIn("gap", text)

    def test_commit(self):
        with mock.patch.dict(os.environ, CANDLE_GDN_COMMIT="abc"):
            self.assertEqual(records.commit(HERE), "abc")
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, CANDLE_GDN_COMMIT=""):
            self.assertEqual(records.commit(folder), "unknown")
        self.assertEqual(records.slug("NVIDIA H200"), "nvidia-h200")

    def test_shared_times(self):
        works = [w for w in workloads.select("contest-decode") if len(w.lens) == 4][:4]
        fine, bad = {"error": {"o": 1e-3}, "note": "passes"}, {"error": {"o": 1.0}, "note": "not timed, over"}
        results = [{**fine, "gpu": clocks.spread([3.0])}, fine, bad, {"note": "not usable"}]
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
            tiers = {} if not w.timed else {"gpu": clocks.spread([us]), "event": clocks.spread([us + 1]), "launches": 1}
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
            results[0] = {"gpu": clocks.spread([3.0]), "note": ""}
            raise KeyboardInterrupt
        code, _, files = self.run_all("decode", "--quick", times=stopped)
        self.assertEqual(code, 130)
        rows = files["peers-decode.json"]["rows"]
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
            refused(self, llama_cpp, *argv)


class Gguf(unittest.TestCase):
    STAND_IN = """#!/bin/sh
        echo "$0 $@" >> "$(dirname "$0")/said"
        echo '[{"n_prompt": 16, "n_gen": 0, "samples_ns": [%d, 8e6]}, {"n_prompt": 0, "n_gen": 4, "samples_ns": [%d]}]'
        """

    def test_bad_input(self):
        for argv in ([], ["--ours", HERE, "--llama", HERE, __file__], ["--ours", __file__, "--llama", HERE, __file__]):
            refused(self, gguf, *argv)

    def test_best_runs_side_by_side(self):
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(os.path.join(folder, "bin"))
            paths = [os.path.join(folder, "ours"), os.path.join(folder, "bin", "llama-bench")]
            for path, prompt, decode in zip(paths, (4e6, 2e6), (1e6, 2e6)):
                with open(path, "w", encoding="utf-8") as f:
                    f.write(textwrap.dedent(self.STAND_IN % (prompt, decode)))
                os.chmod(path, 0o755)
            args, _ = gguf.arguments(["--ours", paths[0], "--llama", folder, "--threads", "1", "--rounds", "2", __file__])
            best = gguf.time_file(args, __file__, lambda text: None)
            self.assertEqual([line.split(" | ")[1:] for line in gguf.lines(__file__, best)],
                             [["prompt 16", "4,000.0", "8,000.0", "0.50 |"], ["decode 4", "4,000.0", "2,000.0", "2.00 |"]])
            with open(os.path.join(folder, "said"), encoding="utf-8") as f:
                ours = f"--gguf {__file__} --prompts 16,128,512 --decode 64 --depth 128 --repeats 2"
                self.assertEqual(f.readline().split(" ", 1)[1].strip(), ours)
            with open(os.path.join(folder, "bin", "said"), encoding="utf-8") as f:
                self.assertEqual(len(f.readlines()), 4)


# ---- contenders, on the host ----

def at(address, dtype, shape, strides):
    """The tensor that lies at an address; strides in elements."""
    elements = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides))
    memory = (C.c_char * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


class HostKernels:
    """Our kernels on the host: the formulas of reference.py at the addresses that the structs of gdn.h hold. Functions of
    the C ABI that nothing here calls are missing."""
    BF16, F32 = torch.bfloat16, torch.float32

    def gdn_status_string(self, status):
        return b"no such kernel" if status == abi.BAD_ALGO else b"bad"

    def heads(self, x, p, heads, dim):
        """[sequence, token, head, dim]; packed sequences are one."""
        seqs = p.seqs
        n, tokens = (1, seqs.total_tokens) if seqs.cu_seqlens else (seqs.num_seqs, seqs.tokens_per_seq)
        return at(x.ptr, self.BF16, (n, tokens, heads, dim), (x.seq_stride, x.token_stride, x.head_stride, 1))

    def states(self, p):
        """Those before and those after, [sequence, HV, V, K]."""
        shape = p.seqs.num_seqs, p.num_v_heads, p.head_v, p.head_k
        assert p.state_dtype == abi.F32 and p.in_slots.num_slots == shape[0]
        assert not p.in_slots.slots and not p.out_slots.slots
        strides = p.head_v * p.head_k, p.head_k, 1
        return [at(x, self.F32, shape, (slots.slot_stride, *strides))
                for x, slots in ((p.state_in, p.in_slots), (p.state_out, p.out_slots))]

    def rule(self, p, q, k, v):
        """o; the sequences one after the other, packed or not."""
        lens = [v.shape[1]] * v.shape[0]
        if p.seqs.cu_seqlens:
            lens = at(p.seqs.cu_seqlens, torch.int32, (p.seqs.num_seqs + 1,), (1,)).diff().tolist()
        assert max(lens) <= p.seqs.max_tokens_per_seq
        assert p.io_dtype == p.gate_dtype == abi.BF16
        a, b = (self.heads(x, p, p.num_v_heads, 1)[..., 0] for x in (p.a, p.b))
        a_log, dt_bias = (at(x, self.F32, (p.num_v_heads,), (1,)) for x in (p.a_log, p.dt_bias))
        before, after = self.states(p)
        inputs = [x.double().flatten(0, 1) for x in (q, k, v, a, b)]
        o, state = by_tokens(*inputs, a_log, dt_bias, before, lens, (p.l2norm, p.l2_eps, p.scale, p.beta_scale))
        after.copy_(state)
        return o.view(v.shape)

    def gdn_rule_workspace(self, p, size):
        p, size = p._obj, size._obj
        if p.algo == abi.RECURRENT:
            return abi.BAD_ALGO
        size.value = 8 * p.seqs.total_tokens if p.seqs.total_tokens > p.seqs.num_seqs else 0
        return abi.OK

    def gdn_rule(self, p, stream):
        size = C.c_int64()
        status = self.gdn_rule_workspace(p, C.byref(size))
        if status != abi.OK:
            return status
        p = p._obj
        if size.value:
            assert p.workspace and p.workspace % 256 == 0 and p.workspace_bytes >= size.value
            C.memset(p.workspace, 0, size.value)
        q, k = (self.heads(x, p, p.num_k_heads, p.head_k) for x in (p.q, p.k))
        v, o = (self.heads(x, p, p.num_v_heads, p.head_v) for x in (p.v, p.o))
        o.copy_(self.rule(p, q, k, v))
        return abi.OK

    def conv(self, p, past, kept, weight, width, channels):
        """y [sequence, token, channel]. `past`, `kept`: address and stride."""
        assert p.io_dtype == abi.BF16
        x = self.heads(p.x, p, 1, channels)[:, :, 0]
        past, kept = (at(address, self.BF16, (x.shape[0], width - 1, channels), (stride, channels, 1))
                      for address, stride in (past, kept))
        y, last = reference.conv(past, x, at(weight, self.BF16, (channels, width), (width, 1)))
        kept.copy_(last.clone())
        return y

    def gdn_conv(self, p, stream):
        p = p._obj
        assert p.weight_dtype == abi.BF16 and p.silu
        past, kept = (p.state_in, p.in_slots.slot_stride), (p.state_out, p.out_slots.slot_stride)
        self.heads(p.y, p, 1, p.channels)[:, :, 0] = self.conv(p, past, kept, p.weight, p.width, p.channels)
        return abi.OK

    def gdn_norm(self, p, stream):
        p = p._obj
        assert p.io_dtype == p.weight_dtype == abi.BF16 and not p.sigmoid
        x, z, out = (at(x.ptr, self.BF16, (p.tokens, p.heads, p.head_v), (x.token_stride, x.head_stride, 1))
                     for x in (p.x, p.z, p.out))
        out.copy_(reference.gated_norm(x, z, at(p.weight, self.BF16, (p.head_v,), (1,))))
        return abi.OK

    def gdn_linear(self, p, stream):
        p = p._obj
        assert p.dtype == abi.BF16
        x = at(p.x, self.BF16, (p.rows, p.inputs), (p.x_stride, 1))
        w = at(p.w, self.BF16, (p.outputs, p.inputs), (p.w_stride, 1))
        at(p.y, self.BF16, (p.rows, p.outputs), (p.y_stride, 1)).copy_(reference.linear(x, w))
        return abi.OK

    def gdn_step(self, p, stream):
        """What it stands for, one after the other."""
        p = p._obj
        assert p.conv_dtype == p.norm_dtype == abi.BF16 and not p.sigmoid
        widths = [p.num_k_heads * p.head_k] * 2 + [p.num_v_heads * p.head_v]
        past, kept = (p.conv_in, p.conv_in_stride), (p.conv_out, p.conv_out_stride)
        y = self.conv(p, past, kept, p.conv_weight, p.conv_width, sum(widths)).to(self.BF16)
        q, k, v = (x.unflatten(-1, (-1, dim)) for x, dim in zip(y.split(widths, -1), (p.head_k, p.head_k, p.head_v)))
        o = self.rule(p, q, k, v).to(self.BF16)
        z, out = (self.heads(x, p, p.num_v_heads, p.head_v) for x in (p.z, p.out))
        out.copy_(reference.gated_norm(o, z, at(p.norm_weight, self.BF16, (p.head_v,), (1,))))
        return abi.OK


def check(contender, w, variant, sets=2):
    """The errors that child.py would report."""
    case = child.case_of(contender, w, variant, sets)
    for call in case.calls:
        call()
    with mock.patch("torch.cuda.synchronize"):
        return child.errors(contender, w, case)


@mock.patch("abi.stream", lambda: None)
class CandleGdn(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with mock.patch("abi.load", return_value=HostKernels()):
            cls.contender = contenders.load("candle-gdn")("", "cpu")

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
        for w in (work([1, 1], 16, 32, "layer", True), work([3], 16, 32, "layer"), work([17], 16, 32, "layer")):
            for variant in ("auto", "recurrent_128", *(v for v in contenders.APART if contenders.takes("", v, w))):
                found, _ = check(self.contender, w, variant)
                self.assertLess(found["o"], 2e-2, (w, variant))
                self.assertLess(found["state"], 2e-2, (w, variant))

    def test_a_refused_shape_says_so(self):
        with self.assertRaisesRegex(RuntimeError, "gdn_rule: no such kernel"):
            check(self.contender, work([4]), "recurrent")

    def test_untouched_outputs_are_found(self):
        with mock.patch.object(self.contender, "launch"):
            found, _ = check(self.contender, work([4]), "auto")
        self.assertEqual((found["o"], found["state"]), (math.inf, math.inf))

    def test_child_process(self):
        """child.run as it is, the GPU's part stood in for."""
        again = work([4], 1, 2, "contest-prefill", l2norm=False, draw=2, timed=False)
        items = [{"workload": w.to_json(), "variant": v}
                 for w, v in ((work([4]), "auto"), (work([4]), "recurrent"), (again, "auto"))]
        lines = []
        props = types.SimpleNamespace(L2_cache_size=1 << 20)
        with mock.patch.multiple("torch.cuda", synchronize=mock.DEFAULT, empty_cache=mock.DEFAULT), \
                mock.patch("torch.cuda.get_device_properties", return_value=props), \
                mock.patch.object(contenders, "load", return_value=lambda lib: self.contender), \
                mock.patch.object(clocks, "measure", return_value={"gpu": clocks.spread([1.0]), "note": ""}):
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
    o, s = reference.packed_recurrence(q, k, v, g, beta, state, lens, scale)
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
                for error, bound in zip(found.values(), contender.bounds(w, "")):
                    self.assertLess(error, bound, w)

    def test_fla_must_run_its_own_kernels(self):
        import contenders.peer_fla as peer
        self.assertEqual(os.environ["FLA_FLASH_QLA"], "0")
        with self.modules(flash_qla={}), self.assertRaisesRegex(RuntimeError, "FlashQLA"):
            peer.Fla.own(None)

    def test_torch(self):
        """The real thing, on the host; compiled too where a compiler stands in."""
        decodes = [work([1] * 3, 2, 4, "decode", True), work([1], 3, 3, "decode", True)]
        prefills = [work([n] * 2, 2, 4) for n in (1, 63, 64, 130)]
        self.agree(contenders.load("torch")(None, "cpu"), decodes + prefills)
        compiled = []

        def compile(function, dynamic):
            compiled.append((function.__name__, dynamic))
            return function
        with mock.patch("torch.compile", compile):
            self.agree(contenders.load("torch-compile")(None, "cpu"), decodes + prefills)
        self.assertEqual(compiled, [("decode", False), ("prefill", False)])

    def test_torch_calls_compute_their_own_set(self):
        contender = contenders.load("torch")(None, "cpu")
        for w in (work([1] * 2, 1, 2, "decode", True), work([5, 5], 1, 2)):
            case = contender.rule_case(w, "", 2)
            case.calls[1]()
            with self.assertRaises(KeyError):
                case.result()

    @mock.patch("abi.stream", lambda: None)
    def test_torch_layer(self):
        with mock.patch("abi.load", return_value=HostKernels()), mock.patch("torch.compile", lambda f, dynamic: f):
            for name in ("torch", "torch-compile"):
                contender = contenders.load(name)("", "cpu")
                for w in (work([1, 1], 16, 32, "layer", True), work([3], 16, 32, "layer")):
                    for variant in ("one", "six"):
                        found, _ = check(contender, w, variant)
                        for error, bound in zip(found.values(), contender.bounds(w, variant)):
                            self.assertLess(error, bound, (name, w, variant))

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
