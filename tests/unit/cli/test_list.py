import json

import pytest

import seqloom
from seqloom.errors import SeqloomError


@pytest.mark.parametrize(("kind", "name"), [("models", "llama3-8b"), ("devices", "H200"), ("planners", "zones")])
def test_names_of_a_kind(run, kind, name):
    shown = run(f"list {kind} --json").json
    assert list(shown) == [kind] and name in shown[kind]
    assert name in run(f"list {kind}").out


def test_every_cluster_and_profile_that_is_listed_can_be_used(run):
    shown = run("list --json").json
    for cluster in shown["clusters"]:
        assert seqloom.Cluster.parse(cluster).ranks == shown["clusters"][cluster]["gpus"]
    for profile in shown["profiles"]:
        assert shown["profiles"][profile]["devices"]
    assert json.dumps(shown) and set(shown) == {"models", "clusters", "devices", "samplers", "profiles", "planners"}


@pytest.mark.parametrize("columns", ["80", "200"])
def test_devices_say_where_their_figures_come_from(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    out = " ".join(run("list devices").out.split())
    assert "AMD Instinct MI300X data sheet: seven links" in out and ("Sources: A100-40G: NVIDIA" in out) == (
        columns == "80"
    )


def test_an_unknown_kind_is_refused(run):
    refused = run("list modells")
    assert refused.code == 2 and "did you mean models" in refused.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": 8}, "cluster 8 is no cluster"),
        ({"model": 3}, "model 3 is no model"),
        ({"planner": None}, "planner None is no name"),
        ({"seed": "x"}, "seed is 'x'; give a whole number"),
        ({"clutser": 1}, "did you mean cluster"),
        ({"planner": "flex", "evaluation": 3}, "unknown option of planner flex 'evaluation'"),
    ],
)
def test_the_python_api_refuses_in_words(changes, message):
    with pytest.raises(SeqloomError, match=message):
        seqloom.plan([100, 200], **{"cluster": "1x8xH200", "model": "gpt-7b", **changes})


def test_planners_are_found_whatever_their_case():
    assert seqloom.plan([100, 200], cluster="1x8xH200", model="gpt-7b", planner="FLEX").planner == "flex"


def test_a_profile_of_another_device_is_named(run, folder):
    line = "plan --lengths lengths.txt --cluster 1x8xH200 --model gpt-7b"
    assert "constants of L40S or L40 or PCIe, not of H200" in " ".join(run(f"{line} --profile l40s").out.split())
    assert "constants of" not in run(line).out


def test_public_names_and_help():
    assert set(dir(seqloom)) == set(seqloom.__all__)
    assert (seqloom.plan.__doc__ or "").startswith("Plan one step")
