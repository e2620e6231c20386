"""Log-probabilities of completions under plans, for reinforcement learning and preference losses: GRPO, DPO and others.

    steps = PlannedSteps(model)                              # all ranks of the job
    policy = completion_log_probs(steps, prompts, completions)
    loss = my_loss(policy)                                   # of all completions, on every rank
    loss.backward()                                          # gradients of the whole loss, on every rank

The ranks share the tokens of all sequences, so no prompt is padded to the longest one and no rank waits for the one
with the longest completion. Values and gradients are those of one process. A loop whose ranks each have rows of their
own, and a loss of them, calls `row_log_probs`.

Losses of these kinds need the log-probabilities of many sequences at once, where a plan runs its rounds one by one. So
the first pass computes them without a graph, and the backward runs every round forward and backward, with the loss's
gradient as weights of its tokens. Memory stays that of one round, whatever the loss. The values of the first pass are
the "old" log-probabilities of a step on policy: `policy.detach()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.function import once_differentiable

from seqloom.dist import Context, Transport
from seqloom.engine import RankPlan, rank_losses, run_step
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers.plain_calls import one_run_each
from seqloom.integrations.transformers.planned_steps import Documents, PlannedSteps
from seqloom.models.loss import IGNORED, Logits, summed_loss, token_losses, token_statistics
from seqloom.params import ReplicatedParameters
from seqloom.plan import LayerRange
from seqloom.train.plan_broadcast import gather_vectors

Tokens = Sequence[int] | torch.Tensor
SAME_LOSS = 1e-4
"""Gradients of the log-probabilities may differ by this share between ranks: rounding, on GPUs of several kinds."""


def completion_log_probs(
    steps: PlannedSteps, prompts: Sequence[Tokens], completions: Sequence[Tokens], *, temperature: float = 1.0
) -> tuple[torch.Tensor, ...]:
    """Return the log-probabilities of each completion's tokens after its prompt, with gradients; all ranks call it.

    Every rank gets all of them, computes the same loss of them and calls backward, which sums gradients over ranks:
    then each rank has those of the whole loss. Under `torch.no_grad()` there is the first pass only, as for a reference
    model. The same lengths have the same plan, so the ratio to values of an earlier call is 1 while the model is the
    same.

    Args:
        steps: of the model; parameters that need no gradient get none.
        prompts, completions: token ids without padding, the same on all ranks; a prompt has one token or more, a
            completion may be empty. Completions of one prompt name it once each.
        temperature: that logits are divided by.

    Returns:
        A tensor per completion, [tokens] in float32 (float64 for a float64 model).
    """
    documents = _pack(prompts, completions, steps.device)
    if not documents.valid:
        raise SeqloomError("no completion has a token: there are no log-probabilities; give one token or more")
    found, _ = _label_log_probs(steps, documents, temperature, statistics=False)
    return found.split([len(each) for each in completions])


class RowLogProbs(NamedTuple):
    """What a model says of the labels in this rank's rows, [rows, tokens - 1] each; 0 where no label counts.

    Attributes:
        log_probs: of the labels, with gradients.
        entropy, log_sum_sq_probs, mean_logits, is_top1: of the distributions that the labels were predicted by, without
            gradients: `token_statistics`. None where they were not asked for.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None


def row_log_probs(
    steps: PlannedSteps,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    statistics: bool = False,
) -> RowLogProbs:
    """Return the log-probabilities of the labels in this rank's rows; all ranks call it, each with rows of its own.

    The rows of all ranks run under one plan, without their padding. Each rank computes a loss of its rows; backward,
    which all ranks call, leaves the mean of the gradients of their losses on every rank, as DistributedDataParallel
    does.

    Args:
        steps: of the model.
        input_ids: int64[rows, tokens], a sequence in each row, padded on either side.
        labels: int64[rows, tokens]: the ids themselves where the loss counts them, else `IGNORED`.
        attention_mask: [rows, tokens], 0 where a row is padded; None: nowhere.
        temperature: that logits are divided by.
        statistics: whether to return more than log-probabilities.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    counted = labels[:, 1:] != IGNORED
    if not one_run_each(mask.bool()) or bool((counted & ~(mask[:, 1:].bool() & mask[:, :-1].bool())).any()):
        raise SeqloomError(
            "rows with holes in their attention_mask, or with a label that no token of its row comes before: every row "
            "is one sequence, and its first token has no label; give each completion a prompt of one token or more"
        )
    own = Documents.from_batch({"input_ids": input_ids, "labels": labels, "attention_mask": mask})
    documents, labels_of_ranks = _of_all_ranks(own.to(steps.device), steps.transport)
    values, measured = _label_log_probs(steps, documents, temperature, statistics=statistics)
    start = sum(labels_of_ranks[: steps.transport.rank])
    part = slice(start, start + labels_of_ranks[steps.transport.rank])
    if steps.transport.ranks > 1:
        values = _OwnPart.apply(values, part, steps.transport)

    def place(found: torch.Tensor) -> torch.Tensor:
        return found.new_zeros(counted.shape).masked_scatter(counted.to(found.device), found)

    if measured is None:
        return RowLogProbs(place(values))
    entropy, log_sum_sq_probs, mean_logits, is_top1 = (place(column) for column in measured[part].unbind(1))
    return RowLogProbs(place(values), entropy, log_sum_sq_probs, mean_logits, is_top1.bool())


def _pack(prompts: Sequence[Tokens], completions: Sequence[Tokens], device: torch.device) -> Documents:
    """Pack prompts and completions, with a label where the next token is one of a completion, or refuse them."""
    if len(prompts) != len(completions):
        raise SeqloomError(
            f"{len(prompts)} prompts and {len(completions)} completions: give one prompt for each completion, the "
            "same one several times where it has several"
        )
    ids, labels, lengths = [], [], []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        first, second = (torch.as_tensor(each, dtype=torch.int64).to(device) for each in (prompt, completion))
        if first.ndim != 1 or second.ndim != 1 or not len(first):
            raise SeqloomError(
                f"prompt {number} has shape {list(first.shape)}, its completion {list(second.shape)}: both are "
                "rows of token ids without padding, and a prompt has one token or more, since the first token of "
                "a completion is predicted from it"
            )
        ids += [first, second]
        labels += [first.new_full((len(first) - 1,), IGNORED), second, first.new_full((1,), IGNORED)]
        lengths.append(len(first) + len(second))
    packed = (torch.cat(each) if each else torch.empty(0, dtype=torch.int64) for each in (ids, labels))
    return Documents(*packed, lengths=tuple(lengths))


def _of_all_ranks(own: Documents, transport: Transport) -> tuple[Documents, list[int]]:
    """Return the documents of all ranks, in the order of the ranks, and how many labels of each rank count."""
    if transport.ranks == 1:
        return own, [own.valid]
    sizes = torch.tensor([len(own.ids), len(own.lengths), own.valid], device=own.ids.device)
    tokens, documents, valid = gather_vectors(sizes, transport).unbind(1)
    ends = [0, *accumulate((2 * tokens + documents).tolist())]
    flat = own.ids.new_zeros(ends[-1])
    mine = torch.cat((own.ids, own.labels, torch.tensor(own.lengths, dtype=torch.int64, device=own.ids.device)))
    flat[ends[transport.rank] : ends[transport.rank + 1]] = mine
    transport.all_reduce(flat, tuple(range(transport.ranks)))
    parts = [
        part.split([count, count, number])
        for part, count, number in zip(
            flat.split((2 * tokens + documents).tolist()), tokens.tolist(), documents.tolist(), strict=True
        )
    ]
    joined = Documents.join([Documents(ids, labels, tuple(lengths.tolist())) for ids, labels, lengths in parts])
    return joined, valid.tolist()


def _label_log_probs(
    steps: PlannedSteps, documents: Documents, temperature: float, *, statistics: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probabilities of the labels that count, [labels], and [labels, 4] of statistics if asked for."""
    if steps.sharding != "none":
        raise SeqloomError(
            f"log-probabilities of a model with sharding {steps.sharding!r}: they are computed with parameters that "
            "every rank has; give PlannedSteps sharding='none'"
        )
    if steps.adapter.router_loss is not None:
        raise SeqloomError(
            "log-probabilities of a model with a router loss: which loss its routers add is not known here; load it "
            "with output_router_logits=False"
        )
    if not temperature > 0:
        raise SeqloomError(f"temperature {temperature}: logits are divided by it; give a number above 0")
    trained = [*steps.parameters.master_weights().values()]
    if not documents.valid:
        empty = torch.cat([each.flatten()[:0] for each in trained])
        return empty, empty.detach().new_zeros((0, 4)) if statistics else None
    run = _Run(steps, documents, temperature, statistics, steps.bind(documents.lengths))
    return _LogProbs.apply(run, *trained)


@dataclass(slots=True, eq=False)
class _Run:
    """A step whose log-probabilities a loss is made of: a forward, then forward and backward with its gradient."""

    steps: PlannedSteps
    documents: Documents
    temperature: float
    statistics: bool
    rank_plan: RankPlan = field(repr=False)

    def forward(self) -> torch.Tensor:
        """Return the log-probabilities of the labels that count, and statistics: [labels, 1 or 5]."""
        documents = self.documents
        parameters = _TokenLosses(self.steps, self.temperature)
        shape = (len(documents.labels), 5 if self.statistics else 1)
        parameters.measured = documents.labels.new_zeros(shape, dtype=parameters.wide)
        parameters.documents = documents
        rank_losses(self.rank_plan, parameters, documents.rows, documents.valid)
        transport = self.steps.transport
        transport.all_reduce(parameters.measured, tuple(range(transport.ranks)))
        return parameters.measured[documents.labels != IGNORED]

    def backward(self, gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradients of the trained parameters, given that of the log-probabilities."""
        self._check_same_loss(gradient)
        documents = self.documents
        parameters = _TokenLosses(self.steps, self.temperature)
        weights = documents.labels.new_zeros(len(documents.labels), dtype=parameters.wide)
        weights[documents.labels != IGNORED] = gradient * -documents.valid  # the engine divides by the valid labels
        parameters.weights, parameters.documents = weights, documents
        trained = [*parameters.master_weights().values()]
        kept = [each.grad for each in trained]
        for each in trained:
            each.grad = None
        try:
            with torch.enable_grad():
                run_step(self.rank_plan, parameters, documents.rows, documents.valid)
            return [each.grad for each in trained]
        finally:
            for each, before in zip(trained, kept, strict=True):
                each.grad = before

    def _check_same_loss(self, gradient: torch.Tensor) -> None:
        """Refuse a loss that another rank has not computed alike, such as one of a rank's own completions."""
        signs = torch.ones_like(gradient)
        signs[1::2] = -1
        mine = torch.stack((gradient.norm(), gradient.sum(), (gradient * signs).sum())).double()
        found = gather_vectors(mine, self.steps.transport)
        if bool(((found - found[0]).abs() > SAME_LOSS * found[:, :1].max() * len(gradient) ** 0.5).any()):
            raise SeqloomError(
                "ranks computed different losses of the log-probabilities, whose gradients have the norms "
                f"{', '.join(f'{each:.3g}' for each in found[:, 0].tolist())}: every rank has all completions, and "
                "computes the same loss of all of them; gather rewards and advantages of all ranks before, or let "
                "row_log_probs take each rank's own rows"
            )


class _TokenLosses(ReplicatedParameters):
    """The parameters of planned steps, with a forward that measures the labels of tokens, or weights their losses."""

    def __init__(self, steps: PlannedSteps, temperature: float) -> None:
        super().__init__(steps.adapter, steps.transport)
        made = steps.adapter.logits
        cap = None if made.cap is None else made.cap / temperature
        self._made = Logits(made.scale / temperature, cap)
        self.wide = torch.promote_types(self._dtype, torch.float32)
        self.documents: Documents | None = None
        self.measured: torch.Tensor | None = None
        self.weights: torch.Tensor | None = None

    def forward(
        self, layers: LayerRange, inputs: torch.Tensor, labels: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        """Return the sum of this rank's token losses; see `Parameters.forward`."""
        assert self.documents is not None and labels is not None
        rows = self.documents.indices(context)
        states, head = self._adapter.run(layers, inputs, context), self._adapter.head
        weight, bias = cast("torch.Tensor", head.weight), cast("torch.Tensor | None", getattr(head, "bias", None))
        tp_group = self._adapter.head_tp_group(context)
        if self.measured is not None:
            options = {"bias": bias, "logits": self._made, "tp_group": tp_group}
            if self.measured.shape[1] > 1:
                self.measured[rows] = token_statistics(states, weight, labels, **options)
            else:
                self.measured[rows, 0] = -token_losses(states, weight, labels, **options)
            return -self.measured[rows, 0].sum()
        assert self.weights is not None
        return summed_loss(
            states,
            weight,
            labels,
            bias=bias,
            head_gradients=self._head_gradients,
            logits=self._made,
            token_weights=self.weights[rows],
            tp_group=tp_group,
        )


class _LogProbs(torch.autograd.Function):
    """The autograd node of log-probabilities: a function of the trained parameters."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *trained: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.run = run
        ctx.save_for_backward(*trained)  # reading them raises if an optimiser has changed them meanwhile
        found = run.forward()
        statistics = found[:, 1:].clone() if run.statistics else None
        if statistics is not None:
            ctx.mark_non_differentiable(statistics)
        return found[:, 0].clone(), statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        _ = ctx.saved_tensors
        return None, *ctx.run.backward(grad_outputs[0])


class _OwnPart(torch.autograd.Function):
    """The part of values that a rank's loss is made of. Backward joins the gradients of all ranks' losses' mean."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, part: slice, transport: Transport) -> torch.Tensor:
        ctx.shape, ctx.part, ctx.transport = values.shape, part, transport
        return values[part].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        transport: Transport = ctx.transport
        joined = grad_outputs[0].new_zeros(ctx.shape)
        joined[ctx.part] = grad_outputs[0] / transport.ranks
        transport.all_reduce(joined, tuple(range(transport.ranks)))
        return joined, None, None
