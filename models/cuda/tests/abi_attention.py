"""The C ABI of gdn_attention.h for Python, beside that of gdn.h in abi.py."""
import ctypes as C

import abi
from abi import Heads, Sequences, Slots


class KvCache(C.Structure):
    _fields_ = [("k", C.c_void_p), ("v", C.c_void_p), ("slots", Slots), ("head_stride", C.c_int64),
                ("token_stride", C.c_int64), ("capacity", C.c_int32)]


class PrepareParams(C.Structure):
    _fields_ = ([(n, Heads) for n in ("q", "k", "v", "q_out")]
                + [(n, C.c_void_p) for n in ("q_weight", "k_weight", "inv_freq", "inv_freq_low", "positions")]
                + [("cache", KvCache), ("seqs", Sequences)]
                + [(n, C.c_int32) for n in ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "io_dtype",
                                            "zero_centred", "overlap")]
                + [("eps", C.c_float)])


class AttentionParams(C.Structure):
    _fields_ = ([(n, Heads) for n in ("q", "gate", "o")] + [("positions", C.c_void_p), ("cache", KvCache),
                ("workspace", C.c_void_p), ("workspace_bytes", C.c_int64), ("seqs", Sequences)]
                + [(n, C.c_int32) for n in ("num_heads", "num_kv_heads", "head_dim", "io_dtype", "max_len", "splits",
                                            "overlap")]
                + [("scale", C.c_float)])


class AdvanceParams(C.Structure):
    _fields_ = [("positions", C.c_void_p), ("slots", Slots), ("seqs", Sequences), ("overlap", C.c_int32)]


LAUNCHERS = (("gdn_attention_prepare", PrepareParams), ("gdn_attention", AttentionParams), ("gdn_advance", AdvanceParams))


def load(path):
    lib = abi.load(path)
    for name, params in LAUNCHERS:
        f = getattr(lib, name)
        f.argtypes, f.restype = [C.POINTER(params), C.c_void_p], C.c_int
    lib.gdn_attention_workspace.argtypes = [C.POINTER(AttentionParams), C.POINTER(C.c_int64)]
    lib.gdn_attention_workspace.restype = C.c_int
    return lib
