"""The rule in PyTorch's own operations, eager and through torch.compile: what a model has without kernels of its own. q, k
and v come in bf16, states and arithmetic are in f32; products too, or in TF32 where the variant says so."""
import layer
import torch
from contenders import TUNED
from contenders.peer import Peer
from contenders.torch_layer import TorchLayer
from data import BF16, Case, draw, log_decay_f32, output_bytes, poison_allocator, raw_math
from gradients import RAW, by_autograd, upstream
from workloads import CHUNK, DIM


def unit(x):
    x = x.float()
    return x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()


def spread_heads(x, heads):
    """[.., HK, K] to [.., HV, K]: each key head serves several value heads."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], heads // x.shape[-2], x.shape[-1]).flatten(-3, -2)


def prepared(q, k, v, a, b, a_log, dt_bias):
    """q, k, v, the log decay and beta, in f32 and by value heads."""
    q, k = (spread_heads(unit(x), v.shape[-2]) for x in (q, k))
    return q * DIM ** -0.5, k, v.float(), log_decay_f32(a, a_log, dt_bias), b.float().sigmoid()


def decode(q, k, v, a, b, a_log, dt_bias, state):
    """A token [sequence, heads, ..] of each sequence; the state [sequence, HV, V, K] is updated in place."""
    q, k, v, g, beta = prepared(q, k, v, a, b, a_log, dt_bias)
    state.mul_(g.exp()[..., None, None])
    delta = (v - (state @ k.unsqueeze(-1)).squeeze(-1)) * beta.unsqueeze(-1)
    state.add_(delta.unsqueeze(-1) * k.unsqueeze(-2))
    return (state @ q.unsqueeze(-1)).squeeze(-1).to(BF16)


def prefill(q, k, v, a, b, a_log, dt_bias, state):
    """Sequences of equal lengths, [sequence, token, heads, ..], in chunks: o and the new state.

    Within a chunk the tokens' writes depend on each other through a triangular system, which is solved at once for what
    they would write into a state of zero (u) and for what they take out of the one before (w)."""
    n, tokens = q.shape[:2]
    parts = prepared(q, k, v, a, b, a_log, dt_bias)
    # [sequence, head, chunk, token, ..]; tokens of padding write nothing and let nothing decay.
    pad = -tokens % CHUNK
    parts = [torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, pad)) for x in parts]
    q, k, v, g, beta = (x.unflatten(1, (-1, CHUNK)).movedim(3, 1) for x in parts)
    g = g.cumsum(-1)
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().tril()
    written = k * beta.unsqueeze(-1)
    system = (written @ k.mT * decay).tril(-1)      # and ones on the diagonal
    sides = torch.cat([v * beta.unsqueeze(-1), written * g.exp().unsqueeze(-1)], -1)
    u, w = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split(DIM, -1)
    attention = q @ k.mT * decay
    read = q * g.exp().unsqueeze(-1)
    last = g[..., -1:]
    kept, fading = k * (last - g).exp().unsqueeze(-1), last.exp().unsqueeze(-1)
    state, outs = state.mT, []
    for c in range(q.shape[2]):
        new = u[:, :, c] - w[:, :, c] @ state
        outs.append(read[:, :, c] @ state + attention[:, :, c] @ new)
        state = state * fading[:, :, c] + kept[:, :, c].mT @ new
    o = torch.stack(outs, 2).movedim(1, 3).flatten(1, 2)[:, :tokens]
    return o.to(BF16), state.mT.contiguous()


class TensorOps(Peer):
    compiled = False

    def __init__(self, lib_path=None, device="cuda"):
        self.lib_path, self.device, self.version = lib_path, device, torch.__version__
        if self.compiled:
            torch._dynamo.config.recompile_limit = 64       # a function is compiled again for every shape; eager past 8
        self.functions = {}

    def function(self, f, variant):
        """As the variant runs it, and the precision of products, which is the process's."""
        torch.backends.cuda.matmul.allow_tf32 = variant in ("tf32", TUNED)
        if not self.compiled:
            return f
        if (f, variant) not in self.functions:
            # Not in CUDA graphs: the clocks make their own.
            mode = "max-autotune-no-cudagraphs" if variant == TUNED else "default"
            self.functions[f, variant] = torch.compile(f, dynamic=False, mode=mode)
        return self.functions[f, variant]

    def backward_case(self, work, variant, sets):
        self.function(prefill, variant)
        d = draw(work, sets, self.device)
        split = lambda x: x.split(list(work.lens))

        def forward(i, leaves):
            *tokens, a_log, dt_bias, state = leaves
            done = [prefill(*(x.unsqueeze(0) for x in own), a_log, dt_bias, state[n:n + 1])
                    for n, own in enumerate(zip(*map(split, tokens)))] if len(set(work.lens)) > 1 else \
                [prefill(*(x.unflatten(0, (len(work.lens), -1)) for x in tokens), a_log, dt_bias, state)]
            return torch.cat([o.flatten(0, 1) for o, _ in done]), torch.cat([final for _, final in done])

        vectors = (x.expand(sets, -1) for x in (d.a_log, d.dt_bias))
        return by_autograd(forward, RAW, sets, upstream(work, sets, self.device),
                           (d.q, d.k, d.v, d.a, d.b, *vectors, d.state), self.device)

    def includes(self, work, variant):
        if work.suite == "layer":
            return "convolution, gates, L2 norm, gated norm, both products; the rule is our kernel"
        return "gates, L2 norm"

    def bounds(self, work, variant):
        if work.suite == "backward":
            return (2e-2,) * len(RAW)
        return layer.BOUNDS if work.suite == "layer" else super().bounds(work, variant)

    def layer_case(self, work, variant, sets):
        products, _, tuned = variant.partition(" ")
        return TorchLayer(self.lib_path, self.device, lambda f: self.function(f, tuned), self.compiled).case(work, products, sets)

    def rule_case(self, work, variant, sets):
        d = draw(work, sets, self.device)
        math, results = raw_math(d, work), {}
        run_decode, run_prefill = (self.function(f, variant) for f in (decode, prefill))
        # [set, sequence, token, ..] of equal lengths.
        lead = (len(work.lens),) if work.decode else (len(work.lens), work.lens[0])
        inputs = [x.unflatten(1, lead) for x in (d.q, d.k, d.v, d.a, d.b)]

        def call(i):
            args = *(x[i] for x in inputs), d.a_log, d.dt_bias, d.state[i]

            def run():
                results[i] = (run_decode(*args), d.state[i]) if work.decode else run_prefill(*args)
            return run

        def result():
            o, state = results[0]
            return o.reshape(work.tokens, work.hv, DIM), state

        poison_allocator(output_bytes(work), self.device)
        return Case([call(i) for i in range(sets)], math, result)


class Compiled(TensorOps):
    compiled = True
