"""The table of actions as the rules see it: of a plan's pipeline, or of a schedule that is not in a plan yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.error import broken

if TYPE_CHECKING:
    from seqloom.plan.plan import Plan

Row = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """One row of actions per host."""

    name: str
    """How errors name it, for example ``pipeline 0``."""
    hosts: tuple[int, ...]
    """The host of every stage."""
    rounds: int
    rows: tuple[Row, ...]
    links: tuple[tuple[int, int], ...] = ()
    """(early, late) rounds that hold neighbouring pieces of one document; empty where no rule asks for them."""

    @property
    def width(self) -> int:
        """Number of hosts."""
        return max(self.hosts, default=-1) + 1

    def here(self, host: int) -> str:
        """Name a host in an error."""
        return f"{self.name} host {host}"

    def stages_of(self, host: int) -> tuple[int, ...]:
        """Return the stages that a host runs."""
        return tuple(stage for stage, own in enumerate(self.hosts) if own == host)

    def lanes(self) -> Iterator[Lane]:
        """Yield every stage's part of its host's row, in the order of the stages."""
        positions: list[dict[tuple[ActionKind, int | None], int]] = [{} for _ in self.hosts]
        for row in self.rows:
            for k, action in enumerate(row):
                positions[action.stage][action.kind, action.round] = k
        for s, at in enumerate(positions):
            yield Lane(self, s, self.rows[self.hosts[s]], at)


class Lane(NamedTuple):
    """One stage's part of its host's row."""

    table: Table
    stage: int
    row: Row
    at: dict[tuple[ActionKind, int | None], int]
    """Where in the row the stage has which action."""

    @property
    def host(self) -> int:
        """The host whose row it is."""
        return self.table.hosts[self.stage]

    @property
    def here(self) -> str:
        """Name of the host in an error."""
        return self.table.here(self.host)

    def backward(self, number: int) -> int:
        """Return where the stage makes the gradient of its input: at B or I."""
        whole = self.at.get((ActionKind.B, number))
        return self.at[ActionKind.I, number] if whole is None else whole

    def expect(self, first: int, second: int, must: str, rule: str = "order") -> None:
        """Refuse a row in which `first` comes after `second`."""
        if first > second:
            early, late = self.row[second], self.row[first]
            value = f"{self.here} has {early} (action {second}) before {late} (action {first})"
            raise broken(rule, value, must, f"put {late} before {early}", (self.host, second))


def tables(plan: Plan) -> Iterator[Table]:
    """Yield the tables of a plan's pipelines, without links."""
    for p, pipeline in enumerate(plan.pipelines):
        number = {ranks: host for host, ranks in enumerate(pipeline.hosts)}
        hosts = tuple(number[stage.ranks] for stage in pipeline.stages)
        yield Table(f"pipeline {p}", hosts, len(pipeline.rounds), pipeline.actions)
