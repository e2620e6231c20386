"""``seqloom data prepare``."""

import json
import subprocess
import sys

import pytest

from seqloom.cli import shared
from seqloom.data import TokenStore


@pytest.fixture
def corpus(folder):
    (folder / "pairs.jsonl").write_text(
        '{"prompt": "2 + 2 = ", "answer": "4"}\n'
        '{"prompt": "x", "answer": ""}\n'
        '{"prompt": "a", "answer": "bcdefghijkl"}\n'
    )
    (folder / "lines.txt").write_text("one\ntwo\n")
    return folder


def test_one_line_of_totals_and_what_was_left_out(run, corpus):
    result = run("data prepare pairs.jsonl lines.txt --out store --tokenizer bytes --max-length 11 --too-long drop")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        "3 documents, 18 tokens of which 8 count, longest 10, vocabulary 257",
        "left out: 1 empty, 0 with nothing to learn",
        "too long: 1 dropped, 13 tokens lost",
        "wrote store",
    ]
    assert len(TokenStore(corpus / "store")) == 3


def test_json_agrees_with_the_store(run, corpus):
    found = run(
        "data prepare pairs.jsonl --out store --tokenizer bytes --json --max-length 12 --too-long truncate"
    ).json
    meta = json.loads((corpus / "store" / "meta.json").read_text())
    for name in ("documents", "tokens", "valid", "longest", "vocabulary"):
        assert found[name] == meta[name]
    assert found["counts"] == meta["prepared"]["counts"]
    assert (found["path"], found["max_length"], found["too_long"]) == ("store", 12, "truncate")
    assert found["counts"]["too_long"] == 1


def test_fields_ids_and_whole_files(run, corpus):
    assert run("data prepare lines.txt --out book --tokenizer bytes --unit file --json").json["documents"] == 1
    (corpus / "ids.jsonl").write_text('{"mine": [1, 2, 3], "text": "x"}\n')
    assert run("data prepare ids.jsonl --out ids --ids mine --vocabulary 9 --json").json["tokens"] == 3
    assert run("data prepare ids.jsonl --out text --text text --tokenizer bytes --json").json["tokens"] == 2
    one = run("data prepare pairs.jsonl --out one --prompt answer --answer prompt --tokenizer bytes --json").json
    assert one["valid"] == 9 + 1 + 2


def test_folders_globs_and_chats(run, corpus, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    letters = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate("?<>uax")}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(corpus / "letters")
    (corpus / "t.jinja").write_text(
        "{% for m in messages %}<{{ m.role[0] }}{{ m.content }}>{% endfor %}{% if add_generation_prompt %}<a{% endif %}"
    )
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "xx"}]
    (corpus / "chats").mkdir()
    (corpus / "chats" / "a.jsonl").write_text(json.dumps({"mine": chat}) + "\n")
    (corpus / "chats" / "notes.md").write_text("x")
    options = "--tokenizer letters --chat-template t.jinja --messages mine"
    result = run(f"data prepare chats --out s {options}")
    assert result.out.splitlines() == [
        "1 documents, 9 tokens of which 3 count, longest 9, vocabulary 6",
        "not read: 1 files of other kinds, chats/notes.md among them",
        "wrote s",
    ]
    assert TokenStore(corpus / "s").labels(0, 0, 9).tolist() == [*[-100] * 5, 5, 5, 2, -100]
    found = run(f"data prepare chats/*.jsonl --out t {options} --json").json
    assert (found["files"], found["other_files"], found["documents"]) == (1, [], 1)
    assert AutoTokenizer.from_pretrained(corpus / "letters").decode(TokenStore(corpus / "s").tokens(0, 0, 9))


def test_a_token_across_the_border_is_said(run, corpus):
    from tokenizers import Tokenizer, models

    pair = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    pair.save(str(corpus / "pair.json"))
    (corpus / "p.jsonl").write_text('{"prompt": "ba", "answer": "bb"}\n')
    result = run("data prepare p.jsonl --out s --tokenizer pair.json")
    assert result.out.splitlines()[1] == "merged: in 1 a token lies across the border of prompt and answer, and counts"
    assert TokenStore(corpus / "s").labels(0, 0, 3).tolist() == [2, 1, -100]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gone.jsonl --out s --tokenizer bytes", "'gone.jsonl' does not exist"),
        ("lengths.csv --out s --tokenizer bytes", "is none of .jsonl, .parquet, .txt"),
        ("lines.txt --out s", "neither a tokenizer nor a vocabulary"),
        ("lines.txt --out s --tokenizer gpt", "neither a file nor a folder"),
        ("lines.txt --out lines.txt --tokenizer bytes", "'lines.txt' exists"),
        ("lines.txt --out no/s --tokenizer bytes", "needs the folder 'no'"),
        ("lines.txt --out s --tokenizer bytes --too-long cut", "unknown policy"),
        ("lines.txt --out s --tokenizer bytes --max-length 2", "lines.txt, line 1 has 4 tokens"),
        ("lines.txt --out s --tokenizer bytes --unit page", "unknown unit of text"),
        ("pairs.jsonl --out s --tokenizer bytes --prompt p", "name both fields"),
        ("pairs.jsonl --out s --tokenizer bytes --text body", "no field 'body'"),
        ("pairs.jsonl --out s --chat-template t.jinja", "without --tokenizer; name a Hugging Face"),
        ("no*.jsonl --out s --tokenizer bytes", "no file matches 'no*.jsonl'"),
    ],
)
def test_refused(refused, corpus, arguments, message):
    assert message in refused(f"data prepare {arguments}")


def test_without_pyarrow_the_extra_is_named(refused, corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'seqloom[data]'" in refused("data prepare lines.txt --out s --tokenizer bytes")


def test_torch_is_not_needed(corpus):
    code = (
        "import sys; sys.modules['torch'] = None; from seqloom.cli import main; "
        "sys.argv = 'seqloom data prepare lines.txt --out s --tokenizer bytes'.split(); main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=corpus)
    assert (done.returncode, done.stderr) == (0, "")


def test_progress_is_a_bar_for_somebody_who_looks(run, corpus, monkeypatch):
    monkeypatch.setattr(sys.modules["seqloom.data.prepare"], "CHUNK", 100)
    (corpus / "long.txt").write_text("many words, and more of them\n" * 1_000)
    seen = []

    class Shown:
        def __enter__(self):
            return seen.append

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(shared, "progress_bar", lambda total, description: Shown())
    assert run("data prepare long.txt --out s --tokenizer bytes").code == 0
    assert 50 < len(seen) <= 100
