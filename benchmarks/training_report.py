"""What `cpu_training` finds: means of every planner, how far predictions are off, and whether the targets hold."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import record
from common import Check, show, show_checks

from seqloom.cost import CostModel, GroupShape
from seqloom.cost.calibrate import Calibration, Trial
from seqloom.plan import Group
from seqloom.planners.registry import TimedPlan

TIE = 1.01
"""Planners whose predicted times are nearer than this have no order to be right or wrong about."""
Row = dict[str, dict[str, Any]]
"""One batch: by planner, what was predicted and measured."""


@dataclass
class Report:
    """Everything that goes into the result; rows are added batch by batch."""

    names: list[str]
    calibration: Calibration
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @staticmethod
    def entry(made: TimedPlan, cost: CostModel, seconds: float) -> dict[str, Any]:
        """One batch under one planner."""
        rounds = made.plan.pipelines[0].rounds
        groups = [group for each in rounds for group in each.by_stage[0].groups]
        return {
            "measured_ms": 1e3 * seconds,
            "predicted_ms": cost.plan_ns(made.plan) / 1e6,
            "plan_ms": made.plan_ns / 1e6,
            "rounds": len(rounds),
            "groups": {str(shape): count for shape, count in sorted(Counter(map(shape_of, groups)).items())},
            "plan": made.plan.hash[:12],
        }

    @staticmethod
    def line(row: Row) -> str:
        return ", ".join(f"{n} {v['measured_ms']:.0f} ({v['predicted_ms']:.0f})" for n, v in row.items())

    def planners(self) -> dict[str, dict[str, float]]:
        """Means over the batches; ratios are of sums, so that long steps count as long."""
        found = {}
        static = self.best_static
        for name in self.names:
            measured, predicted = self._column(name, "measured_ms"), self._column(name, "predicted_ms")
            off = predicted / measured - 1
            found[name] = {
                "measured_ms": measured.mean(),
                "predicted_ms": predicted.mean(),
                "predicted_off": predicted.sum() / measured.sum() - 1,
                "mean_step_off": np.abs(off).mean(),
                "worst_step_off": off[np.abs(off).argmax()],
                "to_best_static": self._column(static, "measured_ms").sum() / measured.sum(),
                "plan_ms": self._column(name, "plan_ms").mean(),
            }
        return found

    @property
    def best_static(self) -> str:
        """The static degree that took least time in all."""
        static = [name for name in self.names if name.startswith("static")]
        return min(static, key=lambda name: self._column(name, "measured_ms").sum())

    def order(self, key: str) -> list[str]:
        """The best static degree and the other planners, the fastest first."""
        chosen = [name for name in self.names if name == self.best_static or not name.startswith("static")]
        return sorted(chosen, key=lambda name: self._column(name, key).sum())

    def misplaced(self) -> list[tuple[str, str]]:
        """Pairs of planners of which the first was predicted to be faster, by more than `TIE`, and was not."""
        measured, predicted = (self.order(key) for key in ("measured_ms", "predicted_ms"))
        pairs = [(a, b) for i, a in enumerate(predicted) for b in predicted[i + 1 :]]
        total = {name: self._column(name, "predicted_ms").sum() for name in predicted}
        apart = [(a, b) for a, b in pairs if total[b] > TIE * total[a]]
        return [(a, b) for a, b in apart if measured.index(a) > measured.index(b)]

    def checks(self) -> list[Check]:
        """The targets."""
        table = self.planners()
        off = 100 * max(abs(row["predicted_off"]) for row in table.values())
        rivals = ("flex", "auto")
        checks = [Check(f"{name} / best static, speed", table[name]["to_best_static"], 1.3, True) for name in rivals]
        return [
            *checks,
            Check("predicted step time off, the worst planner, %", off, 15),
            Check("pairs of planners not in the predicted order", len(self.misplaced()), 0),
        ]

    def write(self, script: str, arguments: argparse.Namespace) -> None:
        """Write what is known so far."""
        figures: dict[str, Any] = dict(self.settings)
        if self.rows:
            figures |= {"best_static": self.best_static, "planners": self.planners(), "steps": self.rows}
            figures["order"] = {key: self.order(key) for key in ("measured_ms", "predicted_ms")}
        figures["profile"] = asdict(self.calibration.profile)
        pairs = zip(self.calibration.trials, self.calibration.predicted_ns, strict=True)
        figures["calibration"] = [described(trial, predicted) for trial, predicted in pairs]
        record.write(arguments.out, script, arguments, figures, self.checks() if self.rows else [], gpu=False)

    def show(self) -> None:
        table = self.planners()
        rows = [(name, *(f"{value:.4g}" for value in row.values())) for name, row in table.items()]
        show(f"{len(self.rows)} steps", ("planner", *next(iter(table.values()))), rows)
        show_checks(self.checks())

    def _column(self, name: str, key: str) -> np.ndarray:
        return np.array([row[name][key] for row in self.rows], dtype=float)


def shape_of(group: Group) -> GroupShape:
    return GroupShape(group.ulysses, group.ring, group.method)


def described(trial: Trial, predicted_ns: float) -> dict[str, Any]:
    """One trial of the calibration."""
    rounds = trial.plan.pipelines[0].rounds
    group = rounds[0].by_stage[0].groups[0]
    return {
        "shape": str(shape_of(group)),
        "documents": len(group.spans),
        "length": group.spans[0].tokens,
        "rounds": len(rounds),
        "measured_ms": trial.ns / 1e6,
        "predicted_ms": predicted_ns / 1e6,
    }
