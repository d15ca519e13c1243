"""A product of few rows, for the programs that check dense weights (check_linear.py) and the models' stored weights and SwiGLU."""
from abi import BAD_ALGO, CODES, fill
from harness import Frame, Launch, Output, call, chain_repeats, normal, rounding
from reference import linear

QUICK_ROWS, QUICK_NUMBERS = (1, 8, 9, 16, 32, 48, 65), 300_000      # for compute-sanitizer: each kernel, matrices of a few tiles
# (inputs, outputs) of the layers of Qwen's models of 4B, 0.8B, 35B and 27B, and of OLMo-Hybrid-7B: projections of both mixers in and out,
# feed-forward, head; and of those with SwiGLU.
SHAPES = [(2560, 18432), (9216, 2560), (2560, 12352), (4096, 2560), (2560, 10240), (2560, 248320),
          (1024, 7168), (3584, 1024), (1024, 8224), (1024, 5120), (2048, 1024), (1024, 248320),
          (2048, 12352), (4096, 2048), (2048, 9216), (512, 2048), (2048, 248320),
          (5120, 34816), (17408, 5120), (5120, 16480), (6144, 5120), (5120, 14336),
          (3840, 17340), (5760, 3840), (3840, 11520), (3840, 3840), (11008, 3840), (3840, 100352)]
SWIGLU_SHAPES = [(2560, 9216), (1024, 3584), (2048, 512), (5120, 17408), (3840, 11008)]


def small(cases):
    """Those for compute-sanitizer."""
    return [case for case in cases if case["rows"] in QUICK_ROWS and case["shape"][0] * case["shape"][1] <= QUICK_NUMBERS]


class Dense:
    """A weight [outputs, inputs] in the type of x. `fields`: of it in a launch's parameters."""

    def __init__(self, outputs, inputs, dtype, gap=0, seed=0):
        self.frame = Frame(outputs, inputs, dtype, gap, values=normal(seed)(outputs, inputs) * inputs ** -0.5)
        self.numbers, self.fields, self.nbytes = self.frame.view, dict(w=self.frame.view, w_stride=self.frame.view.stride(0)), 2 * outputs * inputs


def product(struct, f, weight, rows, dtype, gaps=(0, 0), seed=0, swiglu=False, more=(), x=None, outputs=None):
    """The launch of y = x w^T with a weight that has `numbers`, `fields` and `nbytes`. With `swiglu` the weight has the gate's rows, then
    up's. Its params_of(x, y, overlap) are for other tensors."""
    count, inputs = weight.numbers.shape
    width = count // 2 if swiglu else count
    x = Frame(rows, inputs, dtype, gaps[0], values=normal(seed + 1)(rows, inputs) if x is None else x)
    y = Frame(rows, width, dtype, gaps[1])

    def params_of(x, y, overlap=0):
        return fill(struct, **{**dict(
            x=x, y=y, x_stride=x.stride(0), y_stride=y.stride(0), rows=x.shape[0], inputs=inputs, outputs=width if outputs is None else outputs,
            dtype=CODES[dtype], overlap=overlap), **weight.fields})

    def results():
        want = linear(x.view, weight.numbers, swiglu)
        return [Output("y", y.buffer, y.index, want, rounding(dtype, want.numel()) + 2e-5)]     # 2e-5: of sums in f32

    made = Launch(f, params_of(x.view, y.view), results, more, replays=2, nbytes=weight.nbytes, keep=(x, y, weight))
    made.params_of, made.x, made.y, made.weight = params_of, x.view, y.view, weight
    return made


def taken(x):
    """Whether there is a kernel for it here."""
    return call(x.f, x.params, *x.more) != BAD_ALGO


def check_chain(name, products):
    """Launches one after the other, on the weights by turns."""
    def link(i, x, y, overlap):
        one = products[i % len(products)]
        return call(one.f, one.params_of(x, y, overlap), *one.more)

    chain_repeats(f"chain {name}", link, products[0].x.contiguous())


SWEEP = [("--sweep", dict(action="store_true", help="times of all ways to cut the product"))]
