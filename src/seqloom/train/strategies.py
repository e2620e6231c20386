"""The strategies that a run chooses from at every step: proposed for its data, or read from a file.

The list is part of a run's folder, so that it can be read, and given to another run. Nothing that is saved depends on
it: parameters and the optimiser's state lie the same way whatever the plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from seqloom.cost import CostModel
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.planners.registry import chooses_strategies, makes_stages
from seqloom.planners.strategies import (
    Strategy,
    check_strategies,
    propose_strategies,
    strategies_from_json,
    strategies_to_json,
)
from seqloom.planners.strategies.assign import Assignment
from seqloom.planners.strategies.planner import build
from seqloom.train.config import Config

FILE = "strategies.json"
"""Where the list lies in a run's folder."""
FEW = 2
"""Tokens per rank of a document that rehearses a pipeline."""


def candidates(config: Config, cost: CostModel, lengths: np.ndarray) -> tuple[Strategy, ...]:
    """Return what the run's planner chooses from; nothing where it chooses from no list.

    Args:
        config: of the run.
        cost: prices its plans.
        lengths: int64[documents], tokens of all its documents.

    Raises:
        SeqloomError: a list that cannot be read, that the ranks or the model do not allow, or that holds no document
            as long as the longest.
    """
    planner, stages = config.plan.planner, config.pipeline.stages
    if not chooses_strategies(planner, config.plan.sharding) or stages != 1:
        return ()
    if config.plan.strategies == "auto":
        tokens = tokens_of_step(config, lengths)
        try:
            return propose_strategies(lengths, cost, tokens_per_step=tokens, seed=config.run.seed)
        except SeqloomError:
            if makes_stages(planner):
                raise
            return ()  # plans of one stage may do
    strategies = _read(Path(config.plan.strategies), cost)
    room, longest = max(each.longest for each in strategies), int(lengths.max())
    if room < longest:
        raise SeqloomError(
            f"document {int(lengths.argmax())} has {longest:,} tokens, but no pipeline of plan.strategies = "
            f"{config.plan.strategies!r} holds more than {room:,}; set data.max_length to {room} with data.too_long "
            "'truncate' or 'drop', or propose strategies for longer documents"
        )
    return strategies


def tokens_of_step(config: Config, lengths: np.ndarray) -> int:
    """Return the tokens that a step of the run has, as a mean where it has so many documents."""
    return config.data.tokens or round((config.data.sequences or 1) * float(lengths.mean()))


def kept(config: Config, strategies: Sequence[Strategy]) -> Config:
    """Write a list that was proposed into the run's folder; return the config that names the file.

    One that came from a file stays there.
    """
    if not strategies or config.plan.strategies != "auto":
        return config
    path = config.run.output / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(strategies_to_json(strategies) + "\n")
    except OSError as error:
        reason = error.strerror or error
        raise SeqloomError(f"{path}: cannot be written ({reason}); choose another run.output") from None
    return replace(config, plan=replace(config.plan, strategies=str(path)))


def told(config: Config, strategies: Sequence[Strategy], former: Sequence[Any] | None) -> Iterator[str]:
    """Say what the run chooses from, and whether the run that it goes on from chose from something else.

    Args:
        config: of the run.
        strategies: its list.
        former: that of the checkpoint, as plain values; None: the run begins.
    """
    if strategies:
        where = config.run.output / FILE if config.plan.strategies == "auto" else config.plan.strategies
        yield f"{len(strategies)} strategies to choose from ({where}): {'; '.join(map(str, strategies))}"
    if config.model.compile and any(pipe.scheme.tensor > 1 for each in strategies for pipe in each.pipelines):
        yield "model.compile = true: layers of stages that split weights (tensor > 1) run uncompiled, others compiled"
    if former is not None and list(former) != [each.as_dict() for each in strategies]:
        other = f"{len(former)} other strategies" if former else "no strategies"
        yield f"the checkpoint was made with {other}; nothing in it depends on them"


def small_plans(strategies: Sequence[Strategy], cost: CostModel) -> list[Plan]:
    """Return a plan of next to no tokens for every strategy, in which all its pipelines work on two documents each."""
    plans = []
    for strategy in strategies:
        lengths = [min(FEW * len(pipe.ranks), pipe.longest) for pipe in strategy.pipelines for _ in range(2)]
        batches = tuple(((2 * number,), (2 * number + 1,)) for number in range(len(strategy.pipelines)))
        given = Assignment(0, batches, (0,) * len(batches))
        plans.append(build(np.array(lengths), strategy, given, cost, seed=0).plan)
    return plans


def _read(path: Path, cost: CostModel) -> tuple[Strategy, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SeqloomError(
            f"plan.strategies = {str(path)!r} cannot be read ({reason}); write it with seqloom propose --json, or "
            "set 'auto'"
        ) from None
    try:
        strategies = strategies_from_json(text)
        check_strategies(strategies, cost)
        return strategies
    except SeqloomError as error:
        raise SeqloomError(f"plan.strategies = {str(path)!r}: {error}") from None
