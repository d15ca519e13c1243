"""Tables of cases: all combinations of some values, and their names. Needs no torch."""
import itertools
import random


def every(*tables, **axes):
    """[{name: value}, ..]: all combinations of the axes. A list is an axis, anything else one value; each of `tables` is a list of
    dicts, one more axis. The last one changes first."""
    parts = [*tables, *([{name: value} for value in (values if isinstance(values, list) else [values])] for name, values in axes.items())]
    return [{name: value for part in combination for name, value in part.items()} for combination in itertools.product(*parts)]


def rows(names, *values):
    """Rows of a table: rows("hk hv", (2, 4), ..) is [{"hk": 2, "hv": 4}, ..]; of one name the values stand alone."""
    names = names.split()
    return [dict(zip(names, value if len(names) > 1 else (value,))) for value in values]


# Scales of q and epsilons of the L2 norm beside K^-0.5 and 1e-6, large enough to be missed.
CONSTANTS = rows("scale l2_eps", (0.3, 1e-6), (None, 20.0), (0.3, 20.0))


def drawn(cases, **values):
    """The cases, each with a value drawn from each list: always the same ones, and in no step with the axes."""
    draws = {name: random.Random(name) for name in values}
    return [{**case, **{name: draws[name].choice(some) for name, some in values.items()}} for case in cases]


def words(case):
    """A case in words. Long lists are cut."""
    shown = lambda value: value if len(value) < 60 else f"{value[:50]}.."
    return " ".join(f"{name}={shown(str(value).replace(' ', ''))}" for name, value in case.items() if name != "seed")
