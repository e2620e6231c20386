"""Chats to ids and masks: against transformers, TRL's rules written out, and ids put together by hand."""

import json

import numpy as np
import pytest

from seqloom.data import IGNORE_INDEX, RecordFields, TokenStore, load_tokenizer, prepare
from seqloom.errors import SeqloomError

MARKS = "{% for m in messages %}<s>{{ m.role }}\n"
MARKS += "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}{{ '\\n' }}"
MARKS += "{% else %}{{ m.content }}</s>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
PLAIN = MARKS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TOOLS = "{% if tools %}<s>tools{% for t in tools %} {{ t.name }}{% endfor %}</s>{% endif %}{{ mood }}" + PLAIN
THOUGHTS = PLAIN.replace("{{ m.content }}", "{% if loop.last %}hm {% endif %}{{ m.content }}", 1)
"""What the assistant thinks is in its last message only, as Qwen 3 has it."""

CHATS = [
    [("user", "the cat"), ("assistant", "sat on the mat")],
    [
        ("system", "a dog"),
        ("user", "東京"),
        ("assistant", ""),
        ("user", "x"),
        ("assistant", "naïve"),
        ("user", "a bird"),
    ],
    [("user", "a"), ("assistant", "cat"), ("assistant", "and a dog")],
]


def messages(chat):
    return [{"role": role, "content": content} for role, content in chat]


@pytest.fixture
def template(tmp_path):
    def write(text, name="template.jinja"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def by_hand(folder, chat, newline):
    """Ids and mask of `PLAIN`, one text after the other; `newline`: whether the loss counts what follows an end."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids, mask = [], []
    for role, content in chat:
        said = role == "assistant"
        for text, counts in ((f"<s>{role}\n", False), (f"{content}</s>", said), ("\n", said and newline)):
            part = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids, mask = ids + part, mask + [counts] * len(part)
    return ids, mask


def stored(store, document):
    """Ids of a document and which of them are somebody's label; the first one never is."""
    length = int(store.lengths[document])
    labels = store.labels(document, 0, length)
    assert labels[-1] == IGNORE_INDEX
    ids = store.tokens(document, 0, length)
    assert all(label in (IGNORE_INDEX, following) for label, following in zip(labels[:-1], ids[1:], strict=True))
    return ids.tolist(), [False, *(labels[:-1] != IGNORE_INDEX).tolist()]


@pytest.mark.parametrize(("text", "newline"), [(MARKS, False), (PLAIN, True)])
def test_the_loss_counts_what_the_assistant_says(text, newline, template, jsonl, tmp_path, tokenizer_folder):
    path = jsonl(*({"messages": messages(chat)} for chat in CHATS))
    tokenizer = load_tokenizer(tokenizer_folder, template(text))
    done = prepare([path], tmp_path / "store", tokenizer=tokenizer)
    store = TokenStore(tmp_path / "store")
    assert done.documents == len(CHATS)
    for document, chat in enumerate(CHATS):
        assert stored(store, document) == by_hand(tokenizer_folder, chat, newline)
    assert list(store.meta.prepared["chat_templates"].values()) == ["prefixes" if newline else "marks"]


def test_masks_by_marks_are_those_of_transformers(template, jsonl, tmp_path, tokenizer_folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer_folder)
    theirs.chat_template = MARKS
    theirs.save_pretrained(tmp_path / "with-template")  # a folder that has a template of its own
    path = jsonl(*({"conversations": messages(chat)} for chat in CHATS))
    prepare([path], tmp_path / "store", tokenizer=load_tokenizer(tmp_path / "with-template"))
    store = TokenStore(tmp_path / "store")
    for document, chat in enumerate(CHATS):
        wanted = theirs.apply_chat_template(messages(chat), return_dict=True, return_assistant_tokens_mask=True)
        assert stored(store, document) == (wanted["input_ids"], [bool(each) for each in wanted["assistant_masks"]])


def test_a_completion_counts_as_trl_has_it(template, jsonl, tmp_path, tokenizer_folder):
    """TRL: the whole chat's ids, and the loss counts what follows the prompt with the header of an answer."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer_folder)
    pairs = [(chat[:cut], chat[cut:]) for chat, cut in zip(CHATS, (1, 2, 2), strict=True)]
    path = jsonl(*({"prompt": messages(before), "completion": messages(after)} for before, after in pairs))
    prepare([path], tmp_path / "store", tokenizer=load_tokenizer(tokenizer_folder, template(MARKS)))
    store = TokenStore(tmp_path / "store")
    for document, (before, after) in enumerate(pairs):
        options = {"chat_template": MARKS, "return_dict": False}
        prompt = theirs.apply_chat_template(messages(before), add_generation_prompt=True, **options)
        whole = theirs.apply_chat_template(messages(before + after), **options)
        assert stored(store, document) == (whole, [False] * len(prompt) + [True] * (len(whole) - len(prompt)))


def test_text_pairs_are_masked_as_trl_does(jsonl, tmp_path, tokenizer_folder):
    """TRL: prompt and completion are one text with an end; the loss counts from where its ids leave the prompt's."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer_folder)
    pairs = [("the cat", " sat"), ("the c", "at sat"), ("", "on the mat"), ("a", "b</s>"), ("naïve ", "café")]
    path = jsonl(*({"prompt": prompt, "completion": answer} for prompt, answer in pairs))
    done = prepare([path], tmp_path / "store", tokenizer=load_tokenizer(tokenizer_folder))
    store, merged = TokenStore(tmp_path / "store"), 0
    for document, (prompt, answer) in enumerate(pairs):
        alone = theirs(prompt)["input_ids"]
        whole = theirs(prompt + answer.removesuffix("</s>") + "</s>")["input_ids"]
        start = next((k for k, pair in enumerate(zip(alone, whole, strict=False)) if pair[0] != pair[1]), len(alone))
        merged += start < len(alone)
        wanted = [False] * start + [True] * (len(whole) - start)
        assert stored(store, document) == (whole, [False, *wanted[1:]])
    assert done.counts.merged == merged > 0


def test_tools_and_variables_reach_the_template(template, jsonl, tmp_path, tokenizer_folder):
    from transformers import AutoTokenizer

    theirs, tools = AutoTokenizer.from_pretrained(tokenizer_folder), [{"name": "cat"}, {"name": "dog"}]
    chat = {"messages": messages(CHATS[0])}
    records = [
        {**chat, "tools": tools},
        {**chat, "tools": json.dumps(tools)},
        {**chat, "chat_template_kwargs": {"mood": "x"}, "tools": None},
    ]
    prepare([jsonl(*records)], tmp_path / "store", tokenizer=load_tokenizer(tokenizer_folder, template(TOOLS)))
    store = TokenStore(tmp_path / "store")
    options = {"chat_template": TOOLS, "return_dict": False}
    assert stored(store, 0)[0] == theirs.apply_chat_template(chat["messages"], tools=tools, **options)
    assert stored(store, 1) == stored(store, 0)
    assert stored(store, 2)[0] == theirs.apply_chat_template(chat["messages"], mood="x", **options)


def test_parquet_has_the_same_chats(template, jsonl, tmp_path, tokenizer_folder):
    """Every row of a Parquet column has every key, null where a message has none."""
    import pyarrow
    import pyarrow.parquet

    records = [{"messages": messages(chat)} for chat in CHATS]
    records[0]["messages"][0]["name"] = "anna"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "chats.parquet")
    tokenizer = load_tokenizer(tokenizer_folder, template("{{ messages[-1].name is defined }}" + MARKS))
    for name, path in (("rows", tmp_path / "chats.parquet"), ("lines", jsonl(*records))):
        prepare([path], tmp_path / name, tokenizer=tokenizer)
    for name in ("tokens.arrow", "index.arrow"):
        assert (tmp_path / "rows" / name).read_bytes() == (tmp_path / "lines" / name).read_bytes()


def test_chats_without_an_answer_are_left_out_and_counted(template, jsonl, tmp_path, tokenizer_folder):
    records = [messages(CHATS[0]), messages([("user", "a")]), [], None]
    path = jsonl(*({"messages": each} for each in records), {"messages": messages(CHATS[2])})
    for text in (MARKS, PLAIN):
        tokenizer = load_tokenizer(tokenizer_folder, template(text))
        done = prepare([path], tmp_path / f"store-{len(text)}", tokenizer=tokenizer)
        assert (done.documents, done.counts.empty, done.counts.nothing_to_learn) == (2, 2, 1)


def test_parts_of_text_are_text(template, jsonl, tmp_path, tokenizer_folder):
    parts = (
        "{% for m in messages %}<s>{{ m.role }}{% generation %}{{ m.content[0].text }}{% endgeneration %}{% endfor %}"
    )
    content = [{"type": "text", "text": "the cat"}]
    path = jsonl({"messages": [{"role": "user", "content": content}]})
    prepare([path], tmp_path / "store", tokenizer=load_tokenizer(tokenizer_folder, template(parts)))
    assert TokenStore(tmp_path / "store").valid[0] > 1


CAT = '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            CAT + '{"text": "a"}\n',
            r"line 2: a record with 'text', and those before it in the file have 'messages'; put",
        ),
        ('{"text": "a"}\n\n' + CAT, "line 3: a record with 'messages', and those before it in the file have 'text'"),
        (CAT + '{"prompt": "a", "completion": "b"}\n', "line 2: a record with 'prompt' and 'completion', and those"),
        (CAT[:-2] + ', "text": "a"}\n', "line 1: more than one way to read its records"),
        ('{"messages": "x"}\n', "line 1, field 'messages': not a list of messages"),
        ('{"messages": ["x"]}\n', "not a list of messages"),
        (
            '{"messages": [{"from": "human", "value": "x"}]}\n',
            "message 0: no 'role' that is a text, it has 'from', 'va",
        ),
        ('{"messages": [{"role": "user", "content": 5}]}\n', "message 0: content 5 is not text"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]}\n',
            "message 0: content .*image.* is not text, and nothing else is trained on",
        ),
        ('{"messages": [{"role": "assistant", "content": "x"}]}\n', "nothing comes before the answer"),
        ('{"prompt": [{"role": "user", "content": "x"}], "completion": "y"}\n', "field 'completion': not a list"),
        (CAT[:-2] + ', "tools": "{"}\n', "field 'tools': not valid JSON"),
        (CAT[:-2] + ', "tools": {"a": 1}}\n', "'tools' must be a list"),
        (
            CAT[:-2] + ', "chat_template_kwargs": {"tokenize": false}}\n',
            "'tokenize' in chat_template_kwargs, which is no",
        ),
        (
            '{"messages": [{"role": "user", "content": "stop"}]}\n',
            r"line 1: the chat template cannot write this chat \(no stopping\)",
        ),
    ],
)
def test_a_bad_chat_is_named(lines, message, template, tmp_path, tokenizer_folder):
    stop = "{% if messages[0].content == 'stop' %}{{ raise_exception('no stopping') }}{% endif %}" + PLAIN
    tokenizer = load_tokenizer(tokenizer_folder, template(stop))
    path = tmp_path / "input.jsonl"
    path.write_text(lines)
    with pytest.raises(SeqloomError, match=message):
        prepare([path], tmp_path / "store", tokenizer=tokenizer)
    assert not (tmp_path / "store").exists()


def test_a_template_whose_prefixes_are_none_is_refused(template, jsonl, tmp_path, tokenizer_folder):
    one, two = messages(CHATS[0]), messages(CHATS[0] + CHATS[0])
    tokenizer = load_tokenizer(tokenizer_folder, template(THOUGHTS))
    assert prepare([jsonl({"messages": one})], tmp_path / "one", tokenizer=tokenizer).documents == 1
    path = jsonl({"messages": one}, {"messages": two}, name="two.jsonl")
    with pytest.raises(SeqloomError, match=r"two.jsonl, line 2: .*first 2 of 4 messages are not what .*generation"):
        prepare([path], tmp_path / "two", tokenizer=tokenizer)


def test_what_chats_need(template, jsonl, tmp_path, tokenizer_file, tokenizer_folder):
    path = jsonl({"messages": messages(CHATS[0])})
    for name in ("bytes", tokenizer_file, tokenizer_folder):
        with pytest.raises(
            SeqloomError, match=r"line 1: a chat, and tokenizer '.*' has no chat template; name a Huggin"
        ):
            prepare([path], tmp_path / "store", tokenizer=load_tokenizer(name))
    with pytest.raises(SeqloomError, match="line 1: a chat, and no tokenizer"):
        prepare([path], tmp_path / "store", vocabulary=9)
    for name in ("bytes", tokenizer_file):
        with pytest.raises(SeqloomError, match="templates need a Hugging Face tokenizer folder"):
            load_tokenizer(name, template(PLAIN))
    with pytest.raises(SeqloomError, match="cannot be read"):
        load_tokenizer(tokenizer_folder, tmp_path / "gone.jinja")
    with pytest.raises(SeqloomError, match="name the fields of one"):
        RecordFields(text="a", messages="b")


def test_random_chats_by_prefixes_equal_ids_put_together(template, jsonl, tmp_path, tokenizer_folder):
    draw = np.random.default_rng(0)
    words, roles = ["the cat", "sat ", " on", "\n", "naïve", "東京", ""], ["user", "assistant", "tool"]
    chats = [
        [
            ("user", "x"),
            *((str(draw.choice(roles)), "".join(draw.choice(words, 3))) for _ in range(draw.integers(1, 6))),
        ]
        for _ in range(60)
    ]
    chats = [chat for chat in chats if any(role == "assistant" for role, _ in chat)]
    path = jsonl(*({"mine": messages(chat)} for chat in chats))
    options = {"tokenizer": load_tokenizer(tokenizer_folder, template(PLAIN)), "fields": RecordFields(messages="mine")}
    prepare([path], tmp_path / "store", **options)
    store = TokenStore(tmp_path / "store")
    for document, chat in enumerate(chats):
        assert stored(store, document) == by_hand(tokenizer_folder, chat, newline=True)
