"""The figures of a benchmark: each has a target, and a benchmark that misses one exits with 1.

A benchmark says at its top what it will measure (`Figure`s), sets every value once and ends with finish(), which prints each figure
beside its target and ceiling, then for run.py one JSON line per figure and one that says that the benchmark came to its end. A
value that is missing or not finite misses its target.

Every benchmark takes --impossible (targets that nothing meets: shows that the benchmark can fail) and --smoke (the same, with the fewest
rounds and the smallest sizes that give every figure: shows that the benchmark runs, and judges no time).
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    name: str
    unit: str  # "x": a ratio, 1 is as good as what it is compared with
    ceiling: str  # what bounds the figure, or what it is compared with
    at_least: float | None = None  # the target: one of the two
    at_most: float | None = None

    def __post_init__(self):
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"{self.name}: at_least or at_most")


def common_options(description):
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("bin_dir", type=Path, help="build/bin")
    parser.add_argument("--smoke", action="store_true", help="the fewest rounds that give every figure, with impossible targets")
    parser.add_argument("--impossible", action="store_true", help="targets that nothing meets: every figure must be missed")
    return parser


class Figures:
    def __init__(self, options, figures):
        self.impossible = options.impossible or options.smoke
        self.benchmark = Path(sys.argv[0]).name
        self.figures = {figure.name: figure for figure in figures}
        if len(self.figures) != len(figures):
            raise ValueError("two figures have the same name")
        self.values, self.ceilings = {}, {}

    def set(self, name, value, ceiling=None):
        """`ceiling`: the figure's, with what was measured of it."""
        if name not in self.figures or name in self.values:
            raise KeyError(f"{name}: {'set twice' if name in self.values else 'not announced'}")
        self.values[name] = value
        self.ceilings[name] = ceiling or self.figures[name].ceiling

    def target(self, figure):
        at_least = figure.at_least is not None
        if self.impossible:
            return math.inf if at_least else -math.inf
        return figure.at_least if at_least else figure.at_most

    def met(self, figure):
        value = self.values.get(figure.name)
        if not measured(value):
            return False
        return value >= self.target(figure) if figure.at_least is not None else value <= self.target(figure)

    def rows(self):
        """`target` is the figure's own, whatever it was judged by."""
        judged = {"impossible": True} if self.impossible else {}
        return [{"benchmark": self.benchmark, "figure": figure.name, "value": self.values.get(figure.name), "unit": figure.unit,
                 "bound": "at least" if figure.at_least is not None else "at most",
                 "target": figure.at_least if figure.at_least is not None else figure.at_most,
                 "ceiling": self.ceilings.get(figure.name, figure.ceiling), "met": self.met(figure), **judged}
                for figure in self.figures.values()]

    def finish(self):
        """Prints everything and exits: 0 if every target is met."""
        rows = self.rows()
        for line in table(rows):
            print(line)
        for row in rows:
            print(json.dumps(row))
        missed = sum(not row["met"] for row in rows)
        print(json.dumps({"benchmark": self.benchmark, "figures": len(rows), "missed": missed}), flush=True)
        sys.exit(1 if missed or not rows else 0)

    def fail(self, reason):
        """Ends the benchmark, which cannot measure: what is not set is missing."""
        print(f"{self.benchmark}: {reason}")
        self.finish()


def measured(value):
    return value is not None and math.isfinite(value)


def number(value, unit):
    if value is None:
        return "missing"
    if not math.isfinite(value):
        return str(value)
    digits = 3 if abs(value) < 0.1 else 2 if abs(value) < 100 else 0
    return f"{value:.{digits}f}{'' if unit == 'x' else ' '}{unit}"


def verdict(row):
    if "impossible" in row and measured(row["value"]):
        return "CANNOT FAIL" if row["met"] else "can fail"
    return "met" if row["met"] else "MISSED"


def table(rows):
    """Lines: a figure, its value, its target, its ceiling, and whether the target is met."""
    cells = [("figure", "value", "target", "ceiling", "verdict")]
    cells += [(row["figure"], number(row["value"], row["unit"]), f"{row['bound']} {number(row['target'], row['unit'])}", row["ceiling"],
               verdict(row)) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
