import sys

import pytest

from seqloom.data import load_tokenizer, prepare
from seqloom.errors import SeqloomError
from support.decoding import decode


def test_bytes(texts):
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocabulary, tokenizer.begin, tokenizer.end) == (257, (), (256,))
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert bytes(ids.tolist()).decode() == text


def test_a_file_keeps_its_own_template(tokenizer_file, texts):
    tokenizer = load_tokenizer(tokenizer_file)
    assert (tokenizer.begin, tokenizer.end) == ((0,), ())
    assert tokenizer.vocabulary > 258
    assert [decode(tokenizer_file, ids) for ids in tokenizer.encode(texts)] == texts
    assert tokenizer.metadata["kind"] == "tokenizers"


def test_a_folder_adds_its_end_of_sequence(tokenizer_folder, tokenizer_file, texts):
    tokenizer, plain = load_tokenizer(tokenizer_folder), load_tokenizer(tokenizer_file)
    assert (tokenizer.begin, tokenizer.end) == ((0,), (1,))
    assert tokenizer.vocabulary == plain.vocabulary
    assert [decode(tokenizer_folder, ids) for ids in tokenizer.encode(texts)] == texts
    for ours, theirs in zip(tokenizer.encode(texts), plain.encode(texts), strict=True):
        assert ours.tolist() == theirs.tolist()
    described = tokenizer.metadata
    assert (described["kind"], described["name"], len(described["sha256"])) == ("transformers", "little", 64)


def test_a_file_whose_first_words_are_special_is_still_probed(tmp_path):
    """A word-level tokenizer without the word `a`, and with a template on both sides."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({"[A]": 0, "[Z]": 1, "cat": 2}))
    tokenizer.add_special_tokens(["[A]", "[Z]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[A] [A] $A [Z]", special_tokens=[("[A]", 0), ("[Z]", 1)]
    )
    tokenizer.save(str(tmp_path / "words.json"))
    found = load_tokenizer(tmp_path / "words.json")
    assert found.encode(["cat cat"])[0].tolist() == [2, 2]
    assert (found.begin, found.end) == ((0, 0), (1,))
    (tmp_path / "input.txt").write_text("cat\ncat dog\n")
    with pytest.raises(SeqloomError, match=r"input\.txt, line 2: tokenizer 'words\.json' cannot encode a text"):
        prepare([tmp_path / "input.txt"], tmp_path / "store", tokenizer=found)


def test_what_cannot_be_loaded(tmp_path, tokenizer_file, tokenizer_folder, monkeypatch):
    with pytest.raises(SeqloomError, match="neither a file nor a folder"):
        load_tokenizer("gpt-17")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(SeqloomError, match="cannot be read"):
        load_tokenizer(tmp_path / "broken.json")
    with pytest.raises(SeqloomError, match="cannot be read"):
        load_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in (tokenizer_file, tokenizer_folder):
        with pytest.raises(SeqloomError, match=r"pip install 'seqloom\[hf\]'"):
            load_tokenizer(name)
