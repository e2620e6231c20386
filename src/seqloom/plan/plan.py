"""The plan of one optimiser step: an immutable value without tensors, decided once and read by everyone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seqloom.errors import PlanError
from seqloom.plan.limits import Limits, Reduce, Sharding
from seqloom.plan.notebook import html_table
from seqloom.plan.pipeline import Pipeline
from seqloom.plan.rules import RULES

NOTEBOOK_ROWS = 40
"""Groups that a notebook shows of a plan."""


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Pipelines side by side, over the documents of one step.

    Equality and hash are those of the content: who made the plan, and for what, does not matter.

    Attributes:
        limits: what the plan must respect.
        sharding: how far parameters are sharded.
        reduce: when gradients are reduced.
        documents: length of every document in tokens; a document's id is its index.
        pipelines: pipelines on disjoint ranks.
        planner: name of the planner.
        made_for: cluster, model, profile and limits that it was made for, as files have them; see `cost.made_for`.
            None: not said.
    """

    limits: Limits
    sharding: Sharding
    reduce: Reduce
    documents: tuple[int, ...]
    pipelines: tuple[Pipeline, ...]
    planner: str = field(default="", compare=False)
    made_for: dict[str, Any] | None = field(default=None, compare=False)
    _hash: str | None = field(default=None, init=False, compare=False)
    _valid: bool = field(default=False, init=False, compare=False)

    @property
    def hash(self) -> str:
        """Hex sha256 of the canonical JSON without `planner` and `made_for`; the same in every process."""
        from seqloom.plan.json import content_hash

        known = self._hash or content_hash(self)
        object.__setattr__(self, "_hash", known)
        return known

    @property
    def shard_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that share parameter shards, and so take part in the same rounds, pipeline rank by pipeline rank.

        A shard group is all ranks of a pipeline rank (full sharding), those in one node (hybrid), or one rank (none),
        and its EP group where experts are divided. Ranks of no stage are in no shard group.
        """
        pp_ranks = ((each, index) for each in self.pipelines for index in range(len(each.ranks_by_pp_rank)))
        return tuple(group for pipeline, index in pp_ranks for group in self.shard_groups_of(pipeline, index))

    def shard_groups_of(self, pipeline: Pipeline, pp_rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the shard groups of one pipeline rank."""
        first = pipeline.stages[pipeline.stages_of(pp_rank)[0]]
        return self.limits.shard_groups(self.sharding, first.ranks, first.expert)

    @property
    def rounds(self) -> int:
        """Rounds of the longest pipeline."""
        return max((len(pipeline.rounds) for pipeline in self.pipelines), default=0)

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(self.documents)

    @property
    def has_pieces(self) -> bool:
        """Whether a document is cut into pieces."""
        return any(pipeline.has_pieces(self.documents) for pipeline in self.pipelines)

    def validate(self) -> None:
        """Raise `PlanError` with the value, the rule and the nearest legal choice if a rule is broken.

        Rules are checked once: a plan never changes.
        """
        if not self._valid:
            for rule in RULES.values():
                rule(self)
            object.__setattr__(self, "_valid", True)

    def to_json(self) -> str:
        """Return the plan as one line of JSON."""
        from seqloom.plan.json import to_json

        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote; does not validate."""
        from seqloom.plan.json import from_json

        return from_json(text)

    def to_text(self) -> str:
        """Return the plan in its readable form, one line per group and per row of actions."""
        from seqloom.plan.text import to_text

        return to_text(self)

    @classmethod
    def from_text(cls, text: str) -> Plan:
        """Read what `to_text` wrote; does not validate."""
        from seqloom.plan.text import from_text

        return from_text(text)

    def _repr_html_(self) -> str:
        """Show the plan in a notebook: its first groups, round by round."""
        rows = [
            (
                pipeline_number,
                round_number,
                stage,
                ranks_text(group.ranks),
                group.ulysses,
                group.ring,
                len(group.spans),
                tokens,
            )
            for pipeline_number, pipeline in enumerate(self.pipelines)
            for round_number, current in enumerate(pipeline.rounds)
            for stage, work in enumerate(current.by_stage)
            for group in work.groups
            for tokens in [f"{sum(stop - start for _, start, stop in group.spans):,}"]
        ]
        hidden = len(rows) - NOTEBOOK_ROWS
        caption = f"{self!r}, the last {hidden:,} groups not shown" if hidden > 0 else repr(self)
        header = ("pipeline", "round", "stage", "ranks", "ulysses", "ring", "sequences", "tokens")
        return html_table(caption, header, rows[:NOTEBOOK_ROWS])

    def save(self, path: str | Path) -> None:
        """Write the plan to a .json or .txt file."""
        form = _form_of(path)
        Path(path).write_text(self.to_json() + "\n" if form == ".json" else self.to_text(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read and validate a plan file."""
        form = _form_of(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read {str(path)!r}: {error}; give a plan file", rule="format") from error
        plan = cls.from_json(text) if form == ".json" else cls.from_text(text)
        plan.validate()
        return plan

    def __hash__(self) -> int:
        return int(self.hash[:15], 16)

    def __repr__(self) -> str:
        rounds = sum(len(pipeline.rounds) for pipeline in self.pipelines)
        groups = sum(len(current.groups) for pipeline in self.pipelines for current in pipeline.rounds)
        name = self.planner or "unnamed"
        return (
            f"Plan({name}: {len(self.documents)} documents, {self.limits.ranks} ranks, {rounds} rounds, "
            f"{groups} groups, hash {self.hash[:8]})"
        )


def _form_of(path: str | Path) -> str:
    suffix = Path(path).suffix
    if suffix not in (".json", ".txt"):
        raise PlanError(f"{str(path)!r} ends in {suffix!r}; a plan file ends in .json or .txt", rule="format")
    return suffix


def plan_shape(plan: Plan) -> str:
    """Name the pipelines of a plan side by side, those with most ranks first; equal ones are counted.

    A pipeline is its tensor degree, its pipeline ranks and its ranks: ``t2p2 on 4, 2 of t1p1 on 2`` has a pipeline of
    two stages of two ranks that split the weights, and two pipelines of one stage on two ranks. For logs and metrics.
    """
    counts = Counter((len(pipeline.ranks), _pipeline_shape(pipeline)) for pipeline in plan.pipelines)
    largest_first = sorted(counts.items(), key=lambda each: (-each[0][0], each[0][1]))
    return ", ".join(f"{count} of {name}" if count > 1 else name for (_, name), count in largest_first)


def _pipeline_shape(pipeline: Pipeline) -> str:
    tensors = dict.fromkeys(str(stage.tensor) for stage in pipeline.stages)
    return f"t{'-'.join(tensors)}p{len(pipeline.ranks_by_pp_rank)} on {len(pipeline.ranks)}"


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Return ranks as text, contiguous ones as first and last: ``0-7``."""
    if len(ranks) > 1 and tuple(ranks) == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
