"""The C ABI of gdn_model.h for Python, beside that of gdn.h in abi.py."""
import ctypes as C

import abi
from abi import LinearParams


class ResidualParams(C.Structure):
    _fields_ = ([(n, C.c_void_p) for n in ("x", "h", "sum", "y", "weight")]
                + [(n, C.c_int64) for n in ("x_stride", "h_stride", "sum_stride", "y_stride", "rows")]
                + [(n, C.c_int32) for n in ("dim", "dtype", "overlap")] + [("eps", C.c_float)])


class SwigluParams(C.Structure):
    _fields_ = ([(n, C.c_void_p) for n in ("gate", "up", "out")]
                + [(n, C.c_int64) for n in ("gate_stride", "up_stride", "out_stride", "rows")]
                + [(n, C.c_int32) for n in ("columns", "dtype", "overlap")])


class LinearOptions(C.Structure):
    _fields_ = [(n, C.c_int32) for n in ("swiglu", "warps", "groups", "cluster", "blocks")]


def load(path):
    lib = abi.load(path)
    for name, params in (("gdn_residual", ResidualParams), ("gdn_swiglu", SwigluParams)):
        f = getattr(lib, name)
        f.argtypes, f.restype = [C.POINTER(params), C.c_void_p], C.c_int
    lib.gdn_linear_with.argtypes = [C.POINTER(LinearParams), C.POINTER(LinearOptions), C.c_void_p]
    lib.gdn_linear_with.restype = C.c_int
    return lib
