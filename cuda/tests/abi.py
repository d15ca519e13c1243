#!/usr/bin/env python3
"""The C ABI for Python, read from its headers: gdn.h, and those of the models' kernels beside it where they are.

    python3 cuda/tests/abi.py --check            # the same headers by a C compiler: sizes, offsets and values compared
    python3 cuda/tests/abi.py --build LIB        # builds the kernels of gdn.h as a shared library (--models: the models')

A struct `gdn_rule_params` is the class RuleParams here, a constant `GDN_OK` is OK. Reading and --check need neither torch
nor CUDA; building needs nvcc.
"""
import argparse
import ctypes as C
import glob
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

CUDA = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODELS = os.path.join(os.path.dirname(CUDA), "models", "cuda")
HEADERS = [os.path.join(CUDA, "gdn.h"), *sorted(glob.glob(os.path.join(MODELS, "gdn_*.h")))]

SCALARS = {"int": C.c_int, "int32_t": C.c_int32, "uint32_t": C.c_uint32, "int64_t": C.c_int64, "uint64_t": C.c_uint64,
           "float": C.c_float, "double": C.c_double}
DECLARATION = re.compile(r"""
    \#define\s+(?P<constant>\w+)\s+(?P<value>\w+)[ ]*\n
    | typedef\s+(?P<kind>enum|struct)\s+(?P<name>\w+)\s*\{(?P<body>[^{}]*)\}\s*(?P=name)\s*;
    | (?P<result>int|const\s+char\s*\*)\s*(?P<function>gdn_\w+)\((?P<arguments>[^()]*)\)\s*;
    | (?P<other>\#\w*.*\n | extern\s+"C"\s*\{ | \} | typedef\s+struct\s+\w+\s*\*\s*cudaStream_t\s*;)""", re.X)


class Struct(C.Structure):
    """A struct of the headers. A name that is no field of its own is looked for in its nested structs: p.algo may be
    p.common.algo, and p.ring__keys is p.ring.keys. A tensor stands for its address, and the struct keeps it alive. A name
    that is nowhere, or in two places, is an error."""
    room = None     # of workspace()

    @classmethod
    def path(cls, name):
        """The fields that lead to `name`."""
        first, _, rest = name.partition("__")
        kinds = dict(cls._fields_)
        if first in kinds:
            return [first] + (kinds[first].path(rest) if rest else [])
        found = [[field, *kind.path(name)] for field, kind in cls._fields_ if issubclass(kind, Struct) and kind.has(name)]
        if len(found) != 1:
            raise AttributeError(f"{cls.__name__} has {len(found)} fields {name}")
        return found[0]

    @classmethod
    def has(cls, name):
        try:
            return bool(cls.path(name))
        except AttributeError:
            return False

    def __getattr__(self, name):
        value = self
        for field in self.path(name):
            value = C.Structure.__getattribute__(value, field)
        return value

    def __setattr__(self, name, value):
        if name == "room":
            return C.Structure.__setattr__(self, name, value)
        *path, field = self.path(name)
        inner = getattr(self, "__".join(path)) if path else self
        self.__dict__.setdefault("kept", {})[name] = value
        C.Structure.__setattr__(inner, field, value.data_ptr() if hasattr(value, "data_ptr") else value)


class Headers:
    """What the headers declare, by C names: `constants` (of enums too), `enums` {name: [members]}, `structs` and
    `functions` {name: (argument types, result type)}. What it does not know is an error."""

    def __init__(self, paths):
        self.constants, self.enums, self.structs, self.functions = {}, {}, {}, {}
        texts = {}
        for path in paths:
            with open(path, encoding="utf-8") as f:
                texts[os.path.basename(path)] = f.read()

        def read(header):    # after the headers that it includes, as a compiler does
            text = texts.pop(header)
            for included in re.findall(r'#include "(\w+\.h)"', text):
                if included in texts:
                    read(included)
            self.read(text)

        while texts:
            read(next(iter(texts)))

    def read(self, text):
        text, end = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S).strip() + "\n", 0
        while text[end:].strip():
            end = re.compile(r"\s*").match(text, end).end()
            found = DECLARATION.match(text, end)
            if not found:
                raise ValueError(f"not understood: {text[end:end + 200]}")
            self.declare(**found.groupdict())
            end = found.end()

    def declare(self, constant, value, kind, name, body, result, function, arguments, other):
        if constant:
            self.constants[constant] = int(value.rstrip("u"), 0)
        elif kind == "enum":
            members = [[word.strip() for word in part.split("=")] for part in body.split(",")]
            self.enums[name] = [member for member, _ in members]
            self.constants.update((member, int(value, 0)) for member, value in members)
        elif kind == "struct":
            fields = [field for part in body.split(";")[:-1] for field in self.fields(part)]
            self.structs[name] = type(python_name(name), (Struct,), {"_fields_": fields})
        elif function:
            kinds = [self.fields(part, argument=True)[0][1] for part in arguments.split(",")]
            self.functions[function] = kinds, C.c_int if result == "int" else C.c_char_p

    def fields(self, text, argument=False):
        """[(name, type)] of `const float *x, *y`. Pointers are addresses; those of arguments know what they point to."""
        base, names = re.fullmatch(r"\s*(?:const\s+)?(\w+)\b(.*)", text, re.S).groups()
        known, found = {**SCALARS, **self.structs}, []
        for part in names.split(","):
            star, name, count = re.fullmatch(r"\s*(\*?)\s*([A-Za-z_]\w*)\s*(?:\[(\w+)\]\s*)?", part).groups()
            if argument and base == "cudaStream_t":
                kind = C.c_void_p
            elif star:
                kind = C.POINTER(known[base]) if argument and base in known else C.c_void_p if base in ("void", *known) else known[base]
            else:
                kind = known[base]
            found.append((name, kind * self.constants[count] if count else kind))
        return found

    def python_names(self):
        names = {python_name(name): struct for name, struct in self.structs.items()}
        return {**names, **{name.removeprefix("GDN_"): value for name, value in self.constants.items()}}

    def names_of(self, enum, prefix):
        """The members' names in small letters, without the prefix; a value is the place in the list."""
        assert [self.constants[m] for m in self.enums[enum]] == list(range(len(self.enums[enum])))
        return [m.removeprefix(prefix).lower() for m in self.enums[enum]]


def python_name(c_name):
    return "".join(word.capitalize() for word in c_name.removeprefix("gdn_").split("_"))


ABI = Headers(HEADERS)
globals().update(ABI.python_names())
Heads, Sequences, Slots, RuleParams = (ABI.structs[f"gdn_{name}"] for name in ("heads", "sequences", "slots", "rule_params"))
CODES = {"f32": ABI.constants["GDN_F32"], "bf16": ABI.constants["GDN_BF16"], "f16": ABI.constants["GDN_F16"]}
ALGO_NAMES, STEP_NAMES = ABI.names_of("gdn_algo", "GDN_"), ABI.names_of("gdn_step_algo", "GDN_STEP_")
GUARD = 1024        # bytes past a workspace


# ---- the same by a C compiler ----

def layout(abi):
    """{C expression: number} of all structs and constants, as Python has them."""
    found = dict(abi.constants)
    for name, struct in abi.structs.items():
        found[f"sizeof({name})"] = C.sizeof(struct)
        for field, _ in struct._fields_:
            found[f"offsetof({name}, {field})"] = getattr(struct, field).offset
            found[f"sizeof((({name} *)0)->{field})"] = getattr(struct, field).size
    return found


def in_c(paths, expressions, compiler="cc"):
    """The numbers that a C program of these headers has for them."""
    includes = ["#include <stddef.h>", "#include <stdio.h>", *(f'#include "{path}"' for path in paths)]
    lines = [f'  printf("%lld\\n", (long long){expression});' for expression in expressions]
    with tempfile.TemporaryDirectory() as folder:
        source, program = os.path.join(folder, "layout.c"), os.path.join(folder, "layout")
        with open(source, "w", encoding="utf-8") as f:
            f.write("\n".join([*includes, "int main(void) {", *lines, "  return 0;", "}", ""]))
        subprocess.run([compiler, "-std=c99", "-Wall", "-Werror", "-I", CUDA, source, "-o", program], check=True)
        text = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return [int(line) for line in text.splitlines()]


def differences(paths=HEADERS, abi=ABI):
    """What the C compiler sees otherwise than Python, a line each; none is what it should be."""
    ours = layout(abi)
    return [f"{what}: {number} in Python, {in_header} in C"
            for (what, number), in_header in zip(ours.items(), in_c(paths, ours)) if number != in_header]


# ---- the library ----

def build(path, extra=(), models=False):
    """Compiles every .cu by itself, side by side, and links a shared library for the device that is there: of the kernels
    of gdn.h, or of the models' with the sources that both share. Without a device for sm_80 and sm_90a."""
    import torch
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    targets = ["80", "90a"] if (major, minor) == (9, 0) else sorted({"80", f"{major}{minor}"})
    gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in targets]
    base = ["nvcc", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "--default-stream", "per-thread", "-I", CUDA,
            "-Xcompiler", "-fPIC,-Wall", *gencode, *extra]
    patterns = [(MODELS, "*", "*.cu"), *((CUDA, folder, "*.cu") for folder in ("common", "linear"))] if models else [(CUDA, "*", "*.cu")]
    sources = sorted(source for pattern in patterns for source in glob.glob(os.path.join(*pattern)))
    with tempfile.TemporaryDirectory() as folder:
        objects = [os.path.join(folder, f"{i}.o") for i in range(len(sources))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda so: subprocess.run([*base, "-c", so[0], "-o", so[1]], check=True), zip(sources, objects)))
        subprocess.run([*base, "-shared", *objects, "-o", path], check=True)


def load(path):
    """A library, with the types of those functions that it has. AttributeError where it is not one of the kernels."""
    lib = C.CDLL(path)
    assert lib.gdn_status_string
    for name, (arguments, result) in ABI.functions.items():
        if hasattr(lib, name):
            f = getattr(lib, name)
            f.argtypes, f.restype = arguments, result
    return lib


# ---- parameters ----

def stream():
    import torch
    return torch.cuda.current_stream().cuda_stream


def fill(struct, **fields):
    """A struct with these fields, see Struct; the others are null or 0."""
    return struct(**fields)


def columns(x, first=0, head_stride=0, tokens_per_seq=0):
    """Heads that begin at column `first` of x [token, column]; `tokens_per_seq` 0: packed."""
    return Heads(ptr=x[:, first:], seq_stride=tokens_per_seq * x.stride(0), token_stride=x.stride(0), head_stride=head_stride)


def heads(x, tokens_per_seq=0):
    """Heads of a tensor [token, head, dim], or [token, head] for gates."""
    return columns(x, 0, x.stride(1), tokens_per_seq)


def sequences(lens, cu=None):
    """Sequences of these lengths: packed where there is a tensor cu of their bounds, else all of one length."""
    longest = max(lens, default=0)
    return fill(Sequences, cu_seqlens=cu, num_seqs=len(lens), tokens_per_seq=longest if cu is None else 0,
                max_tokens_per_seq=longest, total_tokens=sum(lens))


def slots(numbers, num_slots, slot_stride):
    """`numbers`: a tensor of them, or None."""
    return fill(Slots, slots=numbers, num_slots=num_slots, slot_stride=slot_stride)


def rule_params(**fields):
    """RuleParams; what is left out is null or 0, but for these constants of the models."""
    return fill(RuleParams, **{"l2_eps": 1e-6, "scale": fields["head_k"] ** -0.5, "beta_scale": 1.0, **fields})


def workspace(query, *params, device=None):
    """Gives launches that run one after the other one workspace, as large as the largest that `query`, a function of the
    library, requires. They keep it alive.

    All its bytes are 0xff, so that what is read before it is written is NaN; the last GUARD bytes lie past the size that a
    launch is given. Parameters that are refused get no workspace: the launch reports why."""
    import torch
    sizes = []
    for p in params:
        size = C.c_int64(0)
        sizes.append(size.value if query(C.byref(p), C.byref(size)) == ABI.constants["GDN_OK"] else 0)
    room = torch.full((max(sizes) + GUARD + 255,), 0xFF, dtype=torch.uint8, device=device)
    first = -room.data_ptr() % 256
    room = room[first:first + max(sizes) + GUARD]
    for p, size in zip(params, sizes):
        p.workspace, p.workspace_bytes, p.room = (room if size else None), size, room
    return room


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with a C compiler (cc)")
    parser.add_argument("--build", metavar="LIB", help="build the shared library")
    parser.add_argument("--models", action="store_true", help="that of the models' kernels")
    parser.add_argument("--nvcc", default="", help="further arguments for nvcc")
    args = parser.parse_args()
    if not args.check and not args.build:
        parser.error("nothing to do: --check or --build LIB")
    wrong = differences() if args.check else []
    for line in wrong:
        print(line)
    if args.check:
        print(f"{len(layout(ABI))} sizes, offsets and values of {len(ABI.structs)} structs in {len(HEADERS)} headers, "
              f"{len(wrong)} differ")
    if args.build:
        build(args.build, args.nvcc.split(), args.models)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
