"""What `seqloom replay` shows: a step that a run has dumped, run again on CPU, and where numbers stop being finite.

The documents, the plan and the parameters of the step are in the dump (`train.step_checks`). One process runs them as a
single group; with `under_plan` also as the run did, with threads for ranks. A step that is finite here and was not
there points at the machine that ran it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from seqloom.cost import CostModel
from seqloom.data import Batch, rank_rows
from seqloom.describe import Cluster, ModelSpec
from seqloom.dist import SingleRankTransport, Transport, run_ranks
from seqloom.engine import bind_plan, evaluate, run_step
from seqloom.errors import SeqloomError
from seqloom.models import ModelAdapter
from seqloom.params import Parameters, ReplicatedParameters, ReshardingParameters
from seqloom.plan import Plan, Sharding
from seqloom.planners import make_plan
from seqloom.reader import build
from seqloom.train.config import Config
from seqloom.train.model import ModelFamily, load_trained, prepare_layers
from seqloom.train.optim import is_usable
from seqloom.train.step_checks import Dump, DumpedDocuments

DTYPES = ("float64", "float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Replay:
    """A step of a run, run again.

    Attributes:
        reason: why the run saved it.
        dtype: that layers computed in here.
        loss, grad_norm: of one process.
        plan_loss, plan_grad_norm: under the step's plan; None: not run.
        first_not_finite: the first parameter, module or gradient with a value that is no number; None: all are.
        documents_not_finite: numbers, in the run's source, of documents whose loss alone is no number.
    """

    step: int
    plan_hash: str
    reason: str
    dtype: str
    documents: int
    tokens: int
    loss: float
    grad_norm: float
    plan_loss: float | None
    plan_grad_norm: float | None
    first_not_finite: str | None
    documents_not_finite: tuple[int, ...]

    @property
    def fails(self) -> bool:
        """Whether one process could not use its gradient either."""
        return not is_usable(self.loss, self.grad_norm)

    def as_dict(self) -> dict[str, Any]:
        """Return all by name; what is no number as a text, which JSON can hold."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: str(each) if isinstance(each, float) and not math.isfinite(each) else each
            for name, each in values.items()
        }


def load_dump(path: Path) -> tuple[Dump, Config]:
    """Read a dump and the config of its run."""
    dump = Dump.read(path)
    return dump, build(Config, dump.config, f"{path}, config")


def dumped_step(path: Path, dump: Dump, vocabulary: int) -> tuple[Plan, DumpedDocuments]:
    """Return the plan of a dump and its documents, or refuse what does not belong together."""
    plan, source = Plan.from_json(dump.plan), DumpedDocuments(dump, vocabulary)
    if plan.hash != dump.plan_hash or plan.documents != tuple(source.lengths.tolist()):
        raise SeqloomError(f"{path}: the plan is another than that of the step; take another dump")
    plan.validate()
    return plan, source


def replay(path: Path, dump: Dump, config: Config, family: ModelFamily, *, dtype: str, under_plan: bool) -> Replay:
    """Run a dumped step again; layers compute in `dtype`, plainly: not compiled and not in float8."""
    spec = family.describe(config)
    plan, source = dumped_step(path, dump, spec.vocabulary)
    batch = source.batch
    build_model = partial(_build, path, config, family, getattr(torch, dtype))
    adapter = prepare_layers(build_model())
    parameters = ReplicatedParameters(adapter, SingleRankTransport())
    with watch_finite(adapter.module) as first:
        loss, norm = _run(_plan_alone(batch.lengths, spec), parameters, source, batch, dump.seed, SingleRankTransport())
    finite = math.isfinite(loss) and math.isfinite(norm)
    if not finite and not first:
        first.append("the loss, or a sum of gradients")
    planned = _run_planned(plan, build_model, source, batch, dump.seed) if under_plan else (None, None)
    return Replay(
        *(dump.step, dump.plan_hash, dump.reason, dtype, len(batch), batch.tokens, loss, norm, *planned),
        first_not_finite=first[0] if first else None,
        documents_not_finite=() if finite else tuple(_not_finite(dump, spec, parameters, source)),
    )


def _build(path: Path, config: Config, family: ModelFamily, dtype: torch.dtype) -> ModelAdapter:
    """Build the model on CPU with the parameters of a dump, then in another dtype."""
    adapter = load_trained(path, config, family)
    for parameter in adapter.module.parameters():
        parameter.data = parameter.data.to(dtype)
    return adapter


def _plan_alone(lengths: np.ndarray, spec: ModelSpec) -> Plan:
    longest = int(lengths.max())
    cost = CostModel(Cluster.parse("1x1xCPU"), spec, max_length=longest, capacity=longest)
    return make_plan("static:1", lengths, cost)


def _run(
    plan: Plan, parameters: Parameters, source: DumpedDocuments, batch: Batch, seed: int, transport: Transport
) -> tuple[float, float]:
    """Run one step as a rank; return loss and gradient norm."""
    rows = partial(rank_rows, source, batch=batch)
    result = run_step(bind_plan(plan, transport, dropout_seed=seed), parameters, rows, batch.valid_tokens)
    return result.loss, result.gradient_norm


def _run_planned(
    plan: Plan, build_model: Callable[[], ModelAdapter], source: DumpedDocuments, batch: Batch, seed: int
) -> tuple[float, float]:
    """Run the step under its plan, with threads for ranks and a model each."""
    adapters = [build_model() for _ in range(plan.limits.ranks)]  # before: libraries load for one thread at a time
    parameter_class = ReshardingParameters if plan.sharding == Sharding.FREE else ReplicatedParameters

    def body(transport: Transport) -> tuple[float, float]:
        parameters = parameter_class(prepare_layers(adapters[transport.rank]), transport)
        return _run(plan, parameters, source, batch, seed, transport)

    return run_ranks(plan.limits.ranks, body, timeout_s=3600)[0]


def _not_finite(dump: Dump, spec: ModelSpec, parameters: Parameters, source: DumpedDocuments) -> Iterator[int]:
    """Yield the documents whose loss alone is no number."""
    for index, number in enumerate(dump.documents):
        one = Batch(*(each[index : index + 1] for each in (np.arange(len(source)), source.lengths, source.valid)))
        if one.valid_tokens:
            bound = bind_plan(_plan_alone(one.lengths, spec), SingleRankTransport())
            if not math.isfinite(evaluate(bound, parameters, partial(rank_rows, source, batch=one), one.valid_tokens)):
                yield number


@contextmanager
def watch_finite(module: nn.Module) -> Iterator[list[str]]:
    """Yield a list that gets the name of what first has a value that is no number, in the order of the computation."""
    first: list[str] = []

    def note(what: str, tensors: Any) -> None:
        for each in tensors if isinstance(tensors, tuple | list) else (tensors,):
            if not first and isinstance(each, torch.Tensor) and each.is_floating_point() and not each.isfinite().all():
                first.append(what)

    hooks = []
    for name, parameter in module.named_parameters():
        note(f"parameter {name}", parameter.detach())
        if parameter.requires_grad:

            def note_gradient(own: torch.Tensor, name: str = name) -> None:
                note(f"gradient of {name}", own.grad)

            hooks.append(parameter.register_post_accumulate_grad_hook(note_gradient))
    for name, each in module.named_modules():

        def note_output(_: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            note(f"output of {name or 'the model'}", output)

        hooks.append(each.register_forward_hook(note_output))
    try:
        yield first
    finally:
        for hook in hooks:
            hook.remove()
