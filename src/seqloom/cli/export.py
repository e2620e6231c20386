"""``seqloom export``: the model of any checkpoint of a run, for ``from_pretrained``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from seqloom.cli import shared
from seqloom.errors import SeqloomError, import_extra


def export(
    run: Annotated[Path, Argument(help="Output folder of a run, or one of its checkpoints.", metavar="RUN")],
    out: Annotated[Path, Option(help="Folder of the model; it must not exist.")],
    step: Annotated[int | None, Option(help="The checkpoint of this step; without it, the newest.")] = None,
    best: Annotated[bool, Option("--best", help="The checkpoint with the lowest validation loss.")] = False,
    overrides: shared.Overrides = None,
    json: shared.AsJson = False,
) -> None:
    """Write the model of a checkpoint, as the run writes its last one: config, safetensors, tokenizer.

    The checkpoint may be of any number of ranks and stages. Adapters are added to the weights, and are in the folder
    adapter of the model as well. Needs memory for one model, and no GPU.

    \b
    Example:
        seqloom export runs/chat --out chat-model
        seqloom export runs/chat --best --out chat-best --set model.huggingface=FOLDER
    """
    if best and step is not None:
        raise SeqloomError(f"--best and --step {step}: both name a checkpoint; leave one out")
    import_extra("seqloom export", "train", "torch")
    from seqloom.train import model_family_of
    from seqloom.train.config import Config
    from seqloom.train.model import ADAPTER_FOLDER, export_model
    from seqloom.train.run_folder import Manifest, named_checkpoint

    path = named_checkpoint(run, step, best=best)
    manifest = Manifest.read(path)
    if "config" not in manifest.extra:
        raise SeqloomError(f"{path} was not written by a run: it has no config; name the folder of a run")
    config = Config.of_checkpoint(manifest.extra["config"], str(path), overrides or [])
    model = export_model(path, config, model_family_of(config), out).module
    adapters = out / ADAPTER_FOLDER
    summary = {
        "path": str(out),
        "adapter": str(adapters) if adapters.is_dir() else None,
        "checkpoint": str(path),
        "step": manifest.step,
        "trained_tensors": len(manifest.model),
        "parameters": sum(each.numel() for each in model.parameters()),
    }
    lines = [f"step {manifest.step:,} of {path}", f"model: {out}"]
    lines += [f"adapters: {adapters}"] if adapters.is_dir() else []
    shared.report(json, lambda: summary, lambda _: typer.echo("\n".join(lines)))
