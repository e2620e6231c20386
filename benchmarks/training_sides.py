"""Training steps of one transformers model on one device, by two sides: Seqloom's engine, and plain transformers.

The modules are two, the parameters one: both sides always have the same values, the same optimiser, the same clipping
and the same chunked loss. A step begins with lengths and token ids on the host and ends with updated parameters.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from training_inputs import CONFIGS, Pack
from transformers import AutoModelForCausalLM

from seqloom.attention.kernels.kernel import Shape
from seqloom.attention.kernels.registry import default
from seqloom.comm import bind_alone
from seqloom.comm.alone import Alone
from seqloom.integrations import attach, network
from seqloom.plan import Checkpoint, Group, Limits, Pipeline, Plan, Reduce, Round, Sharding, Span, Work
from seqloom.runtime import Replicated, bind_plan, recompute_layers, run_step, scale_gradients, summed_loss

CLIP, CHUNK, GIB = 1.0, 4096, 2**30


class Step(NamedTuple):
    """What a step took and found."""

    seconds: float
    loss: float
    norm: float
    peak_gib: float


class Sides:
    """A model with both sides around it."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.device, self.config = device, CONFIGS[name]()
        torch.manual_seed(0)
        with device:  # drawn where it will live
            self.plain: Any = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16)
        self.plain.train()
        self.parameters = list(self.plain.parameters())
        shared: Any = {id(each): each for each in self.parameters}
        self.network = network(attach(copy.deepcopy(self.plain, shared)))
        recompute_layers(self.network.layers)
        self.engine = Replicated(self.network, Alone(), chunk=CHUNK)
        self.optimiser = torch.optim.AdamW(self.parameters, lr=1e-5, fused=True)

    def pack(self, lengths: list[int]) -> Pack:
        """Documents of random tokens."""
        return Pack.drawn(lengths, self.config.vocab_size, self.device)

    def warm_up(self, longest: int, report: Callable[[int, int], None]) -> int:
        """Build the engine's kernels for documents of up to `longest` tokens."""
        c = self.config
        shape = (c.num_attention_heads, c.num_key_value_heads, c.head_dim, torch.bfloat16, self.device)
        return default(self.device).warm_up(Shape(*shape, c.head_dim**-0.5), longest, report=report)

    def ours(self, pack: Pack, keep: Checkpoint) -> tuple[float, float]:
        """Loss and gradients by the engine: one round on one rank, run as in training."""
        spans = tuple(Span(number, 0, length) for number, length in enumerate(pack.lengths))
        rounds = [Round((Work((Group((0,), 1, 1, spans),), keep),))]
        limits = Limits(1, 1, self.config.num_attention_heads, ((keep, len(pack.ids)),))
        pipeline = Pipeline.single((0,), self.config.num_hidden_layers, rounds, Reduce.STEP)
        plan = Plan(limits, Sharding.NONE, Reduce.STEP, tuple(pack.lengths), (pipeline,), "benchmark")
        bound = bind_plan(plan, Alone(), device=self.device)
        result = run_step(bound, self.engine, lambda context: self._upload(pack), pack.valid)
        scale_gradients(self.engine, min(1.0, CLIP / result.gradient_norm))
        return result.loss, result.gradient_norm

    def flex(self, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        """Plain transformers, packed: positions that begin anew tell it where documents begin."""
        ids, labels = self._upload(pack)
        positions = torch.cat([torch.arange(length) for length in pack.lengths]).to(self.device, non_blocking=True)
        return self._backward(pack, [(ids, positions, labels)])

    def documents(self, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        """Plain transformers, a call for every document; also for a pack of one."""
        ids, labels = (x.split(pack.lengths) for x in self._upload(pack))
        return self._backward(pack, [(i, None, label) for i, label in zip(ids, labels, strict=True)])

    def run(self, side: str, pack: Pack, recompute: str) -> Step:
        """A whole step of "ours", "flex" or "documents", timed."""
        keep = Checkpoint(recompute)
        if side != "ours":
            self._prepare("flex_attention" if side == "flex" else "sdpa", keep)
        self.optimiser.zero_grad()  # what a step that ran out of memory may have left
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss, norm = self.ours(pack, keep) if side == "ours" else getattr(self, side)(pack)
        self.optimiser.step()
        self.optimiser.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        return Step(seconds, float(loss), float(norm), torch.cuda.max_memory_allocated() / GIB if cuda else 0.0)

    @torch.no_grad()
    def difference(self, pack: Pack) -> float:
        """How far the hidden states of the sides are apart: norm of the difference / norm."""
        self._prepare("sdpa", Checkpoint.NONE)
        ids, _ = self._upload(pack)
        wanted = torch.cat([self._hidden(part, None) for part in ids.split(pack.lengths)]).float()
        found = self.network.hidden(ids, bind_alone(pack.lengths, device=self.device))
        return float((found.float() - wanted).norm() / wanted.norm())

    def _upload(self, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        return pack.ids.to(self.device, non_blocking=True), pack.labels.to(self.device, non_blocking=True)

    def _prepare(self, attention: str, keep: Checkpoint) -> None:
        self.plain.set_attn_implementation(attention)
        if keep == Checkpoint.FULL:
            self.plain.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.plain.gradient_checkpointing_disable()

    def _hidden(self, ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        given = {} if positions is None else {"position_ids": positions[None]}
        return self.plain.get_decoder()(input_ids=ids[None], use_cache=False, **given).last_hidden_state.squeeze(0)

    def _backward(self, pack: Pack, calls: list) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros((), device=self.device)
        weight = self.plain.get_output_embeddings().weight
        for ids, positions, labels in calls:
            loss = summed_loss(self._hidden(ids, positions), weight, labels, chunk=CHUNK) / pack.valid
            loss.backward()
            total += loss.detach()
        return total, torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
