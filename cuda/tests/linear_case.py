"""A product of few rows, for the programs that check dense weights (check_linear.py) and the models' stored weights and SwiGLU."""
import itertools

import torch
from abi import BAD_ALGO, CODES, OK, fill
from harness import Frame, Output, WAYS, bf16, call, chain_repeats, normal, rounding, verify
from reference import linear
from timing import compare, graph_us, often

QUICK_ROWS, QUICK_NUMBERS = (1, 8, 9, 16, 32, 48, 65), 300_000      # for compute-sanitizer: each kernel, matrices of a few tiles
# inputs, outputs, swiglu; of the models' layers: projections of both mixers in and out, feed-forward, head.
SHAPES = {
    "first": ((2048, 12352, 0), (4096, 2048, 0), (2048, 2048, 0), (2560, 2560, 0), (2048, 6144, 0), (6144, 2048, 0),
              (5120, 5120, 0)),
    "4b": ((2560, 9216, 1), (2560, 18432, 0), (9216, 2560, 0), (2560, 12352, 0), (4096, 2560, 0), (2560, 10240, 0),
           (2560, 248320, 0)),
    "2b": ((2048, 6144, 1), (6144, 2048, 0), (2048, 248320, 0)),
    "0.8b": ((1024, 3584, 1), (1024, 7168, 0), (3584, 1024, 0), (1024, 8224, 0), (1024, 5120, 0), (2048, 1024, 0),
             (1024, 248320, 0)),
    "35b": ((2048, 12352, 0), (4096, 2048, 0), (2048, 9216, 0), (2048, 248320, 0)),
    "27b": ((5120, 17408, 1), (5120, 34816, 0), (17408, 5120, 0), (5120, 16480, 0), (6144, 5120, 0), (5120, 14336, 0)),
}


def small(rows, inputs, outputs, quick):
    return not quick or (rows in QUICK_ROWS and inputs * outputs <= QUICK_NUMBERS)


class Dense:
    """A weight [outputs, inputs] in the type of x. `fields`: of it in a launch's parameters."""

    def __init__(self, outputs, inputs, dtype, gap=0, seed=0):
        self.frame = Frame(outputs, inputs, dtype, gap, values=normal(seed)(outputs, inputs) * inputs ** -0.5)
        self.numbers, self.fields, self.nbytes = self.frame.view, dict(w=self.frame.view, w_stride=self.frame.view.stride(0)), 2 * outputs * inputs


class Product:
    """y = x w^T of a weight that has `numbers` (float64 where they are not a tensor of x's type) and `fields`, and how it is launched:
    `struct` and the name of a `function`, with `more` arguments. With `swiglu` the weight has the gate's rows, then up's."""

    def __init__(self, lib, struct, function, weight, rows, dtype, gaps=(0, 0), seed=0, swiglu=False, more=(), x=None):
        self.lib, self.struct, self.f, self.weight, self.more, self.dtype = lib, struct, getattr(lib, function), weight, more, dtype
        outputs, inputs = weight.numbers.shape
        self.swiglu, self.outputs, self.name = swiglu, outputs // 2 if swiglu else outputs, function
        self.x = Frame(rows, inputs, dtype, gaps[0], values=normal(seed + 1)(rows, inputs) if x is None else x)
        self.y = Frame(rows, self.outputs, dtype, gaps[1])

    def params(self, x=None, y=None, overlap=0):
        x, y = self.x.view if x is None else x, self.y.view if y is None else y
        fields = dict(x=x, y=y, x_stride=x.stride(0), y_stride=y.stride(0), rows=x.shape[0], inputs=x.shape[1], outputs=self.outputs,
                      dtype=CODES[self.dtype], overlap=overlap)
        return fill(self.struct, **{**fields, **self.weight.fields})

    def launch(self, params):
        return call(self.f, params, *self.more)

    def taken(self):
        """Whether there is a kernel for it here."""
        return self.launch(self.params()) != BAD_ALGO

    def check(self, text, ways=WAYS):
        want = linear(self.x.view, self.weight.numbers, self.swiglu)
        rows, inputs = self.x.view.shape
        name = f"{self.name} {text} {self.dtype} {rows}x{inputs} -> {self.outputs}{' swiglu' if self.swiglu else ''}"
        # The sums in f32 add at most 2e-5.
        output = Output("y", self.y.buffer, self.y.index, want, rounding(self.dtype, want.numel()) + 2e-5)
        verify(self.lib, name, self.f, self.params(), [output], ways, self.more, replays=2)


def check_chain(name, products, rows, hidden, dtype):
    """Launches one after the other, on the weights by turns."""
    def link(i, x, y, overlap):
        product = products[i % len(products)]
        return product.launch(product.params(x, y, overlap))

    chain_repeats(f"chain {name} {dtype} rows {rows} hidden {hidden}", link, normal(rows)(rows, hidden).to(products[0].x.view.dtype))


def times(title, args, make, bytes_of_number, takes, best=0, cuts=()):
    """Times of args.shapes and args.rows beside torch's. make(inputs, outputs, swiglu, rows, seed, cut) is a Product; takes(rows,
    swiglu): whether there is a kernel. With `best` each line has the best of cuts(rows, inputs, swiglu) too."""
    def theirs(product, w):
        y = torch.nn.functional.linear(product.x.view, w)
        return torch.nn.functional.silu(y[:, :product.outputs]) * y[:, product.outputs:] if product.swiglu else y

    def table():
        for name, rows in itertools.product(args.shapes, args.rows):
            for inputs, outputs, swiglu in SHAPES[name]:
                if not takes(rows, swiglu):
                    continue
                nbytes = inputs * outputs * (2 if swiglu else 1) * bytes_of_number
                products = [make(inputs, outputs, swiglu, rows, seed, None) for seed in range(int(2.4e8 / nbytes) + 2)]
                calls = lambda every, overlap: [lambda p=product.params(overlap=overlap), product=product: product.launch(p) for product in every]
                dense = [bf16(outputs * (2 if swiglu else 1), inputs) for _ in products]
                found = {"": calls(products, 0), "overlapped": calls(products, 1),
                         "torch": [lambda p=p, w=w: theirs(p, w) for p, w in zip(products, dense)]}
                tried = []
                for cut in cuts(rows, inputs, swiglu) if best else ():
                    others = [make(inputs, outputs, swiglu, rows, product.weight, cut) for product in products]
                    if others[0].launch(others[0].params()) == OK:
                        tried.append((graph_us(often(calls(others, 1)), 5), cut))
                found.update({f"cut {cut}": f"{us:.2f}" for us, cut in sorted(tried)[:best]})
                yield f"{name} {inputs} -> {outputs}{' swiglu' if swiglu else ''} rows {rows}", nbytes, found

    compare(f"{title}, cold L2", table())


def options(default_rows):
    words = lambda text: text.split(",")
    return [("--sweep", dict(action="store_const", const=5, default=0, help="with the times: the best ways to cut the product")),
            ("--shapes", dict(type=words, default=list(SHAPES), help="of " + ", ".join(SHAPES))),
            ("--rows", dict(type=lambda text: [int(rows) for rows in words(text)], default=default_rows))]
