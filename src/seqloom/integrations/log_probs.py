"""Log-probabilities of completions under plans, for reinforcement learning and preference losses: GRPO, DPO and others.

    steps = PlannedSteps(model)                              # all ranks of the job
    policy = completion_log_probs(steps, prompts, completions)
    loss = my_loss(policy)                                   # of all completions, on every rank
    loss.backward()                                          # gradients of the whole loss, on every rank

The ranks share the tokens of all sequences, so no prompt is padded to the longest one and no rank waits for the one
with the longest completion. Values and gradients are those of one process.

Losses of these kinds need the log-probabilities of many sequences at once, where a plan runs its rounds one by one. So
the first pass computes them without a graph, and the backward runs every round forward and backward, with the loss's
gradient as weights of its tokens. Memory stays that of one round, whatever the loss. The values of the first pass are
the "old" log-probabilities of a step on policy: `policy.detach()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from seqloom.dist import Context
from seqloom.engine import RankPlan, rank_losses, run_step
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers.planned_steps import Documents, PlannedSteps
from seqloom.models.loss import IGNORED, Logits, summed_loss, token_losses
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
    sequences = _Sequences.of(prompts, completions, steps.device)
    if steps.adapter.router_loss is not None:
        raise SeqloomError(
            "log-probabilities of a model with a router loss: which loss its routers add is not known here; load it "
            "with output_router_logits=False"
        )
    if not temperature > 0:
        raise SeqloomError(f"temperature {temperature}: logits are divided by it; give a number above 0")
    if not sequences.counts or not sum(sequences.counts):
        raise SeqloomError("no completion has a token: there are no log-probabilities; give one token or more")
    run = _Run(steps, sequences, temperature, steps.bind(sequences.documents.lengths))
    trained = [*steps.parameters.master_weights().values()]
    return _LogProbs.apply(run, *trained).split(sequences.counts)


@dataclass(frozen=True, slots=True, eq=False)
class _Sequences:
    """Prompts with their completions, packed.

    Attributes:
        documents: with a label where the next token is one of a completion.
        counts: tokens of every completion.
    """

    documents: Documents
    counts: list[int]

    @classmethod
    def of(cls, prompts: Sequence[Tokens], completions: Sequence[Tokens], device: torch.device) -> _Sequences:
        """Pack prompts and completions, or refuse them."""
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
        return cls(Documents(*packed, lengths=tuple(lengths)), [len(each) for each in completions])


@dataclass(slots=True, eq=False)
class _Run:
    """A step whose log-probabilities a loss is made of: a forward, then forward and backward with its gradient."""

    steps: PlannedSteps
    sequences: _Sequences
    temperature: float
    rank_plan: RankPlan = field(repr=False)

    def forward(self) -> torch.Tensor:
        """Return the log-probabilities of all completions, [tokens of completions]."""
        documents = self.sequences.documents
        parameters = _TokenLosses(self.steps, self.temperature)
        parameters.losses = documents.labels.new_zeros(len(documents.labels), dtype=parameters.wide)
        parameters.documents = documents
        rank_losses(self.rank_plan, parameters, documents.rows, documents.valid)
        transport = self.steps.transport
        transport.all_reduce(parameters.losses, tuple(range(transport.ranks)))
        return parameters.losses[documents.labels != IGNORED].neg_()

    def backward(self, gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradients of the trained parameters, given that of the log-probabilities."""
        self._check_same_loss(gradient)
        documents = self.sequences.documents
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
                "computes the same loss of all of them; gather rewards and advantages of all ranks before"
            )


class _TokenLosses(ReplicatedParameters):
    """The parameters of planned steps, with a forward that keeps the losses of tokens, or weights them."""

    def __init__(self, steps: PlannedSteps, temperature: float) -> None:
        super().__init__(steps.adapter, steps.transport)
        made = steps.adapter.logits
        cap = None if made.cap is None else made.cap / temperature
        self._made = Logits(made.scale / temperature, cap)
        self.wide = torch.promote_types(self._dtype, torch.float32)
        self.documents: Documents | None = None
        self.losses: torch.Tensor | None = None
        self.weights: torch.Tensor | None = None

    def forward(
        self, layers: LayerRange, inputs: torch.Tensor, labels: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        """Return the sum of this rank's token losses; see `Parameters.forward`."""
        assert self.documents is not None and labels is not None
        rows = self.documents.indices(context)
        states, head = self._adapter.run(layers, inputs, context), self._adapter.head
        weight, bias = cast("torch.Tensor", head.weight), cast("torch.Tensor | None", getattr(head, "bias", None))
        if self.losses is not None:
            losses = token_losses(states, weight, labels, bias=bias, logits=self._made)
            self.losses[rows] = losses
            return losses.sum()
        assert self.weights is not None
        return summed_loss(
            states,
            weight,
            labels,
            bias=bias,
            head_gradients=self._head_gradients,
            logits=self._made,
            token_weights=self.weights[rows],
        )


class _LogProbs(torch.autograd.Function):
    """The autograd node of log-probabilities: a function of the trained parameters."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *trained: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(*trained)  # reading them raises if an optimiser has changed them meanwhile
        return run.forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        _ = ctx.saved_tensors
        return None, *ctx.run.backward(grad_outputs[0])
