#!/usr/bin/env python3
"""Checks gdn_moe, through the C ABI, against a mixture of experts in float64.

    python3 cuda/check_moe.py              # builds all kernels; the exit code is 1 when a case fails
    python3 cuda/check_moe.py --lib PATH   # of a library that is there
    python3 cuda/check_moe.py --quick      # a small set, for compute-sanitizer
    python3 cuda/check_moe.py --time       # the checks, then times (timing_moe.py)
    python3 cuda/check_moe.py --only-time
    python3 cuda/check_moe.py --self-test  # of the reference alone, on the CPU

An error is the largest over tokens of ||y - ref|| / ||ref||. Outputs hold NaN before a launch, as does everything around
them, around x and in the workspace. Tokens whose k-th and next logit differ by less than f32 can tell are left out, but
where the logits are given and ties are exact.
"""
import ctypes as C
import math

import checks
import torch
from abi import (BAD_ALGO, BAD_DTYPE, BAD_LENGTH, BAD_STRIDE, BAD_WORKSPACE, DTYPES, GUARD, NULL_POINTER, OK, ptr, stream)
from abi_moe import EXPERTS, FEW, GROUPED, MOE_AUTO, STREAM, TOP_K, MoeParams, load
from checks import report, same

# Rounding of y, at most 2^-7 / sqrt(12) of it in bf16, and as much of silu(gate) * up before the last product; GROUPED
# rounds each expert's output too. Narrow cases average little.
BOUND = {"bf16": 6e-3, "f16": 8e-4}
DEVICE = "cuda"


# ---- the definition, in float64 ----

def route(logits, k, normalise):
    """[tokens, k] experts, ties to the lower one, and their weights; and how far the k-th logit is from the next."""
    order = torch.sort(logits, dim=1, descending=True, stable=True)
    experts = order.indices[:, :k]
    weights = torch.softmax(logits, 1).gather(1, experts)
    if normalise:
        weights = weights / weights.sum(1, keepdim=True)
    gap = order.values[:, k - 1] - order.values[:, k] if k < logits.shape[1] else torch.ones_like(logits[:, 0])
    return experts, weights, gap


def mlp(x, gate_up, down):
    gate, up = (x @ gate_up.double().T).chunk(2, 1)
    return (torch.nn.functional.silu(gate) * up) @ down.double().T


def reference(case):
    """y in float64, and the tokens whose choice is not a matter of rounding."""
    x, n = case.x.double(), case.experts
    logits = x @ case.router.double().T if case.logits is None else case.logits.double()
    experts, weights, gap = route(logits[:, :n], case.k, case.normalise)
    y = torch.zeros_like(x) if case.residual is None else case.residual.double()
    for e in experts.unique().tolist():
        token, choice = (experts == e).nonzero(as_tuple=True)
        y.index_add_(0, token, weights[token, choice, None] * mlp(x[token], case.gate_up[e], case.down[e]))
    if case.shared:
        y = y + torch.sigmoid(logits[:, n:]) * mlp(x, case.shared_gate_up, case.shared_down)
    sure = torch.ones_like(gap, dtype=torch.bool)
    if case.logits is None:
        sure = gap > 1e-5 * (1 + logits[:, :n].abs().amax(1))
    return y, sure


# ---- one case ----

class Case:
    """`favour`: an expert that all tokens take. `ties`: given logits of few distinct values."""

    def __init__(self, tokens, hidden=256, experts=16, k=4, inner=64, shared=64, io="bf16", router="f32",
                 normalise=True, residual=False, given=False, ties=False, favour=None, gaps=(0, 0, 0), algo=MOE_AUTO,
                 overlap=0, scale=1.0, seed=0):
        gen = torch.Generator(device=DEVICE).manual_seed(seed)
        randn = lambda *s: torch.randn(*s, generator=gen, device=DEVICE)
        self.tokens, self.hidden, self.experts, self.k = tokens, hidden, experts, k
        self.inner, self.shared = inner, shared
        self.io, self.router_dtype, self.normalise, self.algo, self.overlap = io, router, normalise, algo, overlap
        dt = DTYPES[io][1]

        def framed(gap):
            buf = torch.full((tokens + 4, hidden + gap), math.nan, device=DEVICE, dtype=dt)
            return buf, buf[2:2 + tokens, :hidden]
        self.x_buf, self.x = framed(gaps[0])
        self.x.copy_(scale * randn(tokens, hidden))
        self.y_buf, self.y = framed(gaps[1])
        self.residual = None
        if residual:
            self.residual_buf, self.residual = framed(gaps[2])
            self.residual.copy_(randn(tokens, hidden))
        scored = experts + (shared > 0)
        self.router = (randn(scored, hidden) * hidden ** -0.5).to(DTYPES[router][1])
        if favour is not None:
            self.x[:, 0] = 4.0
            self.router[favour, 0] = 100.0
        self.logits = None
        if ties:
            self.logits = torch.randint(0, 4, (tokens, scored), generator=gen, device=DEVICE).float()
        elif given:
            self.logits = self.x.float() @ self.router.float().T
        self.gate_up = (randn(experts, 2 * inner, hidden) * hidden ** -0.5).to(dt)
        self.down = (randn(experts, hidden, inner) * inner ** -0.5).to(dt)
        self.shared_gate_up = (randn(2 * shared, hidden) * hidden ** -0.5).to(dt) if shared else None
        self.shared_down = (randn(hidden, shared) * shared ** -0.5).to(dt) if shared else None

    def params(self, lib):
        """With a workspace of NaN, of which the last GUARD bytes are past what the launch is told of."""
        p = MoeParams(ptr(self.x), ptr(self.router), ptr(self.logits), ptr(self.gate_up), ptr(self.down),
                      ptr(self.shared_gate_up), ptr(self.shared_down), ptr(self.residual), ptr(self.y), None, 0,
                      self.x.stride(0), 0 if self.logits is None else self.logits.stride(0),
                      0 if self.residual is None else self.residual.stride(0), self.y.stride(0), self.tokens,
                      self.hidden, self.experts, self.k, self.inner, self.shared, DTYPES[self.io][0],
                      DTYPES[self.router_dtype][0], int(self.normalise), self.algo, self.overlap)
        size = C.c_int64(0)
        status = lib.gdn_moe_workspace(C.byref(p), C.byref(size))
        room = torch.full((size.value + GUARD + 255,), 0xFF, dtype=torch.uint8, device=DEVICE)
        first = -room.data_ptr() % 256
        p.room = room[first:first + size.value + GUARD]
        p.workspace, p.workspace_bytes = ptr(p.room), size.value
        return status, p

    def run(self, lib, graph=False):
        """(status, the whole buffer of y, guard untouched)"""
        self.y_buf.fill_(math.nan)
        status, p = self.params(lib)
        if status != OK:
            return status, self.y_buf.clone(), True
        torch.cuda.synchronize()
        if graph:
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                status = lib.gdn_moe(C.byref(p), stream())
            g.replay()
            g.replay()
        else:
            status = lib.gdn_moe(C.byref(p), stream())
        torch.cuda.synchronize()
        return status, self.y_buf.clone(), bool((p.room[p.workspace_bytes:] == 0xFF).all())


def check_case(lib, name, quiet=True, repeats=False, broken=(), **kw):
    """`broken`: tokens with a NaN in x; theirs must show it, and no other may."""
    case = Case(**kw)
    name = f"{case.io} {case.experts}/{case.k} {case.hidden}x{case.inner}+{case.shared} T={case.tokens} {name}"
    for token in broken:
        case.x[token, 3] = math.nan
    status, out, guard = case.run(lib)
    if status != OK:
        return report(name, False, lib.gdn_status_string(status).decode())
    y = out[2:2 + case.tokens, :case.hidden].double()
    ref, sure = reference(case)
    wrong = [] if guard else ["wrote past its workspace"]
    for token in broken:
        sure[token] = False
        if not bool(y[token].isnan().all()):
            wrong.append(f"token {token} hides its NaN")
    errors = ((y - ref).norm(dim=1) / ref.norm(dim=1))[sure]
    error = errors.max().item() if errors.numel() else 0.0
    around = out.clone()
    around[2:2 + case.tokens, :case.hidden] = math.nan
    if not bool(around.isnan().all()):
        wrong.append("wrote outside of y")
    if not bool(errors.isfinite().all()):
        wrong.append("not finite")
    if repeats:
        for graph, overlap in ((False, 0), (True, 0), (False, 1), (True, 1), (True, -1)):
            case.overlap = overlap
            status, again, _ = case.run(lib, graph)
            if status != OK or not same(again, out):
                wrong.append(f"graph {graph} overlap {overlap}: status {status}, other bits")
    report(name, error <= BOUND[case.io] and not wrong,
           f"{error:.1e}, {int(sure.sum())} of {case.tokens} tokens {', '.join(wrong)}", quiet)


def check_quick(lib):
    for io in ("bf16", "f16"):
        for algo in (STREAM, GROUPED):
            for tokens in (1, 3, 11):
                check_case(lib, f"algo {algo}", quiet=False, tokens=tokens, io=io, algo=algo)
        check_case(lib, "prefill", quiet=False, tokens=70, io=io, residual=True)


def check_cases(lib):
    seed = 0
    for io in ("bf16", "f16"):
        for tokens in (*range(1, 34), 40, 64, 65, 100, 128, 129, 200, 257):
            algos = (STREAM, GROUPED) if tokens <= FEW else (GROUPED,)
            for algo in algos:
                for experts, k, hidden, inner, shared in ((16, 4, 256, 64, 64), (8, 8, 128, 128, 0),
                                                          (60, 3, 320, 192, 64), (300, 10, 192, 64, 320),
                                                          (1, 1, 64, 64, 64)):
                    seed += 1
                    check_case(lib, f"algo {algo}", tokens=tokens, hidden=hidden, experts=experts, k=k, inner=inner,
                               shared=shared, io=io, router=("f32", "bf16")[seed % 2], normalise=seed % 3 != 0,
                               residual=seed % 4 == 0, given=seed % 7 == 0, algo=algo,
                               gaps=(8 * (seed % 3), seed % 4, seed % 2), seed=seed)
        for tokens in (1, 2, 7, 8, 9, 32, 33, 150):
            for algo in (STREAM, GROUPED) if tokens <= FEW else (GROUPED,):
                for kw in ({"ties": True}, {"ties": True, "experts": 33, "k": 16}, {"favour": 5},
                           {"favour": 15, "k": 1}, {"experts": 1000, "k": 16, "hidden": 64},
                           {"experts": 512, "k": 10, "shared": 0}, {"hidden": 2112, "inner": 64}, {"hidden": 4096},
                           {"hidden": 2048, "inner": 512, "shared": 512}, {"inner": 320, "shared": 576},
                           {"given": True}, {"scale": 20.0}):
                    seed += 1
                    check_case(lib, f"algo {algo} {kw}", tokens=tokens, io=io, algo=algo, seed=seed, **kw)
                for broken in ((0,), (tokens - 1,), tuple(range(tokens))):
                    check_case(lib, f"algo {algo} NaN in {len(broken)}", tokens=tokens, io=io, algo=algo, broken=broken,
                               seed=seed)
                check_case(lib, f"algo {algo} NaN, shared", tokens=tokens, io=io, algo=algo, broken=(tokens // 2,),
                           shared=128, normalise=False, seed=seed)


def check_models(lib):
    """The shapes that matter, and that every launch gives the same bits."""
    for experts, k in ((256, 8), (512, 10)):
        for tokens in (1, 2, 4, 8, 16, 31, 32, 33, 96, 512, 2048):
            check_case(lib, "model", quiet=False, repeats=True, tokens=tokens, hidden=2048, experts=experts, k=k,
                       inner=512, shared=512, router=("f32", "bf16")[tokens % 2], residual=tokens % 4 == 0, seed=tokens)
            torch.cuda.empty_cache()


def check_chain(lib, tokens, steps=24, layers=4):
    """Launches that each read what the one before wrote, over two buffers and one workspace: the hazards of overlap."""
    cases = [Case(tokens, 512, 64, 6, 128, 128, residual=True, router="bf16", seed=i) for i in range(layers)]
    # Small: SwiGLU grows with the square, and 24 of them must stay finite.
    start, out = cases[0].x * 0.02, torch.empty_like(cases[0].x)
    buffers = [torch.empty_like(start) for _ in range(2)]
    _, room = cases[0].params(lib)

    def chain(overlap):
        buffers[0].copy_(start)
        buffers[1].fill_(math.nan)
        for i in range(steps):
            x, y = buffers[i % 2], buffers[(i + 1) % 2]
            case = cases[i % layers]
            case.overlap = overlap
            p = case.plain
            p.x, p.residual, p.y, p.overlap = ptr(x), ptr(x), ptr(y), overlap
            p.x_stride = p.residual_stride = p.y_stride = 512
            p.workspace, p.workspace_bytes = room.workspace, room.workspace_bytes
            assert lib.gdn_moe(C.byref(p), stream()) == OK
        out.copy_(buffers[steps % 2])

    for case in cases:
        case.plain = case.params(lib)[1]
    chain(-1)
    torch.cuda.synchronize()
    ref, bad = out.clone(), 0
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        chain(1)
    for i in range(40):
        out.fill_(math.nan)
        g.replay() if i % 2 else chain(1)
        torch.cuda.synchronize()
        bad += not same(out, ref)
    report(f"chain T={tokens}", bad == 0 and bool(ref.isfinite().all()), f"{bad} of 40 differ")


def check_arguments(lib):
    case = Case(4)

    def expect(want, **changes):
        _, p = case.params(lib)
        for name, value in changes.items():
            setattr(p, name, value)
        got = lib.gdn_moe(C.byref(p), stream())
        report(f"refuses {changes}", got == want, f"status {got}, expected {want}", quiet=True)

    for name in ("x", "router", "gate_up", "down", "shared_gate_up", "shared_down", "y"):
        expect(NULL_POINTER, **{name: None})
    expect(BAD_DTYPE, io_dtype=0)
    expect(BAD_DTYPE, io_dtype=7)
    expect(BAD_DTYPE, router_dtype=2)
    for changes in ({"tokens": -1}, {"hidden": 0}, {"num_experts": 0}, {"num_experts": EXPERTS + 1}, {"top_k": 0},
                    {"top_k": TOP_K + 1}, {"top_k": 17, "num_experts": 16}, {"num_experts": 3}, {"inner": 0},
                    {"shared_inner": -64}, {"tokens": 1 << 30}):
        expect(BAD_LENGTH, **changes)
    for changes in ({"hidden": 96}, {"inner": 40}, {"shared_inner": 32}, {"x": case.x.data_ptr() + 2}, {"x_stride": 260},
                    {"gate_up": case.gate_up.data_ptr() + 8}, {"algo": 3}, {"algo": -1},
                    {"algo": STREAM, "tokens": FEW + 1}):
        expect(BAD_ALGO, **changes)
    expect(BAD_STRIDE, x_stride=-8)
    expect(BAD_STRIDE, y_stride=-1)
    expect(BAD_WORKSPACE, workspace=None)
    expect(BAD_WORKSPACE, workspace_bytes=64)
    expect(OK, tokens=0, x=None)
    size = C.c_int64(-1)
    report("null parameters", lib.gdn_moe(None, stream()) == NULL_POINTER
           and lib.gdn_moe_workspace(None, C.byref(size)) == NULL_POINTER, quiet=True)
    torch.cuda.synchronize()


def self_test():
    """The reference against the definition written out; runs anywhere."""
    global DEVICE
    DEVICE = "cpu"
    torch.manual_seed(0)
    for kw in ({}, {"ties": True}, {"favour": 2}, {"shared": 0, "normalise": False},
               {"gaps": (8, 3, 1), "residual": True}):
        case = Case(5, 64, 6, 2, 64, **{"shared": 64, **kw})
        y, sure = reference(case)
        assert sure.all()
        logits = case.logits if case.logits is not None else case.x.double() @ case.router.double().T
        for t in range(5):
            left = [(-logits[t, e].item(), e) for e in range(6)]
            chosen = [e for _, e in sorted(left)[:2]]
            p = logits[t, :6].double().exp() / logits[t, :6].double().exp().sum()
            total = sum(p[e] for e in chosen) if case.normalise else 1.0
            want = case.residual[t].double() if case.residual is not None else torch.zeros(64).double()
            x = case.x[t].double()
            for e in chosen:
                gate, up = (case.gate_up[e].double() @ x).chunk(2)
                want = want + p[e] / total * (case.down[e].double() @ (gate / (1 + (-gate).exp()) * up))
            if case.shared:
                gate = case.shared_gate_up.double() @ x
                h = gate[:64] / (1 + (-gate[:64]).exp()) * gate[64:]
                want = want + (case.shared_down.double() @ h) / (1 + (-logits[t, 6].double()).exp())
            assert (y[t] - want).abs().max() < 1e-9, (kw, t)
        if "favour" in kw:
            assert (route(logits[:, :6], 2, True)[0] == 2).any(1).all()
    print("the reference holds")


def main():
    parser = checks.arguments(__doc__)
    parser.add_argument("--self-test", action="store_true", help="check the reference, on the CPU")
    parser.add_argument("--compile", action="store_true", help="time torch.compile too")
    args = parser.parse_args()
    if args.self_test:
        return self_test()
    lib = checks.library(args, load)
    if not args.only_time:
        check_quick(lib)
        if not args.quick:
            check_cases(lib)
            check_models(lib)
            for tokens in (1, 2, 8, 32, 100):
                check_chain(lib, tokens)
            check_arguments(lib)
        checks.summary()
    if args.time or args.only_time:
        from timing_moe import times
        times(lib, args.compile)
    checks.leave()


if __name__ == "__main__":
    main()
