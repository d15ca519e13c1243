#!/usr/bin/env python3
"""compute-sanitizer over the GPU tests of a program, a test a process, several side by side.

    cargo test --features cuda --no-run                       # prints the programs' paths
    python3 tests/sanitize.py target/debug/deps/gdn-… --tools racecheck,initcheck --jobs 8

Tests of the models' program run in the folder models. What is done is kept in a file (--done), so that another run goes on
where this one ended; remove it to start from the first test. The exit code is 1 if a test failed, reported something or reached its limit.
"""
import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

TOOLS = ["memcheck", "racecheck", "initcheck", "synccheck"]
OURS = ["--kernel-name", "kns=gdn"]    # candle's and cuBLAS' kernels cost most of the time; initcheck must see what they write
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")
REPORTED = re.compile(r"^========= (?!COMPUTE-SANITIZER)\S", re.M)    # any line of the tool but its first
ENV = {"CANDLE_GDN_SOAK": "200", **os.environ, "CANDLE_GDN_TEST_DEVICE": "cuda"}    # every kind of call, few of each


def tests_of(program):
    listed = subprocess.run([program, "--list"], capture_output=True, text=True, check=True, env=ENV).stdout
    return [line[: -len(": test")] for line in listed.splitlines() if line.endswith(": test")]


def run(tool, options, program, test, gpu, limit):
    """How it ended, as a word, and the output. A program that launches no kernel has no summary."""
    folder = "models" if os.path.basename(program).startswith(("models", "candle_gdn_models")) else "."
    command = ["compute-sanitizer", "--tool", tool, *options, *([] if tool == "initcheck" else OURS), "--error-exitcode", "77",
               os.path.abspath(program), "--exact", test]
    env = {**ENV, "CUDA_VISIBLE_DEVICES": str(gpu)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=folder,
                               env=env, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)    # the test too, which the sanitizer does not stop
        output, _ = process.communicate()
        return f"over {limit:.0f} s{', after reports' if REPORTED.search(output) else ''}", output
    found = SUMMARY.findall(output)
    clean = bool(found) and found[-1].startswith("0 ")
    if not found and " 1 passed" in output:
        return "no kernel", ""
    if clean and process.returncode == 0:
        return "clean", ""
    return found[-1] if found and not clean else f"failed with {process.returncode}", output


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--tools", default=",".join(TOOLS), help="default: all four")
    parser.add_argument("--options", default="", help="more options of the sanitizer, as in --options='--racecheck-filter-cluster-id 0' "
                        "(CUDA 13.5: racecheck of one block or cluster of each launch); --done records runs with other options apart")
    parser.add_argument("--jobs", type=int, default=4, help="processes side by side; default 4")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that they share")
    parser.add_argument("--only", default="", help="tests whose names this regular expression finds")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a test; default 600")
    parser.add_argument("--total", type=float, default=float("inf"), help="seconds for all")
    parser.add_argument("--done", default="sanitize.tsv", help="default sanitize.tsv")
    parser.add_argument("--logs", default="sanitize-logs", help="outputs of tests that were not clean; default sanitize-logs")
    args = parser.parse_args()
    if not shutil.which("compute-sanitizer"):
        parser.error("no compute-sanitizer on the PATH")
    for tool in args.tools.split(","):
        if tool not in TOOLS:
            parser.error(f"--tools: expected some of {', '.join(TOOLS)}, got {tool!r}")
    for program in args.programs:
        if not os.access(program, os.X_OK):
            parser.error(f"no program {program}")
    known = {}
    if os.path.exists(args.done):
        with open(args.done, encoding="utf-8") as f:
            known = {tuple(line.split("\t")[:3]): line.rstrip("\n").split("\t")[3] for line in f}
    options = args.options.split()
    name_of = lambda tool, program, test: (" ".join([tool, *options]), os.path.basename(program), test)
    todo = [(tool, program, test) for tool in args.tools.split(",") for program in args.programs for test in tests_of(program)
            if re.search(args.only, test)]
    of_run = [name_of(*job) for job in todo]
    todo = [job for job, key in zip(todo, of_run) if key not in known]
    begun, lock = time.monotonic(), threading.Lock()

    def work(number):
        while True:
            with lock:
                left = args.total - (time.monotonic() - begun)
                if not todo or left < 10:
                    return
                tool, program, test = todo.pop(0)
            how, output = run(tool, options, program, test, number % args.gpus, min(args.limit, left))
            key = name_of(tool, program, test)
            with lock:
                if output:
                    os.makedirs(args.logs, exist_ok=True)
                    name = "-".join(key).replace("::", "-").replace(" ", "")
                    with open(os.path.join(args.logs, f"{name}.txt"), "w", encoding="utf-8") as f:
                        f.write(output)
                if left >= args.limit or not how.startswith("over"):      # what the end of the run cut off is not done
                    known[key] = how
                    with open(args.done, "a", encoding="utf-8") as f:
                        print(*key, how, sep="\t", file=f)
                print(*key, how, flush=True)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(args.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    ends = [known[key] for key in of_run if key in known]
    fine = sum(how in ("clean", "no kernel") for how in ends)
    print(f"{fine} clean, {len(ends) - fine} not, {len(of_run) - len(ends)} not run")
    return 0 if fine == len(of_run) else 1


if __name__ == "__main__":
    sys.exit(main())
