"""The C ABI of gdn.h for Python: its structs, and the shared library built and loaded. Needs nvcc and torch."""
import ctypes as C
import glob
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
DTYPES = {"f32": (0, torch.float32), "bf16": (1, torch.bfloat16), "f16": (2, torch.float16)}
AUTO, RECURRENT, RECURRENT_128, CHUNKED, DECODE_128, CHUNKED_SM80, CHUNKED_SM90 = range(7)
UNALIGNED = [RECURRENT, CHUNKED, AUTO]
ALGO_NAMES = ["auto", "recurrent", "recurrent_128", "chunked", "decode_128", "chunked_sm80", "chunked_sm90"]
(OK, BAD_DTYPE, NULL_POINTER, BAD_HEADS, BAD_HEAD_DIM, BAD_LENGTH, BAD_CONV_WIDTH, BAD_ALGO, BAD_STRIDE, NO_PROFILE,
 PROFILE_BUFFER, BAD_WORKSPACE, BAD_CHECKPOINTS) = range(13)
NO_SLOT = 0xFFFFFFFF
CHUNK = 64
GUARD = 1024


class Heads(C.Structure):
    _fields_ = [("ptr", C.c_void_p), ("seq_stride", C.c_int64), ("token_stride", C.c_int64), ("head_stride", C.c_int64)]


class Sequences(C.Structure):
    _fields_ = [("cu_seqlens", C.c_void_p), ("num_seqs", C.c_int32), ("tokens_per_seq", C.c_int32),
                ("max_tokens_per_seq", C.c_int32), ("total_tokens", C.c_int32)]


class Slots(C.Structure):
    _fields_ = [("slots", C.c_void_p), ("num_slots", C.c_int64), ("slot_stride", C.c_int64)]


class RuleParams(C.Structure):
    _fields_ = [("q", Heads), ("k", Heads), ("v", Heads), ("a", Heads), ("b", Heads), ("a_log", C.c_void_p),
                ("dt_bias", C.c_void_p), ("o", Heads), ("state_in", C.c_void_p), ("state_out", C.c_void_p),
                ("token_states", C.c_void_p), ("checkpoints", C.c_void_p), ("workspace", C.c_void_p),
                ("workspace_bytes", C.c_int64), ("in_slots", Slots), ("out_slots", Slots), ("seqs", Sequences),
                ("num_k_heads", C.c_int32), ("num_v_heads", C.c_int32), ("head_k", C.c_int32), ("head_v", C.c_int32),
                ("io_dtype", C.c_int32), ("gate_dtype", C.c_int32), ("state_dtype", C.c_int32), ("l2norm", C.c_int32),
                ("algo", C.c_int32), ("checkpoint_tokens", C.c_int32), ("segments", C.c_int32), ("l2_eps", C.c_float),
                ("scale", C.c_float), ("beta_scale", C.c_float)]


class ConvParams(C.Structure):
    _fields_ = [("x", Heads), ("y", Heads), ("weight", C.c_void_p), ("state_in", C.c_void_p), ("state_out", C.c_void_p),
                ("in_slots", Slots), ("out_slots", Slots), ("seqs", Sequences), ("channels", C.c_int32),
                ("width", C.c_int32), ("io_dtype", C.c_int32), ("weight_dtype", C.c_int32), ("silu", C.c_int32)]


class NormParams(C.Structure):
    _fields_ = [("x", Heads), ("z", Heads), ("out", Heads), ("weight", C.c_void_p), ("tokens", C.c_int64),
                ("heads", C.c_int32), ("head_v", C.c_int32), ("io_dtype", C.c_int32), ("weight_dtype", C.c_int32),
                ("sigmoid", C.c_int32), ("eps", C.c_float)]


class StepParams(C.Structure):
    _fields_ = ([(n, Heads) for n in ("x", "z", "a", "b", "out")]
                + [(n, C.c_void_p) for n in ("conv_weight", "norm_weight", "a_log", "dt_bias", "conv_in", "conv_out",
                                             "state_in", "state_out", "token_states")]
                + [("in_slots", Slots), ("out_slots", Slots), ("conv_in_stride", C.c_int64),
                   ("conv_out_stride", C.c_int64), ("seqs", Sequences)]
                + [(n, C.c_int32) for n in ("num_k_heads", "num_v_heads", "head_k", "head_v", "conv_width", "io_dtype",
                                            "gate_dtype", "state_dtype", "conv_dtype", "norm_dtype", "l2norm", "sigmoid",
                                            "algo", "overlap")]
                + [(n, C.c_float) for n in ("l2_eps", "scale", "beta_scale", "norm_eps")])


class LinearParams(C.Structure):
    _fields_ = ([(n, C.c_void_p) for n in ("x", "w", "y")]
                + [(n, C.c_int64) for n in ("x_stride", "w_stride", "y_stride")]
                + [(n, C.c_int32) for n in ("rows", "inputs", "outputs", "dtype", "overlap")])


def build(path, extra):
    """Compiles every .cu by itself, side by side, and links a shared library."""
    major, minor = torch.cuda.get_device_capability()
    targets = {"80": "80", "90a": "90a"} if (major, minor) == (9, 0) else {"80": "80", f"{major}{minor}": f"{major}{minor}"}
    gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in targets]
    base = ["nvcc", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "--default-stream", "per-thread",
            "-Xcompiler", "-fPIC,-Wall", *gencode, *extra]
    with tempfile.TemporaryDirectory() as tmp:
        sources = sorted(glob.glob(os.path.join(HERE, "*", "*.cu")))
        objects = [os.path.join(tmp, os.path.basename(s) + ".o") for s in sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda so: subprocess.run([*base, "-c", so[0], "-o", so[1]], check=True), zip(sources, objects)))
        subprocess.run([*base, "-shared", *objects, "-o", path], check=True)


def load(path):
    lib = C.CDLL(path)
    for name, params in (("gdn_rule", RuleParams), ("gdn_conv", ConvParams), ("gdn_norm", NormParams),
                         ("gdn_step", StepParams), ("gdn_linear", LinearParams)):
        f = getattr(lib, name)
        f.argtypes, f.restype = [C.POINTER(params), C.c_void_p], C.c_int
    lib.gdn_rule_choice.argtypes, lib.gdn_rule_choice.restype = [C.POINTER(RuleParams), C.POINTER(C.c_int32)], C.c_int
    lib.gdn_rule_workspace.argtypes = [C.POINTER(RuleParams), C.POINTER(C.c_int64)]
    lib.gdn_rule_workspace.restype = C.c_int
    lib.gdn_step_choice.argtypes, lib.gdn_step_choice.restype = [C.POINTER(StepParams), C.POINTER(C.c_int32)], C.c_int
    lib.gdn_profile_set.argtypes, lib.gdn_profile_set.restype = [C.c_void_p, C.c_uint64, C.c_uint32], C.c_int
    for name in ("gdn_status_string", "gdn_profile_scope", "gdn_profile_role"):
        f = getattr(lib, name)
        f.argtypes, f.restype = [C.c_int], C.c_char_p
    return lib


def stream():
    return torch.cuda.current_stream().cuda_stream


def heads(x, packed):
    """A tensor [tokens, head, dim] (packed), [sequence, token, head, dim], or the same without dim (the gates)."""
    s = list(x.stride())
    return Heads(x.data_ptr(), 0, s[0], s[1]) if packed else Heads(x.data_ptr(), s[0], s[1], s[2])


def ptr(x):
    return None if x is None else x.data_ptr()


def sequences(lens, cu=None):
    """Sequences of these lengths: packed where there is a tensor cu of their bounds, else all of one length."""
    longest = max(lens, default=0)
    return Sequences(cu_seqlens=ptr(cu), num_seqs=len(lens), tokens_per_seq=longest if cu is None else 0,
                     max_tokens_per_seq=longest, total_tokens=sum(lens))


def rule_params(**fields):
    """RuleParams by the names of gdn.h. Tensors stand for their addresses; what is left out is null or 0, but for these
    constants of the models."""
    fields = {"l2_eps": 1e-6, "scale": fields["head_k"] ** -0.5, "beta_scale": 1.0, **fields}
    return RuleParams(**{name: ptr(x) if isinstance(x, torch.Tensor) else x for name, x in fields.items()})


def workspace(lib, *params, device="cuda"):
    """Gives launches that run one after the other a workspace, large enough for any of them. They keep it alive.

    All its bytes are 0xff, so that what is read before it is written is NaN; the last GUARD are past what a launch is
    told of. Parameters that are refused get none: the launch says why."""
    sizes = []
    for p in params:
        size = C.c_int64(0)
        sizes.append(size.value if lib.gdn_rule_workspace(C.byref(p), C.byref(size)) == OK else 0)
    room = torch.full((max(sizes) + GUARD + 255,), 0xFF, dtype=torch.uint8, device=device)
    first = -room.data_ptr() % 256
    room = room[first:first + max(sizes) + GUARD]
    for p, size in zip(params, sizes):
        p.workspace, p.workspace_bytes, p.room = (ptr(room) if size else None), size, room
    return room


def u32(values):
    return torch.tensor([v - (1 << 32) if v >= 1 << 31 else v for v in values], dtype=torch.int32, device="cuda")
