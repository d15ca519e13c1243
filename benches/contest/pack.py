#!/usr/bin/env python3
"""Packs the kernels of cuda/ for the harness of FlashInfer's contest, flashinfer-bench 0.1.2: a folder with the two
definitions, the workloads of workloads.json, our solution of each definition and FlashInfer's.

    python3 benches/contest/pack.py FOLDER
    TVM_FFI_CUDA_ARCH_LIST=9.0a python3 benches/contest/run.py FOLDER
    python3 benches/contest/report.py FOLDER

Needs torch and safetensors, no GPU. v, a and b are the harness's own normal numbers, new for each trial. What has to be of
some size comes from files: q and k of length one, states of a tenth, decays as a model has them (benches/peers/data.py).
"""
import argparse
import glob
import json
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [os.path.join(TOP, "benches", "peers"), os.path.join(TOP, "cuda", "tests")]

import data
import torch
import workloads
from safetensors.torch import save_file

KINDS = ("decode", "prefill")
# What gdn_rule is linked of. The harness compiles it without --expt-relaxed-constexpr.
UNITS = ["common/code.cu", "common/status.cu", "common/tensor_map.cu", "chunk/*.cu", "rule/*.cu"]
BINDING = "benches/contest/binding.cu"
INCLUDE = re.compile(r'^#include "(.*)"', re.M)


def read(*path):
    with open(os.path.join(TOP, *path), encoding="utf-8") as f:
        return f.read()


def write(folder, path, text):
    path = os.path.join(folder, path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


# ---- definitions ----

def definition(kind):
    """Of the format: the file of that name, and the reference beside it."""
    stem = f"benches/contest/definitions/gdn_{kind}_qk4_v8_d128_k_last"
    return {**json.loads(read(stem + ".json")), "reference": read(stem + ".py")}


# ---- solutions ----

def sources():
    """{path: text} of the binding and of all that it is compiled and linked of, paths as in the checkout but the
    binding's."""
    units = [path for unit in UNITS for path in sorted(glob.glob(os.path.join(TOP, "cuda", unit)))]
    found, todo = {"binding.cu": read(BINDING)}, [os.path.relpath(path, TOP) for path in units]
    todo += INCLUDE.findall(found["binding.cu"])
    while todo:
        path = todo.pop()
        if path not in found:
            found[path] = read(path)
            todo += [os.path.normpath(os.path.join(os.path.dirname(path), name)) for name in INCLUDE.findall(found[path])]
    return dict(sorted(found.items()))


def solution(name, kind, author, spec, files, description):
    return {"name": name, "definition": definition(kind)["name"], "author": author, "description": description,
            "spec": {"target_hardware": ["cuda"], **spec},
            "sources": [{"path": path, "content": text} for path, text in files.items()]}


def solutions():
    for kind in KINDS:
        spec = {"language": "cuda", "binding": "tvm-ffi", "entry_point": f"binding.cu::{kind}", "destination_passing_style": True}
        yield kind, solution(f"candle_gdn_{kind}", kind, "candle-gdn", spec, sources(),
                             "gdn_rule; compile it for sm_90a on Hopper (TVM_FFI_CUDA_ARCH_LIST=9.0a)")
        for path in sorted(glob.glob(os.path.join(HERE, "baselines", f"flashinfer_{kind}*.py"))):
            name, text = os.path.basename(path).removesuffix(".py"), read(path)
            spec = {"language": "python", "entry_point": "main.py::run", "dependencies": ["flashinfer"],
                    "destination_passing_style": "new_state):" in text}
            yield kind, solution(name, kind, "flashinfer", spec, {"main.py": text}, text.split('"""')[1])
            # Its default is not its fastest on most workloads.
            without = text.replace('CONTEXT_PARALLEL = "auto"', "CONTEXT_PARALLEL = False")
            if without != text:
                yield kind, solution(f"{name}_nocp", kind, "flashinfer", spec, {"main.py": without}, "The same without context parallelism.")


# ---- workloads ----

def axes(work):
    if work.decode:
        return {"batch_size": len(work.lens)}
    return {"total_seq_len": work.tokens, "num_seqs": len(work.lens), "len_cu_seqlens": len(work.lens) + 1}


def tensors(work):
    """What is not the harness's own random numbers."""
    d = data.draw(work, 1, "cpu")
    found = {"q": d.q[0], "k": d.k[0], "state": d.state[0], "A_log": d.a_log, "dt_bias": d.dt_bias}
    if work.decode:
        return {**found, "q": found["q"][:, None], "k": found["k"][:, None]}
    return {**found, "cu_seqlens": data.cumulative(work, torch.int64, "cpu")}


def workload(folder, kind, work):
    """Writes its tensors; the line of the format."""
    wanted, uuid = definition(kind), f"{kind}-{work.name.split()[0][1:]}"
    path = f"blob/workloads/{wanted['op_type']}/{wanted['name']}/{uuid}.safetensors"
    saved = {name: x.contiguous() for name, x in tensors(work).items()}
    os.makedirs(os.path.join(folder, os.path.dirname(path)), exist_ok=True)
    save_file(saved, os.path.join(folder, path))

    inputs = {name: {"type": "random"} for name in wanted["inputs"]}
    inputs.update({name: {"type": "safetensors", "path": path, "tensor_key": name} for name in saved})
    inputs["scale"] = {"type": "scalar", "value": workloads.DIM ** -0.5}
    return {"definition": wanted["name"], "solution": None, "evaluation": None,
            "workload": {"uuid": uuid, "axes": axes(work), "inputs": inputs}}


def pack(folder, number=None):
    for kind in KINDS:
        wanted = definition(kind)
        works = workloads.select(f"contest-{kind}", number=number)
        lines = [json.dumps(workload(folder, kind, work)) for work in works]
        write(folder, f"definitions/{wanted['op_type']}/{wanted['name']}.json", json.dumps(wanted, indent=2))
        write(folder, f"workloads/{wanted['op_type']}/{wanted['name']}.jsonl", "".join(line + "\n" for line in lines))
        print(f"{wanted['name']}: {len(lines)} workloads")
    for kind, made in solutions():
        wanted = definition(kind)
        path = f"solutions/{made['author']}/{wanted['op_type']}/{wanted['name']}/{made['name']}"
        # Ours is also what the contest takes: one solution.json.
        write(folder, f"{path}/solution.json", json.dumps(made, indent=2))
        print(f"{path}/solution.json: {len(made['sources'])} files")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="is made; what lies there under the same names is replaced")
    parser.add_argument("--workload", type=int, metavar="N", help="one workload of each definition, by its place in the "
                        "file from 0; default: all")
    args = parser.parse_args(argv)
    most = max(len(workloads.select(f"contest-{kind}")) for kind in KINDS)
    if args.workload is not None and not 0 <= args.workload < most:
        parser.error(f"--workload: expected 0 to {most - 1}, got {args.workload}")
    pack(args.folder, args.workload)


if __name__ == "__main__":
    main()
