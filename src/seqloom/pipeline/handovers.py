"""What one rank hands over from stage to stage, round by round: with whom it exchanges which rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from seqloom.pipeline.borders import Share, alike, border, same_groups, states_layout, whole
from seqloom.plan import Action, ActionKind, Layout, Pipeline

Shares = tuple[Share, ...] | None


class Handovers:
    """The borders between the stages of a pipeline, as one rank sees them."""

    def __init__(self, pipeline: Pipeline, rank: int, device: torch.device) -> None:
        """Look at a pipeline; rows are worked out when they are asked for."""
        self._pipeline, self._rank, self._device = pipeline, rank, device
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._alike: dict[tuple[int, int], bool] = {}

    def of(self, stage: int, number: int, tokens: int) -> tuple[Shares, Shares]:
        """Return what comes from the stage before and what goes to the stage after in a round; None: nothing moves.

        Args:
            stage: one of this rank.
            number: of the round.
            tokens: of this rank on the stage.
        """
        behind = self._side(stage - 1, number, tokens, sends=False) if stage else None
        ahead = self._side(stage, number, tokens, sends=True) if stage + 1 < len(self._pipeline.stages) else None
        return behind, ahead

    def with_own(self, row: Sequence[Action]) -> tuple[Action, ...]:
        """Return a host's row with the messages among its ranks: between its own stages, where tokens change places.

        They follow directly what makes them, on all ranks of the host, so they are sent and received in one order.
        """
        return tuple(each for action in row for each in (action, *self._own(action)))

    def _own(self, action: Action) -> Iterator[Action]:
        if action.round is None or action.kind not in (ActionKind.F, ActionKind.B, ActionKind.I):
            return
        forward = action.kind == ActionKind.F
        other = action.stage + (1 if forward else -1)
        first = min(action.stage, other)
        if 0 <= other < len(self._pipeline.stages) and self._moves_inside(first, action.round):
            kinds = (ActionKind.SEND_F, ActionKind.RECV_F) if forward else (ActionKind.SEND_B, ActionKind.RECV_B)
            yield Action(action.stage, kinds[0], action.round)
            yield Action(other, kinds[1], action.round)

    def _moves_inside(self, stage: int, number: int) -> bool:
        """Whether tokens change ranks between a stage and the next one, both on one host."""
        one, other = self._pipeline.stages[stage : stage + 2]
        return one.ranks == other.ranks and not self._same(stage, number)

    def _side(self, stage: int, number: int, tokens: int, *, sends: bool) -> Shares:
        """Return this rank's side of the border between `stage` and the next one."""
        ranks, others = (each.ranks for each in self._pipeline.stages[stage : stage + 2])
        if self._same(stage, number):
            if ranks == others:
                return None
            here, there = (ranks, others) if sends else (others, ranks)
            return whole(tokens, there[here.index(self._rank)])
        source, target = self._layout(stage, number), self._layout(stage + 1, number)
        return border(source, target, self._rank, sends=sends, device=self._device)

    def _same(self, stage: int, number: int) -> bool:
        key = (stage, number)
        if key not in self._alike:
            ranks, others = (each.ranks for each in self._pipeline.stages[stage : stage + 2])
            work, other = self._pipeline.rounds[number].work[stage : stage + 2]
            self._alike[key] = same_groups(work, other, ranks, others) or alike(
                self._layout(stage, number), self._layout(stage + 1, number), ranks, others
            )
        return self._alike[key]

    def _layout(self, stage: int, number: int) -> Layout:
        key = (stage, number)
        if key not in self._layouts:
            self._layouts[key] = states_layout(self._pipeline.rounds[number].work[stage])
        return self._layouts[key]
