"""What `cpu_pipeline` finds: every side's times, how far predictions are off, and whether the targets hold."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import record
from common import Check, show, show_checks
from training_report import described

from seqloom.cost.calibrate import Calibration
from seqloom.plan import Plan
from seqloom.simulate import Simulation

Row = dict[str, dict[str, Any]]
"""One batch: by side, what was predicted and measured."""


@dataclass
class Report:
    """Everything that goes into the result."""

    calibration: Calibration
    settings: dict[str, Any]
    rows: dict[int, list[Row]] = field(default_factory=dict)
    """By number of stages."""

    @staticmethod
    def entry(plan: Plan, predicted: Simulation, seconds: float, busy: list[float]) -> dict[str, Any]:
        """One batch by one side; busy: seconds of every rank in forwards and backwards."""
        expected = predicted.busy_ns + predicted.comm_ns
        return {
            "measured_ms": 1e3 * seconds,
            "predicted_ms": predicted.step_ns / 1e6,
            "measured_busy_ms": 1e3 * np.mean(busy),
            "predicted_busy_ms": expected.mean() / 1e6,
            "fullest": [1e3 * max(busy), expected.max() / 1e6],
            "units": len(plan.pipelines[0].rounds),
            "plan": plan.hash[:12],
        }

    @staticmethod
    def line(row: Row) -> str:
        return ", ".join(f"{n} {v['measured_ms']:.0f} ({v['predicted_ms']:.0f})" for n, v in row.items())

    def sides(self) -> list[dict[str, Any]]:
        """Means over the batches; ratios are of sums."""
        found = []
        for stages, rows in self.rows.items():
            measured = {name: np.array([row[name]["measured_ms"] for row in rows]) for name in rows[0]}
            for name, times in measured.items():
                predicted = np.array([row[name]["predicted_ms"] for row in rows])
                found.append(
                    {
                        "stages": stages,
                        "side": name,
                        "measured_ms": times.mean(),
                        "predicted_off": predicted.sum() / times.sum() - 1,
                        "busy_off": _total(rows, name, "predicted_busy_ms") / _total(rows, name, "measured_busy_ms")
                        - 1,
                        "worst_step_off": np.abs(predicted / times - 1).max(),
                        "auto_faster": times.sum() / measured["auto"].sum(),
                        "units": np.mean([row[name]["units"] for row in rows]),
                    }
                )
        return found

    def checks(self) -> list[Check]:
        """The targets."""
        sides = self.sides()
        off = 100 * max(abs(side["predicted_off"]) for side in sides)
        least = min(side["auto_faster"] for side in sides if side["side"] != "auto")
        return [
            Check("predicted step time off, the worst side, %", off, 15),
            Check("auto / the best other side, speed", least, 1.0, True),
        ]

    def write(self, script: str, arguments: argparse.Namespace) -> None:
        """Write the result."""
        figures: dict[str, Any] = self.settings | {"sides": self.sides(), "steps": self.rows}
        figures["profile"] = asdict(self.calibration.profile)
        pairs = zip(self.calibration.trials, self.calibration.predicted_ns, strict=True)
        figures["calibration"] = [described(trial, predicted) for trial, predicted in pairs]
        record.write(arguments.out, script, arguments, figures, self.checks(), gpu=False)

    def show(self) -> None:
        sides = self.sides()
        rows = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in side.values()] for side in sides]
        show("steps", [*sides[0]], rows)
        show_checks(self.checks())


def _total(rows: list[Row], name: str, key: str) -> float:
    return sum(row[name][key] for row in rows)
