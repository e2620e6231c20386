"""Training steps of one transformers model on one device: by Seqloom's engine, and by its rivals.

The modules are several, the parameters one: all sides always have the same values, the same optimiser, the same
clipping and the same chunked loss. A step begins with lengths and token ids on the host and ends with an update. The
learning rate is 0: the optimiser does all its work, and every step of every side starts from the same parameters.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from training_inputs import CONFIGS, Pack, Step
from training_rivals import Rival, make_layers, pack_arguments, rotary_of, set_attention
from transformers import AutoModelForCausalLM

from seqloom.attention import AttentionSpec, attention_builds
from seqloom.dist import Context, SingleRankTransport, bind_single_rank
from seqloom.engine import bind_plan, run_step
from seqloom.integrations.transformers import attach, model_adapter
from seqloom.layout import Span
from seqloom.models import ModelAdapter, summed_loss
from seqloom.params import ReplicatedParameters
from seqloom.plan import Checkpoint, Group, Limits, Pipeline, Plan, Reduce, Round, Sharding, StageMicroBatch
from seqloom.train.model import prepare_layers

OURS, FLOAT8 = "ours", "float8"
CLIP, CHUNK, GIB = 1.0, 4096, 2**30


class Sides:
    """A model with all sides around it: "ours" and "float8", the engine, layers compiled if asked for; and rivals."""

    def __init__(self, name: str, device: torch.device, *, compiled: bool) -> None:
        self.device, self.config = device, CONFIGS[name]()
        torch.manual_seed(0)
        with device:  # drawn where it will live
            plain: Any = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16).train()
        self.parameters = list(plain.parameters())
        self._model, self._rivals = plain, dict[Rival, Any]()
        self._compiled, self._engines = compiled, dict[str, tuple[ModelAdapter, ReplicatedParameters]]()
        self.adapter = self._engine_of(OURS)[0]
        self.optimiser = torch.optim.AdamW(self.parameters, lr=0.0, fused=True)

    def _copy(self) -> Any:
        """Another module with the same parameters."""
        return copy.deepcopy(self._model, {id(each): each for each in self.parameters})

    def _engine_of(self, side: str) -> tuple[ModelAdapter, ReplicatedParameters]:
        """Another module with the same parameters, as the engine runs it."""
        if side not in self._engines:
            options = {"compiled": self._compiled, "split_backward": False, "float8": side == FLOAT8}
            adapter = prepare_layers(model_adapter(attach(self._copy())), **options)
            self._engines[side] = adapter, ReplicatedParameters(adapter, SingleRankTransport(), chunk=CHUNK)
        return self._engines[side]

    def pack(self, lengths: list[int]) -> Pack:
        """Documents of random tokens."""
        return Pack.drawn(lengths, self.config.vocab_size, self.device)

    def warm_up(self, longest: int, report: Callable[[int, int], None]) -> int:
        """Build the engine's kernels for packs of `longest` tokens."""
        c = self.config
        spec = AttentionSpec(c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        builds = attention_builds(spec, torch.bfloat16, self.device, longest=longest, tokens=longest)
        for done, build in enumerate(builds, 1):
            build()
            report(done, len(builds))
        return len(builds)

    def run(self, side: Rival | str, pack: Pack, recompute: str) -> Step:
        """A whole step, timed."""
        keep, cuda = Checkpoint(recompute), self.device.type == "cuda"
        model = self._rival(side, keep) if isinstance(side, Rival) else None
        self.optimiser.zero_grad()  # what a step that ran out of memory may have left
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss, norm = self._plain(model, side, pack) if isinstance(side, Rival) else self._engine(side, pack, keep)
        self.optimiser.step()
        self.optimiser.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        return Step(seconds, float(loss), float(norm), torch.cuda.max_memory_allocated() / GIB if cuda else 0.0)

    @torch.no_grad()
    def errors(self, pack: Pack) -> tuple[float, float]:
        """How far hidden states are from those in float32: the engine's, and plain transformers'; norm over norm."""
        plain, (ids, _) = self._rival(Rival("documents", "plain"), Checkpoint.NONE), self._upload(pack)
        exact = copy.deepcopy(plain).float()
        parts = ids.split(pack.lengths)
        oracle, wanted = (torch.cat([self._hidden(m, part, {}) for part in parts]).float() for m in (exact, plain))
        found = self.adapter.hidden(ids, bind_single_rank(pack.lengths, device=self.device)).float()
        return tuple(float((one - oracle).norm() / oracle.norm()) for one in (found, wanted))

    def _engine(self, side: str, pack: Pack, keep: Checkpoint) -> tuple[float, float]:
        """One round on one rank, run as in training."""
        _, engine = self._engine_of(side)
        spans = tuple(Span(number, 0, length) for number, length in enumerate(pack.lengths))
        rounds = [Round((StageMicroBatch((Group((0,), 1, 1, spans),), keep),))]
        limits = Limits(1, 1, self.config.num_attention_heads, ((keep, len(pack.ids)),))
        pipeline = Pipeline.single((0,), self.config.num_hidden_layers, rounds, Reduce.STEP)
        plan = Plan(limits, Sharding.NONE, Reduce.STEP, tuple(pack.lengths), (pipeline,), "benchmark")
        bound = bind_plan(plan, SingleRankTransport(), device=self.device, prepare=self._prepare)
        result = run_step(bound, engine, lambda context: self._upload(pack), pack.valid, max_norm=CLIP)
        return result.loss, result.gradient_norm

    def _prepare(self, context: Context) -> None:
        self.adapter.prepare(context, torch.bfloat16)

    def _plain(self, model: Any, rival: Rival, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        """What a loop without Seqloom does."""
        ids, labels = self._upload(pack)
        calls = [(ids, labels)]
        if rival.attention == "documents":
            calls = list(zip(*(x.split(pack.lengths) for x in (ids, labels)), strict=True))
        arguments = pack_arguments(rival.attention, pack.lengths, self.device)
        total, weight = torch.zeros((), device=self.device), model.get_output_embeddings().weight
        with rotary_of(model, rival.layers):
            for some, wanted in calls:
                loss = summed_loss(self._hidden(model, some, arguments), weight, wanted, chunk=CHUNK) / pack.valid
                loss.backward()
                total += loss.detach()
        return total, torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)

    def _rival(self, rival: Rival, keep: Checkpoint) -> Any:
        """The model of a rival, ready for its way to attend and to recompute."""
        if rival not in self._rivals:
            self._rivals[rival] = make_layers(self._copy(), rival.layers)
            set_attention(self._rivals[rival], rival.attention)
        model = self._rivals[rival]
        if keep == Checkpoint.FULL:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        return model

    def _hidden(self, model: Any, ids: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        return model.get_decoder()(input_ids=ids[None], use_cache=False, **arguments).last_hidden_state.squeeze(0)

    def _upload(self, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        return pack.ids.to(self.device, non_blocking=True), pack.labels.to(self.device, non_blocking=True)
