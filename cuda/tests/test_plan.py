#!/usr/bin/env python3
"""The choosers of plan.h as tables: compiles plan_test.cpp with the C++ compiler and runs it. Needs neither CUDA nor a GPU."""
import os
import subprocess
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))


class Plan(unittest.TestCase):
    def test_tables(self):
        sources = [os.path.join(HERE, "plan_test.cpp"), os.path.join(HERE, "..", "chunk", "segments.cu")]
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "plan")
            subprocess.run(["c++", "-std=c++17", "-Wall", "-Werror", "-x", "c++", *sources, "-o", program], check=True)
            done = subprocess.run([program], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout)


if __name__ == "__main__":
    unittest.main()
