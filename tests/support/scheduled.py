"""Pipeline plans in the order of a schedule by its name, for tests: drawn ones, and some that are always the same."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from seqloom.describe import ModelSpec
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Limits, Pipeline, Plan, Reduce, Round, Sharding, Stage, StageMicroBatch
from seqloom.schedules import Schedule
from seqloom.schedules.registry import SCHEDULES, build_schedule
from support.pipelines import ample, grouped_rounds, stages_on
from support.steps import Step, tiny_spec


@st.composite
def scheduled_steps(draw: st.DrawFn, name: str) -> tuple[Step, Plan]:
    """Draw a step and its plan in the order of a schedule that has a name.

    A sequence of the schedule is a document in as many pieces, with whole documents beside some of the pieces.
    """
    hosts, width = draw(st.sampled_from((3, 2, 4, 1))), draw(st.sampled_from((1, 2)))
    counts = st.just(1) if SCHEDULES[name].for_pieces else st.sampled_from((2, 1, 3))
    pieces = [draw(counts) for _ in range(draw(st.integers(3, 5)))]
    schedule = build_schedule(name, hosts, len(pieces), pieces)
    lengths = [draw(st.integers(count, 9)) for count in pieces]
    beside = draw(st.lists(st.integers(0, len(schedule.units) - 1), max_size=2))
    placements = unit_spans(schedule, lengths, beside, length=draw(st.integers(1, 5)))
    spec = tiny_spec(layers=len(schedule.pp_ranks), tied=draw(st.booleans()), hidden=8, ffn=8)
    own = ample(hosts * width, spec.heads)
    stages = stages_on(schedule.pp_ranks, width, spec.layers)
    rounds = draw(grouped_rounds(placements, len(lengths) + len(beside), stages, own, Sharding.FULL))
    return scheduled(schedule, spec, stages, rounds, own)


def unit_spans(schedule: Schedule, lengths: Sequence[int], beside: Sequence[int], length: int) -> list[list[Span]]:
    """Return what every unit works on: pieces of sequences as equal as can be, whole documents beside some units.

    Args:
        schedule: its units are the pieces of sequences.
        lengths: of the sequences.
        beside: units with a whole document more.
        length: of these.
    """
    placements: list[list[Span]] = []
    for sequence, piece, count in schedule.units:
        low, high = (lengths[sequence] * (piece + k) // count for k in (0, 1))
        placements.append([Span(sequence, low, high)])
    for document, unit in enumerate(beside, len(lengths)):
        placements[unit].append(Span(document, 0, length))
    return placements


def scheduled(
    schedule: Schedule, spec: ModelSpec, stages: Sequence[Stage], rounds: Sequence[Round], own: Limits
) -> tuple[Step, Plan]:
    """Return the step of some rounds and its plan, in the order of a schedule."""
    ends: dict[int, int] = {}
    for document, _, stop in (span for each in rounds for span in each.by_stage[0].spans()):
        ends[document] = max(stop, ends.get(document, 0))
    lengths = tuple(ends[document] for document in range(len(ends)))
    line = Pipeline(tuple(stages), tuple(rounds), schedule.pipeline_actions())
    plan = Plan(own, Sharding.FULL, Reduce.STEP, lengths, (line,), schedule.name)
    plan.validate()
    return Step(lengths, spec), plan


def fixed_step(
    name: str, hosts: int, width: int, pieces: Sequence[int], *, ring: bool = False, tied: bool = True
) -> tuple[Step, Plan]:
    """Return a step of documents in pieces, packs beside two of them, under every checkpointing; the same anywhere.

    Args:
        name: of the schedule.
        hosts: of the pipeline.
        width: ranks of each; all of them share every document.
        pieces: of every sequence.
        ring: whether they share it by position instead of by heads.
        tied: whether the head is the table of tokens.
    """
    schedule = build_schedule(name, hosts, len(pieces), list(pieces))
    placements = unit_spans(schedule, [5 + 7 * count for count in pieces], (0, len(schedule.units) - 1), length=4)
    spec = tiny_spec(layers=len(schedule.pp_ranks) + 1, tied=tied)
    stages, own = stages_on(schedule.pp_ranks, width, spec.layers), ample(hosts * width, spec.heads)
    shape = (1, width) if ring else (width, 1)
    kinds = [*Checkpoint] * len(placements)
    rounds = [
        Round(
            tuple(
                StageMicroBatch(
                    (Group(stage.ranks, *shape, tuple(spans)),),
                    kinds[unit + s],
                    offloaded_layers=stage.layer_count if unit % 3 == 1 else 0,
                )
                for s, stage in enumerate(stages)
            )
        )
        for unit, spans in enumerate(placements)
    ]
    return scheduled(schedule, spec, stages, rounds, own)
