"""The timing process of one contender: runs the items of a spec in order and reports each as a line of JSON.

A spec is a JSON file: task ("probe", "time" or "compile"), contender, lib, items ([{workload, variant}]) and out, the
file the lines go to. Lines: {"info": ...} once, {"start": i} before an item, {"row": i, ...} after it, {"fatal": text}
where nothing can be run at all. The exit status 3 says that the GPU is lost to this process: go on in a new one.
"""
import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(os.path.dirname(HERE)), "cuda", "tests")]
GPU_LOST = 3


def main(path):
    with open(path, encoding="utf-8") as f:
        spec = json.load(f)
    with open(spec["out"], "a", encoding="utf-8") as f:
        def say(**line):
            f.write(json.dumps(line) + "\n")
            f.flush()
        return probe(spec, say) if spec["task"] == "probe" else run(spec, say)


def probe(spec, say):
    """Looks at the machine, builds the kernels where they are wanted, and measures the ceilings."""
    why = unusable(spec["lib"])
    if why:
        say(fatal=why)
        return 1
    import clocks
    import torch
    say(info={"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "ceilings": clocks.ceilings()})
    return 0


def unusable(lib):
    """Why nothing can be timed here, or None."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    import abi
    import timing
    x = torch.randn(1 << 20, device="cuda")
    if not timing.device_activities(lambda: x.mul_(2)):
        return "CUPTI is missing or may not be used: torch.profiler sees nothing that the GPU does"
    try:
        if lib and not os.path.exists(lib):
            abi.build(lib)
        if lib:
            abi.load(lib)
    except subprocess.CalledProcessError as e:
        return f"nvcc could not compile the kernels (exit status {e.returncode}); its messages are above"
    except (OSError, AttributeError) as e:
        return f"{lib} is not the kernels' library: {timing.one_line(e)}"


def run(spec, say):
    import torch

    import contenders
    import timing
    from workloads import Workload
    torch.set_grad_enabled(False)
    try:
        contender = contenders.load(spec["contender"])(spec["lib"])
    except Exception as e:      # whatever a package raises when it does not fit this machine
        say(fatal=f"{spec['contender']} is not usable here: {timing.one_line(e)}")
        return 1
    say(info={"version": contender.version})
    for i, item in enumerate(spec["items"]):
        say(start=i)
        work = Workload.from_json(item["workload"])
        try:
            row = compile_only(contender, work, item["variant"]) if spec["task"] == "compile" else \
                time_one(contender, work, item["variant"])
        except Exception as e:
            row = {"note": f"failed: {timing.one_line(e)}"}
        say(row=i, **row)
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception:
            return GPU_LOST
    return 0


def case_of(contender, work, variant, sets):
    kind = work.suite if work.suite in ("layer", "projections", "backward") else "rule"
    return getattr(contender, f"{kind}_case")(work, variant, sets)


def compile_only(contender, work, variant):
    import torch
    case_of(contender, work, variant, 1).calls[0]()
    torch.cuda.synchronize()
    return {}


def time_one(contender, work, variant):
    """Checks set 0, then times all sets. Further draws of a shape are checked alone."""
    import clocks
    import torch
    from workloads import touched
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    sets = 1 if not work.timed else clocks.sets_for(touched(work), work.l2, l2_bytes)
    case = case_of(contender, work, variant, sets)
    case.calls[0]()
    torch.cuda.synchronize()
    row = {"includes": contender.includes(work, variant)}
    row["error"], note = errors(contender, work, case, variant)
    # Of hard inputs errors are what is asked for.
    bounds = () if work.hard else contender.bounds(work, variant)
    names = list(row["error"]) if work.suite == "backward" else ["o", "state"]
    over = [f"{name} {row['error'][name]:.1e} > {bound:.0e}" for name, bound in zip(names, bounds)
            if name in row["error"] and not row["error"][name] <= bound]      # NaN is over too
    if over:
        note = "not timed, over its bound: " + ", ".join(over)
    elif not note.startswith("not timed") and work.timed and not work.hard:
        case.math = None
        torch.cuda.empty_cache()
        if work.suite in ("layer", "backward"):
            row["between_bytes"] = case.between + allocated(case.calls[0])
        times = clocks.measure(case.calls)
        note = "; ".join(n for n in (note, times.pop("note")) if n)
        row.update(times)
    row["note"] = note
    return row


def allocated(call):
    """Bytes that a call allocates, at its peak."""
    import torch
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def errors(contender, work, case, variant=""):
    """Relative RMS of set 0's outputs, and a note: the contest's own test where that applies. Of gradients those of a smaller shape."""
    import contest
    import reference
    if work.suite == "backward":
        import gradients
        return gradients.errors(contender, work, variant), ""
    if work.suite == "projections":
        return {"o": contender.projections_error(case)}, ""
    o, state = case.result()
    want = case.math if work.suite == "layer" else reference.packed_chunks(*case.math, work.lens, work.k ** -0.5)
    found = {"o": reference.relative(o, want[0]), "state": reference.relative(state, want[1])}
    if not work.suite.startswith("contest"):
        return found, ""
    passed = contest.passes(o, want[0]) and contest.passes(state, want[1])
    return found, "passes the contest's tolerance" if passed else "not timed, over the contest's tolerance of 1e-2"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
