"""Puts the harness, cuda/tests, on the path of Python. Imported before it."""
import os
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 3, "cuda", "tests"))
