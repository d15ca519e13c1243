"""What is timed: the shapes of every suite, and the work that a shape stands for. No torch in here."""
import zlib
from dataclasses import asdict, dataclass, replace

import contest

DIM = 128                   # K = V, where --dim does not say others
CHUNK = 64
HIDDEN = 2048               # of the layer and of the projections, with HK/HV 16/32
HEADS = ["16/32", "16/16", "16/48", "16/64", "4/8", "2/8"]
BATCHES = [1, 4, 8, 16, 32, 48, 64, 128, 256]
LENGTHS = ["1x64", "1x128", "1x512", "1x2048", "1x8192", "1x32768", "4x2048", "4x8192", "8x1024"]
BACKWARD_HEADS = ["16/32", "8/16", "4/8"]
BACKWARD_LENGTHS = ["1x512", "1x2048", "1x8192", "4x2048", "8x4096", "1x32768"]
PROJECTION_TOKENS = [1 << i for i in range(14)]
LAYER_BATCHES, LAYER_TOKENS = [1, 8, 32, 128], PROJECTION_TOKENS[1:]    # T=1 is B=1
FUSED_TOKENS = 8            # of a sequence at most, for which a layer takes the fused step
SUITES = ["decode", "prefill", "contest-decode", "contest-prefill", "backward", "layer", "projections", "hard"]
# Inputs that cost 16-bit operands most; see data.harden.
HARD = ["usual", "repeated keys", "two keys in turn", "no decay", "decays to -30", "large norms", "beta near 2",
        "repeated keys, no decay", "repeated keys, no decay, beta near 2"]
HARD_LENGTHS = ["1x1024", "4x300"]


@dataclass(frozen=True)
class Workload:
    """One shape. `lens` are the tokens of each sequence; `decode` is one token a sequence, state in place."""
    suite: str
    name: str
    hk: int
    hv: int
    lens: tuple
    decode: bool
    l2: str = "cold"
    l2norm: bool = True     # raw q and k come in; else they come in normalised, and nobody normalises
    draw: int = 0           # further draws of random inputs for one shape
    timed: bool = True      # else only checked: of a shape of the contest the first draw is timed
    hard: str = ""          # what makes the inputs hard: checked, never timed
    k: int = DIM            # head sizes
    v: int = DIM

    @property
    def tokens(self):
        return sum(self.lens)

    @property
    def beta_scale(self):
        """What multiplies the sigmoid."""
        return 2.0 if "beta near 2" in self.hard else 1.0

    @property
    def key(self):
        """Names the work among all suites."""
        return self.suite, self.name, self.l2

    @property
    def seed(self):
        """The same in every process, so that all contenders get the same numbers."""
        dim = "" if (self.k, self.v) == (DIM, DIM) else f" {self.k}x{self.v}"
        return zlib.crc32(f"{self.suite} {self.hk}/{self.hv}{dim} {self.lens} {self.draw}".encode())

    def shape(self):
        """The record's. `tokens` is of each sequence, absent where they differ."""
        shape = {"hk": self.hk, "hv": self.hv, "k": self.k, "v": self.v, "batch": len(self.lens)}
        if len(set(self.lens)) == 1:
            shape["tokens"] = self.lens[0]
        shape["total_tokens"] = self.tokens
        if self.suite in ("layer", "projections"):
            shape["hidden"] = HIDDEN
        return shape

    def state_bytes(self):
        return len(self.lens) * self.hv * self.v * self.k * 4

    def to_json(self):
        return {**asdict(self), "lens": list(self.lens)}

    @staticmethod
    def from_json(fields):
        return Workload(**{**fields, "lens": tuple(fields["lens"])})


def rule_flop(work):
    """Operations of the chunk form, C = 64: for K = V = 128 163,840 a token and value head.

    A token costs, in multiply-adds: its rows of K Kᵀ and Q Kᵀ, C·K each; its read of the state by k and by q, K·V
    each; its rows of A (...) and of the masked Q Kᵀ times V', C·V each; its share of V'ᵀ K, K·V. That is
    2 (2 C K + 2 C V + 3 K V). The inverse of the C x C block and everything per element is left out.
    """
    return work.tokens * work.hv * 2 * (2 * CHUNK * (work.k + work.v) + 3 * work.k * work.v)


def backward_flop(work):
    """Operations of the chunk form's backward pass, C = 64: for K = V = 128 409,600 a token and value head.

    A chunk costs 11 products of C x C by K or V, counted as of (K + V) / 2, and 7 of C x K x V. What recomputes the states before each chunk is left out.
    """
    return work.tokens * work.hv * (11 * CHUNK * (work.k + work.v) + 14 * work.k * work.v)


def projection_widths(hk, hv):
    """Output features of q, k, v, z, b, a."""
    return [hk * DIM, hk * DIM, hv * DIM, hv * DIM, hv, hv]


def cost(work):
    """(bytes, flop) of the work: bytes that every implementation moves, and the operations of chunks of 64 tokens. Smaller chunks
    need fewer (rule_flop: of 16 tokens 30 % fewer), in products that fill the tensor cores less."""
    states = 2 * work.state_bytes()
    if work.suite == "projections":
        rows = sum(projection_widths(work.hk, work.hv))
        return 2 * (rows * HIDDEN + work.tokens * (HIDDEN + rows)), 2 * work.tokens * HIDDEN * rows
    if work.suite == "layer":
        weights = HIDDEN * (sum(projection_widths(work.hk, work.hv)) + work.hv * DIM)
        flop = 2 * work.tokens * weights + (0 if work.decode else rule_flop(work))
        return 2 * weights + states + 2 * 2 * work.tokens * HIDDEN, flop
    if work.decode:
        return states, 0
    if work.suite == "backward":
        # q, k, v and the gradient of o are read, three gradients written, and the gates of f32; three kinds of state.
        io = 2 * work.tokens * (4 * work.hk * work.k + 3 * work.hv * work.v) + 4 * 4 * work.tokens * work.hv
        return 3 * work.state_bytes() + io, backward_flop(work)
    # q and k, v and o, and the gates, in bf16.
    io = 2 * work.tokens * (2 * work.hk * work.k + 2 * work.hv * work.v + 2 * work.hv)
    return states + io, rule_flop(work)


def touched(work):
    """Bytes of buffers that a call reads or writes: what has to pass through L2 before a buffer is used again."""
    n = cost(work)[0]
    # In place, the state is read and written at one address.
    return n - work.state_bytes() if work.decode or work.suite == "layer" else n


def heads_of(text):
    hk, hv = text.split("/")
    return int(hk), int(hv)


def lens_of(text):
    n, tokens = text.split("x")
    return (int(tokens),) * int(n)


def rule_suite(suite, heads, batches, lengths, dim=(DIM, DIM)):
    k, v = dim
    for pair in heads:
        hk, hv = heads_of(pair)
        name = pair if dim == (DIM, DIM) else f"{pair} {k}x{v}"
        if suite == "decode":
            for batch in batches:
                for l2 in ("cold", "warm"):
                    yield Workload(suite, f"{name} B={batch}", hk, hv, (1,) * batch, True, l2, k=k, v=v)
        else:
            for length in lengths:
                yield Workload(suite, f"{name} {length}", hk, hv, lens_of(length), False, k=k, v=v)


def contest_suite(suite):
    """Every workload of the contest. Repeated shapes are drawn and checked each time and timed once."""
    seen = {}
    decode = suite == "contest-decode"
    all_lens = [(1,) * b for b in contest.DECODE] if decode else contest.PREFILL
    for i, lens in enumerate(all_lens):
        draw = seen[lens] = seen.get(lens, -1) + 1
        name = f"#{i} " + (f"B={len(lens)}" if decode else f"{len(lens)}:{sum(lens)}")
        yield Workload(suite, name, contest.HK, contest.HV, lens, decode, l2norm=False, draw=draw, timed=not draw)


def hard_suite():
    for kind in HARD:
        for length in HARD_LENGTHS:
            yield Workload("hard", f"{kind}, {length}", 16, 32, lens_of(length), False, hard=kind)


def model_suite(suite, batches, all_tokens):
    """Shapes of a model of 16/32 heads."""
    for batch in batches:
        yield Workload(suite, f"B={batch}", 16, 32, (1,) * batch, True)
    for tokens in all_tokens:
        yield Workload(suite, f"T={tokens}", 16, 32, (tokens,), False)


QUICK = {
    "decode": {"16/32 B=1", "16/32 B=8", "16/32 B=64"},
    "prefill": {"16/32 1x64", "16/32 1x2048", "16/32 8x1024"},
    "backward": {"16/32 1x2048", "16/32 4x2048"},
    "contest-decode": {"#0 B=1", "#1 B=1", "#46 B=64"},
    "contest-prefill": {"#0 1:6", "#1 1:134", "#2 1:134", "#3 32:8192"},
    "hard": {f"{kind}, 4x300" for kind in HARD},
    "layer": {"B=1", "B=32", "T=16", "T=512"},
    "projections": {"T=1", "T=512"},
}


def select(suite, heads=None, batches=None, lengths=None, quick=False, number=None, dim=(DIM, DIM)):
    """The workloads of a suite. `heads` and `batches` and `lengths`, where given, replace the suite's own or, in the
    suites whose heads are fixed, keep or drop all of it. `number` keeps one workload of the contest's suites, by its place
    in the set, and nothing of others. Other head sizes than 128 are of decode, prefill and backward alone."""
    if dim != (DIM, DIM) and suite not in ("decode", "prefill", "backward"):
        return []
    if suite in ("decode", "prefill"):
        works = list(rule_suite(suite, heads or HEADS, batches or BATCHES, lengths or LENGTHS, dim))
    elif suite == "backward":
        works = list(rule_suite(suite, heads or BACKWARD_HEADS, [], lengths or BACKWARD_LENGTHS, dim))
    elif suite.startswith("contest"):
        works = list(contest_suite(suite))
        if batches and suite == "contest-decode":
            works = [w for w in works if len(w.lens) in batches]
    elif suite == "hard":
        works = list(hard_suite())
    elif suite == "layer":
        works = list(model_suite(suite, batches or LAYER_BATCHES, LAYER_TOKENS))
    else:
        works = list(model_suite(suite, [], PROJECTION_TOKENS))
    if heads:
        works = [w for w in works if (w.hk, w.hv) in [heads_of(h) for h in heads]]
    if quick:
        works = [w for w in works if w.name in QUICK[suite]]
    if number is not None:
        named = [w for w in works if suite.startswith("contest") and w.name.startswith(f"#{number} ")]
        works = [replace(w, timed=True) for w in named]
    return works
