"""One plan for all ranks: one of them plans ahead, the plan is broadcast, and every rank checks its hash."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from seqloom.attention import warm_up_attention
from seqloom.data import Batch, rank_rows
from seqloom.dist import Context, Transport
from seqloom.dist.torch_transport import broadcast_bytes
from seqloom.engine import RankPlan, StepResult, bind_plan, evaluate, run_step
from seqloom.errors import SeqloomError
from seqloom.models import ModelAdapter
from seqloom.params import Parameters, scale_gradients
from seqloom.plan import Plan
from seqloom.plan.plan import outline
from seqloom.planners.ahead import PlanAhead, StepPlan
from seqloom.train.checkpoint import Checkpoints
from seqloom.train.config import Config
from seqloom.train.logging import Metrics, StepRecord, open_display, open_sinks
from seqloom.train.model import REFERENCE, ModelFamily, dtypes, gathered, made_ready, place
from seqloom.train.optim import clip_factor, learning_rate, make_optimiser, named_state, set_learning_rate
from seqloom.train.setup import Setup, kept, small_plans, told
from seqloom.train.watch import Watch


@dataclass(frozen=True, slots=True, eq=False)
class SharedPlans:
    """The plans of a run, as one rank sees them.

    Attributes:
        transport: this rank's.
        ahead: who plans, on the root; None on the others.
        device: where the transport's tensors live.
        root: the rank that plans.
    """

    transport: Transport
    ahead: PlanAhead | None
    device: torch.device | str = "cpu"
    root: int = 0

    def submit(self, step: int, lengths: Sequence[int] | np.ndarray) -> None:
        """Have the plan of a coming step made; nothing happens on other ranks than the root."""
        if self.ahead is not None:
            self.ahead.submit(step, lengths)

    def take(self, step: int, lengths: Sequence[int] | np.ndarray) -> StepPlan:
        """Return the plan of a step, the same on all ranks; all ranks call it.

        The root decides, also whether the static plan stands in. Times are those of the root.

        Raises:
            SeqloomError: on every rank, when the ranks do not hold the same plan, or not one for these lengths.
        """
        payload = None if self.ahead is None else _answer(self.ahead, step, lengths)
        taken = _decode(broadcast_bytes(self.transport, payload, root=self.root, device=self.device))
        self._check(step, lengths, taken)
        return taken

    def hand_out(self, plans: Sequence[Plan] | None) -> list[Plan]:
        """Return plans of the root on all ranks, which all call it; others than the root give None."""
        payload = None if plans is None else json.dumps([plan.to_json() for plan in plans]).encode()
        texts = json.loads(broadcast_bytes(self.transport, payload, root=self.root, device=self.device))
        return [Plan.from_json(text) for text in texts]

    def _check(self, step: int, lengths: Sequence[int] | np.ndarray, taken: StepPlan) -> None:
        """Compare step, plan and lengths over all ranks, before anybody acts on them."""
        own = [taken.step == step, list(taken.plan.documents) == np.asarray(lengths).tolist()]
        digest = int(taken.plan.hash[:15], 16)
        mine = torch.tensor([*map(int, own), digest, step], dtype=torch.int64, device=self.device)
        everyone = torch.empty(self.transport.ranks * len(mine), dtype=torch.int64, device=self.device)
        self.transport.all_gather(everyone, mine, range(self.transport.ranks))
        rows = everyone.view(-1, len(mine)).tolist()
        for rank, (same_step, same_lengths, its_digest, its_step) in enumerate(rows):
            if not same_step:
                raise SeqloomError(f"rank {rank} is at step {its_step}, the plan is for step {taken.step}; start again")
            if not same_lengths:
                raise SeqloomError(
                    f"step {step}: the batch of rank {rank} has other lengths than the plan; "
                    "all ranks must read the same data with the same sampler state"
                )
            if its_digest != rows[0][2]:
                raise SeqloomError(
                    f"step {step}: rank {rank} holds another plan than rank 0; run one version on all ranks"
                )


def _answer(ahead: PlanAhead, step: int, lengths: Sequence[int] | np.ndarray) -> bytes:
    """The root's plan, or why there is none: then all ranks refuse together and nobody waits."""
    try:
        taken = ahead.take(step, lengths)
    except SeqloomError as error:
        return json.dumps({"step": step, "error": str(error)}).encode()
    names = ("step", "plan_ns", "wait_ns", "predicted_ns", "fallback_reason", "bound_ns", "idle_share")
    head = {name: getattr(taken, name) for name in names}
    return (json.dumps(head) + "\n" + taken.plan.to_json()).encode()


def _decode(payload: bytes) -> StepPlan:
    head, _, plan = payload.decode().partition("\n")
    content = json.loads(head)
    if "error" in content:
        raise SeqloomError(f"step {content['step']} cannot be planned: {content['error']}")
    return StepPlan(plan=Plan.from_json(plan), **content)


# ---- merged: train.warm
# Before the first step: all that attention builds for shapes it has not met yet, and a rehearsal of every strategy.
#
# On a GPU a new shape holds up a step by about 0.1 s, and with it every rank that waits for this one. What the
# first plan
# and the rehearsed ones spread their documents over is taken for what later ones will do; another degree is built
# when
# it comes. A rehearsal is a whole step of next to no tokens without an update: from then on all lanes and
# communicators
# of a strategy are there, and what its parameters' moves need to know.


QUARTERS = 4
"""How often progress is told, for every degree."""


def warm_up(
    adapter: ModelAdapter,
    plans: Sequence[Plan],
    longest: int,
    dtype: torch.dtype,
    device: torch.device,
    note: Callable[[str], None],
) -> int:
    """Build what the attention of a model can need. Every rank does it for itself.

    Args:
        network: whose layers call attention.
        plans: of the first step and of rehearsals; their Ulysses degrees decide how many heads a rank has.
        longest: tokens of a document.
        dtype: that layers compute in.
        device: where they run; on a CPU there is nothing to build.
        note: is told how far it is.

    Returns:
        Number of shapes.
    """
    capacity = max(tokens for plan in plans for _, tokens in plan.limits.capacity)
    built = 0
    for degree in sorted({degree for plan in plans for degree in _degrees(plan)}):
        for heads, kv_heads, dim, window, scale in adapter.attention_specs:
            built += warm_up_attention(
                heads,
                kv_heads,
                dim,
                dtype,
                device,
                longest=longest if window is None else min(longest, window),
                tokens=degree * capacity,
                scale=scale,
                ulysses=(degree,),
                report=lambda done, total, degree=degree: _tell(note, degree, done, total),
            )
    return built


def rehearse(bound: RankPlan, parameters: Parameters) -> None:
    """Run a plan on made-up tokens and forget its gradients. All ranks call it."""

    def rows(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.zeros(context.tokens, dtype=torch.int64, device=bound.device)
        return ids, ids

    run_step(bound, parameters, rows, sum(bound.plan.documents))
    parameters.zero_grad()


def _degrees(plan: Plan) -> Iterator[int]:
    for line in plan.pipelines:
        yield from (group.ulysses for each in line.rounds for work in each.work for group in work.groups)


def _tell(note: Callable[[str], None], degree: int, done: int, total: int) -> None:
    if total >= QUARTERS and done % (total // QUARTERS) == 0:
        note(f"attention over {degree} rank{'s' * (degree > 1)}: {done} of {total} shapes built")


# ---- merged: train.loop
# The training loop of one rank: take a plan, run it, update, write down what happened.
#
# All ranks run the same lines in the same order; only the first one plans, shows and writes metrics.


PATIENCE_S, FIRST_PATIENCE_S = 5.0, 300.0
"""How long a step waits for its plan before a plain one stands in; the first one compiles the planner."""


class Trainer:
    """One rank of a run. `close` it, or use it in a `with`."""

    def __init__(
        self,
        config: Config,
        setup: Setup,
        transport: Transport,
        *,
        kind: ModelFamily = REFERENCE,
        device: torch.device | str = "cpu",
        watch: Watch | None = None,
    ) -> None:
        """Build the model and everything around it, and go to the latest checkpoint if the config says so.

        Args:
            config: of the run.
            setup: what it is made of.
            transport: this rank's, over torch.distributed.
            kind: how the model is built and written.
            device: where the model runs.
            watch: is told what this rank is doing; None: nobody is.
        """
        self.config, self.setup, self.transport, self.device = config, setup, transport, torch.device(device)
        self._closing, self._kind, self._watch = ExitStack(), kind, watch
        masters, compute = dtypes(config)
        self._compute = compute or masters
        stages = setup.planners.stages
        built = kind.build(config, self.device, masters)
        self._adapter = made_ready(built, compiled=config.model.compile, split=setup.planners.cut)
        self.parameters = place(self._adapter, transport, stages, setup.cost, compute)
        self.optimiser = make_optimiser(self.parameters.master_weights(), config.optimiser)
        self.sampler = setup.sampler
        self.checkpoints = self._closing.enter_context(Checkpoints(config.checkpoints, keep=config.checkpoint.keep))
        self._former: list[Any] | None = None  # strategies of the run before the checkpoint
        self.step = self._resumed()
        if transport.rank == 0:
            kept(config, setup.planners.strategies)
        self.plans = SharedPlans(transport, self._planner(), self.device)

    def __enter__(self) -> Trainer:
        """Return itself."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Close everything that was opened; after an error nothing is waited for."""
        self._closing.__exit__(*error)

    def run(self, stream: IO[str] | None = None, *, notes: Sequence[str] = ()) -> dict[str, Any]:
        """Train to the last step and return the summary; only the first rank's counts.

        Args:
            stream: where progress is shown, on the first rank; None: nowhere.
            notes: what the log says before the first step.
        """
        metrics, setup = self._metrics(stream), self.setup
        if metrics is not None:
            for text in (*notes, *told(self.config, setup.planners.strategies, self._former)):
                metrics.note(self.step, text)
        before = "none before it"
        for number, batch in self._batches():
            self._at(f"step {number}, whose plan has not come ({before})")
            taken = self.plans.take(number, batch.lengths)
            before = f"step {number}, plan {taken.plan.hash[:12]}"
            if number == self.step + 1:
                self._at(f"{before}, and what it needs")
                self._warm_up(taken.plan, metrics)
            self._at(before)
            record = self._train(taken, batch)
            if metrics is not None:
                metrics.step(record)
                if taken.fallback_reason:
                    metrics.note(number, f"the {taken.plan.planner} plan stood in: {taken.fallback_reason}")
            self.checkpoints.poll()
            self._evaluate(number, metrics)
            if self._due(self.config.checkpoint.every, number) or number == self.setup.steps:
                self._save(number)
        self._at("the end of the run", limited=False)
        self._write_model()
        return {} if metrics is None else metrics.summary.as_dict()

    def _warm_up(self, first: Plan, metrics: Metrics | None) -> None:
        """Build what attention on a GPU needs for shapes it has not met, and rehearse every strategy."""
        note = (lambda text: None) if metrics is None else partial(metrics.note, self.step)
        setup = self.setup
        small = small_plans(setup.planners.strategies, setup.cost) if self.transport.rank == 0 else None
        rehearsed = self.plans.hand_out(small) if setup.planners.strategies else []
        longest = setup.cost.max_length or int(setup.source.lengths.max())
        warm_up(self._adapter, [first, *rehearsed], longest, self._compute, self.device, note)
        for plan in rehearsed:
            self._at(f"rehearsal of {outline(plan)}, plan {plan.hash[:12]}")
            rehearse(self._bound(plan), self.parameters)

    def _at(self, place: str, *, limited: bool = True, where: Callable[[], str] | None = None) -> None:
        if self._watch is not None:
            self._watch.at(place, limited=limited, where=where)

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield the steps to come, planned ahead."""
        ahead = self.config.plan.ahead
        for number, batch in enumerate(self.sampler.peek(min(ahead, self.setup.steps - self.step)), self.step + 1):
            self.plans.submit(number, batch.lengths)
        for number in range(self.step + 1, self.setup.steps + 1):
            batch = self.sampler.next_batch()
            if ahead and number + ahead <= self.setup.steps:
                self.plans.submit(number + ahead, self.sampler.peek(ahead)[-1].lengths)
            yield number, batch

    def _train(self, taken: StepPlan, batch: Batch) -> StepRecord:
        """Run one step and update the parameters."""
        begin = time.perf_counter()
        bound = self._bound(taken.plan)
        if any(
            len(line.ranks_by_pp_rank) > 1 for line in taken.plan.pipelines
        ):  # if a stage hangs, say for which it waits
            self._at(f"step {taken.step}, plan {taken.plan.hash[:12]}", where=bound.progress.report)
        rows = self.setup.source
        result = run_step(bound, self.parameters, lambda context: rank_rows(rows, context, batch), batch.valid_tokens)
        rate = self._update(taken.step, result)
        return self._record(batch, taken, result, rate, self._slowest(time.perf_counter() - begin))

    def _bound(self, plan: Plan) -> RankPlan:
        """Bind a plan that `SharedPlans` has compared, with all index work of the model's layers."""
        return bind_plan(plan, self.transport, device=self.device, check=False, prepare=self._prepare)

    def _prepare(self, context: Context) -> None:
        self._adapter.prepare(context, self._compute)

    def _update(self, number: int, result: StepResult) -> float:
        """Clip, set the rate, step the optimiser; return the rate."""
        settings = self.config.optimiser
        factor = clip_factor(result.gradient_norm, settings.clip)
        if factor < 1:
            scale_gradients(self.parameters, factor)
        schedule = self.config.schedule
        rate = learning_rate(number, steps=self.setup.steps, peak=settings.lr, schedule=schedule)
        set_learning_rate(self.optimiser, rate)
        self.optimiser.step()
        self.parameters.zero_grad()
        return rate

    def _record(self, batch: Batch, taken: StepPlan, result: StepResult, rate: float, seconds: float) -> StepRecord:
        return StepRecord(
            step=taken.step,
            loss=result.loss,
            tokens=batch.tokens,
            lr=rate,
            grad_norm=result.gradient_norm,
            measured_ms=seconds * 1e3,
            predicted_ms=taken.predicted_ns / 1e6,
            planner_wait_ms=taken.wait_ns / 1e6,
            gap_to_bound=None if not taken.bound_ns else taken.predicted_ns / taken.bound_ns - 1,
            idle_share=taken.idle_share,
            planner=taken.plan.planner or "",
            plan_hash=taken.plan.hash,
            shape=outline(taken.plan),
            fallback=bool(taken.fallback_reason),
        )

    def _slowest(self, seconds: float) -> float:
        """The longest time of all ranks."""
        mine = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        every = torch.empty(self.transport.ranks, dtype=torch.float64, device=self.device)
        self.transport.all_gather(every, mine, range(self.transport.ranks))
        return float(every.max())

    def _evaluate(self, number: int, metrics: Metrics | None) -> None:
        if not self._due(self.config.evaluation.every, number):
            return
        source, batches = self.setup.validation()
        total = 0.0
        for index, batch in enumerate(batches):
            self._at(f"evaluation after step {number}")
            taken = self.plans.take(-1 - index, batch.lengths)
            loss = evaluate(
                self._bound(taken.plan),
                self.parameters,
                lambda context, batch=batch: rank_rows(source, context, batch),
                batch.valid_tokens,
            )
            total += loss * batch.valid_tokens
        if metrics is not None:
            metrics.evaluation(number, total / sum(batch.valid_tokens for batch in batches))

    def _save(self, number: int) -> None:
        self._at(f"checkpoint of step {number}", limited=False)  # the one before may still be on its way to the disk
        strategies = [each.as_dict() for each in self.setup.planners.strategies]
        extra = {"sampler": self.sampler.state_dict(), "config": self.config.as_dict(), "strategies": strategies}
        state = named_state(self.optimiser)
        self.checkpoints.save(number, model=self.parameters.master_weights(), optimiser=state, extra=extra)

    def _write_model(self) -> None:
        """Write the trained model; also when nothing was left to do, since a crash may have been."""
        leads = self.transport.rank == 0
        state = gathered(self._adapter.module, self.parameters, keep=leads)
        if leads:
            self._kind.save(self.config, self._adapter.module, state)

    def _resumed(self) -> int:
        """Load the checkpoint to begin from, if any; return the steps that are done."""
        resume = self.config.checkpoint.resume
        if resume == "never" and self.checkpoints.latest is not None:
            raise SeqloomError(
                f"checkpoint.resume = 'never', and {self.checkpoints.latest} is there, which the run could not "
                "replace; choose another run.output, or resume"
            )
        path = self.checkpoints.latest
        if path is None and resume not in ("auto", "never"):
            path = Path(resume)
        if path is None:
            return 0
        state = named_state(self.optimiser)
        manifest = self.checkpoints.load(path, model=self.parameters.master_weights(), optimiser=state)
        self.sampler.load_state_dict(manifest.extra["sampler"])
        self._former = manifest.extra.get("strategies", [])
        return manifest.step

    def _planner(self) -> PlanAhead | None:
        if self.transport.rank:
            return None
        limit = self.config.run.timeout_s / 2  # other ranks wait as well
        patience = {"patience_s": min(PATIENCE_S, limit), "first_patience_s": min(FIRST_PATIENCE_S, limit)}
        chosen = self.setup.planners
        ahead = PlanAhead(self.setup.cost, chosen.planner, fallback=chosen.fallback, **patience)
        return self._closing.enter_context(ahead)

    def _metrics(self, stream: IO[str] | None) -> Metrics | None:
        if self.transport.rank:
            return None
        log = self.config.log
        display = None if stream is None else open_display(stream, self.setup.steps, self.step)
        sinks = open_sinks(log.sinks, self.config.run.output, settings=self.config.as_dict(), done=self.step)
        metrics = Metrics(self.config.metrics, done=self.step, every=log.every, sinks=sinks, display=display)
        return self._closing.enter_context(metrics)

    @staticmethod
    def _due(every: int, number: int) -> bool:
        return bool(every) and number % every == 0
