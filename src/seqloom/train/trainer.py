"""The training loop of one rank.

All ranks run the same lines in the same order; only rank 0 plans, displays and writes metrics. A step is:

1. `Trainer._planned_batches` gives the lengths of coming batches to a planning process (`planners.plan_ahead`), which
   plans them `plan.ahead` steps early, with prediction, bound and hash; `PlanBroadcast.take` sends the plan of this
   step to all ranks, which only parse it.
2. `Trainer.train_step` binds the plan: groups, split sizes, `cu_seqlens` of every round, once for all layers.
3. `engine.run_step` runs the rounds: each rank reads only the spans of its layout, ahead (`data.RowReader`), layers
   run on packed tokens, the loss is divided by the step's valid tokens, and gradients are reduced and clipped.
4. `Trainer.update` sets the learning rate and steps the optimiser.
5. Predicted and measured time, its phases, memory, MFU and gap to the bound become a `StepRecord`; one all-gather
   brings together what the ranks measured.
6. `cost.feedback` on rank 0 compares the two, and refits a few factors of the profile: those of plans from then on.

Before the first step `warm_up` builds kernels and communicators; after steps that are due come checks, evaluation and
checkpoints. A step whose gradient is no number or zero, or that fails a check, is saved and ends the run.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from statistics import fmean
from typing import IO, TYPE_CHECKING, Any

import torch

from seqloom.api import Evaluation
from seqloom.attention import attention_builds
from seqloom.attention.kernels import KernelBuild
from seqloom.compat import is_out_of_memory
from seqloom.cost.compute import training_flops
from seqloom.cost.feedback import NO_CHANGE, Factors, Feedback, Measurement, PhaseCost, can_refit
from seqloom.cost.memory import GIB
from seqloom.cost.speeds import BusyTime
from seqloom.data import Batch, RowReader
from seqloom.describe.cluster import Device, is_device
from seqloom.dist import Context, Transport
from seqloom.dist.layer_times import ATTENTION, TimeSlice
from seqloom.engine import RankPlan, StepResult, bind_plan, evaluate, run_step
from seqloom.engine.executor import MESSAGES, ROWS
from seqloom.errors import MemoryBudgetError, SeqloomError
from seqloom.models import ModelAdapter
from seqloom.models.experts import balance_experts
from seqloom.models.float8 import check_float8
from seqloom.params.host_masters import copy_to_shards
from seqloom.plan import ActionKind, Plan, Sharding
from seqloom.plan.plan import plan_shape
from seqloom.planners.plan_ahead import PlanAhead, StepPlan
from seqloom.simulate import simulate
from seqloom.simulate.memory import peak_memory
from seqloom.train.checkpoint import Checkpoints
from seqloom.train.logging import (
    Callback,
    Callbacks,
    Metrics,
    RankMeasurement,
    StartUp,
    StepRecord,
    open_display,
    open_trackers,
    read_steps,
    summarize_ranks,
)
from seqloom.train.model import (
    ADAPTER_FOLDER,
    MODEL_FOLDER,
    REFERENCE,
    ModelFamily,
    check_expert_bias,
    gather_state_dict,
    layer_parameters,
    make_sharded_optimiser,
    parameter_dtypes,
    prepare_layers,
    shard_parameters,
)
from seqloom.train.optim import check_gradients, learning_rate, set_learning_rate, state_by_name
from seqloom.train.plan_broadcast import PlanBroadcast, gather_vectors
from seqloom.train.run_folder import REPORT_FILE, DamagedCheckpointError, resumed_checkpoint
from seqloom.train.setup import RunSetup, strategy_notes, warm_up_plans, write_strategies
from seqloom.train.signals import blocked_signals
from seqloom.train.step_checks import FAILED, CheckFailedError, Dump, StepChecks, write_dump
from seqloom.view.report import ReportRun, ReportStep, save_report
from seqloom.view.trace import MeasuredSlice, save_trace

if TYPE_CHECKING:
    from seqloom.train.watchdog import Watchdog

PATIENCE_S, FIRST_PATIENCE_S = 5.0, 300.0
"""How long a step waits for its plan before the fallback planner makes one; the first plan compiles the planner."""
OUT_OF_MEMORY_PLAN = "out-of-memory-plan.json"
"""In `run.output`: the plan of the step that memory did not hold."""
SLICES = ("bind", "optimiser", MESSAGES, ROWS, *(kind.value for kind in ActionKind))
"""Names of slices of a step, which ranks exchange by number."""
MEASURED_EVERY = 4
"""On a GPU, steps from one whose attention and messages are measured to the next: events cost the host time."""
PROGRESS_LINES = 8
"""How often the progress of builds is shown."""


class Trainer(AbstractContextManager):
    """One rank of a run, used in a `with`; `start_step` is the step of the checkpoint that it resumes from, or 0."""

    def __init__(
        self,
        setup: RunSetup,
        transport: Transport,
        *,
        model_family: ModelFamily = REFERENCE,
        device: torch.device | str = "cpu",
        watchdog: Watchdog | None = None,
        start: StartUp | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Build model, optimiser and planner, and load the latest checkpoint if the config says so.

        Args:
            setup: of the run, the same on all ranks.
            transport: between the ranks.
            model_family: builds the model and saves it.
            device: of this rank.
            watchdog: is told what comes next.
            start: is told what comes before the first step.
            callbacks: are called on rank 0, those of the config after them; as many on all ranks.
        """
        config = setup.config
        self.setup, self.config, self.transport, self.device = setup, config, transport, torch.device(device)
        self._enter_phase: Callable[..., None] = watchdog.enter_phase if watchdog else lambda *_, **__: None
        self._watchdog, self._leaves, self._start = watchdog, False, start or StartUp()
        self._model_family, self._closing = model_family, ExitStack()
        try:
            self.feedback = Feedback(setup.cost) if config.plan.feedback and can_refit(setup.cost) else None
            # first: its process starts while this one loads the model
            self.plans = PlanBroadcast(transport, self._start_planner(), self.device)
            self._load_model()
            self._start.enter("looking for a checkpoint")
            self.sampler, self._evaluation_due = setup.sampler, False
            self._resumed_strategies: list[Any] | None = None
            self._resume_notes: list[str] = []
            self._best: dict[str, Any] | None = None  # step and loss of the best checkpoint
            self.checkpoints = self._closing.enter_context(Checkpoints(config.checkpoints, keep=config.checkpoint.keep))
            self.start_step = self.load_checkpoint()
            self._checks = StepChecks(
                *(setup, transport, self.parameters, self.bind, self.plans.broadcast),
                *(partial(gather_vectors, transport=transport), self._compute_dtype, self.device),
            )
            self._callbacks = Callbacks(callbacks, config.run.callbacks, leads=transport.rank == 0)
            self._callbacks.told = self.checkpoints.latest
            self._checked = 0
            self._latest: list[RankMeasurement] = []  # of all ranks, in the latest step
            self._use_feedback()
        except BaseException:
            self._closing.__exit__(*sys.exc_info())
            raise
        if transport.rank == 0:
            write_strategies(config, setup.planners.strategies)

    def _load_model(self) -> None:
        """Build the model, shard its parameters and make the optimiser."""
        config, setup = self.config, self.setup
        self._start.enter("loading the model")
        if config.model.float8:
            check_float8(self.device)
        parameter_dtype, compute_dtype = parameter_dtypes(config)
        self._compute_dtype = compute_dtype or parameter_dtype
        adapter = self._model_family.build(config, self.device, parameter_dtype)
        options = {"compiled": config.model.compile, "float8": config.model.float8}
        self.adapter = prepare_layers(adapter, **options, split_backward=setup.planners.multi_stage)
        check_expert_bias(self.adapter, config.optimiser)
        stages, hidden = setup.planners.stages, layer_parameters(self.adapter)
        self.parameters = shard_parameters(self.adapter, self.transport, stages, setup.cost, compute_dtype)
        self.optimiser = make_sharded_optimiser(self.parameters, setup.cost, config.optimiser, hidden)

    def __exit__(self, *error: Any) -> None:
        """Close everything that was opened, without waiting for anything after an error."""
        self._closing.__exit__(*error)

    def train(self, stream: IO[str] | None = None, *, notes: Sequence[str] = ()) -> dict[str, Any]:
        """Train to the last step; return the summary on rank 0, {} on others. Rank 0 shows progress on `stream`.

        After a signal to leave all ranks return `left`, a sentence, instead; their checkpoint is complete. A callback
        may end the run after a step, as if that were the last.
        """
        metrics = self._open_metrics(stream)
        if metrics is not None:
            strategies = strategy_notes(self.config, self.setup.planners.strategies, self._resumed_strategies)
            for text in (*notes, *self._resume_notes, *strategies, *self._feedback_notes()):
                metrics.note(self.start_step, text)
            self._callbacks.train_begin(self.config.as_dict(), self.start_step, self.setup.steps)
        self._start.enter("planning")
        before, step_plan, stopped = "none before it", None, None
        if self._evaluation_due and self.config.evaluation.every:
            self._is_best(self.start_step, self.evaluate(self.start_step, metrics), metrics)
        for step, batch in self._planned_batches():
            self._enter_phase(f"step {step}, waiting for its plan ({before})")
            last_plan, step_plan = step_plan, self.plans.take(step, batch.lengths)
            before = f"step {step}, plan {step_plan.plan_hash[:12]}"
            if step == self.start_step + 1:
                self._enter_phase(f"{before}, warming up")
                self.warm_up(step_plan.plan)
                if self._watchdog is not None:
                    self._watchdog.begin_steps()
                self._start.enter("first step")
            self._enter_phase(before)
            record = self.train_step(step_plan, batch)
            if metrics is not None:
                self._log_step(metrics, record, step_plan, last_plan)
                self._callbacks.step_end(record)
            self.checkpoints.poll()
            if self._checks.due(step):
                self.check_step(step_plan, batch, metrics)
            improved = self._evaluate_if_due(step, metrics)
            if self._leaves_after(step):
                return self.leave(step)
            stopped = self._asked_to_stop(step)
            every, ends = self.config.checkpoint.every, stopped is not None or step == self.setup.steps
            if improved or ends or (every and step % every == 0):
                self.save_checkpoint(step)
            self._callbacks.checkpoint(self.checkpoints.latest)
            if stopped is not None:
                break
        return self._finish(metrics, step_plan, stopped)

    def _log_step(self, metrics: Metrics, record: StepRecord, step_plan: StepPlan, last_plan: StepPlan | None) -> None:
        """Write a step and what is to be said of its plan, and learn from it. Rank 0 calls it."""
        step, first = record.step, self.start_step + 1
        if step == first:
            metrics.note(self.start_step, self._start.summary())
        metrics.step(record)
        if step_plan.fallback_reason:
            metrics.note(step, f"{step_plan.plan.planner} plan as a fallback: {step_plan.fallback_reason}")
        if step_plan.within_error and not (last_plan and last_plan.within_error):  # once, where such steps begin
            metrics.note(step, step_plan.within_error)
        if step > first and (drift := self.learn(step_plan, record)):
            metrics.note(step, drift)

    def _evaluate_if_due(self, step: int, metrics: Metrics | None) -> bool:
        """Evaluate after a step where that is due; return whether its checkpoint is the best so far."""
        every = self.config.evaluation.every
        return bool(every) and step % every == 0 and self._is_best(step, self.evaluate(step, metrics), metrics)

    def _asked_to_stop(self, step: int) -> str | None:
        """Return which callback has asked to end the run after this step; None: none has. All ranks call it."""
        if not self._callbacks.names:
            return None
        asked = int(gather_values([self._callbacks.take_request()], self.transport, self.device)[0, 0])
        return None if asked < 0 else f"step {step:,} of {self.setup.steps:,}, by {self._callbacks.names[asked]}"

    def _finish(self, metrics: Metrics | None, last: StepPlan | None, stopped: str | None) -> dict[str, Any]:
        """Write the trained model and the report; return the summary on rank 0, {} on others."""
        self._enter_phase("the end of the run", on_disk=True)
        # also when no step was left to do, since a crash may have come before this
        state = gather_state_dict(self.adapter.module, self.parameters, self.transport, self.device)
        if self.transport.rank == 0:
            folders = (self.config.run.output / name for name in (MODEL_FOLDER, ADAPTER_FOLDER))
            self._model_family.save(self.config, self.adapter.module, state, *folders)
        self.checkpoints.wait()
        totals = {} if metrics is None else {**metrics.summary(), "best": self._best, "stopped": stopped}
        if metrics is not None:
            self._save_report(totals, last)
            self._callbacks.checkpoint(self.checkpoints.latest)
            self._callbacks.train_end(totals)
        if self._watchdog is not None:
            self._watchdog.finish()
        return totals

    def _planned_batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield number and batch of the coming steps; rank 0 submits those `plan.ahead` steps later for planning."""
        ahead, last = self.config.plan.ahead, self.setup.steps
        first = self.start_step + 1
        for step, batch in enumerate(self.sampler.peek(min(ahead, last - self.start_step)), first):
            self.plans.submit(step, batch.lengths)
        for step in range(first, last + 1):
            batch = self.sampler.next_batch()
            if ahead and step + ahead <= last:
                self.plans.submit(step + ahead, self.sampler.peek(ahead)[-1].lengths)
            yield step, batch

    def train_step(self, step_plan: StepPlan, batch: Batch) -> StepRecord:
        """Run one step under a plan and update the parameters. All ranks call it."""
        try:
            return self._train_step(step_plan, batch)
        except Exception as error:
            if is_out_of_memory(error):
                raise self._out_of_memory(step_plan, error) from error
            raise

    def _train_step(self, step_plan: StepPlan, batch: Batch) -> StepRecord:
        start = time.perf_counter()
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        rank_plan = self.bind(step_plan.plan, dropout_seed=step_seed(self.config.run.seed, step_plan.step))
        rank_plan.layer_times.complete = not cuda or step_plan.step % MEASURED_EVERY == 0
        bound = time.perf_counter()
        pipelined = any(len(pipeline.ranks_by_pp_rank) > 1 for pipeline in step_plan.plan.pipelines)
        if pipelined:  # if a stage hangs, the report says for which message
            phase = f"step {step_plan.step}, plan {step_plan.plan_hash[:12]}"
            self._enter_phase(phase, details=rank_plan.progress.report)
        with RowReader(rank_plan, self.setup.source, batch) as rows:
            clip = self.config.optimiser.clip or None
            began = time.perf_counter()
            result = run_step(rank_plan, self.parameters, rows, batch.valid_tokens, max_norm=clip)
        self._check_gradients(step_plan, batch, result)
        computed = time.perf_counter()  # `run_step` has waited for the device, but not for the clipping
        rate = self.update(step_plan.step, result)
        if cuda:
            torch.cuda.synchronize(self.device)  # the optimiser's kernels are part of the step
        end = time.perf_counter()
        mine = RankMeasurement(
            step_s=end - start,
            bind_s=bound - start,
            rows_s=result.rows_s,
            forward_s=result.forward_s,
            backward_s=result.backward_s,
            messages_s=result.messages_s,
            parameters_s=result.parameters_s,
            optimiser_s=end - computed,
            allocated=torch.cuda.max_memory_allocated(self.device) if cuda else 0,
            reserved=torch.cuda.max_memory_reserved(self.device) if cuda else 0,
            busy_s=result.layers.loss,
            busy_tokens=result.layers.loss_tokens,
            attention_s=result.layers.attention,
            exchange_s=result.layers.exchange,
            layers_measured=result.layers.complete,
        )
        if step_plan.step in self.config.log.trace:
            begin, between = TimeSlice("bind", 0.0, bound - start), began - start
            own = [
                each._replace(start_s=each.start_s + between, stop_s=each.stop_s + between) for each in result.slices
            ]
            self._save_trace(step_plan, [begin, *own, TimeSlice("optimiser", computed - start, end - start)])
        return self._record(step_plan, batch, result, rate, mine)

    def check_step(self, step_plan: StepPlan, batch: Batch, metrics: Metrics | None) -> None:
        """Compare what ranks hold and compute after a step; save the step and stop if it differs. All ranks call it."""
        step = step_plan.step
        self._enter_phase(f"checks after step {step}, plan {step_plan.plan_hash[:12]}")
        start = time.perf_counter()
        try:
            compared = self._checks.run(step, step_plan.plan, batch, self._model_state(masters=False))
        except CheckFailedError as error:
            since = f"the checks after step {self._checked} passed" if self._checked else "no check passed before"
            raise SeqloomError(
                f"step {step}, plan {step_plan.plan_hash[:12]}: {error}. {self._dump(step_plan, batch, str(error))}; "
                f"{since}, and checkpoints since then may be wrong: go back to one before, on other machines"
            ) from error
        self._checked = step
        if metrics is not None:
            milliseconds = 1e3 * (time.perf_counter() - start)
            metrics.note(step, f"checked in {milliseconds:.1f} ms: {compared}")

    def _check_gradients(self, step_plan: StepPlan, batch: Batch, result: StepResult) -> None:
        """Stop, and save the step, unless its gradient can be used. All ranks call it."""
        try:
            check_gradients(result.loss, result.gradient_norm)
        except SeqloomError as error:
            dumped = self._dump(step_plan, batch, str(error))
            raise SeqloomError(f"step {step_plan.step}, plan {step_plan.plan_hash[:12]}: {error}. {dumped}") from None

    def _dump(self, step_plan: StepPlan, batch: Batch, reason: str) -> str:
        """Save a step that failed; return how to run it again. All ranks call it."""
        self._enter_phase(f"saving step {step_plan.step}, which failed", on_disk=True)
        seed = step_seed(self.config.run.seed, step_plan.step)
        dump = Dump.of(step_plan, batch, self.setup, reason, seed)
        return write_dump(self.config.run.output / FAILED, dump, self._model_state(), self.checkpoints)

    def _save_trace(self, step_plan: StepPlan, mine: Sequence[TimeSlice]) -> None:
        """Write when every rank did what, beside the simulated step, on rank 0. All ranks call it."""
        everyone = gather_slices(mine, self.transport, self.device)
        if self.transport.rank == 0:
            file = self.config.run.output / f"trace-{step_plan.step}.json"
            slices = [
                MeasuredSlice(rank, name, 1e9 * start, 1e9 * stop, stage, number)
                for rank, own in enumerate(everyone)
                for name, start, stop, stage, number in own
            ]
            title = f"step {step_plan.step}, plan {step_plan.plan_hash[:12]}"
            save_trace(file, simulate(step_plan.plan, self.setup.cost), slices, title)

    def learn(self, step_plan: StepPlan, record: StepRecord) -> str:
        """Compare a step with its prediction and use the factors that follow; return what changes, "" if nothing does.

        Only rank 0 calls it: its planning process uses the factors, and every plan brings its own to all ranks. The
        first step of a process does not count, since it warms up, nor do those of the fallback planner.
        """
        if self.feedback is None or step_plan.factor_ns is None:
            return ""
        factors = Factors(*step_plan.factors).resolved(self.setup.cost)
        derivatives, imbalances = Factors(*step_plan.factor_ns), record.expert_imbalance or [0.0]
        times = step_plan.predicted_ns, 1e6 * record.measured_ms
        measured = Measurement.of(factors, derivatives, *times, imbalance=fmean(imbalances))
        phases = tuple(self._measured_phases(map(PhaseCost.of, step_plan.phases), factors))
        busy = [BusyTime(rank.busy_s, rank.busy_tokens) for rank in self._latest]
        drift = self.feedback.observe(measured._replace(phases=phases), busy)
        self._use_feedback()
        return drift

    def _measured_phases(self, predicted: Iterable[PhaseCost], factors: Factors) -> Iterator[Measurement]:
        """Yield what the ranks measured of phases, in the mean, beside their predictions by these factors."""
        for phase in predicted:
            ranks = [self._latest[rank] for rank in phase.ranks]
            attention = phase.phase == ATTENTION
            seconds = (each.attention_s if attention else each.computing_s for each in ranks)
            mean_ns = 1e9 * fmean(seconds)
            if mean_ns > 0 and all(each.layers_measured for each in ranks):
                yield Measurement.of(factors, phase.derivatives, phase.predicted_ns, mean_ns)

    def _use_feedback(self) -> None:
        """Have plans made by what the run has learned; speeds only if all its planners give slow ranks less."""
        if self.feedback is not None:
            planners = self.setup.planners
            by_speed = planners.planner.uses_speeds and planners.fallback.uses_speeds and not planners.multi_stage
            speeds = self.feedback.speeds.values if by_speed and self.setup.cost.sharding != Sharding.FREE else ()
            self.plans.use_factors(self.feedback.factors, speeds, self.feedback.error)

    def _feedback_notes(self) -> Iterator[str]:
        """Say by which factors a resumed run begins, and why one learns nothing although it shall."""
        if self.feedback is not None and self.feedback.factors != NO_CHANGE:
            yield f"plans are priced by the factors of the checkpoint ({self.feedback.factors})"
        if self.feedback is not None and self.feedback.speeds.values:
            slowest = min(self.feedback.speeds.values)
            yield f"ranks have the speeds of the checkpoint, the slowest {slowest:g} times that of the median rank"
        if self.config.plan.feedback and self.feedback is None:
            profile = self.setup.cost.profile.name
            yield f"plan.feedback: profile {profile} holds published constants, which steps do not change"

    def _save_report(self, totals: Mapping[str, Any], last: StepPlan | None) -> None:
        """Write the report: predicted against measured over the run, and the plan of its last step. Rank 0 calls it."""
        file, cost, steps = self.config.run.output / REPORT_FILE, self.setup.cost, []
        if last is not None:
            plan = last.plan
            one = Evaluation(plan, simulate(plan, cost), last.bound_ns, last.plan_ns)
            name = f"step {last.step:,}, {plan.planner}"
            steps = [ReportStep(name, plan, one.simulation, one.bound_ns, one.as_dict())]
        elif file.exists():
            return  # no step was left to do
        run = ReportRun([record.as_dict() for record in read_steps(self.config.metrics)], totals)
        title = f"{self.config.run.output.name}: {totals['steps']:,} steps on {cost.ranks:,} {cost.rank_word}s"
        notes = [f"{cost.cluster.name}, {cost.model.name}, profile {cost.profile.name}, {cost.sharding} sharding"]
        save_report(file, title, steps, cost, notes=notes, run=run)

    def _out_of_memory(self, step_plan: StepPlan, error: BaseException) -> MemoryBudgetError:
        """Say what a step needs and has by the cost model and by torch, and save its plan."""
        cost, rank, file = self.setup.cost, self.transport.rank, self.config.run.output / OUT_OF_MEMORY_PLAN
        file.write_text(step_plan.plan_json, encoding="utf-8")
        predicted, budget = peak_memory(step_plan.plan, cost)[rank] / GIB, cost.budget_bytes / GIB
        measured = "" if self.device.type == "cpu" else f", torch has reserved {_reserved_gib(self.device):.1f} GiB"
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return MemoryBudgetError(
            f"step {step_plan.step}, plan {step_plan.plan_hash[:12]}: rank {rank} is out of memory ({reason}). The "
            f"plan ({file}) was predicted to take {predicted:.1f} GiB of a budget of {budget:.1f} GiB{measured}. "
            f"Set plan.budget_gib to {0.9 * budget:.3g} or less, so that plans recompute more or use more GPUs, "
            f"{self.setup.cost.ways_out}"
        )

    def _record(
        self, step_plan: StepPlan, batch: Batch, result: StepResult, rate: float, mine: RankMeasurement
    ) -> StepRecord:
        """Gather what the ranks measured in a step; all ranks call it."""
        rows = gather_values([*mine, self._asked_to_leave], self.transport, self.device).tolist()
        ranks = [RankMeasurement(*row[:-1]) for row in rows]
        self._latest = ranks
        self._agree_to_leave([row[-1] for row in rows])
        flops = training_flops(batch.lengths, self.setup.spec)
        peak_flops = find_peak_flops(self.setup.cost.cluster.device, self.device)
        plan, bound_ns = step_plan.plan, step_plan.bound_ns
        return StepRecord(
            **summarize_ranks(ranks, flops, peak_flops),
            step=step_plan.step,
            loss=result.loss,
            tokens=batch.tokens,
            lr=rate,
            grad_norm=result.gradient_norm,
            expert_imbalance=[round(each, 4) for each in result.expert_imbalance] or None,
            predicted_ms=step_plan.predicted_ns / 1e6,
            planner_wait_ms=step_plan.wait_ns / 1e6,
            gap_to_bound=step_plan.predicted_ns / bound_ns - 1 if bound_ns else None,
            idle_share=step_plan.idle_share,
            planner=plan.planner or "",
            plan_hash=step_plan.plan_hash,
            shape=plan_shape(plan),
            fallback=bool(step_plan.fallback_reason),
            factors=Factors(*step_plan.factors).digest,
            slowest=min(step_plan.speeds, default=None),
        )

    def bind(self, plan: Plan, *, dropout_seed: int | None = None) -> RankPlan:
        """Bind a plan to this rank, with all index work of the model's layers; `PlanBroadcast` has checked its hash.

        Without a seed, as in evaluation, nothing is dropped.
        """

        def prepare(context: Context) -> None:
            self.adapter.prepare(context, self._compute_dtype)

        options = {"device": self.device, "check": False, "prepare": prepare, "dropout_seed": dropout_seed}
        return bind_plan(plan, self.transport, **options)

    def update(self, step: int, result: StepResult) -> float:
        """Set the learning rate and step the optimiser; return the rate."""
        settings, schedule = self.config.optimiser, self.config.schedule
        rate = learning_rate(step, steps=self.setup.steps, peak=settings.lr, schedule=schedule)
        set_learning_rate(self.optimiser, rate)
        self.optimiser.step()
        self.parameters.zero_grad()
        if settings.expert_bias_rate and result.expert_tokens is not None:
            buffers = self.adapter.bias_buffers()
            biases = [buffers.get(name) for name in self.adapter.expert_biases]
            balance_experts(biases, result.expert_tokens.to(self.device), settings.expert_bias_rate)
        return rate

    @property
    def _asked_to_leave(self) -> bool:
        return self._watchdog is not None and self._watchdog.asked_to_leave

    def _agree_to_leave(self, asked: Sequence[float]) -> None:
        """Note whether a rank was asked to leave, which all ranks know from a gather that they had in any case."""
        self._leaves = any(asked)

    def _leaves_after(self, step: int) -> bool:
        """Whether the ranks have agreed to leave after this step; after the last one the run ends as ever."""
        return self._leaves and step < self.setup.steps

    def leave(self, step: int) -> dict[str, Any]:
        """Write a checkpoint, wait until it is complete, and say so. All ranks call it."""
        self.save_checkpoint(step)
        self.checkpoints.wait()
        if self._watchdog is not None:
            self._watchdog.finish()
        left = f"left after step {step:,} of {self.setup.steps:,}, asked by a signal"
        return {"left": f"{left}; {self.checkpoints.latest} is complete, and the same command goes on from it"}

    def evaluate(self, step: int, metrics: Metrics | None) -> float | None:
        """Return the loss on the validation batches, each planned when it is due. All ranks call it.

        A run that leaves does not begin the next batch, and gets None: the run that goes on from its checkpoint
        evaluates first.
        """
        source, batches = self.setup.validation()
        total = 0.0
        self._evaluation_due = True
        for index, batch in enumerate(batches):
            if self._leaves_after(step):
                return None
            self._enter_phase(f"evaluation after step {step}")
            rank_plan = self.bind(self.plans.take(-1 - index, batch.lengths).plan)
            with RowReader(rank_plan, source, batch) as rows:
                total += evaluate(rank_plan, self.parameters, rows, batch.valid_tokens) * batch.valid_tokens
            self._agree_to_leave(gather_values([self._asked_to_leave], self.transport, self.device)[:, 0].tolist())
        self._evaluation_due = False
        loss = total / sum(batch.valid_tokens for batch in batches)
        if metrics is not None:
            metrics.evaluation(step, loss)
            self._callbacks.evaluate(step, loss)
        return loss

    def _is_best(self, step: int, loss: float | None, metrics: Metrics | None) -> bool:
        """Whether the checkpoint of a step is to stay as the best from now on. All ranks call it."""
        if not self.config.checkpoint.best or loss is None:
            return False
        loss = float(gather_values([loss], self.transport, self.device)[0, 0])  # all ranks decide by the same number
        elsewhere = step == self.start_step and self.checkpoints.latest is None  # resumed from another run
        if elsewhere or not math.isfinite(loss) or (self._best is not None and loss >= self._best["loss"]):
            return False
        self._best = {"step": step, "loss": loss}
        if metrics is not None:
            metrics.note(step, f"the lowest loss on the validation documents so far, {loss:.4f}: the best checkpoint")
        return True

    def warm_up(self, first: Plan) -> None:
        """Build attention kernels and communicators before the first step. All ranks call it.

        On a GPU a new kernel holds up a step, and with it every rank that waits for this one. Kernels follow from the
        groups of the first plan and of a small plan per strategy; others are built when they come. The small plans are
        then run on dummy tokens without an update: from then on all communicators of a strategy exist, and the index
        work of its parameter moves is done.
        """
        setup = self.setup
        small: Sequence[Plan] = ()
        if setup.planners.strategies:
            root = self.transport.rank == 0
            small = self.plans.broadcast(warm_up_plans(setup.planners.strategies, setup.cost) if root else None)
        self._start.enter("compiling kernels")
        longest = setup.cost.max_length or int(setup.source.lengths.max())
        builds = kernel_builds(self.adapter, [first, *small], longest, self._compute_dtype, self.device)
        run_builds(builds, self.transport, setup.cost.node_size, self.device, self._start.show)
        for number, plan in enumerate(small, 1):
            self._start.enter(f"strategy {number}/{len(small)}")
            self._enter_phase(f"warm-up of {plan_shape(plan)}, plan {plan.hash[:12]}")
            run_step(self.bind(plan, dropout_seed=0), self.parameters, _dummy_rows, sum(plan.documents))
            self.parameters.zero_grad()

    def save_checkpoint(self, step: int) -> None:
        """Start to write a checkpoint: parameters, optimiser state, sampler cursor, config and strategies."""
        self._enter_phase(f"checkpoint of step {step}", on_disk=True)  # the disk may still be busy with the one before
        strategies = [strategy.as_dict() for strategy in self.setup.planners.strategies]
        extra: dict[str, Any] = {"sampler": self.sampler.state_dict(), "config": self.config.as_dict()}
        extra |= {"strategies": strategies, "evaluation_due": self._evaluation_due, "best": self._best}
        if self.feedback is not None:
            extra["feedback"] = self.feedback.state_dict()
        state = {"model": self._model_state(), "optimiser": state_by_name(self.optimiser)}
        best = None if self._best is None else self._best["step"]
        self.checkpoints.save(step, **state, extra=extra, best=best)

    def _model_state(self, *, masters: bool = True) -> dict[str, torch.Tensor]:
        """Return what steps change of the model: master weights, unless left out, and biases that balance experts."""
        balanced = self.config.optimiser.expert_bias_rate > 0
        biases = self.adapter.bias_buffers() if balanced else {}
        return {**self.parameters.master_weights(), **biases} if masters else biases

    def load_checkpoint(self) -> int:
        """Load the checkpoint that the config says to resume from, if any; return the steps that are done.

        One of this run's own that is damaged is set aside for the one before.
        """
        state = state_by_name(self.optimiser)
        while True:
            path = resumed_checkpoint(self.checkpoints.latest, self.config.checkpoint.resume)
            if path is None:
                return 0
            try:
                manifest = self.checkpoints.load(path, model=self._model_state(), optimiser=state)
                break
            except DamagedCheckpointError as error:
                if path != self.checkpoints.latest:
                    raise
                self._resume_notes.append(f"{error}; set aside as {self.checkpoints.set_aside().name}")
        copy_to_shards(self.parameters.master_weights(), self.parameters.device_shards())
        self.sampler.load_state_dict(manifest.extra["sampler"])
        self._resumed_strategies = manifest.extra.get("strategies", [])
        self._evaluation_due = manifest.extra.get("evaluation_due", False)
        if path == self.checkpoints.latest:
            self._best = manifest.extra.get("best")
        if self.feedback is not None:
            saved = manifest.extra.get("feedback")
            self.feedback = Feedback(self.setup.cost, saved)
            if saved is not None and saved["about"] != self.feedback.about:
                self._resume_notes.append(f"the checkpoint has factors of {saved['about']}; they begin anew")
        return manifest.step

    def _start_planner(self) -> PlanAhead | None:
        if self.transport.rank:
            return None
        limit = self.config.run.timeout_s / 2  # other ranks wait as well
        patience = {"patience_s": min(PATIENCE_S, limit), "first_patience_s": min(FIRST_PATIENCE_S, limit)}
        planners = self.setup.planners
        with blocked_signals():  # the run leaves after a step, which needs plans
            ahead = PlanAhead(
                self.setup.cost,
                planners.planner,
                fallback=planners.fallback,
                feedback=self.feedback is not None,
                **patience,
            )
        return self._closing.enter_context(ahead)

    def _open_metrics(self, stream: IO[str] | None) -> Metrics | None:
        if self.transport.rank:
            return None
        config, done = self.config, self.start_step
        display = None if stream is None else open_display(stream, self.setup.steps, done)
        trackers = open_trackers(config.log.sinks, config.run.output, settings=config.as_dict(), done=done)
        metrics = Metrics(config.metrics, done=done, every=config.log.every, trackers=trackers, display=display)
        return self._closing.enter_context(metrics)


def _reserved_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_reserved(device) / GIB


def step_seed(seed: int, step: int) -> int:
    """Return the seed of a step's random numbers, which a resumed run finds again."""
    return seed << 32 | step


def kernel_builds(
    adapter: ModelAdapter, plans: Sequence[Plan], longest: int, dtype: torch.dtype, device: torch.device
) -> list[KernelBuild]:
    """Return what the attention of a model compiles for plans like these; `longest` document in tokens."""
    limits = [plan.limits for plan in plans]
    capacity = max(tokens for own in limits for _, tokens in (*own.capacity, *own.offload_capacity))
    degrees: dict[int, set[tuple[int, int]]] = {}
    for pipeline in (pipeline for plan in plans for pipeline in plan.pipelines):
        for round_ in pipeline.rounds:
            for stage, work in zip(pipeline.stages, round_.by_stage, strict=True):
                found = {(group.ulysses, group.ring) for group in work.groups}
                degrees.setdefault(stage.tensor, {(1, 1)}).update(found)
    builds = []
    for tensor, found in sorted(degrees.items()):
        for spec in adapter.attention_specs:
            local = spec._replace(heads=spec.heads // tensor, kv_heads=spec.kv_heads // tensor)
            builds += attention_builds(local, dtype, device, longest=longest, tokens=capacity, degrees=found)
    return builds


def run_builds(
    builds: Sequence[KernelBuild],
    transport: Transport,
    node_size: int,
    device: torch.device,
    show: Callable[[str], None],
) -> None:
    """Run builds on every rank; the ranks of a node first compile a share each of what all others then load from disk.

    All ranks call it with equal lists.
    """
    if not builds:
        return
    share = range(transport.rank % node_size, len(builds), node_size)
    rest = [number for number in range(len(builds)) if number not in share]

    def run(numbers: Sequence[int], before: int) -> None:
        for done, number in enumerate(numbers, before + 1):
            builds[number]()
            if done % max(1, len(builds) // PROGRESS_LINES) == 0:
                show(f"compiling kernels {done}/{len(builds)}")

    run(share, 0)
    gather_values([0.0], transport, device).tolist()  # all ranks have compiled their share
    run(rest, len(share))


def _dummy_rows(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(context.tokens, dtype=torch.int64, device=context.device)
    return ids, ids


def find_peak_flops(described: Device, device: torch.device) -> float | None:
    """Return the dense bfloat16 peak of a GPU, FLOP/s, by the cluster's description.

    None: not known, on a CPU, or where the description is not of this GPU (`plan.cluster` names another).
    """
    if device.type != "cuda":
        return None
    return 1e12 * described.peak_tflops if is_device(described.name, torch.cuda.get_device_name(device)) else None


def gather_values(values: Sequence[float], transport: Transport, device: torch.device) -> torch.Tensor:
    """Return the values of all ranks, which wait for each other here; float64[ranks, values]."""
    return gather_vectors(torch.tensor(values, dtype=torch.float64, device=device), transport)


def gather_slices(mine: Sequence[TimeSlice], transport: Transport, device: torch.device) -> list[list[TimeSlice]]:
    """Return the slices of all ranks, which wait for each other here; ranks may have different numbers of them."""
    longest = int(gather_values([len(mine)], transport, device).max())
    rows = [[SLICES.index(each.name), *each[1:]] for each in mine] + [[-1.0] * 5] * (longest - len(mine))
    flat = [float(value) for row in rows for value in row]
    everyone = gather_values(flat, transport, device).view(transport.ranks, longest, 5).tolist()
    return [
        [TimeSlice(SLICES[int(row[0])], row[1], row[2], int(row[3]), int(row[4])) for row in own if row[0] >= 0]
        for own in everyone
    ]
