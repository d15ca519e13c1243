#!/usr/bin/env python3
"""Times llama.cpp's gated delta rule, and a model, on this CPU: the peer of `cargo bench --bench cpu`.

    python3 benches/peers/llama_cpp.py --threads 2 --gguf demo-f16.gguf
    python3 benches/peers/llama_cpp.py --llama path/of/a/build      # with bin/test-backend-ops and bin/llama-bench

Builds the llama.cpp that llama-cpp-python 0.3.36 carries (about 8 minutes on two cores, once), runs its
`test-backend-ops perf` and `llama-bench`, and writes llama.json under --out in the format of benches/README.md.

The op: f32, 32 key and 32 value heads of 128, normalised q and k and ready gates come in. The model: `wall` is the time
of a whole prompt of 512 tokens, and of 128 decoded tokens together.
"""
import argparse
import glob
import json
import os
import re
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, HERE)

import records

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
TOKENS = [1, 64, 256, 512, 1024]        # of the op's own performance cases with 32 heads of 128
HEADS, DIM = 32, 128
PROMPT, DECODE = 512, 128
BINARIES = ["test-backend-ops", "llama-bench"]
REAL = 0.85     # of a thread's time on a CPU, below which it had none of its own
LINE = re.compile(r"GATED_DELTA_NET\(([^)]*)\):\s+\d+ runs -\s+([\d.]+) us/run")

# test-backend-ops has no option for its threads: it takes half of std::thread::hardware_concurrency(), which asks
# get_nprocs(). This answers for it. To pin it to twice as many CPUs would do the same, where there are that many.
SHIM = "int get_nprocs(void) { return 2 * THREADS; }\n"


class Failure(Exception):
    """One sentence for the user."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def arguments(argv):
    cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "candle-gdn-llama")
    cpus = len(os.sched_getaffinity(0))
    p = Parser(prog="llama_cpp.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--threads", type=int, default=cpus, metavar="N", help=f"default: the CPUs there are, {cpus}")
    p.add_argument("--gguf", metavar="FILE", help="a model for llama-bench; without it the op alone is timed")
    p.add_argument("--llama", metavar="DIR", help="an existing build of llama.cpp")
    p.add_argument("--build-dir", default=cache, metavar="DIR", help="where it is built and kept; default: %(default)s")
    p.add_argument("--repeats", type=int, default=5, metavar="N", help="runs of everything; default %(default)s")
    p.add_argument("--out", metavar="DIR", help="default: benches/results/<CPU>")
    args = p.parse_args(argv)
    if not 1 <= args.threads <= cpus:
        p.error(f"{args.threads} threads do not fit the {cpus} CPUs that this process may use")
    if args.repeats < 1:
        p.error("--repeats must be 1 or more")
    if args.gguf and not os.path.isfile(args.gguf):
        p.error(f"there is no file {args.gguf}")
    return args, p


def run(what, command, **kw):
    try:
        return subprocess.run(command, check=True, **kw)
    except FileNotFoundError:
        raise Failure(f"{what}: {command[0]} is not installed") from None
    except subprocess.CalledProcessError as e:
        raise Failure(f"{what} failed with status {e.returncode}: {shlex.join(map(str, command[:4]))} …") from None


def binaries(folder):
    """{name: path}, or None where one is missing."""
    found = {}
    for name in BINARIES:
        paths = [p for p in (os.path.join(folder, "bin", name), os.path.join(folder, name)) if os.path.isfile(p)]
        found.update({name: os.path.abspath(paths[0])} if paths else {})
    return found if len(found) == len(BINARIES) else None


def version(existing):
    """Which llama.cpp it is: its own version numbers are not kept in the package."""
    known = not existing or f"llama_cpp_python-{VERSION}" in os.path.abspath(existing)
    return f"of {PACKAGE} {VERSION}" if known else "of an existing build"


def build(folder):
    """Downloads and compiles once; returns the binaries."""
    target = os.path.join(folder, f"{PACKAGE.replace('-', '_')}-{VERSION}", "vendor", "llama.cpp")
    built = os.path.join(target, "B")
    if binaries(built):
        return binaries(built)
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        raise Failure("llama.cpp cannot be built: there is no C++ compiler")
    os.makedirs(folder, exist_ok=True)
    tools = os.path.join(folder, "tools")
    pip = [sys.executable, "-m", "pip"]
    if not os.path.isdir(target):
        # pip reads a source package's metadata with the package's own build system.
        run("installing build tools", [*pip, "install", "-q", "--upgrade", "--target", tools, "scikit-build-core",
                                       "cmake", "ninja"])
        env = {**os.environ, "PYTHONPATH": tools, "PATH": os.path.join(tools, "bin") + os.pathsep + os.environ["PATH"]}
        run("downloading llama.cpp", [*pip, "download", "-q", "--no-deps", "--no-binary=:all:", "--no-build-isolation",
                                      "-d", folder, f"{PACKAGE}=={VERSION}"], env=env)
        archive, = glob.glob(os.path.join(folder, "llama_cpp_python-*.tar.gz"))
        with tarfile.open(archive) as tar:
            tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    env = {**os.environ, "PYTHONPATH": tools, "PATH": os.environ["PATH"] + os.pathsep + os.path.join(tools, "bin")}
    run("configuring llama.cpp", ["cmake", "-S", target, "-B", built, "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON",
                                  "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=ON", "-DLLAMA_BUILD_SERVER=OFF"],
        env=env, stdout=subprocess.DEVNULL)
    run("building llama.cpp", ["cmake", "--build", built, f"-j{len(os.sched_getaffinity(0))}", "--target", *BINARIES, "llama-quantize"],
        env=env, stdout=subprocess.DEVNULL)
    found = binaries(built)
    if not found:
        raise Failure("llama.cpp was built without " + " and ".join(BINARIES))
    return found


def measured(command, **env):
    """The output of a command, and how many CPUs it kept busy on average. Its threads wait by spinning, so fewer than
    they are means that they had to share."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    text = run("llama.cpp", command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
               text=True).stdout
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    return text, (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / wall


def judge(what, threads, busy, say):
    """Says how real the threads were, and returns what a row has to note of it."""
    say(f"{what}: {threads} threads, {busy:.2f} CPUs busy")
    if busy > REAL * threads:
        return ""
    say("  the threads shared their CPUs with something: these times are too long")
    return f"; only {busy:.2f} CPUs were its own"


def parse_op(text):
    """{tokens: µs a call} of the plain f32 cases with 32 heads of 128 and one sequence."""
    found = {}
    for params, us in LINE.findall(re.sub(r"\x1b\[[\d;]*m", "", text)):
        p = dict(pair.split("=") for pair in params.split(","))
        plain = p["type"] == "f32" and p["head_count"] == str(HEADS) and p["head_size"] == str(DIM) and \
            all(p.get(name, one) == one for name, one in (("n_seqs", "1"), ("v_repeat", "1"), ("permuted", "0"),
                                                          ("kda", "0"), ("K", "1")))
        if plain:
            found[int(p["n_seq_tokens"])] = float(us)
    return found


def parse_model(text):
    """{(prompt tokens, decoded tokens): [µs of each run]}."""
    return {(r["n_prompt"], r["n_gen"]): [ns / 1e3 for ns in r["samples_ns"]] for r in json.loads(text)}


def row(suite, workload, wall, **more):
    spread = {name: round(of(wall), 3) for name, of in (("median", statistics.median), ("min", min), ("max", max))}
    return {"suite": suite, "workload": workload, "contender": "llama.cpp", "wall": spread, **more}


def time_op(binary, threads, repeats, say):
    """Rows of the suite `rule`. One run's figure is itself a mean over a second of calls."""
    with tempfile.TemporaryDirectory() as folder:
        source, shim = os.path.join(folder, "shim.c"), os.path.join(folder, "shim.so")
        with open(source, "w", encoding="utf-8") as f:
            f.write(SHIM)
        run("setting the threads", ["cc", f"-DTHREADS={threads}", "-shared", "-fPIC", source, "-o", shim])
        times, least = {}, threads
        only = f"type=f32,head_count={HEADS},head_size={DIM},.*n_seqs=1,v_repeat=1,permuted=0,kda=0"
        for _ in range(repeats):
            text, busy = measured([binary, "perf", "-b", "CPU", "-o", "GATED_DELTA_NET", "-p", only], LD_PRELOAD=shim)
            least = min(least, busy)
            for tokens, us in parse_op(text).items():
                times.setdefault(tokens, []).append(us)
    shared = judge("test-backend-ops", threads, least, say)
    if set(times) != set(TOKENS):
        raise Failure(f"test-backend-ops timed {sorted(times)} tokens where {TOKENS} were expected")
    shape = {"hk": HEADS, "hv": HEADS, "k": DIM, "v": DIM, "batch": 1}
    note = "32 key heads; threads set by a preloaded get_nprocs" + shared
    return [row("rule", f"T={t}", times[t], shape={**shape, "tokens": t, "total_tokens": t}, note=note,
                includes="neither gates nor L2 norm") for t in TOKENS]


def time_model(binary, gguf, threads, repeats, say):
    """Rows of the suite `model`: µs of all tokens together."""
    text, busy = measured([binary, "-m", gguf, "-t", str(threads), "-p", str(PROMPT), "-n", str(DECODE), "-r",
                           str(repeats), "-o", "json"])
    shared = judge("llama-bench", threads, busy, say)
    times = parse_model(text)
    return [row("model", name, times[key], shape={"batch": 1, "tokens": sum(key), "total_tokens": sum(key)},
                note=os.path.basename(gguf) + shared)
            for name, key in ((f"demo prompt {PROMPT}", (PROMPT, 0)), (f"demo decode {DECODE}", (0, DECODE)))]


def main(argv=None):
    args, parser = arguments(sys.argv[1:] if argv is None else argv)
    say = lambda text: print(text, file=sys.stderr, flush=True)
    try:
        found = binaries(args.llama) if args.llama else build(args.build_dir)
        if not found:
            raise Failure(f"{args.llama} has no bin/{' and bin/'.join(BINARIES)}")
        rows = time_op(found["test-backend-ops"], args.threads, args.repeats, say)
        if args.gguf:
            rows += time_model(found["llama-bench"], args.gguf, args.threads, args.repeats, say)
    except Failure as e:
        parser.error(str(e))
    cpu = records.cpu_model()
    machine = {"device": cpu, "host": cpu, "threads": args.threads}
    # Without the folders of whoever ran it.
    command = f"python3 benches/peers/llama_cpp.py --threads {args.threads} --repeats {args.repeats}"
    command += f" --gguf {os.path.basename(args.gguf)}" if args.gguf else ""
    head = records.header("benches/peers/llama_cpp", command, TOP, machine, {},
                          {"llama.cpp": version(args.llama)})
    path = os.path.join(args.out or os.path.join(TOP, "benches", "results", records.slug(cpu)), "llama.json")
    records.save(path, head, rows)
    for r in rows:
        print(f"{r['suite']:6} {r['workload']:16} {r['wall']['median']:12.1f} µs  "
              f"({r['wall']['min']:.1f} … {r['wall']['max']:.1f})")
    say(f"written to {os.path.relpath(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
