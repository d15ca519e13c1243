"""Times of the mixture of experts: `python3 cuda/check_moe.py --time`."""
import ctypes as C
import statistics

import timing
import torch
from abi import OK, ptr, stream
from abi_moe import GROUPED, MOE_AUTO, MoeParams

SHAPES = {"Qwen3.5-35B-A3B: 256 experts, top 8": (256, 8, 2048, 512, 512),
          "Qwen3-Next-80B: 512 experts, top 10": (512, 10, 2048, 512, 512)}
FEW_TOKENS = (1, 2, 4, 8, 16, 32)
MANY_TOKENS = (512, 2048, 8192)


class Layer:
    """Weights of one layer. Of two layers the second call in a row finds nothing of its experts in the L2 cache."""

    def __init__(self, experts, k, hidden, inner, shared):
        self.sizes = experts, k, hidden, inner, shared
        weight = lambda *s: torch.empty(*s, device="cuda", dtype=torch.bfloat16).normal_(std=s[-1] ** -0.5)
        self.router = torch.randn(experts + 1, hidden, device="cuda") * hidden ** -0.5
        self.gate_up, self.down = weight(experts, 2 * inner, hidden), weight(experts, hidden, inner)
        self.shared_gate_up, self.shared_down = weight(2 * shared, hidden), weight(hidden, shared)

    def choice(self, x):
        """As torch would have it, in f32."""
        experts, k = self.sizes[:2]
        logits = x.float() @ self.router.T
        p, chosen = torch.softmax(logits[:, :experts], 1).topk(k)
        return chosen, p / p.sum(1, keepdim=True), torch.sigmoid(logits[:, experts:])

    def bytes(self, x):
        """What a launch has to read: the router, each chosen expert once, the shared one."""
        experts, _, hidden, inner, shared = self.sizes
        used = self.choice(x)[0].unique().numel()
        return used, 4 * (experts + 1) * hidden + 6 * hidden * (used * inner + shared)

    def flops(self, tokens):
        _, k, hidden, inner, shared = self.sizes
        return 6 * tokens * hidden * (k * inner + shared)

    def params(self, x, y, overlap=0, algo=MOE_AUTO, logits=None):
        experts, k, hidden, inner, shared = self.sizes
        return MoeParams(ptr(x), ptr(self.router), ptr(logits), ptr(self.gate_up), ptr(self.down),
                         ptr(self.shared_gate_up), ptr(self.shared_down), None, ptr(y), None, 0, hidden, experts + 1, 0,
                         hidden, x.shape[0], hidden, experts, k, inner, shared, 1, 0, 1, algo, overlap)

    def torch_bmm(self, x):
        """The weights of each token's experts gathered, then batched products: what a graph can capture."""
        chosen, weights, gate = self.choice(x)
        inner = self.sizes[3]
        gate_up = torch.einsum("th,tkih->tki", x, self.gate_up[chosen])
        h = torch.nn.functional.silu(gate_up[..., :inner]) * gate_up[..., inner:]
        y = (torch.einsum("tki,tkhi->tkh", h, self.down[chosen]).float() * weights[..., None]).sum(1)
        return (y + gate * self.shared(x).float()).to(x.dtype)

    def shared(self, x):
        gate, up = (x @ self.shared_gate_up.T).chunk(2, 1)
        return (torch.nn.functional.silu(gate) * up) @ self.shared_down.T

    def torch_loop(self, x):
        """Each expert over its tokens; asks the host which have any."""
        chosen, weights, gate = self.choice(x)
        y = torch.zeros_like(x, dtype=torch.float32)
        for e in chosen.unique().tolist():
            token, choice = (chosen == e).nonzero(as_tuple=True)
            g, up = (x[token] @ self.gate_up[e].T).chunk(2, 1)
            out = (torch.nn.functional.silu(g) * up) @ self.down[e].T
            y.index_add_(0, token, out.float() * weights[token, choice, None])
        return (y + gate * self.shared(x).float()).to(x.dtype)


def calls_of(lib, layers, xs, overlap=0, algo=MOE_AUTO, given=False):
    """A call for each x, by turns on the layers; they share a workspace, as the layers of a model do."""
    y = torch.empty_like(xs[0])
    logits = [x.float() @ layers[i % len(layers)].router.T if given else None for i, x in enumerate(xs)]
    params = [layers[i % len(layers)].params(x, y, overlap, algo, logits[i]) for i, x in enumerate(xs)]
    size = C.c_int64(0)
    status = lib.gdn_moe_workspace(C.byref(params[0]), C.byref(size))
    assert status == OK, lib.gdn_status_string(status).decode()
    room = torch.empty(size.value + 256, dtype=torch.uint8, device="cuda")

    def make(p):
        p.workspace, p.workspace_bytes = room.data_ptr() + -room.data_ptr() % 256, size.value

        def call(keep=(room, y, logits)):
            status = lib.gdn_moe(C.byref(p), stream())
            assert status == OK, lib.gdn_status_string(status).decode()
        return call
    return [make(p) for p in params], size.value


def inputs(tokens, hidden, count):
    return [torch.randn(tokens, hidden, device="cuda").bfloat16() for _ in range(count)]


def by_kernel(calls):
    """{short name: median us} of the kernels of these calls (CUPTI)."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile
    for call in calls:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as prof:
        for call in calls:
            call()
        torch.cuda.synchronize()
    times = {}
    for e in prof.events():
        if e.device_type == DeviceType.CUDA and "_kernel" in e.name:
            name = e.name.split("_kernel")[0].split("::")[-1].split(" ")[-1]
            if "grouped" in name:
                name += " down" if "false" in e.name or "(bool)0" in e.name else " gate_up"
            times.setdefault(name, []).append(e.time_range.elapsed_us())
    return {name: statistics.median(t) for name, t in times.items()}


def or_dash(f):
    """A time, where torch has the memory and the operation for it."""
    try:
        return f"{f():.1f}"
    except Exception as e:    # noqa: BLE001 - out of memory comes as several classes
        torch.cuda.empty_cache()
        return "-" if "memory" in str(e) else f"- ({type(e).__name__})"


def times(lib, compile_too=False):
    rate = timing.copy_rate()
    print(f"\n{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s; bf16, router f32, cold L2. us a call: CUPTI "
          "without overlap (-1); in a graph without; in a graph, its own kernels overlapping (0); and with the call before "
          "it (1)")
    for name, sizes in SHAPES.items():
        layers = [Layer(*sizes) for _ in range(2)]
        times_few(lib, name, layers, rate, compile_too)
        times_many(lib, name, layers, rate)
        del layers
        torch.cuda.empty_cache()


def times_few(lib, name, layers, rate, compile_too):
    print(f"\n{name}\n| tokens | experts | MB | floor | CUPTI | graph, none | graph | overlapped | of copy | grouped | "
          "torch bmm, graph |" + (" compiled |" if compile_too else "") + " each kernel, alone |")
    print("|---" * (12 + compile_too) + "|")
    for tokens in FEW_TOKENS:
        xs = inputs(tokens, layers[0].sizes[2], 24)
        facts = [layers[i % 2].bytes(x) for i, x in enumerate(xs)]
        used, nbytes = (statistics.mean(f[i] for f in facts) for i in range(2))
        floor = nbytes / rate * 1e6
        alone, _ = calls_of(lib, layers, xs, -1)
        cupti, plain = timing.span_us(alone), timing.graph_us(alone)
        own, over = (timing.graph_us(calls_of(lib, layers, xs, overlap)[0]) for overlap in (0, 1))
        grouped = timing.graph_us(calls_of(lib, layers, xs, 1, GROUPED)[0])
        theirs = []
        for bmm in (Layer.torch_bmm, torch.compile(Layer.torch_bmm)) if compile_too else (Layer.torch_bmm,):
            some = [lambda x=x, i=i: bmm(layers[i % 2], x) for i, x in enumerate(xs[:6])]
            theirs.append(or_dash(lambda: timing.graph_us(some, 3)))
        kernels = ", ".join(f"{k} {t:.1f}" for k, t in by_kernel(alone).items())
        print(f"| {tokens} | {used:.0f} | {nbytes / 1e6:.1f} | {floor:.1f} | {cupti:.1f} | {plain:.1f} | {own:.1f} | "
              f"{over:.1f} | {100 * floor / over:.0f} % | {grouped:.1f} | {' | '.join(theirs)} | {kernels} |", flush=True)


def times_many(lib, name, layers, rate):
    print(f"\n{name}, many tokens; with the router's logits given, as the crate does\n"
          "| tokens | floor: weights | CUPTI | graph | TFLOP/s | with own router | workspace, MB | torch's loop, CUPTI | "
          "each kernel |")
    print("|---" * 9 + "|")
    for tokens in MANY_TOKENS:
        xs = inputs(tokens, layers[0].sizes[2], 4)
        floor = statistics.mean(layers[i % 2].bytes(x)[1] for i, x in enumerate(xs)) / rate * 1e6
        given, size = calls_of(lib, layers, xs, 0, given=True)
        cupti, graph = timing.span_us(given * 2), timing.graph_us(given)
        own = timing.graph_us(calls_of(lib, layers, xs, 0)[0])
        busy = lambda i, x: sum(t for _, t in timing.device_activities(lambda: layers[i % 2].torch_loop(x)))
        loop = or_dash(lambda: statistics.median(busy(i, x) for i, x in enumerate(xs[:2] * 2)))
        kernels = ", ".join(f"{k} {t:.1f}" for k, t in by_kernel(given).items())
        print(f"| {tokens} | {floor:.0f} | {cupti:.0f} | {graph:.0f} | {layers[0].flops(tokens) / graph / 1e6:.0f} | "
              f"{own:.0f} | {size / 1e6:.0f} | {loop} | {kernels} |", flush=True)
