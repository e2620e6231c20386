"""Models by the name under which Hugging Face publishes them: found in its cache, or fetched into it."""

from __future__ import annotations

import re
from pathlib import Path

from seqloom.errors import SeqloomError

WANTED = ("*.json", "*.safetensors", "tokenizer*", "vocab*", "merges.txt", "*.model", "*.jinja")
"""Files of a model that a run reads or copies; no code, and no parameters in other formats."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(text: str, folder: Path) -> bool:
    """Say whether a text is a name such as `Qwen/Qwen3-1.7B`, and not a folder below `folder`."""
    return _NAME.fullmatch(text) is not None and not (folder / text).exists()


def fetched(name: str) -> Path:
    """Return the folder of a published model, with its parameters.

    What the cache of Hugging Face has is used as it is; HF_HOME says where that is, HF_HUB_OFFLINE that nothing may be
    fetched. Several ranks may ask at the same time.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise SeqloomError(
            f"model.huggingface = {name!r}: models by name need huggingface_hub ({error}); pip install 'seqloom[hf]', "
            "or give a folder"
        ) from None
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        folder = None
    try:
        if folder is None or not _complete(folder):  # a config alone would train random parameters
            folder = Path(snapshot_download(name, allow_patterns=list(WANTED)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SeqloomError(
            f"model.huggingface = {name!r} is no folder here, not whole in the cache of Hugging Face, and cannot be "
            f"fetched ({reason}); check the spelling, run `hf download {name}` where there is a network, or give a "
            "folder"
        ) from None
    if not _complete(folder):
        raise SeqloomError(
            f"model.huggingface = {name!r} has no config.json with .safetensors in {folder}; run `hf download {name}` "
            "where there is a network, or convert the model with save_pretrained and give the folder"
        )
    return folder


def _complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
