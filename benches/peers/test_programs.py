"""Tests of the programs that the benchmark starts, with stand-ins for them: `python3 -m unittest discover benches/peers`. Needs torch."""
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

from test_peers import HERE, refused
from test_contenders import work
import children
import gguf
import llama_cpp
import workloads

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
        messages = []
        items = [(w, "") for w in workloads.select("decode", ["1/2"], list(batches)) if w.l2 == "cold"]
        with tempfile.TemporaryDirectory() as folder:
            stub = os.path.join(folder, "stub.py")
            with open(stub, "w") as f:
                f.write(f"BAD = {bad}\n" + STUB)
            starter = lambda spec, env, log: subprocess.Popen([sys.executable, stub, spec], env=env, stdout=log,
                                                              stderr=log, start_new_session=True)
            results, version = children.run_items("time", contender, items, None, silence, time.monotonic() + limit,
                                                  starter=starter, complain=messages.append)
        return [r["gpu"]["median"] if "gpu" in r else r["note"] for r in results], version, messages

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
                rows, version, messages = self.run_stub(bad, **options)
                self.assertEqual((rows, version), (want, None if "limit" in options else "1.2"))
                self.assertEqual(any("1/2 B=2" in line for line in messages), 2 in bad.get("segfault", []))
        rows, _, _ = self.run_stub({"slow": [1, 2, 3, 4, 5]}, limit=1.4)
        self.assertEqual((rows[0], rows[-1]), (1, late))

        self.assertEqual(self.run_stub({}, "absent")[0], ["absent is not usable here"] * 5)
        rows, _, messages = self.run_stub({}, "stillborn")
        self.assertEqual(rows, ["not run: its process ended with status 5"] * 5)
        self.assertIn("no such library", messages[-1])

    def test_absent_peer(self):
        """The real child process, without the package."""
        env = {**os.environ, "PYTHONPATH": ""}
        results, version = children.run_items("time", "flashqla", [(work([4]), "")], None, 60, time.monotonic() + 60, env)
        self.assertIn("flashqla is not usable here: ModuleNotFoundError", results[0]["note"])
        self.assertIsNone(version)


class LlamaCpp(unittest.TestCase):
    OP = ("  GATED_DELTA_NET(type=f32,head_count=32,head_size=128,n_seq_tokens=%d,n_seqs=1,v_repeat=1,permuted=0,"
          "kda=%d,K=1):   1023 runs -  3282.37 us/run -     8208 kB/run - \x1b[1;34m   2.39 GB/s\x1b[0m\n")

    def test_output(self):
        self.assertEqual(llama_cpp.parse_op(self.OP % (64, 0) + self.OP % (1, 1) + "Backend CPU: OK\n"), {64: 3282.37})
        other = "  GATED_DELTA_NET(type=f32,head_count=4,head_size=128,n_seq_tokens=64): 10 runs - 1.00 us/run"
        self.assertEqual(llama_cpp.parse_op(other), {})
        text = json.dumps([{"n_prompt": 512, "n_gen": 0, "samples_ns": [512e6, 1024e6]},
                           {"n_prompt": 0, "n_gen": 128, "samples_ns": [128e3]}])
        self.assertEqual(llama_cpp.parse_model(text), {(512, 0): [512000.0, 1024000.0], (0, 128): [128.0]})
        # CPUs that the threads shared are noted.
        self.assertEqual(llama_cpp.judge("x", 2, 1.9, lambda text: None), "")
        self.assertIn("only 1.10 CPUs", llama_cpp.judge("x", 2, 1.1, lambda text: None))

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
        files = ["--ours", __file__, "--llama", HERE, __file__]
        for argv in ([], ["--ours", HERE, "--llama", HERE, __file__], files, ["--threads", "0,1", *files],
                     ["--threads", "1,100000", *files], ["--avx2", HERE, *files]):
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
            found = gguf.time_file(args, "", 1, __file__, lambda text: None)
            self.assertEqual([line.split(", ", 1)[1] for line in gguf.lines("", 1, __file__, found)],
                             ["prompt 16, 1 thread | 4,000.0 | 8,000.0 | 0.50 |",
                              "decode 4, 1 thread | 4,000.0 | 2,000.0 | 2.00 |"])
            with open(os.path.join(folder, "said"), encoding="utf-8") as f:
                crate = f"--gguf {__file__} --prompts 16,128,512 --decode 64 --depth 128 --repeats 2"
                self.assertEqual(f.readline().split(" ", 1)[1].strip(), crate)
            with open(os.path.join(folder, "bin", "said"), encoding="utf-8") as f:
                self.assertEqual(len(f.readlines()), 4)


if __name__ == "__main__":
    unittest.main()
