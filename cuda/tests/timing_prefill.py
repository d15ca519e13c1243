"""Times of prefill beside the peers': `python3 cuda/check_prefill.py --time` or `--only-time`."""
import ctypes as C
import math

import torch
from abi import ALGO_NAMES, OK, RECURRENT_128, Heads, RuleParams, ptr, stream, workspace
from check import CHUNKED_BOUND
from checks import failures, rel
from timing import graph_us, rule_calls, span_us
from timing_decode import sets

DIM = 128
CELLS = ["1x64", "1x128", "1x512", "1x2048", "1x8192", "1x32768", "4x2048", "4x8192", "8x1024"]
# µs of the fastest peer (FlashInfer 0.7.2, FlashQLA 0.1.3) on an H200: their rule alone, from normalised q and k and ready
# gates, where ours includes both.
PEERS = {
    "16/32": [8.8, 11.8, 28.6, 84.7, 227, 705, 101, 371, 110],
    "4/8": [8.0, 11.0, 23.8, 61.7, 111, 234, 82.3, 254, 51.5],
    "16/16": [8.2, 11.2, 25.1, 75.3, 151, 386, 97.3, 365, 57.6],
    "16/48": [8.3, 11.5, 28.1, 95.4, 351, 1255, 197, 723, 160],
    "16/64": [8.4, 11.6, 28.5, 96.3, 362, 1373, 197, 733, 212],
}


def select(text):
    """{heads: [cell]} of "16/32:1x8192,4x8192,4/8" or "all"."""
    chosen, heads = {}, None
    for word in (",".join(PEERS) if text == "all" else text).replace(",", " ").split():
        cell = word
        if "/" in word:
            heads, _, cell = word.partition(":")
            if heads not in PEERS:
                raise SystemExit(f"no times of peers for heads {heads}; there are {', '.join(PEERS)}")
            chosen.setdefault(heads, [])
        if cell and cell not in CELLS or heads is None:
            raise SystemExit(f"'{word}' is not one of {', '.join(CELLS)}, behind heads such as 16/32:")
        chosen[heads] += [cell] if cell else CELLS
    return chosen


def result(lib, call, algo):
    """o and the final state of a call by another kernel or its own, elsewhere than where it writes them."""
    p = RuleParams.from_buffer_copy(call.params)
    o, state = torch.full_like(call.o, math.nan), torch.full_like(call.state, math.nan)
    p.o = Heads(ptr(o), p.o.seq_stride, p.o.token_stride, p.o.head_stride)
    p.state_out, p.algo = ptr(state), algo
    workspace(lib, p)
    status = lib.gdn_rule(C.byref(p), stream())
    torch.cuda.synchronize()
    return (o, state) if status == OK else lib.gdn_status_string(status).decode()


def times(lib, algos, segments, cells):
    variants = [(a, s) for a in algos for s in segments]
    names = [ALGO_NAMES[a] + (f", {s} segments" if s else "") for a, s in variants]
    print(f"\n{torch.cuda.get_device_name()}; µs from the first kernel's begin to the last one's end (CUPTI) / of graph replay"
          " a call; cold L2, bf16, f32 state, K = V = 128; x: the peer's time over ours")
    print(f"| HK/HV | shape | peer | {' | '.join(names)} |")
    print("|---" * (3 + len(names)) + "|")
    worst = 0.0
    for heads, shapes in select(cells).items():
        hk, hv = map(int, heads.split("/"))
        ratios = [[] for _ in variants]
        for shape in shapes:
            batch, tokens = map(int, shape.split("x"))
            peer, row = PEERS[heads][CELLS.index(shape)], []
            nbytes = batch * (tokens * 4 * (hk + hv) * DIM + hv * DIM * DIM * 4)
            want = None
            for (algo, parts), mine in zip(variants, ratios):
                torch.manual_seed(0)
                calls = rule_calls(lib, batch, tokens, hk, hv, DIM, algo, sets(nbytes), parts)
                want = want or result(lib, calls[0], RECURRENT_128)
                got = result(lib, calls[0], algo)
                if isinstance(got, str):
                    row.append(got)
                    continue
                error = max(map(rel, got, want), key=lambda e: math.inf if math.isnan(e) else e)
                if not error <= CHUNKED_BOUND:
                    failures.append(f"timed {heads} {shape} {ALGO_NAMES[algo]} segments {parts}: {error:.1e}")
                    row.append(f"WRONG {error:.1e}")
                    continue
                worst = max(worst, error)
                span = span_us(calls * math.ceil((24 if batch * tokens <= 8192 else 9) / len(calls)))
                mine.append(peer / span)
                row.append(f"{span:.1f} / {graph_us(calls, 5):.1f} x{peer / span:.2f}")
                del calls
            print(f"| {heads} | {shape} | {peer:g} | {' | '.join(row)} |", flush=True)
        mean = lambda x: f"x{math.exp(sum(map(math.log, x)) / len(x)):.2f}" if x else ""
        print(f"| {heads} | geometric mean of {len(shapes)} | | {' | '.join(map(mean, ratios))} |", flush=True)
    print(f"o and states next to {ALGO_NAMES[RECURRENT_128]}: {worst:.1e} at most")
