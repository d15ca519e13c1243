"""The C ABI of gdn_moe.h for Python, beside that of gdn.h in abi.py."""
import ctypes as C

import abi

MOE_AUTO, STREAM, GROUPED = range(3)
FEW, TOP_K, EXPERTS = 32, 16, 1024


class MoeParams(C.Structure):
    _fields_ = ([(n, C.c_void_p) for n in ("x", "router", "logits", "gate_up", "down", "shared_gate_up", "shared_down",
                                           "residual", "y", "workspace")]
                + [(n, C.c_int64) for n in ("workspace_bytes", "x_stride", "logits_stride", "residual_stride",
                                            "y_stride")]
                + [(n, C.c_int32) for n in ("tokens", "hidden", "num_experts", "top_k", "inner", "shared_inner",
                                            "io_dtype", "router_dtype", "normalise", "algo", "overlap")])


def declare(lib):
    lib.gdn_moe.argtypes, lib.gdn_moe.restype = [C.POINTER(MoeParams), C.c_void_p], C.c_int
    lib.gdn_moe_workspace.argtypes = [C.POINTER(MoeParams), C.POINTER(C.c_int64)]
    lib.gdn_moe_workspace.restype = C.c_int
    return lib


def load(path):
    return declare(abi.load(path))
