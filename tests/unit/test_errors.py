import pytest

from seqloom.errors import SeqloomError, unknown_name


def test_an_error_is_a_value_error():
    with pytest.raises(ValueError, match="no"):
        raise SeqloomError("no")


def test_unknown_offers_the_nearest_names():
    error = unknown_name("model", "lama3-8b", ["gpt-7b", "llama3-8b", "llama3-70b"])
    assert isinstance(error, SeqloomError)
    assert str(error).startswith("unknown model 'lama3-8b'; did you mean ")
    assert "llama3-8b" in str(error)
    assert "gpt-7b" not in str(error)


def test_unknown_ignores_case_and_keeps_the_legal_spelling():
    assert "8x8xH200" in str(unknown_name("cluster", "8X8XH20", ["8x8xH200", "laptop"]))


def test_unknown_lists_everything_when_nothing_is_near():
    assert str(unknown_name("planner", "zzz", ["flex", "auto"])) == "unknown planner 'zzz'; known: auto, flex"
