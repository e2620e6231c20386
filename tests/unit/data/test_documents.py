"""Documents that a config names: what a name means, and one preparation for equal contents and settings."""

import json
import shutil
from pathlib import Path

import pytest

from seqloom.data import RecordFields, TokenStore, document_lengths, load_tokenizer, prepare
from seqloom.data.documents import names_documents, prepare_once
from seqloom.data.hub import HubDataset
from seqloom.errors import SeqloomError

CHATS = [{"prompt": "2 + 2 = ", "answer": "4"}, {"prompt": "3 + 4 = ", "answer": "7"}]


def write(path: Path, records=CHATS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def once(names, cache, shown=None, **changes):
    """Prepare with bytes; return the store, and whether it was made now."""
    options = {"tokenizer": load_tokenizer("bytes"), "vocabulary": 257, "fields": RecordFields(), **changes}
    store, done = prepare_once(names, cache, **options, show=(shown if shown is not None else []).append)
    return store, done is not None


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    """The library, with a cache of its own and no network."""
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    library.disable_progress_bars()
    return library


def test_what_names_documents(tmp_path, store):
    write(tmp_path / "folder" / "a.jsonl")
    (tmp_path / "empty").mkdir()
    (tmp_path / "blend.idx").touch()
    store([1, 2, 3])
    documents = ["folder", "folder/a.jsonl", "folder/*.jsonl", "not/there.jsonl", "x.txt.gz"]
    others = ["store", "empty", "blend", "blend.idx", "misspelt", "folder/a.json"]
    assert all(names_documents(tmp_path / each) for each in documents)
    assert not any(names_documents(tmp_path / each) for each in others)
    assert names_documents((tmp_path / "store",)) and names_documents(Path("hf:org/name"))
    assert not names_documents(Path("toy:600"))


def test_the_store_is_what_prepare_writes(tmp_path):
    file, shown = write(tmp_path / "sums.jsonl"), []
    found, made = once(file, tmp_path / "cache", shown)
    prepare([file], tmp_path / "wanted", tokenizer=load_tokenizer("bytes"))
    assert made and found.parent == tmp_path / "cache" and found.name.startswith("sums-")
    for name in ("tokens.arrow", "index.arrow", "meta.json"):
        assert (found / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()
    assert shown == ["preparing sums.jsonl"]


def test_contents_and_settings_say_whether_it_is_there(tmp_path):
    file = write(tmp_path / "a" / "sums.jsonl")
    first, _ = once(file, tmp_path / "cache")
    copy = tmp_path / "b" / "sums.jsonl"
    copy.parent.mkdir()
    shutil.copy(file, copy)
    assert once(copy, tmp_path / "cache") == (first, False)
    assert once(tmp_path / "b", tmp_path / "cache") == (first, False)
    others = [
        once(file, tmp_path / "cache", fields=RecordFields(text="answer")),
        once((file, write(tmp_path / "c.jsonl", [*CHATS, {"prompt": "a", "answer": "b"}])), tmp_path / "cache"),
        once(write(file, CHATS[::-1]), tmp_path / "cache"),
    ]
    assert all(made for _, made in others) and len({first, *(each for each, _ in others)}) == 4


def test_a_tokenizer_of_the_same_content_finds_it_wherever_it_is(tmp_path, tokenizer_folder):
    file = write(tmp_path / "sums.jsonl")
    shutil.copytree(tokenizer_folder, tmp_path / "copy")
    stores = [
        once(file, tmp_path / "cache", tokenizer=load_tokenizer(each)) for each in (tokenizer_folder, tmp_path / "copy")
    ]
    assert stores[0] == (stores[1][0], True) and not stores[1][1]


def test_a_failure_leaves_nothing_to_find(tmp_path):
    file = write(tmp_path / "sums.jsonl", [{"prompt": "x"}])
    with pytest.raises(SeqloomError, match=r"line 1: no field that is known"):
        once(file, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_another_process_may_be_faster(tmp_path, monkeypatch):
    file = write(tmp_path / "sums.jsonl")

    def beaten(inputs, out, **options):
        prepare(inputs, out, **options)
        return prepare(inputs, out, **options)

    monkeypatch.setattr("seqloom.data.documents.prepare", beaten)
    store, made = once(file, tmp_path / "cache")
    assert not made and TokenStore(store).meta.documents == 2


def test_a_data_set_that_the_library_has_saved(tmp_path, datasets):
    rows = datasets.Dataset.from_list(CHATS)
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": rows.select([0]), "test": rows.select([1])}).save_to_disk(tmp_path / "splits")
    found = TokenStore(once(tmp_path / "saved", tmp_path / "cache")[0])
    wanted = TokenStore(once(write(tmp_path / "sums.jsonl"), tmp_path / "cache")[0])
    assert [found.tokens(k, 0, n).tolist() for k, n in enumerate(found.lengths)] == [
        wanted.tokens(k, 0, n).tolist() for k, n in enumerate(wanted.lengths)
    ]
    assert found.valid.tolist() == wanted.valid.tolist()
    planned = document_lengths(f"hf:{tmp_path / 'saved'}", tokenizer="bytes")
    assert planned.lengths.tolist() == found.lengths.tolist()
    test = TokenStore(once(Path(f"hf:{tmp_path / 'splits'}:test"), tmp_path / "cache")[0])
    assert bytes(test.tokens(0, 0, 7).tolist()) == b"3 + 4 ="
    assert once(tmp_path / "saved", tmp_path / "cache")[1] is False
    with pytest.raises(SeqloomError, match=r"no split 'dev' in the folder; it has 'train', 'test'"):
        HubDataset.open(f"hf:{tmp_path / 'splits'}:dev")
    with pytest.raises(SeqloomError, match="leave the split out"):
        HubDataset.open(f"hf:{tmp_path / 'saved'}:dev")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_folder_of_data_files_with_a_part_of_a_split(tmp_path, datasets):
    chats = [
        {"messages": [{"role": "user", "content": "ü"}, {"role": "assistant", "content": str(k)}]} for k in range(4)
    ]
    datasets.Dataset.from_list(chats).to_parquet(tmp_path / "data" / "train-00000.parquet")
    opened = HubDataset.open(f"hf:{tmp_path / 'data'}:train[1:3]")
    assert opened.columns == ["messages"] and [row for _, row in opened.read(["messages"])] == chats[1:3]
    assert opened.size > 0 and opened.digest() != HubDataset.open(f"hf:{tmp_path / 'data'}").digest()


def test_a_name_reaches_the_library_with_configuration_and_split(tmp_path, datasets, monkeypatch):
    calls = []

    def load(*where, split):
        calls.append((*where, split))
        return datasets.Dataset.from_list(CHATS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    for name in ("hf:org/name", "hf:org/name:test", "hf:org/name/main:train[:10%]"):
        assert len(HubDataset.open(name).rows) == 2
    assert calls == [
        ("org/name", None, "train"),
        ("org/name", None, "test"),
        ("org/name", "main", "train[:10%]"),
    ]


@pytest.mark.parametrize("error", [ConnectionError("no network\nmore"), ValueError("Unknown split 'dev'")])
def test_a_data_set_that_cannot_be_loaded(datasets, monkeypatch, error):
    def fail(*where, **options):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        SeqloomError, match=r"'hf:org/name:dev' cannot be loaded \((no network|Unknown .*)\); check name"
    ):
        HubDataset.open("hf:org/name:dev")


def test_without_a_network_a_name_is_refused(datasets):
    with pytest.raises(SeqloomError, match=r"'hf:org/nowhere' cannot be loaded"):
        HubDataset.open("hf:org/nowhere")


@pytest.mark.parametrize("name", ["hf:", "hf::train", "hf:a/b/c/d", "hf:no such"])
def test_what_is_no_name(name):
    with pytest.raises(SeqloomError, match="is no data set; write hf:org/name"):
        HubDataset.open(name)
