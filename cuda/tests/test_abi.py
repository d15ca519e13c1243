"""The ABI next to a C compiler: `python3 -m unittest discover cuda/tests`. Needs cc, neither torch nor CUDA."""
import ctypes as C
import os
import tempfile
import unittest

import abi


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
        for text in ("typedef struct gdn_x { int32_t n[4]; } gdn_x;", "typedef struct gdn_x { size_t n; } gdn_x;",
                     "typedef struct gdn_x { int32_t n : 3; } gdn_x;", "typedef struct gdn_x { void **p; } gdn_x;",
                     "typedef struct gdn_x { gdn_y y; } gdn_x;", "typedef struct gdn_x { int32_t n; } gdn_z;",
                     "typedef union gdn_x { int32_t n; } gdn_x;", "typedef enum gdn_x { GDN_A } gdn_x;",
                     "typedef enum gdn_x { GDN_A = -1 } gdn_x;", "typedef int gdn_x;", "#define GDN_X (1 << 3)",
                     "#if GDN_X\n#endif", "#ifdef GDN_X\n#endif", "#pragma pack(1)", "int gdn_f(short x);",
                     "short gdn_f(int x);", "static int n;", "int gdn_f(int x)", "#ifndef GDN_H\n#define GDN_H",
                     "#define GDN_X 1\n#define GDN_X 1"):
            with self.assertRaises(ValueError, msg=text):
                abi.Headers([]).read(text)


if __name__ == "__main__":
    unittest.main()
