"""The ABI next to a C compiler: `python3 -m unittest discover cuda/tests`. Needs cc, neither torch nor CUDA."""
import ctypes as C
import os
import tempfile
import unittest

import abi
import cases


class Abi(unittest.TestCase):
    def test_headers_equal_the_compiled_c(self):
        self.assertEqual(abi.differences(), [])
        self.assertIn("gdn_rule_params", abi.ABI.structs)
        self.assertIn("gdn_rule", abi.ABI.functions)

    def test_a_difference_is_found(self):
        text = "typedef struct gdn_pair { int32_t x; int64_t y; } gdn_pair;\n#define GDN_SEVEN 7\n"
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "pair.h")
            with open(path, "w", encoding="utf-8") as f:
                f.write("#include <stdint.h>\n" + text)
            headers = abi.Headers([path])
            self.assertEqual(abi.differences([path], headers), [])
            headers.constants["GDN_SEVEN"] = 8
            headers.structs["gdn_pair"] = type("Pair", (C.Structure,), {"_fields_": [("x", C.c_int32), ("y", C.c_int32)]})
            wrong = [line.split(":")[0] for line in abi.differences([path], headers)]
        self.assertEqual(wrong, ["GDN_SEVEN", "sizeof(gdn_pair)", "offsetof(gdn_pair, y)", "sizeof(((gdn_pair *)0)->y)"])

    def test_what_is_read(self):
        headers = abi.Headers([])
        headers.read("typedef enum gdn_kind { GDN_A = 0, GDN_B = 1 } gdn_kind;  // words; {\n"
                     "typedef struct gdn_in { const void *p, *q; float x; } gdn_in;\n"
                     "typedef struct gdn_out { gdn_in a, b; /* ; */ uint32_t n; } gdn_out;\n"
                     "#define GDN_ALL 0xffffffffu\n"
                     "const char *gdn_text(int n);\n"
                     "int gdn_go(const gdn_out *x, int64_t *bytes, cudaStream_t stream);\n")
        self.assertEqual(headers.constants, {"GDN_A": 0, "GDN_B": 1, "GDN_ALL": 0xFFFFFFFF})
        self.assertEqual(headers.names_of("gdn_kind", "GDN_"), ["a", "b"])
        out = headers.structs["gdn_out"]
        self.assertEqual([name for name, _ in out._fields_], ["a", "b", "n"])
        self.assertEqual([name for name, _ in headers.structs["gdn_in"]._fields_], ["p", "q", "x"])
        self.assertEqual(headers.functions["gdn_text"], ([C.c_int], C.c_char_p))
        self.assertEqual(headers.functions["gdn_go"], ([C.POINTER(out), C.POINTER(C.c_int64), C.c_void_p], C.c_int))

    def test_what_it_does_not_know_is_an_error(self):
        for text in ("typedef struct gdn_x { int32_t n[FOUR]; } gdn_x;", "typedef struct gdn_x { size_t n; } gdn_x;",
                     "typedef struct gdn_x { int32_t n : 3; } gdn_x;", "typedef struct gdn_x { gdn_y y; } gdn_x;",
                     "typedef struct gdn_x { int32_t n; } gdn_z;", "typedef union gdn_x { int32_t n; } gdn_x;",
                     "typedef enum gdn_x { GDN_A } gdn_x;", "typedef int gdn_x;", "int gdn_f(short x);", "short gdn_f(int x);",
                     "static int n;", "int gdn_f(int x)"):
            with self.assertRaises((ValueError, KeyError, AttributeError), msg=text):
                abi.Headers([]).read(text)

    def test_fields_of_nested_structs(self):
        headers = abi.Headers([])
        headers.read("typedef struct gdn_heads { void *ptr; int64_t stride; } gdn_heads;\n"
                     "typedef struct gdn_common { gdn_heads a; int32_t n; } gdn_common;\n"
                     "typedef struct gdn_all { gdn_common common; gdn_heads q; int64_t stride; } gdn_all;\n")
        made = abi.fill(headers.structs["gdn_all"], n=3, a__stride=4, q__stride=5, stride=6)
        self.assertEqual((made.common.n, made.common.a.stride, made.q.stride, made.stride, made.n), (3, 4, 5, 6, 3))
        for wrong in ("nothing", "ptr"):       # nowhere, and in two places
            with self.assertRaises(AttributeError):
                setattr(made, wrong, None)


class Cases(unittest.TestCase):
    def test_tables(self):
        table = cases.every(cases.rows("a b", (1, 2), (3, 4)), c=[5, 6], d=(7, 8))
        self.assertEqual(table[1], dict(a=1, b=2, c=6, d=(7, 8)))
        several = cases.drawn(cases.every(a=list(range(20))), e=(0, 1, 2))
        self.assertEqual(({case["e"] for case in several}, several), ({0, 1, 2}, cases.drawn(cases.every(a=list(range(20))), e=(0, 1, 2))))
        self.assertEqual(cases.words(dict(lens=[1, 2], seed=3, io="f32")), "lens=[1,2] io=f32")


if __name__ == "__main__":
    unittest.main()
