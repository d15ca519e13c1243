#!/usr/bin/env python3
"""Checks gdn_attention_prepare, gdn_attention and gdn_advance, through the C ABI, against softmax attention in float64.

    python3 models/cuda/tests/check_attention.py --only prompts           # checks of prompts alone

An error is ||x - ref|| / ||ref||. All that must not be written is compared bit by bit.
"""
import ctypes as C
import math

import common    # noqa: F401 - the path of cuda/tests
import harness
import torch
from abi import NULL_POINTER, OK
from attention_case import Case, run
from cases import every, rows, drawn, words
from harness import WAYS, Launch, call, capture, expect, launch, normal, one_by_one, report, same, u32
from reference import attention, relative, rotary

# Rounding of o, 2^-9 / sqrt(3) in bf16 at most; that of the weights before they multiply the values, which is as large
# for a single key and averages out over many; and what q and the cache were rounded to is the reference's input too.
O_BOUND = {"f32": 1e-5, "bf16": 4e-3, "f16": 6e-4}
PREPARE_BOUND = {"f32": 2e-6, "bf16": 2.5e-3, "f16": 3.2e-4}
IO = ["bf16", "f16", "f32"]


def judge(case, q, caches, o, guard):
    """(whether all is fine, words) of what both launches left."""
    wrong = [] if guard else ["wrote past its workspace"]
    want = [c.clone() for c in case.caches]
    e_q = e_k = square = norm = 0.0
    for i, part in case.rows:
        before, length = case.before[i], case.lens[i]
        if i not in case.live:
            if not (bool((q[part] == 0).all()) and bool((o[part] == 0).all())):
                wrong.append(f"padding {i} is not zero")
            continue
        if length == 0:
            continue
        positions = torch.arange(before, before + length)
        prepared = lambda x, w: rotary(x[part], w, case.frequencies, positions, 1e-6, case.zero_centred)
        e_q = max(e_q, relative(q[part], prepared(case.q, case.q_weight)))
        slot, new = case.slots[i], case.rows_of(before, before + length)
        kept = len(new)
        new_k = caches[0][slot][:, new].transpose(0, 1)
        if kept:
            e_k = max(e_k, relative(new_k, prepared(case.k, case.k_weight)[:kept]))
            want[0][slot][:, new] = new_k.transpose(0, 1)
            want[1][slot][:, new] = case.v[part][:kept].transpose(0, 1)
        # From what was rounded and written, so that this error is the attention's alone.
        # A ring has the last keys alone, whichever of them the first tokens would see.
        first = max(before + 1 - case.window, before + length - case.capacity, 0) if case.window else 0
        k, v = (cache[slot][:, case.rows_of(first, before + length)].transpose(0, 1) for cache in caches)
        ref = attention(q[part], k, v, before - first, case.scale, case.gate[part] if case.gated else None, case.window)
        square += (o[part].double() - ref).pow(2).sum().item()
        norm += ref.pow(2).sum().item()
    e_o = math.sqrt(square / norm if norm else square)
    wrong += [f"cache {name}" for name, got, ref in zip("kv", caches, want) if not same(got, ref)]
    ok = e_q <= PREPARE_BOUND[case.io] and e_k <= PREPARE_BOUND[case.io] and e_o <= O_BOUND[case.io] and not wrong
    return ok, f"q {e_q:.1e} k {e_k:.1e} o {e_o:.1e} {', '.join(wrong)}"


def check_table(lib, table, again=()):
    """All cases; those of `again` have to leave the same bits in all ways to launch."""
    for seed, given in enumerate([*table, *again]):
        case = Case(**{"seed": seed, **given})
        name = f"attention {words(given)}"
        status, *left = run(lib, case)
        report(name, *(judge(case, *left) if status == OK else (False, lib.gdn_status_string(status).decode())))
        for case.overlap, graph in WAYS if given in again else ():
            status, q, caches, o, _ = run(lib, case, graph)
            report(f"{name} again, graph {graph}, overlap {case.overlap}", status == OK and same([q, o, *caches], [left[0], left[2], *left[1]]),
                   f"differs, status {status}")


# Lengths around the kernel for prompts' tiles, of 128 rows and of 64, 80 or 128 keys, and what was before.
PROMPT_LENGTHS = [1000, 0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 81, 127, 128, 129, 159, 160, 161, 0, 255, 256, 257,
                  511, 512, 513, 640, 641, 0]
PROMPT_BEFORE = [0, 1, 0, 63, 64, 65, 79, 80, 81, 127, 128, 129, 500, 2047]
TOKENS = [1, 8, 31, 32, 33, 63, 64, 65, 79, 80, 81, 100, 127, 128, 129, 200, 255, 256, 257, 383, 384, 400, 1023, 1024, 1025]


def around(seed, count):
    return [PROMPT_BEFORE[(seed + i) % len(PROMPT_BEFORE)] for i in range(count)]


def prompts(io):
    """With splits 0, which on sm_90a chooses the kernel for prompts where there are enough rows: at least 128 of a kv head, and
    some 60 blocks of 64."""
    packed, count = dict(lens=PROMPT_LENGTHS, varlen=True), len(PROMPT_LENGTHS)
    shapes = every(rows("heads kv_heads", (16, 4), (16, 2), (4, 4), (12, 4), (16, 1), (10, 2)), dim=[64, 128, 256], io=io)
    for seed, shape in enumerate(shapes, 1):
        yield dict(before=around(seed % 7, count), slots=seed % 2 == 0, gated=seed % 3 != 0, seed=seed, **packed, **shape)
        yield dict(before=[0] * count, capacity=1000 if seed % 2 else 1500, gap=8, gated=seed % 3 == 0, seed=seed, **packed, **shape)
    for seed, case in enumerate(every(dim=[64, 128, 256], tokens=TOKENS, io=io), 1):
        tokens = case.pop("tokens")
        before = around(seed, 64 if tokens < 100 else 12)
        heads, kv_heads = ((16, 4), (16, 1), (8, 8), (24, 4))[seed % 4]
        yield dict(before=before, lens=[tokens] * len(before), heads=heads, kv_heads=kv_heads, slots=seed % 2 == 0, gated=seed % 5 != 0,
                   capacity=(max(before) + tokens + 700) if seed % 3 else None, gap=8 * (seed % 2), transposed=seed % 7 == 0, seed=seed, **case)
    yield from every(dim=[8, 16, 40, 72, 80, 96, 136, 160, 192, 200, 248], before=[[61, 0, 130]], lens=[[333] * 3], heads=16, kv_heads=4, io=io)
    for capacity in (1000, 961, 896, 80):
        yield dict(before=[capacity - 70, 0, 60, 5], lens=[200] * 4, heads=16, kv_heads=4, dim=256, io=io, capacity=capacity)
    yield from every(rows("before lens heads kv_heads dim", ([0], [2048], 16, 4, 256), ([30000], [512], 16, 2, 256)), io=io)
    yield dict(before=[0], lens=[5000], heads=8, kv_heads=2, dim=128, io=io, gated=False)
    yield dict(before=[500, 20], lens=[300, 300], heads=16, kv_heads=2, dim=256, io=io, sharpness=30.0)
    yield dict(before=[40, 3], lens=[400, 400], heads=16, kv_heads=4, dim=64, io=io, gap=2)    # no 16-byte rows of gates
    yield from every(before=[[500, 20]], lens=[[300, 300]], heads=16, kv_heads=4, dim=[64, 128, 256], scale=0.2, io=io)


def check_prompts(lib, args):
    if args.quick:
        return check_table(lib, every(rows("io dim", ("bf16", 256), ("f16", 256), ("bf16", 128), ("f16", 64)), [
            dict(before=[3, 0, 80, 9, 70], lens=[130, 0, 66, 1, 300], varlen=True, gated=False), dict(before=[3, 0, 80], lens=[130] * 3, slots=True)],
            heads=16, kv_heads=4))
    for io in ("bf16", "f16"):
        check_table(lib, prompts(io), [
            dict(before=[9, 700, 0], lens=[300] * 3, heads=16, kv_heads=4, dim=256, io=io),
            dict(before=around(0, len(PROMPT_LENGTHS)), lens=PROMPT_LENGTHS, heads=16, kv_heads=2, dim=128, io=io, varlen=True, slots=True)])
    case = Case([0], [2048], 16, 4, 256)
    auto, case.splits = run(lib, case)[3], 1
    which = "another kernel" if not same(auto, run(lib, case)[3]) else "the same kernel"
    expected = torch.cuda.get_device_capability() != (9, 0) or which == "another kernel"
    report("prompts, choice", expected, f"splits 0 is {which} than splits 1")


QUICK = [dict(before=[70], lens=[1], heads=8, kv_heads=1, dim=256), dict(before=[0], lens=[1], heads=16, kv_heads=2, dim=256),
         dict(before=[300, 7, 129], lens=[1] * 3, heads=16, kv_heads=2, dim=256, splits=5, slots=True),
         dict(before=[33, 0, 64], lens=[3, 5, 1], heads=4, kv_heads=2, varlen=True, slots=True, splits=3, seed=1),
         dict(before=[50], lens=[16], heads=8, kv_heads=2, dim=64, splits=2)]
WIDE = dict(heads=16, kv_heads=2, dim=256)
NAMED = [
    dict(before=[0, 5, 700, 1, 31, 99], lens=[0, 1, 16, 7, 0, 3], varlen=True, slots=True, **WIDE),
    dict(before=[0, 5], lens=[0, 0], varlen=True, **WIDE),
    dict(before=[40, 3], lens=[2, 2], heads=4, kv_heads=2, dim=64, gap=2),
    dict(before=[40, 333], lens=[2, 2], heads=16, kv_heads=4, dim=256, transposed=True, splits=3),
    dict(before=[40, 333], lens=[2, 2], heads=16, kv_heads=4, dim=256, zero_centred=False),
    dict(before=[40, 333], lens=[2, 2], scale=0.2, **WIDE), dict(before=[40, 333], lens=[1, 1], heads=8, kv_heads=2, dim=64, scale=0.2, splits=3),
    dict(before=[200000], lens=[2], heads=4, kv_heads=2, dim=64, rotary=64),
    dict(before=[200000], lens=[2], heads=4, kv_heads=2, dim=64, rotary=64, low=False),
    dict(before=[(37 * i) % 400 for i in range(150)], lens=[1] * 150, slots=True, **WIDE),
    dict(before=[17, 100], lens=[150, 150], heads=8, kv_heads=2, dim=128), dict(before=[0], lens=[700], **WIDE),
    dict(before=[60, 3], lens=[8, 8], heads=8, kv_heads=2, dim=64, capacity=64), dict(before=[2000], lens=[1], max_len=64, **WIDE)]


def cases():
    shapes = every(rows("heads kv_heads", (2, 2), (4, 2), (16, 2), (16, 4), (16, 1), (12, 4), (6, 1), (3, 3)),
                                                        io=IO, dim=[64, 128, 256], lens=[[n] * 4 for n in (1, 2, 3, 4, 8, 16)], splits=[0, 1, 4])
    yield from drawn(shapes, before=([0, 31, 200, 513], [15, 16, 17, 64], [127, 128, 1, 90]), slots=(False, True),
                            gated=(False, True, True, True, True), gap=(0, 8, 16))
    dims = every(io=IO, dim=[8, 16, 24, 40, 72, 80, 96, 120, 136, 160, 192, 200, 248], before=[[61, 0, 130]], heads=6, kv_heads=2)
    yield from every(dims, [dict(lens=[3] * 3, splits=2), dict(lens=[1] * 3, rotary=0)])
    yield from (dict(lens=[2] * 3, rotary=case["dim"], low=False, **case) for case in dims)
    for length in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4096):
        yield from every([dict(before=[length - 1], lens=[1], capacity=length, **WIDE),
                          dict(before=[length - 1, 3], lens=[1, 1], heads=8, kv_heads=2, dim=128, capacity=5000)], io=IO, splits=[0, 3, 64], seed=length)
    yield from every(NAMED, io=IO)
    yield from every(rows("io sharpness", ("bf16", 30.0), ("f16", 30.0), ("f32", 3.0)), before=[[500, 20]], lens=[[1, 1]], splits=6, **WIDE)
    yield dict(before=[32767] * 2, lens=[1] * 2, seed=3, **WIDE)


def windows(io):
    """Rings of the least capacity and of more that have wrapped never, once and often; decode, drafts and prompts."""
    seed = 0
    for shape in every(rows("heads kv_heads dim", (8, 2, 64), (16, 2, 128), (16, 4, 256), (6, 2, 40)), io=io):
        for lens in ([1] * 4, [5] * 4, [16] * 4, [2, 0, 70, 9], [130, 1, 333, 64], [400] * 4):
            for window in (1, 7, 40, 128, 512, 3000):
                seed += 1
                before = [(0, 39, 700, 5000)[(seed + i) % 4] for i in range(4)]
                least = window + max(lens) - 1
                yield dict(before=before, lens=lens, varlen=len(set(lens)) > 1, window=window, capacity=least + (0, 9, 100)[seed % 3],
                           slots=seed % 2 == 0, gated=seed % 3 != 0, splits=(0, 0, 3)[seed % 3], gap=8, seed=seed, **shape)
    yield dict(before=[5000], lens=[1], window=2000, capacity=2111, io=io, **WIDE)
    yield from (dict(before=[700, 5], lens=[tokens] * 2, window=128, capacity=530, scale=0.2, io=io, **WIDE) for tokens in (1, 400))
    # The last tokens of a call have overwritten what its first ones would see: these see fewer, and none that come after them.
    for shape in every(rows("heads kv_heads dim", (2, 2, 64), (16, 4, 64), (16, 2, 128), (16, 4, 256), (6, 2, 40)), io=io):
        for tokens in (16, 64, 128, 130, 400, 600):
            for window in (tokens // 2, tokens, tokens + 100):
                seed += 1
                yield dict(before=[tokens, 0, 70, 3 * tokens + 5], lens=[tokens] * 4, window=window, capacity=max(window, tokens),
                           slots=seed % 2 == 0, gated=seed % 3 != 0, splits=(0, 0, 3)[seed % 3], seed=seed, **shape)
    yield dict(before=[128], lens=[128], window=128, capacity=128, heads=1, kv_heads=1, dim=64, io=io)
    yield dict(before=[200, 5, 1000], lens=[130, 1, 40], varlen=True, window=100, capacity=130, io=io, **WIDE)
    # Never as long as the window.
    yield dict(before=[90, 3], lens=[10, 10], window=512, capacity=100, io=io, **WIDE)


def check_windows(lib, args):
    again = [dict(before=[900, 31, 5], lens=[tokens] * 3, window=512, capacity=600 + tokens, **WIDE) for tokens in (1, 4, 300)]
    again += [dict(before=[900, 131], lens=[tokens] * 2, window=128, capacity=max(tokens, 128), **WIDE) for tokens in (16, 130)]
    for io in ["bf16"] if args.quick else IO:
        check_table(lib, list(windows(io))[::11] if args.quick else windows(io), [dict(io=io, **case) for case in again])


def check_cases(lib, args):
    check_table(lib, every(QUICK, io=IO))
    if not args.quick:
        again = [dict(before=[100 + 31 * i for i in range(n)], lens=[tokens] * n, splits=splits, **WIDE)
                 for n, tokens, splits in ((1, 1, 0), (9, 1, 0), (8, 4, 0), (1, 16, 7), (40, 1, 1))]
        check_table(lib, cases(), [*again, dict(before=[9, 700], lens=[3, 3], heads=16, kv_heads=4, dim=256, io="f32")])


def check_growth(lib, args):
    """One captured graph, replayed for sequences that grow: gdn_advance is in the graph."""
    for io, (steps, tokens, overlap) in ((io, x) for io in IO for x in ((150, 1, 0), (40, 4, 0), (60, 1, 1)) if not args.quick):
        before = [0, 40, 129]
        replayed, eager = (Case(before, [tokens] * 3, 16, 2, 256, io=io, capacity=130 + steps * tokens, slots=True, seed=steps,
                                overlap=overlap) for _ in range(2))
        for case in (replayed, eager):
            case.positions = u32([b if i in case.live else 0 for i, b in enumerate(before)])
        q, o, again, fresh = (eager.empty() for _ in range(4))
        params = replayed.prepare_params(q), replayed.attention_params(lib, q, o), replayed.advance_params()
        launches = list(zip((lib.gdn_attention_prepare, lib.gdn_attention, lib.gdn_advance), params))
        graph, statuses = capture(lambda: [call(f, p) for f, p in launches])
        first, second = eager.prepare_params(again), eager.attention_params(lib, again, fresh)
        differ, worst = 0, 0.0
        for step in range(steps):
            for case in (replayed, eager):
                case.x.copy_(normal(step)(*case.x.shape))
            again.fill_(math.nan)
            fresh.fill_(math.nan)
            graph.replay()
            statuses += [call(lib.gdn_attention_prepare, first), call(lib.gdn_attention, second)]
            torch.cuda.synchronize()
            differ += not same(fresh, o)
            for i, part in eager.rows if step % 29 == 0 or step == steps - 1 else ():
                if i in eager.live:
                    keys = before[i] + (step + 1) * tokens
                    k, v = (c[eager.slots[i], :, :keys].transpose(0, 1) for c in eager.pools)
                    ref = attention(again[part], k, v, keys - tokens, eager.scale, eager.gate[part])
                    worst = max(worst, relative(o[part], ref))
            eager.positions[eager.live] += tokens
        ok = set(statuses) == {OK} and differ == 0 and worst <= O_BOUND[io] and torch.equal(replayed.positions, eager.positions)
        report(f"{io} growth by {tokens} over {steps} replays, overlap {overlap}", ok,
               f"{differ} replays differ, o {worst:.1e}, statuses {set(statuses)}", quiet=False)


def check_advance(lib, args):
    lens = [3, 0, 16, 1, 1]
    for varlen, slots in ((True, False), (True, True), (False, True)):
        case = Case([5, 6, 7, 8, 9], lens if varlen else [2] * 5, 4, 2, 64, varlen=varlen, slots=slots)
        want = [p + t if i in case.live else p for i, (p, t) in enumerate(zip(case.positions.tolist(), case.lens))]
        status = launch(lambda: call(lib.gdn_advance, case.advance_params()))
        report(f"advance, packed {varlen}, slots {slots}", status == OK and case.positions.tolist() == want,
               f"{case.positions.tolist()}, expected {want}, status {status}")
    expect("advance", lib.gdn_advance, case.advance_params, {"NULL_POINTER": [dict(positions=None)]})


def check_status(lib, args):
    case = Case([5, 9], [2, 2], 4, 2, 64)
    q, o = case.empty(), case.empty()
    both = {"BAD_DTYPE": one_by_one(io_dtype=[9]), "BAD_HEADS": one_by_one(num_kv_heads=[3], num_heads=[0]),
            "BAD_HEAD_DIM": one_by_one(head_dim=[60, 264]),
            "BAD_LENGTH": [*one_by_one(num_seqs=[-1], capacity=[-1], cache__window=[-1]), dict(cache__window=1, cache__capacity=1)],
            "BAD_STRIDE": one_by_one(q__token_stride=[-1], cache__head_stride=[-8]),
            "BAD_ALGO": one_by_one(cache__k=[case.caches[0].data_ptr() + 2], cache__token_stride=[66]),
            "NULL_POINTER": one_by_one(positions=[None], cache__v=[None], q__ptr=[None]),
            "OK": [dict(num_seqs=0, q__ptr=None)]}
    prepare = "prepare", lib.gdn_attention_prepare, lambda: case.prepare_params(q)
    attend = "attention", lib.gdn_attention, lambda: case.attention_params(lib, q, o)
    expect(*prepare, both)
    expect(*attend, both)
    expect(*prepare, {"BAD_HEAD_DIM": one_by_one(rotary_dim=[66, 15]),
                      "NULL_POINTER": one_by_one(inv_freq=[None], k_weight=[None])})
    expect(*attend, {"BAD_ALGO": [dict(q__ptr=q.data_ptr() + 2)],
                     "BAD_LENGTH": one_by_one(splits=[-1, 100000], max_len=[-1])})
    case.splits = 3
    expect(*attend, {"BAD_WORKSPACE": one_by_one(workspace=[None], workspace_bytes=[8])})
    report("workspace of nothing", lib.gdn_attention_workspace(None, C.byref(C.c_int64(-1))) == NULL_POINTER)


# ---- times ----

class Work(Case):
    """For `attention` or `prepare` alone: `length` tokens a sequence, of which the last `tokens` are new, in caches full of numbers."""

    def __init__(self, batch, length, tokens=1, **case):
        super().__init__([length - tokens] * batch, [tokens] * batch, capacity=length, low=False, **case)
        for pool in self.pools:
            pool.normal_()
        self.q_out, self.o = self.empty().normal_(), self.empty()
        self.nbytes = 2 * self.pools[0].numel() * self.pools[0].element_size()


def timed(lib, prepare=False, **case):
    work = Work(**case)
    if prepare:
        return Launch(lib.gdn_attention_prepare, work.prepare_params(work.q_out), nbytes=3 * work.x.numel(), keep=work)
    return Launch(lib.gdn_attention, work.attention_params(lib, work.q_out, work.o), nbytes=work.nbytes, keep=work)


def times(args):
    """The floor is one read of keys and values. Of prompts "splits 1" is the kernel for few tokens."""
    layouts = rows("heads kv_heads dim", (16, 2, 256), (16, 4, 256), (8, 2, 256))
    one = every(layouts, batch=[1, 4, 16, 64], length=[512, 2048, 8192, 32768])
    drafts = every(layouts[:1], rows("batch length", (1, 2048), (1, 32768), (16, 8192)), tokens=[2, 4, 8, 16])
    splits = every(layouts[:1], rows("batch length", (1, 512), (1, 2048), (1, 8192), (1, 32768), (4, 8192), (16, 8192), (64, 2048)),
                   splits=[1, 2, 4, 8, 16, 33, 66, 132, 256])
    prompts = every(rows("heads kv_heads dim", (16, 4, 256), (16, 2, 256), (32, 8, 128)), rows("length tokens", *[(n, n) for n in (512, 2048, 8192, 32768)]), batch=1)
    return [("one new token, bf16", timed, one), ("prepare, one token", timed, every(one, prepare=True)), ("several tokens", timed, drafts),
            ("splits", timed, splits), ("prompts", timed, every(prompts, splits=[0, 1])), ("prepare, prompts", timed, every(prompts, prepare=True))]


GROUPS = {"cases": check_cases, "prompts": check_prompts, "windows": check_windows, "growth": check_growth, "advance": check_advance, "status": check_status}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times, models=True)
