"""Tests of the benchmark itself, without a GPU: `python3 -m unittest discover benches/peers`. Needs torch."""
import contextlib
import io
import json
import math
import os
import random
import sys
import tempfile
import unittest
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(os.path.dirname(HERE)), "cuda", "tests")]

try:
    import torch
except ImportError as e:
    raise unittest.SkipTest(f"{e}: nothing here runs without it")
import abi
import bench
import children
import clocks
import contenders
import contest
import records
import reference
import workloads
from test_contenders import by_tokens, work
from workloads import Workload

CEILINGS = {"copy_gb_s": 4000.0, "matmul_tflop_s": 800.0}


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

        info, why = children.probe(None, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        self.assertEqual((info, why), (None, "torch sees no CUDA GPU"))

    def plan(self, *argv):
        return {suite: dict(parts) for suite, parts in bench.plan(bench.arguments(list(argv))[0])}

    def test_plan(self):
        counts = {suite: {name: len(items) for name, items in parts.items()} for suite, parts in self.plan().items()}
        self.assertEqual(list(counts), workloads.SUITES)
        baselines = lambda n: {"torch": n, "torch-compile": n}
        self.assertEqual(counts["decode"], {"candle-gdn": 108, "flashinfer": 108, "fla": 108, **baselines(12)})
        self.assertEqual(counts["prefill"], {"candle-gdn": 54, "flashinfer": 108, "flashqla": 54, "fla": 54 + 6, **baselines(6)})
        self.assertEqual((counts["contest-prefill"]["candle-gdn"], counts["contest-decode"]["fla"]), (100, 54))
        self.assertEqual(counts["backward"], {"candle-gdn": 18, "flashqla": 18, "fla": 18, "torch": 4})
        self.assertEqual(counts["projections"], {"torch": 42})
        self.assertEqual(counts["layer"], {"candle-gdn": 17 + 4 + 4 + 7, "fla": 17 + 6, "torch": 34, "torch-compile": 18})
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

    def test_the_option_goes_before_the_variable(self):
        self.assertEqual(contenders.ALGOS, abi.ALGO_NAMES)      # those of the header
        algo = lambda *argv: bench.arguments(list(argv))[0].algo
        for value, argv, want in ((None, (), ["auto"]), ("", (), ["auto"]), ("recurrent", (), ["recurrent"]),
                                  ("recurrent", ("--algo", "auto,decode"), ["auto", "decode"]),
                                  ("nonsense", ("--algo", "all"), contenders.ALGOS)):
            with mock.patch.dict(os.environ, {} if value is None else {"CANDLE_GDN_ALGO": value}):
                self.assertEqual(algo(*argv), want, (value, argv))
        for value in ("fast", "all"):
            with mock.patch.dict(os.environ, {"CANDLE_GDN_ALGO": value}):
                self.assertIn(f"CANDLE_GDN_ALGO: expected {', '.join(contenders.ALGOS)}, got '{value}'", refused(self, bench, "decode"))


class Work(unittest.TestCase):
    def test_costs(self):
        decode = workloads.select("decode", ["16/32"], [1])[0]
        self.assertEqual(workloads.cost(decode), (4194304, 0))
        self.assertEqual(decode.shape(), {"hk": 16, "hv": 32, "k": 128, "v": 128, "batch": 1, "tokens": 1, "total_tokens": 1})
        self.assertEqual(workloads.rule_flop(decode), 32 * 163840)
        other = workloads.select("decode", ["30/30"], [2], dim=(96, 192))[0]
        self.assertEqual((other.name, other.shape()["k"], other.shape()["v"]), ("30/30 96x192 B=2", 96, 192))
        self.assertEqual(workloads.cost(other), (2 * 2 * 30 * 96 * 192 * 4, 0))
        todo = bench.plan(bench.arguments(["decode", "layer", "--dim", "96x192", "--shapes", "30/30"])[0])
        self.assertEqual([(suite, [name for name, _ in parts]) for suite, parts in todo], [("decode", ["candle-gdn", "fla"])])
        nbytes, flop = workloads.cost(work([8192], 16, 32))
        layer = next(w for w in workloads.select("layer") if w.name == "B=1")
        for amount, rates, us, delta in (((0, flop), (1, 790), 54, 0.5), ((nbytes, 0), (4260, 1), 48.5, 0.5),
                                         (workloads.cost(layer), (4260, 790), 16.8, 0.1)):
            self.assertAlmostEqual(records.floor_us(*amount, dict(zip(CEILINGS, rates))), us, delta=delta)

    def test_workloads(self):
        for w in (w for suite in workloads.SUITES for w in workloads.select(suite)):
            self.assertEqual(Workload.from_json(json.loads(json.dumps(w.to_json()))), w)
        cold, warm = workloads.select("decode", ["4/8"], [4])
        self.assertEqual(cold.seed, warm.seed)      # of shape and draw alone
        self.assertEqual(len({w.seed for w in workloads.select("contest-decode")}), 54)

    def test_contest(self):
        self.assertEqual((len(contest.DECODE), len(contest.PREFILL)), (54, 100))
        sizes = [(len(lens), sum(lens)) for lens in contest.PREFILL]
        self.assertTrue(all(min(lens) > 0 for lens in contest.PREFILL))
        self.assertEqual((sizes[0], sizes[10], max(sizes)), ((1, 6), (38, 8192), (57, 8192)))
        self.assertEqual((sum(n for n, _ in sizes), sum(t for _, t in sizes)), (797, 183065))    # of the contest's set
        works = workloads.select("contest-prefill")
        self.assertEqual(sum(w.timed for w in works), len({w.lens for w in works}))
        self.assertEqual(len({w.name for w in works}), 100)
        # Its tolerance is loose.
        small = torch.full((4, 2, 8), 0.004, dtype=torch.float64)
        for x, passes in ((torch.zeros_like(small), True), (small + 0.02, False), (small * math.nan, False)):
            self.assertEqual(contest.passes(x, small), passes)


class Reference(unittest.TestCase):
    def compare(self, lens, hk, hv, dims, bound, **changed):
        """The packed rule against the definition, a sequence at a time."""
        torch.manual_seed(1)
        (k_dim, v_dim), t = dims, sum(lens)
        randn = lambda *shape: torch.randn(*shape, dtype=torch.float64)
        x = dict(q=reference.unit(randn(t, hk, k_dim)), k=reference.unit(randn(t, hk, k_dim)), v=randn(t, hv, v_dim), a=randn(t, hv),
                 b=randn(t, hv), dt_bias=randn(hv) - 4, a_log=(torch.rand(hv) * 15 + 1).log().double(),
                 state=randn(len(lens), hv, v_dim, k_dim))
        x.update({name: torch.full_like(x[name], value) for name, value in changed.items()})
        if changed:
            x["k"][:] = x["k"][0]
        want = by_tokens(**x, lens=lens, options=(False, 0.0, k_dim ** -0.5, 1.0))
        g = reference.log_decay(x["a"], x["a_log"], x["dt_bias"])
        got = reference.packed_chunks(x["q"], x["k"], x["v"], g, x["b"].sigmoid(), x["state"], lens, k_dim ** -0.5)
        for part, wanted in zip(got, want):
            self.assertLess(reference.relative(part, wanted), bound, (lens, hk, hv))

    def test_packed_equals_one_by_one(self):
        for lens in ([1] * 5, [64], [130, 0, 3, 64, 65, 1], [200], [0, 0]):
            for hk, hv in ((2, 4), (3, 3), (1, 4)):
                self.compare(lens, hk, hv, (24, 40), 1e-12)
        for a, b in ((-1e3, 40.0), (60.0, 0.0)):    # equal keys with beta 1 and no decay; decays of e^-60
            self.compare([150], 1, 1, (16, 16), 1e-10, a=a, b=b)
        x = torch.tensor([3.0, 4.0])
        for y, error in ((x, 0), (torch.zeros(2), 1), (x * math.nan, math.inf)):
            self.assertEqual(reference.relative(y, x), error)


class Timing(unittest.TestCase):
    def test_spans(self):
        events = [(i * 10.0, 1.0 + i % 2) for i in range(8)]
        random.Random(0).shuffle(events)
        self.assertEqual(clocks.spans(events, 4), (2, [12.0] * 4))
        self.assertEqual(clocks.spans(events, 3), (None, [4.0]))
        # Kernels that overlap, also those of two calls, and one within another.
        events = [(0.0, 5.0), (4.0, 4.0), (7.0, 5.0), (8.0, 2.0)]
        for found, calls, want in ((events, 2, (2, [8.0, 4.0])), (events, 3, (None, [4.0])), (events[:1], 2, (None, [2.5]))):
            self.assertEqual(clocks.spans(found, calls), want)
        for touched, l2, size, sets in ((1000, "warm", 60e6, 1), (1 << 30, "cold", 60 << 20, 2), (2 << 20, "cold", 60 << 20, 90),
                                        (1, "cold", 60 << 20, clocks.MAX_SETS)):
            self.assertEqual(clocks.sets_for(touched, l2, size), sets)

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

        def broken(calls):
            raise RuntimeError("operation not permitted when stream is capturing")

        def measured(activities, capture):
            with mock.patch.multiple(clocks, device_activities=activities, capture=capture, event_us=lambda graph: 12.0,
                                     elapsed_us=elapsed, WARM_UP=0.0), mock.patch("torch.cuda.synchronize"):
                return clocks.measure(calls)

        row = measured(activities, lambda calls: mock.Mock())
        self.assertEqual(row["call"], {"median": 20.0, "min": 20.0, "max": 20.0})
        self.assertEqual([b - a for a, b in zip(order, order[1:]) if (b - a) % 7 != 1], [])
        self.assertEqual((row["launches"], row["gpu"]["median"], row["note"]), (2, 15.0, ""))
        self.assertGreaterEqual(row["wall"]["median"], row["host"]["median"])

        def busy(launches):
            """Of calls with so many launches; the calls that ran while the GPU was watched."""
            watched = []

            def activities(run, ahead):
                n = len(order)
                run()
                watched.append(len(order) - n)
                return [(10.0 * i, 5.0) for i in range(launches * watched[-1])]
            return measured(activities, lambda calls: mock.Mock()), watched

        row, watched = busy(100)
        self.assertEqual((watched, row["launches"], row["note"]), ([3, 5], 100, ""), "no more launches than the driver queues")
        row, watched = busy(1000)
        self.assertEqual((watched, row["launches"], row["gpu"], row["event"] is None), ([3], 1000, None, False))
        self.assertIn("more launches than the driver queues", row["note"])
        row = measured(lambda *_: [(0, 1.0)] * 3, broken)
        self.assertIsNone(row["event"])
        self.assertIn("no CUDA graph (RuntimeError: operation not permitted", row["note"])
        self.assertIn("gpu is a mean", row["note"])


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
        self.assertEqual(records.summary("decode", self.rows()).splitlines(), [
            "decode: our gpu time over theirs, geometric mean (works): fla 0.500 (1)",
            "  gap: fla, 4/8 B=4 cold: failed: x"])
        hard = [{**row, "gpu": None, "event": None, "note": ""} for row in self.rows()[:1]]
        self.assertEqual(records.summary("hard", hard), "hard: our gpu time over theirs, geometric mean (works): none")

    def test_commit(self):
        for folder, variable, want in ((HERE, "abc", "abc"), (tempfile.gettempdir(), "", "unknown")):
            with mock.patch.dict(os.environ, CANDLE_GDN_COMMIT=variable):
                self.assertEqual(records.commit(folder), want)
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
        self.assertEqual(bench.without_folders(["decode", "--lib", "/a/b.so", "--quick", "--out=/c", "--limit", "5"]),
                         ["decode", "--quick", "--limit", "5"])
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
        messages = []
        with mock.patch("children.run_items", compiled):
            bench.compile_ahead(bench.plan(args), math.inf, args, messages.append)
        self.assertEqual(sorted(jobs), sorted(
            [("flashinfer", "decode", 4, 8), ("flashinfer", "decode", 16, 32), ("fla", "decode", 4, 8),
             ("fla", "decode", 16, 32), ("fla", "layer", 16, 32), ("fla", "contest-prefill", 4, 8),
             ("flashqla", "contest-prefill", 4, 8)] +
            [(name, "prefill", *heads) for name in ("fla", "flashqla") for heads in ((4, 8), (16, 32))]))
        items, env = jobs["fla", "contest-prefill", 4, 8]
        self.assertEqual((len(items), env["FLA_CACHE_RESULTS"]), (115, "0"))
        self.assertEqual(len(jobs["flashinfer", "decode", 4, 8][0]), 9)
        self.assertIn(f"in 0 s, {len(jobs)} processes", messages[0])

    def test_interruption_keeps_what_there_is(self):
        def stopped(task, contender, items, lib, silence, deadline, results=None, **kw):
            results[0] = {"gpu": clocks.spread([3.0]), "note": ""}
            raise KeyboardInterrupt
        code, _, files = self.run_all("decode", "--quick", times=stopped)
        self.assertEqual(code, 130)
        rows = files["peers-decode.json"]["rows"]
        self.assertEqual([r["gpu"] is not None for r in rows], [True] + [False] * 5)
        self.assertEqual(rows[1]["note"], "not run: interrupted")


if __name__ == "__main__":
    unittest.main()
