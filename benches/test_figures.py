"""The tables of the READMEs are those of the records: `python3 -m unittest discover benches`. Needs pandas and matplotlib."""
import json
import os
import re
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

    def test_results_of_a_machine_are_of_one_commit(self):
        """Records, and pages that name a commit. Experiments with commits of their own are in docs/results."""
        for machine in (figures.TOP / "benches/results").iterdir():
            found = {}
            for path in machine.rglob("*"):
                name = str(path.relative_to(machine))
                if path.name == "about.tsv":
                    found[name] = [line.split("\t")[2] for line in path.read_text(encoding="utf-8").splitlines()]
                elif path.suffix == ".json" and path.parent.name != "profile":
                    found[name] = [json.loads(path.read_text(encoding="utf-8"))["commit"]]
                elif path.suffix == ".md" and path.name != "table.md":
                    found[name] = re.findall(r"\b[Cc]ommit ([0-9a-f]{7})\b", path.read_text(encoding="utf-8"))
            self.assertEqual(len({commit for commits in found.values() for commit in commits}), 1, f"{machine.name}: {found}")
            self.assertNotIn([], found.values(), machine.name)


if __name__ == "__main__":
    unittest.main()
