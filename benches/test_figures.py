"""The tables of the READMEs are those of the records: `python3 -m unittest discover benches`. Needs pandas and matplotlib."""
import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
try:
    import figures
except ImportError as e:
    raise unittest.SkipTest(f"figures.py: {e}: pip install -r benches/requirements.txt")


class Figures(unittest.TestCase):
    def test_pages(self):
        for page, text in figures.pages().items():
            self.assertMultiLineEqual((figures.TOP / page).read_text(encoding="utf-8"), text, f"{page}: python3 benches/figures.py")

    def test_floors_of_experts_are_counted(self):
        df = figures.frame.load(figures.TOP / figures.RESULTS)[1]
        for note, gaps in (("", [0, 3, 3]), ("960 experts chosen", [0, 0, 0])):
            df.loc[:, "note"] = note
            floors = [line for line in figures.models(df).splitlines() if line.startswith("| floor")]
            self.assertEqual([line.count("–") for line in floors], gaps, note)

    def test_rows_are_of_one_commit(self):
        """Ours and the peers'. The harness of the contest has a commit of its own."""
        for machine in ("nvidia-h200", "nvidia-h100-80gb-hbm3"):
            heads, df = figures.frame.load(figures.TOP / "benches/results" / machine)
            rows = df[df.tool.isin(["benches/peers", "benches/gpu"])]
            self.assertEqual(len({heads[n]["commit"] for n in rows.file}), 1, machine)


if __name__ == "__main__":
    unittest.main()
