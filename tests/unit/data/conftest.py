"""Tokenizers made on the spot, and a way to write a store of ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seqloom.data import StoreWriter, TokenStore

TEXTS = ["the cat sat on the mat", "a dog, a cat and a bird", "naïve café, 東京 and 🦜", "x"]


@pytest.fixture
def texts() -> list[str]:
    return TEXTS


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE whose template begins every text with <s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as transformers saves it, with an end-of-sequence token."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("hf") / "little"
    made = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), bos_token="<s>", eos_token="</s>")
    made.save_pretrained(str(folder))
    return folder


@pytest.fixture
def store(tmp_path: Path):
    """Write documents (ids, or ids and mask) to a store and open it."""

    def write(*documents, vocabulary=300, name="store", **options) -> TokenStore:
        with StoreWriter(tmp_path / name, vocabulary=vocabulary, **options) as writer:
            for document in documents:
                writer.add(*document if isinstance(document, tuple) else (document,))
        return TokenStore(tmp_path / name)

    return write


@pytest.fixture
def jsonl(tmp_path: Path):
    """Write records to a .jsonl file."""

    def write(*records, name="input.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    return write
