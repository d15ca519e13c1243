"""page.py on a small trace."""
import gzip
import json
import os
import tempfile
import unittest
from unittest import mock
from xml.etree import ElementTree

import page


def warp(tid, role, launch, begin, scopes, ghz=2.0):
    """A warp and its scopes (name, µs) one after the other, as the trace has them."""
    total = sum(us for _, us in scopes)
    slices = [("X", tid, role, begin, total, {"launch": launch, "block": 0, "warp": tid, "cycles": round(1000 * ghz * total),
                                              "dropped": 0})]
    for name, us in scopes:
        slices.append(("X", tid, name, begin, us, {"cycles": round(1000 * ghz * us), "token": 64}))
        begin += us
    return [dict(zip(("ph", "tid", "name", "ts", "dur", "args"), s), pid=3) for s in slices]


EVENTS = [{"ph": "M", "pid": 3, "tid": 1, "name": "thread_name", "args": {"name": "x"}},
          *warp(1, "prefill math", 0, 0.0, [("wait: matrices", 1.0), ("U", 2.0), ("U", 1.0)]),
          *warp(2, "prefill maker", 0, 0.0, [("inverse", 3.0), ("wait: tiles", 1.0)]),
          *warp(3, "prefill math", 1, 5.0, [("U", 1.0)])]


class Page(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = os.path.join(self.folder.name, "a.json.gz")
        with gzip.open(self.path, "wt") as file:
            json.dump({"traceEvents": EVENTS}, file)

    def test_shares(self):
        warps = page.read(self.path)
        self.assertEqual([(w.sm, w.role, len(w.scopes)) for w in warps],
                         [(2, "prefill math", 3), (2, "prefill maker", 2), (2, "prefill math", 1)])
        self.assertEqual(page.shares(warps[:1]), {"wait: matrices": (0.25, 2000), "U": (0.75, 2000)})

    def test_picture(self):
        root = ElementTree.fromstring(page.picture(page.read(self.path)))
        titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
        # Of the longer launch alone.
        self.assertEqual(titles[1], "U, 4000 cycles, token 64")
        self.assertEqual(len(titles), 5)

    def test_window_of_a_long_launch(self):
        warps = [w._replace(end=w.end + 100) for w in page.read(self.path)]
        _, _, tracks, begin, end = page.window(warps)
        self.assertEqual(tracks, [1, 2])
        self.assertAlmostEqual(end - begin, page.WINDOW_US)
        self.assertAlmostEqual((begin + end) / 2, 52)

    def test_page(self):
        with open(os.path.join(self.folder.name, "about.tsv"), "w") as file:
            file.write("a\tNVIDIA H200\t0123abc\tprofile --op prefill\tgdn_prefill: 1 x 64 tokens\n")
        written = os.path.join(self.folder.name, "page.md")
        with mock.patch("sys.argv", ["page.py", self.folder.name, "--page", written]):
            page.main()
        with open(written) as file:
            text = file.read()
        for expected in ("## a\n\ngdn_prefill: 1 x 64 tokens. NVIDIA H200, `profile", "### Launch 2 of 2 (1 blocks in the trace)",
                         "| U | 75.0 % | 2000 |  |  |", "| all waits | 25.0 % |  | 25.0 % |  |"):
            self.assertIn(expected, text)
        self.assertTrue(os.path.exists(os.path.join(self.folder.name, "a.svg")))


if __name__ == "__main__":
    unittest.main()
