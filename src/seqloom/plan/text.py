"""A plan as text for people: a header, the documents, then one line per stage, group and row of actions.

    seqloom plan 1
    planner flex
    ranks 8
    ...
    documents 3
      0: 9000 512 700
    pipeline 0
    stage 0 ranks 0-7 layers 0-32 tensor 1
    round 0 stage 0 checkpoint selective
      group ranks 0-3 ulysses 4 ring 1: 0[0:4096)
      group ranks 4 ulysses 1 ring 1: 1 2
    host 0: 0F0 0B0 0REDUCE

A document's number alone stands for the whole document. Layers 0-32 are 0 to 31, as in `[0:32)`. An explicit
layout follows its groups, one line per rank. A line `host` is the row of a pipeline rank: host 0 is the ranks of
stage 0, host 1 the next ranks that a stage names, and so on; stages with the same ranks share a row, such as
`host 0: 0F0 0SEND_F0 2RECV_F0 2F0`. `checkpoint selective lighter 5`: the last 5 layers recompute less; `checkpoint
full offload 12`: the first 12 layers are offloaded, without a number all of them. `ulysses 4 ring 1 latent`: latents
travel in the place of keys and values; `ring 1 states`: states of scans in the place of heads. A last line `made_for`
has what the plan was made for, as JSON. Blank lines and lines that begin with # are skipped. Every error of reading
names the line and the rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NoReturn, TypeVar

from seqloom.errors import PlanError, SeqloomError, unknown_name
from seqloom.layout.layout import Layout, Span
from seqloom.layout.route import Route
from seqloom.plan.action import Action
from seqloom.plan.json import KEYS_OF_LIMITS, read_made_for
from seqloom.plan.limits import Limits, Reduce, Sharding
from seqloom.plan.pipeline import Pipeline, Stage
from seqloom.plan.plan import Plan
from seqloom.plan.round import Checkpoint, Group, Method, Remap, Round, StageMicroBatch
from seqloom.reader import parse_json

_DOCUMENTS_PER_LINE = 16
_CAPACITIES = ("capacity", "offload_capacity")
_NUMBERS = {
    name: KEYS_OF_LIMITS.get(name, name) for name in ("ranks", "node_size", "heads", "pad_multiple", "communicators")
}


def to_text(plan: Plan) -> str:
    """Write the readable form."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    yield "seqloom plan 1"
    plain = re.fullmatch(r"[A-Za-z0-9_.+-]+", plan.planner)
    yield f"planner {plan.planner if plain else json.dumps(plan.planner)}"
    for name, key in _NUMBERS.items():
        yield f"{key} {getattr(plan.limits, name)}"
    for key in _CAPACITIES:
        for checkpoint, tokens in getattr(plan.limits, key):
            yield f"{key} {checkpoint} {tokens}"
    yield f"sharding {plan.sharding}"
    yield f"reduce {plan.reduce}"
    yield f"documents {len(plan.documents)}"
    for start in range(0, len(plan.documents), _DOCUMENTS_PER_LINE):
        yield f"  {start}: {' '.join(map(str, plan.documents[start : start + _DOCUMENTS_PER_LINE]))}"
    for number, pipeline in enumerate(plan.pipelines):
        yield f"pipeline {number}"
        yield from _pipeline_lines(pipeline, plan.documents)
    if plan.made_for is not None:
        yield f"made_for {json.dumps(plan.made_for, sort_keys=True)}"


def _pipeline_lines(pipeline: Pipeline, documents: tuple[int, ...]) -> Iterator[str]:
    for s, stage in enumerate(pipeline.stages):
        first, stop = stage.layers
        expert = f" expert {stage.expert}" if stage.expert != 1 else ""
        yield f"stage {s} ranks {_runs(stage.ranks)} layers {first}-{stop} tensor {stage.tensor}{expert}"
    for r, current in enumerate(pipeline.rounds):
        if not current.by_stage:
            yield f"round {r}"
        for s, work in enumerate(current.by_stage):
            remap = "" if work.remap == Remap.ATTENTION else f" remap {work.remap}"
            offload = f" offload {work.offloaded_layers}" if work.offload else ""
            lighter = f" lighter {work.lighter_layers}" if work.lighter_layers else ""
            yield f"round {r} stage {s} checkpoint {work.checkpoint}{lighter}{remap}{offload}"
            yield from _work_lines(work, documents)
    for h, row in enumerate(pipeline.actions):
        yield f"host {h}: {' '.join(map(str, row))}".rstrip()


def _work_lines(work: StageMicroBatch, documents: tuple[int, ...]) -> Iterator[str]:
    for group in work.groups:
        spans = " ".join(_span(span, documents) for span in group.spans)
        shape = f"ulysses {group.ulysses} ring {group.ring}"
        if group.method != Method.RING:
            shape += f" method {group.method}"
        if group.route is not None:
            shape += f" route {_runs(group.route.proxies)} slices {group.route.slices}"
        shape += " latent" * group.latent + " states" * group.states
        yield f"  group ranks {_runs(group.ranks)} {shape}: {spans}".rstrip()
    for name, layout in (("attention", work.attention), ("linear", work.linear)):
        if layout is not None:
            yield f"  {name} axes {layout.axes}"
            yield from _layout_lines(layout)


def _layout_lines(layout: Layout) -> Iterator[str]:
    rows = zip(*(column.tolist() for column in layout.columns()), strict=True)
    form = "{}[{}:{})" + "x[{}:{})" * (layout.axes - 1)
    for rank, boxes in groupby(rows, key=lambda row: row[0]):
        yield f"    rank {rank}: {' '.join(form.format(*box[1:]) for box in boxes)}"


def _span(span: tuple[int, int, int], documents: tuple[int, ...]) -> str:
    document, start, stop = span
    whole = start == 0 and 0 <= document < len(documents) and stop == documents[document]
    return f"{document}" if whole else f"{document}[{start}:{stop})"


def _runs(ranks: Iterable[int]) -> str:
    """Write ranks as runs, in their order: (0, 1, 2, 8, 9) is 0-2,8-9."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs) or "none"


# -- reading ---------------------------------------------------------------------------------------------------------

_KEYS = ("planner", *_NUMBERS.values(), *_CAPACITIES, "sharding", "reduce", "documents")
_STAGE = re.compile(r"stage (\d+) ranks (\S+) layers (\d+)-(\d+) tensor (\d+)(?: expert (\d+))?")
_ROUND = re.compile(
    r"round (\d+)(?: stage (\d+) checkpoint (\S+)(?: lighter (\d+))?(?: remap (\S+))?( offload(?: (\d+))?)?)?"
)
_GROUP = re.compile(
    r"group ranks (\S+) ulysses (\d+) ring (\d+)(?: method (\S+))?(?: route (\S+) slices (\d+))?( latent)?( states)?"
    r":(.*)"
)
_LAYOUT = re.compile(r"(attention|linear) axes ([12])")
_RANK = re.compile(r"rank (\d+):(.*)")
_ACTIONS = re.compile(r"host (\d+):(.*)")
_RUN = re.compile(r"(\d+)(?:-(\d+))?")
_BOX = re.compile(r"(\d+)(?:\[(\d+):(\d+)\)(?:x\[(\d+):(\d+)\))?)?")
_MAX_RANKS = 2**20
"""A run of ranks longer than this is a typing error, not a cluster."""
_MAX_DIGITS = 16

E = TypeVar("E", Sharding, Reduce, Checkpoint, Method, Remap)


def from_text(text: str) -> Plan:
    """Read what `to_text` wrote."""
    lines = _Lines(text)
    if lines.take() != "seqloom plan 1":
        lines.refuse("a plan text begins with 'seqloom plan 1'; write it with Plan.save")
    header = _read_header(lines)
    documents = _read_documents(lines, header.pop("documents"))
    pipelines = []
    while lines.peek() and not lines.peek().startswith("made_for "):
        number = lines.match(re.compile(r"pipeline (\d+)"), "pipeline NUMBER")[1]
        lines.expect_number("pipeline", number, len(pipelines))
        pipelines.append(_read_pipeline(lines, documents))
    made_for = _read_made_for(lines) if lines.peek() else None
    sharding, reduce, planner = header.pop("sharding"), header.pop("reduce"), header.pop("planner")
    header["pad_multiple"] = header.pop("granule")
    return Plan(Limits(**header), sharding, reduce, documents, tuple(pipelines), planner, made_for)


def _read_made_for(lines: _Lines) -> dict[str, Any] | None:
    """Read the last line: what the plan was made for, as JSON."""
    text = lines.take().removeprefix("made_for ")
    try:
        made_for = read_made_for(parse_json(text, "made_for"), "made_for")
    except SeqloomError as error:
        lines.refuse(str(error))
    if lines.peek():
        lines.take()
        lines.refuse("made_for is the last line; remove what follows")
    return made_for


class _Lines:
    """Lines without blank ones and comments, with their numbers."""

    def __init__(self, text: str) -> None:
        numbered = ((number, line.strip()) for number, line in enumerate(text.split("\n"), 1))
        self.rows = [(number, line) for number, line in numbered if line and not line.startswith("#")]
        self.at = 0

    def peek(self) -> str:
        return self.rows[self.at][1] if self.at < len(self.rows) else ""

    def take(self) -> str:
        line = self.peek()
        self.at += 1
        return line

    def match(self, pattern: re.Pattern[str], form: str) -> re.Match[str]:
        """Take the next line, which must have this form."""
        found = pattern.fullmatch(self.take())
        return found if found else self.refuse(f"expected '{form}'")

    def refuse(self, message: str) -> NoReturn:
        """Raise an error about the line taken last."""
        index = self.at - 1
        where = f"line {self.rows[index][0]}: {_short(self.rows[index][1])}" if index < len(self.rows) else "the end"
        raise PlanError(f"plan text, {where}: {message}", rule="format")

    def number(self, word: str) -> int:
        if not re.fullmatch(r"-?\d+", word, re.ASCII) or len(word) > _MAX_DIGITS:
            self.refuse(f"{_short(word)} is not a number; give a whole number of at most {_MAX_DIGITS} digits")
        return int(word)

    def expect_number(self, what: str, found: str, expected: int) -> None:
        """Refuse numbers out of sequence: they would silently mean something else."""
        if self.number(found) != expected:
            self.refuse(f"{what} {found} is out of order; {what}s are numbered from 0 without gaps, use {expected}")

    def choice(self, word: str, kind: type[E]) -> E:
        try:
            return kind(word)
        except ValueError:
            return self.refuse(str(unknown_name(kind.__name__.lower(), word, [member.value for member in kind])))


def _short(line: str) -> str:
    return repr(line if len(line) <= 60 else line[:57] + "...")


def _read_header(lines: _Lines) -> dict:
    header: dict = dict.fromkeys(_CAPACITIES, ())
    while "documents" not in header:
        key, _, value = lines.take().partition(" ")
        if key not in _KEYS:
            lines.refuse(str(unknown_name("key", key, _KEYS)))
        if key in header and key not in _CAPACITIES:
            lines.refuse(f"{key} is given twice; keep one line")
        if key in _CAPACITIES:
            name, _, tokens = value.partition(" ")
            header[key] += ((lines.choice(name, Checkpoint), lines.number(tokens)),)
        elif key == "planner":
            header[key] = _read_name(lines, value)
        elif key == "sharding":
            header[key] = lines.choice(value, Sharding)
        elif key == "reduce":
            header[key] = lines.choice(value, Reduce)
        else:
            header[key] = lines.number(value)
    missing = [key for key in _KEYS if key not in header]
    if missing:
        lines.refuse(f"the header lacks {missing[0]!r}; its keys are {', '.join(_KEYS)}")
    return header


def _read_name(lines: _Lines, value: str) -> str:
    if not value.startswith('"'):
        return value
    try:
        name = json.loads(value)
    except ValueError:
        name = None
    return name if isinstance(name, str) else lines.refuse("the planner's name is not a quoted string; drop the quotes")


def _read_documents(lines: _Lines, count: int) -> tuple[int, ...]:
    lengths: list[int] = []
    while re.match(r"\d+:", lines.peek()):
        start, _, words = lines.take().partition(":")
        lines.expect_number("document", start, len(lengths))
        lengths += [lines.number(word) for word in words.split()]
    if len(lengths) != count:
        lines.refuse(f"{len(lengths)} lengths for 'documents {count}'; give as many lengths as documents")
    return tuple(lengths)


def _read_pipeline(lines: _Lines, documents: tuple[int, ...]) -> Pipeline:
    stages: list[Stage] = []
    while re.match(r"stage \d+ ", lines.peek()):
        number, ranks, *numbers = lines.match(_STAGE, "stage 0 ranks 0-7 layers 0-32 tensor 1").groups(default="1")
        lines.expect_number("stage", number, len(stages))
        first, stop, tensor, expert = map(lines.number, numbers)
        stages.append(Stage(_read_ranks(lines, ranks), (first, stop), tensor, expert))
    rounds = _read_rounds(lines, documents, [stage.layer_count for stage in stages])
    rows: list[tuple[Action, ...]] = []
    while lines.peek().startswith("host "):
        number, words = lines.match(_ACTIONS, "host 0: 0F0 0B0").groups()
        lines.expect_number("host", number, len(rows))
        try:
            rows.append(tuple(map(Action.parse, words.split())))
        except PlanError as error:
            lines.refuse(str(error))
    if lines.peek() and not lines.peek().startswith(("pipeline ", "made_for ")):
        lines.take()
        lines.refuse("expected a stage, round, group, layout, host or pipeline line, in this order")
    return Pipeline(tuple(stages), rounds, tuple(rows))


def _read_rounds(lines: _Lines, documents: tuple[int, ...], layers: Sequence[int]) -> tuple[Round, ...]:
    """Read the rounds of a pipeline whose stages have so many layers."""
    rounds: list[list[StageMicroBatch]] = []
    while lines.peek().startswith("round "):
        found = lines.match(_ROUND, "round 0 stage 0 checkpoint selective").groups()
        number, stage, checkpoint, lighter, remap, offload, offloaded = found
        fresh = stage is None or lines.number(stage) == 0
        lines.expect_number("round", number, len(rounds) - (not fresh))
        if fresh:
            rounds.append([])
        if stage is not None:
            lines.expect_number("stage", stage, len(rounds[-1]))
            kept, where = lines.choice(checkpoint, Checkpoint), lines.choice(remap or Remap.ATTENTION, Remap)
            groups, layouts = _read_groups(lines, documents), _read_layouts(lines)
            every = layers[len(rounds[-1])] if offload is not None and len(rounds[-1]) < len(layers) else 0
            counts = every if offloaded is None else lines.number(offloaded), lines.number(lighter or "0")
            both = layouts.get("attention"), layouts.get("linear")
            rounds[-1].append(StageMicroBatch(groups, kept, *both, where, *counts))
    return tuple(Round(tuple(work)) for work in rounds)


def _read_groups(lines: _Lines, documents: tuple[int, ...]) -> tuple[Group, ...]:
    groups = []
    while lines.peek().startswith("group "):
        form = "group ranks 0-7 ulysses 8 ring 1: 12 15[0:4096)"
        found = lines.match(_GROUP, form).groups()
        ranks, ulysses, ring, method, proxies, slices, latent, states, words = found
        spans = tuple(_read_span(lines, word, documents) for word in words.split())
        route = None if proxies is None else Route(_read_ranks(lines, proxies), lines.number(slices))
        shape = _read_ranks(lines, ranks), lines.number(ulysses), lines.number(ring)
        how = lines.choice(method or Method.RING, Method)
        groups.append(Group(*shape, spans, how, route, latent is not None, states is not None))
    return tuple(groups)


def _read_layouts(lines: _Lines) -> dict[str, Layout]:
    layouts: dict[str, Layout] = {}
    while lines.peek().startswith(("attention ", "linear ")):
        name, axes = lines.match(_LAYOUT, "linear axes 1").groups()
        if name in layouts:
            lines.refuse(f"the {name} layout is given twice; keep one")
        layouts[name] = _read_layout(lines, int(axes))
    return layouts


def _read_layout(lines: _Lines, axes: int) -> Layout:
    boxes = []
    while lines.peek().startswith("rank "):
        rank, words = lines.match(_RANK, "rank 0: 3[0:100)").groups()
        for word in words.split():
            found = _BOX.fullmatch(word)
            numbers = [] if found is None else [part for part in found.groups() if part is not None]
            if len(numbers) != 1 + 2 * axes:
                lines.refuse(f"{word!r} is not a box; with {axes} axes write {'3[0:100)' + 'x[0:4)' * (axes - 1)}")
            boxes.append((lines.number(rank), *map(lines.number, numbers)))
    try:
        return Layout.of(boxes) if boxes else Layout.empty(axes)
    except PlanError as error:
        return lines.refuse(str(error))


def _read_span(lines: _Lines, word: str, documents: tuple[int, ...]) -> Span:
    found = _BOX.fullmatch(word)
    if found is None or found[4] is not None:
        lines.refuse(f"{_short(word)} is not a span; write 15 for a whole document or 15[0:4096) for a piece")
    document = lines.number(found[1])
    if found[2] is not None:
        return Span(document, lines.number(found[2]), lines.number(found[3]))
    if document >= len(documents):
        lines.refuse(f"there is no document {document}; use 0 to {len(documents) - 1}")
    return Span(document, 0, documents[document])


def _read_ranks(lines: _Lines, text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    ranks: list[int] = []
    for part in text.split(","):
        found = _RUN.fullmatch(part)
        if found is None:
            lines.refuse(f"{_short(part)} is not a run of ranks; write 0-7 or 0-3,8-11")
        first = lines.number(found[1])
        last = first if found[2] is None else lines.number(found[2])
        if not first <= last < first + _MAX_RANKS:
            lines.refuse(f"{_short(part)} is not a run of ranks; the second number is the last rank, write 0-7")
        ranks += range(first, last + 1)
    return tuple(ranks)
