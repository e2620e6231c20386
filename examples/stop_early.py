"""A callback: end a run when the loss on the validation documents no longer falls.

python examples/stop_early.py
seqloom train recipes/tiny-cpu.toml --set "run.callbacks=['examples/stop_early.py:StopEarly']"
"""

from math import inf

from seqloom.train import Callback, train


class StopEarly(Callback):
    """Ends a run after `patience` evaluations in which the loss was not lower than before."""

    def __init__(self, patience: int = 1) -> None:
        """Wait for so many."""
        self.patience, self.lowest, self.failed = patience, inf, 0

    def on_evaluate(self, step: int, loss: float) -> bool:
        """Return True to end the run."""
        self.failed = 0 if loss < self.lowest else self.failed + 1
        self.lowest = min(loss, self.lowest)
        return self.failed >= self.patience


if __name__ == "__main__":  # ranks are processes that import this file
    settings = ["run.ranks=2", "run.steps=40", "evaluation.every=2", "optimiser.lr=0.05", "checkpoint.best=true"]
    summary = train("recipes/tiny-cpu.toml", overrides=settings, callbacks=[StopEarly(patience=2)])
    print(f"stopped after {summary['stopped']}; the best checkpoint is that of step {summary['best']['step']}")
