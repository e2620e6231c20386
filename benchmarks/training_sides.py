"""Training steps of one transformers model on one device, by two sides: Seqloom's engine, and plain transformers.

The modules are several, the parameters one: all sides always have the same values, the same optimiser, the same
clipping and the same chunked loss. A step begins with lengths and token ids on the host and ends with an update.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from training_inputs import CONFIGS, Pack, Step
from transformers import AutoModelForCausalLM

from seqloom.attention import AttentionSpec, attention_builds
from seqloom.dist import Context, SingleRankTransport, bind_single_rank
from seqloom.engine import bind_plan, run_step
from seqloom.integrations.transformers import attach, model_adapter
from seqloom.layout import Span
from seqloom.models import compile_layers, recompute_layers, summed_loss
from seqloom.params import ReplicatedParameters, scale_gradients
from seqloom.plan import Checkpoint, Group, Limits, Pipeline, Plan, Reduce, Round, Sharding, StageMicroBatch

CLIP, CHUNK, GIB = 1.0, 4096, 2**30


class Sides:
    """A model with all sides around it.

    ours        the engine; its layers are compiled if asked for
    flex        plain transformers on whole packs: positions that begin anew tell it where documents begin
    documents   plain transformers with SDPA, a call for every document

    With " compiled" after its name a rival's layers are compiled too.
    """

    def __init__(self, name: str, device: torch.device, *, compiled: str = "none") -> None:
        self.device, self.config = device, CONFIGS[name]()
        torch.manual_seed(0)
        with device:  # drawn where it will live
            plain: Any = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16).train()
        self.parameters = list(plain.parameters())
        self.rivals = {"": plain}
        shared = {id(each): each for each in self.parameters}
        self.adapter = model_adapter(attach(copy.deepcopy(plain, dict(shared))))
        if compiled != "none":
            compile_layers(self.adapter.layers)
        if compiled == "both":
            self.rivals["compiled"] = copy.deepcopy(plain, dict(shared))
            for layer in self.rivals["compiled"].get_decoder().layers:
                layer.compile()
        recompute_layers(self.adapter.layers)
        self.engine = ReplicatedParameters(self.adapter, SingleRankTransport(), chunk=CHUNK)
        self.optimiser = torch.optim.AdamW(self.parameters, lr=1e-5, fused=True)

    def pack(self, lengths: list[int]) -> Pack:
        """Documents of random tokens."""
        return Pack.drawn(lengths, self.config.vocab_size, self.device)

    def warm_up(self, longest: int, report: Callable[[int, int], None]) -> int:
        """Build the engine's kernels for packs of `longest` tokens."""
        c = self.config
        spec = AttentionSpec(c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        builds = attention_builds(spec, torch.bfloat16, self.device, longest=longest, tokens=longest)
        for done, build in enumerate(builds, 1):
            build.run()
            report(done, len(builds))
        return len(builds)

    def run(self, side: str, pack: Pack, recompute: str) -> Step:
        """A whole step, timed."""
        keep, cuda = Checkpoint(recompute), self.device.type == "cuda"
        rival = self._rival(side, keep)
        self.optimiser.zero_grad()  # what a step that ran out of memory may have left
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss, norm = self._engine(pack, keep) if side == "ours" else self._plain(rival, pack)
        self.optimiser.step()
        self.optimiser.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        return Step(seconds, float(loss), float(norm), torch.cuda.max_memory_allocated() / GIB if cuda else 0.0)

    @torch.no_grad()
    def errors(self, pack: Pack) -> tuple[float, float]:
        """How far hidden states are from those in float32: the engine's, and plain transformers'; norm over norm."""
        plain, (ids, _) = self._rival("documents", Checkpoint.NONE), self._upload(pack)
        exact = copy.deepcopy(plain).float()
        parts = ids.split(pack.lengths)
        oracle, wanted = (torch.cat([self._hidden(m, part, None) for part in parts]).float() for m in (exact, plain))
        found = self.adapter.hidden(ids, bind_single_rank(pack.lengths, device=self.device)).float()
        return tuple(float((one - oracle).norm() / oracle.norm()) for one in (found, wanted))

    def _engine(self, pack: Pack, keep: Checkpoint) -> tuple[float, float]:
        """One round on one rank, run as in training."""
        spans = tuple(Span(number, 0, length) for number, length in enumerate(pack.lengths))
        rounds = [Round((StageMicroBatch((Group((0,), 1, 1, spans),), keep),))]
        limits = Limits(1, 1, self.config.num_attention_heads, ((keep, len(pack.ids)),))
        pipeline = Pipeline.single((0,), self.config.num_hidden_layers, rounds, Reduce.STEP)
        plan = Plan(limits, Sharding.NONE, Reduce.STEP, tuple(pack.lengths), (pipeline,), "benchmark")
        bound = bind_plan(plan, SingleRankTransport(), device=self.device, prepare=self._prepare)
        result = run_step(bound, self.engine, lambda context: self._upload(pack), pack.valid)
        scale_gradients(self.engine, min(1.0, CLIP / result.gradient_norm))
        return result.loss, result.gradient_norm

    def _prepare(self, context: Context) -> None:
        self.adapter.prepare(context, torch.bfloat16)

    def _plain(self, model: Any, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        """What a loop without Seqloom does."""
        ids, labels = self._upload(pack)
        calls: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]
        if model.config._attn_implementation == "flex_attention":
            positions = torch.cat([torch.arange(length) for length in pack.lengths])
            calls = [(ids, positions.to(self.device, non_blocking=True), labels)]
        else:
            each = zip(*(x.split(pack.lengths) for x in (ids, labels)), strict=True)
            calls = [(some, None, wanted) for some, wanted in each]
        total, weight = torch.zeros((), device=self.device), model.get_output_embeddings().weight
        for some, positions, wanted in calls:
            loss = summed_loss(self._hidden(model, some, positions), weight, wanted, chunk=CHUNK) / pack.valid
            loss.backward()
            total += loss.detach()
        return total, torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)

    def _rival(self, side: str, keep: Checkpoint) -> Any:
        """The model of a rival, ready for its way to attend and to recompute."""
        way, _, kind = side.partition(" ")
        model = self.rivals[kind]
        model.set_attn_implementation("flex_attention" if way == "flex" else "sdpa")
        if keep == Checkpoint.FULL:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        return model

    def _hidden(self, model: Any, ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        given = {} if positions is None else {"position_ids": positions[None]}
        return model.get_decoder()(input_ids=ids[None], use_cache=False, **given).last_hidden_state.squeeze(0)

    def _upload(self, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        return pack.ids.to(self.device, non_blocking=True), pack.labels.to(self.device, non_blocking=True)
