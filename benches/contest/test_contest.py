"""Tests of the pack for the contest's harness, without a GPU: `python3 -m unittest discover benches/contest`. Needs torch and
safetensors; where flashinfer-bench is installed, its own schema and input code are asked too."""
import ast
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

try:
    import torch, safetensors.torch
except ImportError as e:
    raise unittest.SkipTest(f"{e}: nothing here runs without it")
import pack
import reference
import report
import workloads
from safetensors.torch import load_file

try:
    import flashinfer_bench
    from flashinfer_bench.bench.utils import gen_inputs, load_safetensors
    from flashinfer_bench.compile.builders import TVMFFIBuilder
except ImportError:
    flashinfer_bench = None

torch.set_num_threads(1)
SCALE = 128 ** -0.5
TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int64": torch.int64}


def quiet(program, *argv):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        program.main(list(argv))
    return text.getvalue()


def run_of(kind):
    """The reference of a definition."""
    space = {}
    exec(pack.definition(kind)["reference"], space)
    return space["run"]


def arguments_of(kind):
    wanted = pack.definition(kind)
    return [*wanted["inputs"], *wanted["outputs"]]


def load(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


class Packed(unittest.TestCase):
    """Workload 1 of each definition: a batch of one, and a sequence of 134 tokens."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.root = cls.folder.name
        quiet(pack, cls.root, "--workload", "1")

    def files(self, folder, ending):
        return sorted(os.path.join(place, name) for place, _, names in os.walk(os.path.join(self.root, folder)) for name in names
                      if name.endswith(ending))

    def lines(self):
        for path in self.files("workloads", ".jsonl"):
            with open(path, encoding="utf-8") as f:
                yield from map(json.loads, f)

    def test_tensors_are_what_the_definition_says(self):
        for line in self.lines():
            wanted, work = pack.definition(line["definition"].split("_")[1]), line["workload"]
            self.assertEqual(list(work["inputs"]), list(wanted["inputs"]))
            sizes = {name: axis.get("value", work["axes"].get(name)) for name, axis in wanted["axes"].items()}
            self.assertEqual({name for name, axis in wanted["axes"].items() if axis["type"] == "var"}, set(work["axes"]))
            for name, spec in work["inputs"].items():
                if spec["type"] == "safetensors":
                    x = load_file(os.path.join(self.root, spec["path"]))[spec["tensor_key"]]
                    self.assertEqual(list(x.shape), [sizes[axis] for axis in wanted["inputs"][name]["shape"]], name)
                    self.assertEqual(x.dtype, TYPES[wanted["inputs"][name]["dtype"]], name)
                    if name in "qk":
                        self.assertLess((x.float().norm(dim=-1) - 1).abs().max(), 0.01)
                else:
                    self.assertEqual(spec["type"], "scalar" if name == "scale" else "random")

    def test_numbers(self):
        for kind, count in (("decode", 54), ("prefill", 100)):
            works = workloads.select(f"contest-{kind}")
            self.assertEqual(len(works), count)
            self.assertEqual([w.draw for w in works[:2]], [0, 1 if kind == "decode" else 0])
        for wrong in ("-1", "100"):
            with contextlib.redirect_stderr(io.StringIO()) as text, self.assertRaises(SystemExit):
                pack.main([self.root, "--workload", wrong])
            self.assertIn(f"expected 0 to 99, got {wrong}", text.getvalue())

    def test_solutions_are_whole(self):
        made = [load(path) for path in self.files("solutions", "solution.json")]
        self.assertEqual([s["name"] for s in made],
                         ["candle_gdn_decode", "candle_gdn_prefill", "flashinfer_decode", "flashinfer_decode_in_place",
                          "flashinfer_prefill", "flashinfer_prefill_nocp"])
        plain, without = (s["sources"][0]["content"].splitlines() for s in made[-2:])
        self.assertEqual([(a, b) for a, b in zip(plain, without) if a != b], [('CONTEXT_PARALLEL = "auto"', "CONTEXT_PARALLEL = False")])
        for s in made:
            sources = {source["path"]: source["content"] for source in s["sources"]}
            path, _, entry = s["spec"]["entry_point"].partition("::")
            kind = s["definition"].split("_")[1]
            if s["spec"]["language"] == "cuda":
                for place, text in sources.items():
                    for name in pack.INCLUDE.findall(text):
                        self.assertIn(os.path.normpath(os.path.join(os.path.dirname(place), name)), sources, place)
                found = re.search(rf"^void {entry}\((.*?)\) {{", sources[path], re.M | re.S).group(1)
                names = [part.split()[-1] for part in found.split(",")]
                self.assertIn(f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({entry}, {entry});", sources[path])
            else:
                run = next(x for x in ast.parse(sources[path]).body if isinstance(x, ast.FunctionDef) and x.name == entry)
                names = [a.arg for a in run.args.args]
            writes = s["spec"]["destination_passing_style"]
            self.assertEqual(names, arguments_of(kind) if writes else list(pack.definition(kind)["inputs"]), s["name"])

    @unittest.skipUnless(flashinfer_bench, "flashinfer-bench is not installed")
    def test_the_harness_takes_it(self):
        found = flashinfer_bench.TraceSet.from_path(self.root)
        self.assertEqual(len(found.definitions), 2)
        for name, wanted in found.definitions.items():
            [trace] = found.workloads[name]
            kept = load_safetensors(wanted, trace.workload, found.root)
            inputs = gen_inputs(wanted, trace.workload, "cpu", kept)
            space = {}
            exec(wanted.reference, space)
            shapes = wanted.get_output_shapes(wanted.get_axes_values_from_inputs(inputs))
            for x, shape, dtype in zip(space["run"](*inputs), shapes, wanted.torch_output_dtypes, strict=True):
                self.assertEqual((list(x.shape), x.dtype), (shape, dtype))
                self.assertTrue(x.isfinite().all())
            crate = found.get_solution(f"candle_gdn_{name.split('_')[1]}")
            self.assertTrue(TVMFFIBuilder().can_build(crate))

    def test_report(self):
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as text:
            report.main([self.root])
        self.assertIn("no traces", text.getvalue())
        def trace(solution, ms, status="PASSED"):
            e = {"status": status, "environment": {"hardware": "NVIDIA H200", "libs": {"torch": "2"}}, "timestamp": "2026-11-22T1"}
            if status == "PASSED":
                e["performance"] = {"latency_ms": ms}
                e["correctness"] = {"max_absolute_error": 1e-4, "max_relative_error": 1.0}
            return {"definition": "d", "solution": solution, "evaluation": e,
                    "workload": {"uuid": "decode-1", "axes": {"batch_size": 4}, "inputs": {}}}
        with tempfile.TemporaryDirectory() as folder:
            lines = [trace("candle_gdn_decode", 9.0), trace("candle_gdn_decode", 0.01), trace("flashinfer_decode_in_place", 0.02),
                     trace("other", 0, "RUNTIME_ERROR")]
            pack.write(folder, "traces/gdn/d.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
            out = os.path.join(folder, "out.json")
            quiet(report, folder, "--out", out)
            run = load(out)
        self.assertEqual((run["tool"], run["date"], run["machine"]["device"]), ("flashinfer-bench", "2026-11-22", "NVIDIA H200"))
        found = {(r["contender"], r["variant"]): (r["call"] and r["call"]["median"], r["error"], r["note"]) for r in run["rows"]}
        self.assertEqual({(r["suite"], r["workload"]) for r in run["rows"]}, {("harness-decode", "#1 B=4")})
        self.assertEqual(found, {
            ("candle-gdn", None): (10, {"absolute": 1e-4}, ""),
            ("flashinfer", "in_place"): (20, {"absolute": 1e-4}, ""), ("other", None): (None, None, "failed: RUNTIME_ERROR")})


class References(unittest.TestCase):
    def inputs(self, rows, sequences):
        gen = torch.Generator().manual_seed(1)
        randn = lambda *shape: torch.randn(*shape, generator=gen)
        q, k = (reference.unit(randn(*rows, 4, 128)).bfloat16() for _ in range(2))
        v, a, b = randn(*rows, 8, 128).bfloat16(), randn(*rows, 8).bfloat16(), randn(*rows, 8).bfloat16()
        return q, k, v, 0.1 * randn(sequences, 8, 128, 128), randn(8), a, randn(8) - 4, b

    def held(self, found, want):
        for x, ref, bound in zip(found, want, (4e-3, 1e-6), strict=True):
            self.assertLess(reference.relative(x, ref), bound)

    def rule(self, x, state, lens):
        """The token recurrence on [sequence, token, ..]."""
        q, k, v, a, b = (y.double() for y in (*x[:3], x[5], x[7]))
        return reference.rule(q, k, v, a, b, x[4], x[6], state.double(), torch.tensor(lens), False, 0, SCALE, 1)

    def test_decode(self):
        x = self.inputs((3, 1), 3)
        self.held(run_of("decode")(*x, SCALE), self.rule(x, x[3], [1] * 3))

    def test_prefill(self):
        lens = [1, 64, 0, 65, 130]
        x = self.inputs((sum(lens),), len(lens))
        cu = torch.tensor([0, *lens]).cumsum(0)
        o, state = run_of("prefill")(*x, cu, SCALE)
        for n, length in enumerate(lens):
            rows = slice(cu[n], cu[n + 1])
            part = [y[None, rows] if i in (0, 1, 2, 5, 7) else y for i, y in enumerate(x)]
            self.held((o[None, rows], state[None, n]), self.rule(part, x[3][None, n], [length]))


if __name__ == "__main__":
    unittest.main()
