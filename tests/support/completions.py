"""Prompts and completions of very unequal lengths, their log-probabilities by plain transformers, and losses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from support.tiny_models import VOCABULARY, gradients, tiny_model

Loss = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def prompts_and_completions(
    seed: int = 0, count: int = 8, longest: int = 40
) -> tuple[list[list[int]], list[list[int]]]:
    """Draw pairs; completions are short but for a few, and the last one is empty."""
    draw = random.Random(seed)
    shapes = [(draw.randrange(1, 9), min(longest, int(draw.paretovariate(0.6)))) for _ in range(count - 1)]
    shapes.append((3, 0))
    rows = [[[draw.randrange(1, VOCABULARY) for _ in range(length)] for length in shape] for shape in shapes]
    return [prompt for prompt, _ in rows], [completion for _, completion in rows]


def plain_log_probs(
    model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Return the log-probabilities of completions, one sequence at a time, in a graph."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
        chosen = torch.log_softmax(logits, dim=-1).gather(1, ids[0, len(prompt) :, None])
        found.append(chosen.squeeze(1))
    return found


def clipped_loss(policy: Sequence[torch.Tensor]) -> torch.Tensor:
    """A loss with ratios, clipping, means over tokens and a product of sequences: no sum of token losses."""
    total = torch.zeros((), dtype=policy[0].dtype)
    for number, each in enumerate(policy):
        old = each.detach() + 0.3 * torch.sin(torch.arange(len(each), dtype=each.dtype) + number)
        ratio, advantage = torch.exp(each - old), (-1) ** number * (1 + 0.1 * number)
        total = total - torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / max(1, len(each))
    return total - torch.nn.functional.logsigmoid(0.1 * (policy[0].sum() - policy[1].sum()))


def outcome(model: Any, policy: Sequence[torch.Tensor], loss: Loss = clipped_loss) -> Any:
    """Return log-probabilities, the loss, and the gradients that it leaves in the model."""
    value = loss(policy)
    value.backward()
    return [each.detach() for each in policy], float(value.detach()), gradients(model)


def plain(name: str, seed: int, temperature: float = 1.0, wrap: Any = None) -> Any:
    """Return the `outcome` of plain transformers."""
    model = tiny_model(name) if wrap is None else wrap(tiny_model(name))
    model.set_attn_implementation("eager" if name == "gemma2" else "sdpa")
    return outcome(model, plain_log_probs(model, *prompts_and_completions(seed), temperature))


def planned(cases: Sequence[tuple[str, int, str, float]], wrap: Any = None) -> list[Any]:
    """Return the `outcome` of cases (model, seed, planner, temperature) on all ranks of the job."""
    from seqloom.integrations.log_probs import completion_log_probs
    from seqloom.integrations.transformers.planned_steps import PlannedSteps

    joined()
    found = []
    for name, seed, planner, temperature in cases:
        model = tiny_model(name) if wrap is None else wrap(tiny_model(name))
        steps = PlannedSteps(model, planner)
        found.append(
            outcome(model, completion_log_probs(steps, *prompts_and_completions(seed), temperature=temperature))
        )
    return found


def joined() -> None:
    """Join the job, if it is one of several processes."""
    import os

    import torch.distributed as dist

    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")


def refused_by_rank() -> str:
    """Return what a loss of a rank's own completions is refused with."""
    import torch.distributed as dist

    from seqloom.errors import SeqloomError
    from seqloom.integrations.log_probs import completion_log_probs
    from seqloom.integrations.transformers.planned_steps import PlannedSteps

    joined()
    policy = completion_log_probs(PlannedSteps(tiny_model("llama"), "auto"), *prompts_and_completions())
    try:
        policy[dist.get_rank()].sum().backward()
    except SeqloomError as error:
        return str(error)
    return "nothing"
