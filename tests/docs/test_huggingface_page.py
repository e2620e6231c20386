"""docs/huggingface.md: the table is that of the code, the example is the file, and the file trains."""

import re
from pathlib import Path

import pytest

from seqloom.integrations import transformers as integrations
from support.scripts import run_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "huggingface.md").read_text()
EXAMPLE, DENOISING, PROMPTS = (
    ROOT / "examples" / name for name in ("own_loop.py", "denoising_loop.py", "prompts_loop.py")
)


SUPPORTED = (
    ("full causal attention, grouped or single key/value heads", "computed by the engine, heads unrepeated"),
    ("sliding windows, one per layer", "taken from the layer's own call"),
    ("chunked attention (Llama 4)", "taken from the mask that transformers asks for"),
    ("tokens that see their whole document (bidirectional)", "by the mask that transformers asks for; not in pieces"),
    ("prompts that see themselves (prefix language models)", "in a loop of your own, by `bind(prefixes=)`"),
    ("biases, QK norm, any scaling, RoPE, learned positions", "the model's own code"),
    ("RoPE by the longest sequence (longrope, dynamic)", "fixed by the longest document of the run: `data.max_length`"),
    ("experts", "the model's own code; routing is by token"),
    ("a router loss (`output_router_logits`) like Mixtral's", "over all tokens of the step, by `engine.run_step`"),
    ("logit soft-cap, attention sinks, values of another width than keys", "computed by the engine"),
    ("latent attention (MLA)", "latents travel where the plan says so; keys and values elsewhere"),
    ("tied and untied heads", "`head(model)` says which"),
    ("logits scaled or capped after the head", "inside the loss: `head(model).logits` says how"),
    ("a head with a bias", "inside the loss, with its gradient: `head(model).bias`"),
    (
        "layers that scan: short convolutions, gated delta rules, Mamba-2",
        "the model's own code; a group's ranks exchange tokens for heads, or the few tokens before their own",
    ),
    ("LoRA through peft", "attach the wrapped model"),
    (
        "dropout modules in layers, those of LoRA among them",
        "the same elements under every plan; `bind(dropout_seed=step)`",
    ),
    (
        "dropout of attention weights",
        "the same weights under every plan; by kernels that drop (`triton`, `reference`), `bind(dropout_seed=step)`",
    ),
    ("gradient checkpointing", "`gradient_checkpointing_enable()`, or torch.utils.checkpoint"),
)
"""Features, and how they are supported; tests/property/test_transformers*.py has each of them."""


def support_table() -> str:
    """The table in Markdown: supported features, then refused ones with reason and way out."""
    lines = ["| a model with | | why, and the way out |", "|---|---|---|"]
    lines += [f"| {feature} | supported | {how} |" for feature, how in SUPPORTED]
    lines += [f"| {each.name} | refused | {each.why}; {each.way_out} |" for each in integrations.REFUSALS]
    return "\n".join(lines) + "\n"


def test_the_table_is_made_from_the_code():
    shown = PAGE.split("<!-- support -->\n")[1].split("<!-- /support -->")[0]
    assert shown == support_table(), f"put this there:\n{support_table()}"


def test_every_function_is_explained():
    explained = re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE)
    public = [name for name in integrations.__all__ if name[0].islower()]
    assert sorted(explained) == sorted(public)


def test_the_example_is_the_file():
    assert re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) == [EXAMPLE.read_text()]


def test_it_takes_under_15_lines():
    lines = EXAMPLE.read_text().split("ranks = dist.get_world_size()\n")[1].splitlines()
    everybody = re.compile(r"for documents|backward|optimizer|print|get_rank|destroy|total \+=|^$")  # what any loop has
    assert len([line for line in lines if not everybody.search(line)]) < 15


def losses(ranks: int, folder: Path, script: Path = EXAMPLE) -> list[float]:
    said = run_script(script, ranks, folder)
    return [float(value) for value in re.findall(r"^loss (\S+)", said, re.MULTILINE)]


def test_the_example_trains_and_the_number_of_processes_does_not_matter(tmp_path, fork_server):
    alone, together = losses(1, tmp_path), losses(2, tmp_path)
    assert alone == sorted(alone, reverse=True) and alone[-1] < 0.7 * alone[0]
    assert together == pytest.approx(alone, abs=5e-5)


@pytest.mark.parametrize(
    "script", [DENOISING, pytest.param(PROMPTS, marks=pytest.mark.slow)], ids=lambda each: each.stem
)
def test_models_with_other_masks_train_on_any_number_of_processes(tmp_path, fork_server, script):
    assert f"examples/{script.name}" in PAGE
    alone, together = (losses(ranks, tmp_path, script) for ranks in (1, 3))
    assert alone[-1] < 0.7 * alone[0] and together == pytest.approx(alone, abs=5e-5)


def test_the_trainer_of_the_page_trains(tmp_path):
    from transformers import TrainingArguments

    from support.tiny_models import tiny_model
    from support.trainer_runs import arguments, documents

    section = PAGE.split("## `transformers.Trainer`")[1].split("\n## ")[0]
    block = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))
    settings = {name: value for name, value in arguments(tmp_path, 1).items() if name != "output_dir"}
    settings.pop("per_device_train_batch_size")
    scope = {"model": tiny_model("llama"), "folder": str(tmp_path), "documents": documents()}
    scope["TrainingArguments"] = lambda folder, **given: TrainingArguments(folder, **settings | given)
    exec(compile(block, "page", "exec"), scope)
    assert [entry["epoch"] for entry in scope["trainer"].state.log_history if "loss" in entry][-1] == 2.0
