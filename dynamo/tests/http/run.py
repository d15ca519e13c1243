"""Against Dynamo's frontend, with the demo on the CPU: `run.py WORKER GENERATE [CHECK …]`, the paths of the two programs and
what to check, all unless told. dynamo/test builds both and calls this."""

import sys

import checks
import limits
import load
import logprobs
import machines

CHECKS = {
    "chat": checks.chat_equals_generate,
    "logprobs": logprobs.logprobs,
    "options": limits.options,
    "full": limits.full,
    "signals": limits.signals,
    "drain": checks.drain,
    "migration": checks.migration,
    "handoff": checks.handoff,
    "routing": checks.routing,
    "overhead": checks.overhead,
    "load": load.load,
}

# Only where it is asked for: of root.
ON_DEMAND = {"machines": machines.machines}

worker, generate, *names = sys.argv[1:]
for name in names or CHECKS:
    print(f"== {name}", flush=True)
    (CHECKS | ON_DEMAND)[name](worker, generate)
