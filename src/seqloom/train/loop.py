"""The training loop of one rank: take a plan, run it, update, write down what happened.

All ranks run the same lines in the same order; only the first one plans, shows and writes metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from seqloom.comm import Context, Transport
from seqloom.data import Batch, rank_rows
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.plan.outline import outline
from seqloom.planners.ahead import PlanAhead, StepPlan
from seqloom.runtime import BoundPlan, StepResult, bind_plan, evaluate, run_step, scale_gradients
from seqloom.simulate import predicted_ns
from seqloom.train.checkpoints import Checkpoints
from seqloom.train.config import Config
from seqloom.train.display import open_display
from seqloom.train.kinds import REFERENCE, Kind, dtypes, gathered
from seqloom.train.metrics import Metrics, StepRecord
from seqloom.train.model import made_ready, place
from seqloom.train.optimiser import clip_factor, make_optimiser, named_state, set_learning_rate
from seqloom.train.plans import SharedPlans
from seqloom.train.schedule import learning_rate
from seqloom.train.setup import Setup
from seqloom.train.sinks import open_sinks
from seqloom.train.strategies import kept, small_plans, told
from seqloom.train.warm import rehearse, warm_up
from seqloom.train.watch import Watch

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
        kind: Kind = REFERENCE,
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
        self._network = made_ready(built, compiled=config.model.compile, split=setup.planners.cut)
        self.parameters = place(self._network, transport, stages, setup.cost, compute)
        self.optimiser = make_optimiser(self.parameters.masters(), config.optimiser)
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
                if taken.fallback:
                    metrics.note(number, f"the {taken.plan.planner} plan stood in: {taken.fallback}")
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
        warm_up(self._network, [first, *rehearsed], longest, self._compute, self.device, note)
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
        if any(len(line.hosts) > 1 for line in taken.plan.pipelines):  # if a stage hangs, say for which it waits
            self._at(f"step {taken.step}, plan {taken.plan.hash[:12]}", where=bound.progress.report)
        rows = self.setup.source
        result = run_step(bound, self.parameters, lambda context: rank_rows(rows, context, batch), batch.valid_tokens)
        rate = self._update(taken.step, result)
        return self._record(batch, taken, result, rate, self._slowest(time.perf_counter() - begin))

    def _bound(self, plan: Plan) -> BoundPlan:
        """Bind a plan that `SharedPlans` has compared, with all index work of the model's layers."""
        return bind_plan(plan, self.transport, device=self.device, check=False, prepare=self._prepare)

    def _prepare(self, context: Context) -> None:
        self._network.prepare(context, self._compute)

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
        self.parameters.clear()
        return rate

    def _record(self, batch: Batch, taken: StepPlan, result: StepResult, rate: float, seconds: float) -> StepRecord:
        predicted = predicted_ns(taken.plan, self.setup.cost)
        return StepRecord(
            step=taken.step,
            loss=result.loss,
            tokens=batch.tokens,
            lr=rate,
            grad_norm=result.gradient_norm,
            measured_ms=seconds * 1e3,
            predicted_ms=predicted / 1e6,
            planner_wait_ms=taken.wait_ns / 1e6,
            gap_to_bound=None if not taken.bound_ns else predicted / taken.bound_ns - 1,
            idle_share=taken.idle_share,
            planner=taken.plan.planner or "",
            plan_hash=taken.plan.hash,
            shape=outline(taken.plan),
            fallback=bool(taken.fallback),
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
        self.checkpoints.save(number, model=self.parameters.masters(), optimiser=state, extra=extra)

    def _write_model(self) -> None:
        """Write the trained model; also when nothing was left to do, since a crash may have been."""
        leads = self.transport.rank == 0
        state = gathered(self._network.module, self.parameters, keep=leads)
        if leads:
            self._kind.save(self.config, self._network.module, state)

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
        manifest = self.checkpoints.load(path, model=self.parameters.masters(), optimiser=state)
        self.sampler.load_state_dict(manifest.extra["sampler"])
        self._former = manifest.extra.get("strategies", [])
        return manifest.step

    def _planner(self) -> PlanAhead | None:
        if self.transport.rank:
            return None
        limit = self.config.run.timeout_s / 2  # other ranks wait as well
        patience = {"patience_s": min(PATIENCE_S, limit), "first_patience_s": min(FIRST_PATIENCE_S, limit)}
        chosen = self.setup.planners
        ahead = PlanAhead(self.setup.cost, chosen.planner, stand_in=chosen.stand_in, **patience)
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
