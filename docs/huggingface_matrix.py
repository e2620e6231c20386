"""The table of model types in docs/huggingface.md: every causal one of the installed transformers, tiny, and tried.

python docs/huggingface_matrix.py                  renews docs/huggingface.md between its markers; takes ten minutes
python docs/huggingface_matrix.py phi gpt2 ...     tries these types, and leaves what the page says of the others

`seqloom check` says which models are refused, and why. Others run under plans of 1, 3 and 4 ranks, and of two stages
with a document in pieces. Loss and gradients are compared with those of plain transformers, document by document, in
float64. Scans of transformers round to float32, which sums of decays do not bear well: there they are replaced by plain
ones, token by token. Then the commands verify and train each model, from a folder, on gloo processes.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import transformers
from torch.nn.functional import cross_entropy, softplus
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.gemma3n import modeling_gemma3n
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from seqloom.cli import main
from seqloom.cost import CostModel
from seqloom.data import IGNORE_INDEX, Batch, Source, StoreWriter, open_source
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import attach, model_adapter
from seqloom.integrations.transformers.describe import describe_model, language_model_config
from seqloom.models import ModelAdapter
from seqloom.planners.hydraulis.strategy import ParallelConfig, PipelineConfig, Strategy
from seqloom.planners.registry import PlannerChoice
from seqloom.profiling.verify import StepOutcome, run_plan

MARKER = "matrix"
EXACT, WHOLE, ONE_STAGE = "exact", "exact, documents not in pieces", "exact, not in stages"
TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""All causal model types of the installed transformers."""
VOCABULARY, LENGTHS = 62, (13, 5, 21, 2)
MOST_PARAMETERS = 10_000_000
TOLERANCE = 1e-5
"""Relative difference of a gradient: models that compute parts in float32 by design reach no less."""


class TriedPlan(NamedTuple):
    """How a plan is made."""

    planner: str
    ranks: int
    capacity: int = 24  # tokens of a rank, at most
    sharding: str = "full"
    options: Mapping[str, Any] = {}
    tensor: int = 1


PLANS = (TriedPlan("static:1", 1), TriedPlan("flex", 3), TriedPlan("static:4", 4), TriedPlan("pipeline:2", 2, 8))
TENSOR = Strategy((PipelineConfig(ParallelConfig(1, 2, 2), (0, 1, 2, 3), 96),))
IN_TP_GROUPS = (
    TriedPlan("hydraulis", 4, sharding="free", options={"strategies": (TENSOR,)}),
    TriedPlan("static:4", 4, sharding="none", tensor=2),
)
"""Two TP groups of two ranks, which share documents by heads; the latter cut embedding and head, too."""
TENSOR_REASONS = {
    "mixers that scan": "layers that scan",
    "attention is latent": "latent attention",
    "silent of attention": "a tensor-parallel plan without attention",
    "experts": "experts with code of their own",
    "no tensor-parallel plan": "no tensor-parallel plan published",
    "are not one list": "no plain list of layers",
}
"""What `no_tp_reason` of an adapter says -> what the page says."""
SIZES: Mapping[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64},
    **{"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "n_shared_experts": 1},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "router_aux_loss_coef": 0.0, "aux_loss_coef": 0.0},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
"""Keys of a config, if it has them."""
LATENT = {
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16},
    **{"head_dim": 4, "num_key_value_heads": 4},
}
"""Of latent attention: the width of a head is that of its rotated part there."""
ROUTED = (
    *("ernie4_5_moe", "flex_olmo", "flint", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared", "laguna"),
    *("mellum", "minimax_m2", "minimax_m3_vl_text", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"),
)
"""Types that are tried with an active router loss."""
DELTA_RULE = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 4},
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
"""Of the gated delta rule."""
MAMBA = {
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_chunk_size": 8},
    "mamba_expand": 2,
}
"""Of Mamba-2."""
WINDOWED = ["sliding_attention", "full_attention"] * 2
PER_LAYER_INPUTS = {
    **{"layer_types": WINDOWED, "num_kv_shared_layers": 2},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
}
GEMMA4 = PER_LAYER_INPUTS | {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
"""Wider heads, and fewer of keys, in full attention; the last layers have the keys of others."""
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "gemma4_assistant": {"text_config": {**SIZES, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
}
"""Without which there is no config of a type."""
USUAL: Mapping[str, Mapping[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), DELTA_RULE),
    "olmo_hybrid": DELTA_RULE | {"linear_num_key_heads": 4},
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": MAMBA | {"layer_types": ["linear_attention", "full_attention"] * 2, "logits_scaling": 3.0},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.7, "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9]},
    "nemotron_h": {
        **{"ssm_state_size": 6, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8},
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    },
    **{name: {"logits_scaling": 3.0} for name in ("granite", "granitemoe", "granitemoeshared", "granite_swa")},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1", "minicpm3"), LATENT),
    "youtu": LATENT | {"pad_token_id": None},  # transformers zeroes its row of an embedding that it loads
    "longcat_flash": LATENT | {"num_layers": 2},
    "llama4_text": {
        **{"attention_chunk_size": 8, "floor_scale": 4, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2},
        "no_rope_layers": [1, 1, 1, 0],
    },
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in WINDOWED[:2]},
        "layer_types": WINDOWED,
    },
    "dbrx": {
        "d_model": 32,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "moe_loss_weight": 0.0},
    },
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), GEMMA4),
    "gemma3n_text": PER_LAYER_INPUTS | {"laurel_rank": 4},
    "zamba2": {
        **{"layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_d_state": 6, "mamba_ngroups": 2},
        **{"n_mamba_heads": 4, "chunk_size": 8, "adapter_rank": 4, "num_key_value_heads": 4},
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 6, "n_groups": 2, "chunk_size": 8},
    **NEEDED,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "num_heads": 4, "window_size": 6},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
        **{**DELTA_RULE, "indexer_compress_ratio": 2, "hc_lowrank": 4},
    },
    **{name: {"encoder_attention_heads": 4, "decoder_attention_heads": 4} for name in ("plbart", "whisper")},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "xlnet": {"d_model": 32, "n_head": 4},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "lm_head_bias": True},
}
"""What models of a type have and a small config would not."""
REASONS = {
    "was given a mask of shape": "a mask of its own",
    "but the layer does not pass it to attention": "a window that its layers do not pass on",
    "is no causal language model of the installed transformers": "no causal language model by itself",
}
"""What refusals say that name no feature of `REFUSALS` -> what the page says."""
RECIPE = """
[run]
steps = 2
ranks = 2
timeout_s = 60
output = "output"
[model]
huggingface = "model"
dtype = "float64"
[data]
source = "documents"
validation = "documents"
sequences = 4
max_length = 64
[plan]
capacity = 24
[optimiser]
lr = 1e-3
[schedule]
kind = "constant"
[evaluation]
every = 2
batches = 1
[checkpoint]
every = 0
"""
COMMANDS = """\
all of these were verified and trained by the command line on several processes, from a folder:
`seqloom check`, `seqloom plan`, `seqloom verify --gloo --ranks 4` with sharded parameters (static, flex and, in
stages, pipeline), and `seqloom train --ranks 2`, with one stage and with two. There the loss of the first step is that
of plain transformers, and so is the loss after the last, of the model that `from_pretrained` reads back. What is
refused, `seqloom check` refuses, with exit code 2 and the reason:"""
"""What the page says of exact types."""
TENSOR_HEADING = "Tensor parallelism:"


# ---- Tiny models


def tiny_config(model_type: str) -> Any:
    """Return a small config without dropout, and with small configs inside."""
    return smaller(AutoConfig.for_model(model_type, **NEEDED.get(model_type, {})))


def takes(usual: Any, key: str) -> bool:
    """Whether a config has a key, and does not compute it from others."""
    try:
        return hasattr(usual, key) and not isinstance(getattr(type(usual), key, None), property)
    except RuntimeError:  # it is of each layer
        return True


def smaller(usual: Any) -> Any:
    """Return a config of the same class with small sizes."""
    kind = type(usual)
    keys = {key: value for key, value in SIZES.items() if takes(usual, key)}
    drops = {key: 0.0 for key, value in usual.to_dict().items() if "drop" in key and isinstance(value, float)}
    drops |= {key: 0.0 for key in ("attn_pdrop", "resid_pdrop", "embd_pdrop") if type(getattr(usual, key, 0)) is float}
    if takes(usual, "sliding_window") and usual.sliding_window:
        keys["sliding_window"] = 6
    if usual.model_type in ROUTED:
        keys |= {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    keys |= {key: smaller(each) for key in usual.sub_configs if (each := getattr(usual, key, None)) is not None}
    return kind(**{**keys, **drops, **USUAL.get(usual.model_type, {})})


def describe(config: Any) -> ModelSpec:
    """Return the shapes of a model of a config, built without values; raise for one that is too large here."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    spec = describe_model(attach(model), config.model_type)
    if sum(each.numel() for each in model.parameters()) > MOST_PARAMETERS:
        raise ValueError("its config has sizes of other names")
    return spec


def tiny_model(config: Any) -> Any:
    """Return a model of a config in float64; parameters are drawn so wide that attention is far from uniform.

    Decays of states are drawn around exp(-1): most fresh ones forget everything with the next token.
    """
    kind = AutoModelForCausalLM if language_model_config(config) is None else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        with without_towers() if config.model_type == "gemma3n" else nullcontext():
            model = kind.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            drawn, narrow = torch.randn(parameter.shape), parameter.ndim > 1 or name.endswith("A_log")
            parameter.copy_(0.3 * drawn if narrow else parameter + 0.1 * drawn)
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and buffer.is_floating_point():
                buffer += 0.1 * torch.randn(buffer.shape)
    return in_float64(model)


@contextmanager
def without_towers() -> Iterator[None]:
    """Leave out the modules of images and sounds of Gemma 3n, which need libraries of their own."""
    build = modeling_gemma3n.AutoModel.from_config

    def from_config(config: Any, **options: Any) -> Any:
        return build(config, **options) if config.model_type == "gemma3n_text" else torch.nn.Module()

    with patch.object(modeling_gemma3n.AutoModel, "from_config", from_config):
        yield


def in_float64(model: Any) -> Any:
    """Return a model that computes in float64."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped products have no float64
    return model.to(torch.float64).train()


def tiny_adapter(config: Any) -> ModelAdapter:
    """Return such a model, attached to the engine."""
    return model_adapter(attach(tiny_model(config)))


# ---- Scans, token by token


def delta_rule(q: Any, k: Any, v: Any, *, g: Any, beta: Any, use_qk_l2norm_in_kernel: bool, **_: Any) -> Any:
    """Gated delta rule; q, k, v are [1, tokens, heads, dim]."""
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state, outs = v.new_zeros((*k.shape[2:], v.shape[-1])), []
    for query, key, value, decay, rate in zip(q[0], k[0], v[0], g[0], beta[0], strict=True):
        state = decay.double().exp()[:, None, None] * state
        known = torch.einsum("hk,hkv->hv", key, state)
        state = state + torch.einsum("hk,hv->hkv", key, rate[:, None] * (value - known))
        outs.append(torch.einsum("hk,hkv->hv", query * query.shape[-1] ** -0.5, state))
    return torch.stack(outs)[None], None


def state_space(x: Any, dt: Any, a: Any, b: Any, c: Any, **given: Any) -> Any:
    """Mamba-2; x is [1, tokens, heads, dim], b and c are [1, tokens, groups, states]."""
    dt = softplus(dt + given["dt_bias"]).clamp(*given["dt_limit"])
    b, c = (each.repeat_interleave(x.shape[2] // each.shape[2], 2) for each in (b, c))
    state, outs = x.new_zeros((*x.shape[2:], b.shape[-1])), []
    for value, step, key, query in zip(x[0], dt[0], b[0], c[0], strict=True):
        written = torch.einsum("hp,hn->hpn", step[:, None] * value, key)
        state = (step * a).exp()[:, None, None] * state + written
        outs.append(torch.einsum("hpn,hn->hp", state, query) + given["D"][:, None] * value)
    return torch.stack(outs)[None]


@contextmanager
def plain_scans(model: Any) -> Iterator[None]:
    """Replace the scans in the file of a model of transformers."""
    file, own = sys.modules[type(model).__module__], (delta_rule, state_space)
    with ExitStack() as stack:
        for name, scan in zip(("torch_chunk_gated_delta_rule", "mamba2_chunk_scan"), own, strict=True):
            if hasattr(file, name):
                stack.enter_context(patch.object(file, name, scan))
        yield


# ---- What they compute


def write_run(folder: Path, config: Any) -> None:
    """Write what commands read: a config.json, documents of random tokens, their lengths, and the recipe of a run."""
    config.save_pretrained(folder / "model")
    draw = np.random.default_rng(0)
    with StoreWriter(folder / "documents", vocabulary=VOCABULARY) as writer:
        for length in LENGTHS:
            writer.add(draw.integers(3, VOCABULARY, length))
    (folder / "lengths.txt").write_text("\n".join(map(str, LENGTHS)))
    (folder / "run.toml").write_text(RECIPE)


def open_documents(folder: Path) -> tuple[Source, Batch]:
    """Return the documents of a run, and a batch of all."""
    source = open_source(folder / "documents", vocabulary=VOCABULARY)
    return source, Batch(np.arange(len(LENGTHS)), np.array(source.lengths), np.array(source.valid))


def plain_loss(model: Any, source: Source, *, routed: bool) -> torch.Tensor:
    """Return the loss of plain transformers, document by document; `routed`: with that of routers, of all documents."""
    capped = getattr(model.config, "attn_logit_softcapping", None)  # not by torch's own attention
    model.set_attn_implementation("sdpa" if model._supports_sdpa and not capped else "eager")
    loss, valid, routers = torch.zeros((), dtype=torch.float64), int(source.valid.sum()), []
    for document, length in enumerate(LENGTHS):
        ids, labels = (torch.tensor(np.array(each)) for each in source.rows(document, 0, length))
        with plain_scans(model):
            found = model(input_ids=ids[None], use_cache=False)
        loss = loss + cross_entropy(found.logits[0], labels, reduction="sum", ignore_index=IGNORE_INDEX) / valid
        routers.append(getattr(found, "router_logits", None))
    if routed and getattr(model.config, "output_router_logits", False):
        logits = tuple(torch.cat(layer) for layer in zip(*routers, strict=True))
        counts = (model.num_experts, model.num_experts_per_tok)
        loss = loss + model.router_aux_loss_coef * load_balancing_loss_func(logits, *counts)
    return loss


def plain_outcome(config: Any, source: Source) -> StepOutcome:
    """Return what plain transformers computes."""
    model = tiny_model(config)
    loss = plain_loss(model, source, routed=True)
    loss.backward()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
    return StepOutcome(loss.item(), sum(float(each.norm()) ** 2 for each in found.values()) ** 0.5, found)


class Verdict(NamedTuple):
    """What is to be said of a model type."""

    what: str  # that it is exact, or why it is refused
    tensor: str = ""  # the same of TP groups; "": it is refused in any case


def try_type(model_type: str) -> Verdict:
    """Try a model type by `seqloom check`, in plans, and by the other commands."""
    config = tiny_config(model_type)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, config)
        checked = run_seqloom("check", folder / "run.toml", "--batches", 1)
        if checked.code:
            return Verdict(f"refused: {refusal(checked)}")
        found = try_plans(config, folder)
        stages = not found.what.startswith((WHOLE, ONE_STAGE))
        failure = try_commands(config, folder, stages=stages) if found.what.startswith(EXACT) else ""
        return found._replace(what=failure or found.what)


def try_plans(config: Any, folder: Path) -> Verdict:
    """Compare plans with plain transformers; of a model of images and text, with the language model inside."""
    text = language_model_config(config)
    if text is not None:
        found = try_plans(text, folder)
        return found._replace(what=f"{found.what}, the language model inside")
    source, batch = open_documents(folder)
    spec, adapter, truth = describe(config), tiny_adapter(config), plain_outcome(config, source)
    what, tensor = ONE_STAGE if adapter.single_stage_reason else EXACT, tensor_refusal(adapter, spec)
    plans = [each for each in PLANS if each.planner != "pipeline:2" or what == EXACT]
    for tried in [*plans, *(() if tensor else IN_TP_GROUPS)]:
        options = {"capacity": tried.capacity, "max_length": 64, "stages": 2, "sharding": tried.sharding}
        cost = CostModel(Cluster.parse(f"1x{tried.ranks}xCPU"), spec, **options, tensor=tried.tensor)
        plan = PlannerChoice(tried.planner, tried.options).plan(batch.lengths, cost)
        try:
            outcome = run_plan(plan, source, batch, partial(tiny_adapter, config))
        except SeqloomError as error:
            if "computes attention twice" not in str(error):
                raise
            what = WHOLE
            continue
        difference = max(truth.largest_difference(outcome), abs(outcome.loss / truth.loss - 1))
        if not difference <= TOLERANCE:
            return Verdict(f"WRONG: {difference:.1e} under {tried.planner}")
    return Verdict(what, tensor or EXACT)


def tensor_refusal(adapter: ModelAdapter, spec: ModelSpec) -> str:
    """Return why a model does not run in TP groups of two; "": it does."""
    if not adapter.no_tp_reason and 2 in spec.tensor_degrees:
        return ""
    reason = adapter.no_tp_reason or "numbers of key heads, or widths, that two does not divide"
    return next((name for said, name in TENSOR_REASONS.items() if said in reason), reason)


# ---- What the commands do


class Finished(NamedTuple):
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str


def run_seqloom(*words: Any) -> Finished:
    """Run the command `seqloom` in this process, which has loaded torch already; ranks of a run are processes."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    called = patch.object(sys, "argv", ["seqloom", *map(str, words), "--json"])
    with redirect_stdout(out), redirect_stderr(err), called:
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Finished(code, out.getvalue(), err.getvalue())


def refusal(checked: Finished) -> str:
    """Return the first reason of a refusal by `seqloom check`, by name; each has a place, a rule and a way out."""
    reason = re.search(r"^ +- (?P<name>[^(]+) \(.+\): .+; .+", checked.stderr, re.MULTILINE)
    found = [reason["name"]] if reason else [name for said, name in REASONS.items() if said in checked.stderr]
    if checked.code != 2 or len(found) != 1 or "Traceback" in checked.stderr:
        raise AssertionError(f"no refusal, but exit code {checked.code}: {checked.stderr}")
    return found[0]


def try_commands(config: Any, folder: Path, *, stages: bool) -> str:
    """Plan, verify and train the model of a folder, first with fresh parameters, then with those of a file.

    Return what is wrong; "" if nothing is.
    """
    planners = "static:4,flex,pipeline:2" if stages else "static:4,flex"
    lengths = ("--lengths", folder / "lengths.txt", "--cluster", "1x2xCPU")
    for words in (
        ("plan", *lengths, "--model", folder / "model"),
        ("verify", folder / "run.toml", "--ranks", 4, "--gloo", "--planners", planners),
    ):
        done = run_seqloom(*words)
        if done.code:
            return f"FAILED: seqloom {words[0]}: {done.stderr or done.stdout}"
    model = tiny_model(config)
    model.save_pretrained(folder / "model")
    with torch.no_grad():
        truth = plain_loss(model, open_documents(folder)[0], routed=True).item()
    runs = [train(folder, number) for number in ((1, 2) if stages else (1,))]
    wrong = next((each for each in runs if isinstance(each, str)), "")
    return wrong or compare_runs(truth, runs)


class Trained(NamedTuple):
    """Losses of a run, and of the model that it has left."""

    losses: tuple[float, ...]  # of its steps
    evaluated: float  # by the run, after the last step
    read_back: float  # by plain transformers, with `from_pretrained`


def train(folder: Path, stages: int) -> Trained | str:
    """Train the model of a folder on two processes; return what came of it, or what went wrong."""
    output = folder / f"stages-{stages}"
    planner = "plan.planner=flex" if stages == 1 else f"pipeline.stages={stages}"
    settings = ("--set", f"run.output={output}", "--set", planner)
    done = run_seqloom("train", folder / "run.toml", "--ranks", 2, *settings)
    if done.code:
        return f"FAILED: seqloom train in {stages} stages: {done.stderr}"
    options = {"dtype": torch.float64, "output_loading_info": True, "local_files_only": True}
    model, report = AutoModelForCausalLM.from_pretrained(output / "model", **options)
    odd = [name for names in report.values() for name in names]
    if odd:
        return f"FAILED: from_pretrained has other names than the trained model, {odd[0]}"
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = tuple(each["loss"] for each in records if "loss" in each)
    (evaluated,) = (each["evaluation_loss"] for each in records if "evaluation_loss" in each)
    with torch.no_grad():
        found = plain_loss(in_float64(model), open_documents(folder)[0], routed=False)
    return Trained(losses, evaluated, found.item())


def compare_runs(truth: float, runs: Sequence[Trained]) -> str:
    """Compare runs with plain transformers, which says the loss of the first step, and with each other."""
    for number, run in enumerate(runs, 1):
        pairs = [(run.losses[0], truth), (run.read_back, run.evaluated), *zip(run.losses, runs[0].losses, strict=True)]
        worst = max(abs(found / wanted - 1) for found, wanted in pairs)
        if not worst <= TOLERANCE or not run.losses[-1] < run.losses[0]:
            return f"WRONG: {worst:.1e} in seqloom train in {number} stages, losses {run.losses}"
    return ""


# ---- The page


def matrix(chosen: Sequence[str] = (), page: str = "") -> str:
    """Try the chosen causal model types, or all of them; return the tables in Markdown.

    What they say of types that are not tried is what `page` says.
    """
    found = what_page_says(page) if chosen else {}
    return tables(found | try_types(chosen or TYPES))


def try_types(types: Sequence[str]) -> dict[str, Verdict]:
    """Try model types one after the other."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about tiny configs
        for number, model_type in enumerate(types, 1):
            found[model_type] = try_type(model_type)
            if number % 20 == 0:
                print(f"{number}/{len(types)} model types", file=sys.stderr)
    return found


def tables(found: Mapping[str, Verdict]) -> str:
    """Return the tables in Markdown of what is to be said of every type."""
    release = ".".join(transformers.__version__.split(".")[:2])
    exact = {name: each for name, each in sorted(found.items()) if each.what.startswith(EXACT)}
    cut = sum(each.tensor == EXACT for each in exact.values())
    counts = f"Of the {len(TYPES)} causal model types of transformers {release}, {len(exact)} are exact"
    groups = f"in TP groups of two ranks {cut} of the exact types are exact, too; others are refused there:"
    first, second = ({n: found[n].what for n in TYPES}, {name: each.tensor for name, each in exact.items()})
    return f"{counts}, and {COMMANDS}\n\n{table(first)}\n{TENSOR_HEADING} {groups}\n\n{table(second)}"


def table(said: Mapping[str, str]) -> str:
    """Return a table of model types by what is said of them: what is exact first, then the longest rows."""
    rows = defaultdict(list)
    for name, what in said.items():
        rows[what].append(name)
    lines = ["| | model types | |", "|---|---|---|"]
    for what, names in sorted(
        rows.items(), key=lambda row: (row[0] != EXACT, row[0].partition(":")[0], -len(row[1]), row[0])
    ):
        lines.append(f"| {what} | {', '.join(f'`{name}`' for name in names)} | {len(names)} |")
    return "\n".join(lines) + "\n"


def what_page_says(page: str) -> dict[str, Verdict]:
    """Return what the tables of a page say of every model type."""
    tables = page.split(f"<!-- {MARKER} -->\n")[1].split(f"<!-- /{MARKER} -->")[0]
    rows, tensor_rows = (
        [line.split("|") for line in each.splitlines() if line.startswith("| ") and "`" in line]
        for each in tables.split(TENSOR_HEADING)
    )
    tensor = {name: row[1].strip() for row in tensor_rows for name in re.findall(r"`([^`]+)`", row[2])}
    return {
        name: Verdict(row[1].strip(), tensor.get(name, "")) for row in rows for name in re.findall(r"`([^`]+)`", row[2])
    }


def renewed(page: str, table: str) -> str:
    """Return the page with this table between its markers."""
    before, rest = page.split(f"<!-- {MARKER} -->\n")
    _, after = rest.split(f"<!-- /{MARKER} -->")
    return f"{before}<!-- {MARKER} -->\n{table}<!-- /{MARKER} -->{after}"


if __name__ == "__main__":
    path = Path(__file__).parent / "huggingface.md"
    del __file__  # processes of a run would import this file
    torch.set_num_threads(1)
    written = path.read_text()
    path.write_text(renewed(written, matrix(sys.argv[1:], written)))
