"""Runs a contender's items in processes of its own, one after the other, and outlives every way one of them can end."""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MAX_DEATHS = 4              # of one contender in one suite
POLL = 0.1                  # seconds
FAREWELL = 20               # seconds for a process to end once it has no more to say


def launch(spec_path, env, log):
    """Starts child.py, in a process group of its own: a compiler that it has started ends with it."""
    command = [sys.executable, os.path.join(HERE, "child.py"), spec_path]
    return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def stop(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Watched:
    """One child process: its lines as they come, and how it ended."""

    def __init__(self, spec, env, starter, folder):
        self.out, self.log = (os.path.join(folder, name) for name in ("lines", "log"))
        spec_path = os.path.join(folder, "spec.json")
        with open(spec_path, "w", encoding="utf-8") as f:
            json.dump({**spec, "out": self.out}, f)
        open(self.out, "w").close()
        with open(self.log, "w") as log:
            self.process = starter(spec_path, env, log)
        self.read = 0

    def lines(self):
        """Whole lines that are new."""
        with open(self.out, "rb") as f:
            f.seek(self.read)
            text = f.read()
        whole = text.rfind(b"\n") + 1
        self.read += whole
        return [json.loads(line) for line in text[:whole].splitlines()]

    def follow(self, on_line, silence, deadline, done=lambda: False):
        """Until it ends, is silent for `silence` seconds, or `deadline` passes. Returns what ended it: "", itself.
        Once all is `done` it may not linger."""
        last_line = time.monotonic()
        try:
            while True:
                over = self.process.poll() is not None
                for line in self.lines():
                    on_line(line)
                    last_line = time.monotonic()
                if over:
                    return ""
                if time.monotonic() > deadline:
                    return "the time limit was reached"
                if done() and time.monotonic() - last_line > FAREWELL:
                    return ""
                if time.monotonic() - last_line > silence:
                    return f"no result within {silence:g} s"
                time.sleep(POLL)
        finally:
            stop(self.process)

    def end(self):
        """How a process that nobody stopped ended, in words."""
        code = self.process.returncode
        if code < 0:
            return f"its process died of {signal.Signals(-code).name}"
        return f"its process ended with status {code}"

    def tail(self, lines=3):
        with open(self.log, encoding="utf-8", errors="replace") as f:
            return [line.rstrip() for line in f.read().splitlines() if line.strip()][-lines:]


def run_items(task, contender, items, lib, silence, deadline, env=None, starter=launch, complain=lambda text: None,
              results=None):
    """Times (or compiles) the items, [(Workload, variant)], of a contender.

    Returns a result for each item, {"note": why} for a gap, and the contender's version or None. A process that dies or
    hangs costs the item that it was at; the items after that one run in a new process. `results`, a list of None for
    each item, is filled as they come, for a caller that may be interrupted.
    """
    results = [None] * len(items) if results is None else results
    version, deaths = None, 0
    while None in results:
        pending = [i for i, result in enumerate(results) if result is None]

        def give_up(why):
            for i in pending:
                results[i] = {"note": why}

        late = time.monotonic() > deadline
        if late or deaths > MAX_DEATHS:
            give_up("not run: " + ("the time limit was reached" if late else f"its process had died {deaths} times"))
            break
        spec = {"task": task, "contender": contender, "lib": lib,
                "items": [{"workload": items[i][0].to_json(), "variant": items[i][1]} for i in pending]}
        state = {"at": None, "fatal": None}

        def on_line(line):
            nonlocal version
            if "start" in line:
                state["at"] = pending[line["start"]]
            elif "row" in line:
                results[pending[line["row"]]] = {k: v for k, v in line.items() if k != "row"}
                state["at"] = None
            elif "fatal" in line:
                state["fatal"] = line["fatal"]
            elif "info" in line:
                version = line["info"].get("version", version)

        with tempfile.TemporaryDirectory() as folder:
            child = Watched(spec, env, starter, folder)
            stopped = child.follow(on_line, silence, deadline, lambda: None not in results)
            if state["fatal"]:
                give_up(state["fatal"])
            elif state["at"] is not None:           # in the middle of an item
                deaths += 1
                results[state["at"]] = {"note": "failed: " + (stopped or child.end())}
                complain(f"{contender}, {items[state['at']][0].name}: {stopped or child.end()}")
                for line in child.tail() if not stopped else []:
                    complain("  " + line)
            elif all(results[i] is None for i in pending):      # before its first item
                give_up("not run: " + (stopped or child.end()))
                for line in child.tail():
                    complain("  " + line)
            elif None in results:                   # between two items: the GPU was lost to it
                deaths += 1
    return results, version


def probe(lib, env=None, starter=None, silence=600):
    """(what the machine is, None) or (None, why nothing can be timed). Compiler messages go to stderr."""
    starter = starter or (lambda spec, env, log: launch(spec, env, sys.stderr))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        child = Watched({"task": "probe", "contender": "", "lib": lib, "items": []}, env, starter, folder)
        stopped = child.follow(found.update, silence, float("inf"))
    if "fatal" in found:
        return None, found["fatal"]
    if "info" not in found:
        return None, "the GPU could not be used: " + (stopped or child.end())
    return found["info"], None
