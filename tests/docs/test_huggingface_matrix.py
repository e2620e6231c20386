"""Which Hugging Face model types are exact, and which are refused: docs/huggingface.md says what running them shows."""

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers

from seqloom.describe.huggingface import FAMILIES, model_from_config
from seqloom.integrations.transformers.describe import describe_folder

torch.set_num_threads(1)
DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "huggingface.md").read_text()
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of tiny configs


@pytest.fixture(scope="module")
def matrix(fork_server):
    """The script that tries every type."""
    spec = importlib.util.spec_from_file_location("huggingface_matrix", DOCS / "huggingface_matrix.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PARTS = 16


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)  # a minute or two on quiet cores
@pytest.mark.parametrize("part", range(PARTS))
def test_the_page_says_what_running_every_type_shows(matrix, part):
    """Exact types are verified and trained by the commands on gloo processes, from a folder each."""
    if ".".join(transformers.__version__.split(".")[:2]) not in PAGE:
        pytest.skip("the page is of another release of transformers")
    types, said = matrix.TYPES[part::PARTS], matrix.what_page_says(PAGE)
    found = matrix.try_types(types)
    assert found == {name: said[name] for name in types}, "run: python docs/huggingface_matrix.py"


def test_the_page_is_as_the_script_writes_it(matrix):
    assert matrix.renewed(PAGE, matrix.tables(matrix.what_page_says(PAGE))) == PAGE


def test_nothing_is_wrong_and_most_of_what_is_trained_is_exact(matrix):
    found = matrix.what_page_says(PAGE)
    assert len(found) >= 180
    assert {each.what.partition(":")[0].partition(",")[0] for each in found.values()} == {"exact", "refused"}
    exact = {name: each for name, each in found.items() if each.what.startswith("exact")}
    assert len(exact) >= 100, "all of them trained and verified by the commands"
    assert all(each.tensor for each in exact.values()) and sum(e.tensor == "exact" for e in exact.values()) >= 25


@pytest.mark.parametrize(
    "model_type",
    [
        *("ernie4_5", "opt", "hunyuan_v1_moe", "diffllama", "gpt_oss", "phi", "llama4_text", "mixtral"),
        *("qwen3_next", "falcon_h1", "gemma4_text", "nemotron", "zamba2"),
    ],
)
def test_types_of_every_kind(matrix, tmp_path, model_type):
    config = matrix.tiny_config(model_type)
    matrix.write_run(tmp_path, config)
    assert matrix.try_plans(config, tmp_path) == matrix.what_page_says(PAGE)[model_type]


def test_a_few_types_are_tried_and_the_others_stay(matrix, monkeypatch):
    monkeypatch.setattr(matrix, "try_commands", lambda *_, **__: "")
    wrong = PAGE.replace("`phi`, ", "").replace("| refused: sparse", "| WRONG | `phi` | 1 |\n| refused: sparse")
    assert matrix.what_page_says(wrong)["phi"].what == "WRONG"
    assert matrix.renewed(wrong, matrix.matrix(["bert", "phi"], wrong)) == PAGE


PLAN_ONLY = {"deepseek", "kimi_k2"}  # transformers has no code of them


@pytest.mark.parametrize("model_type", sorted({*FAMILIES} - PLAN_ONLY))
def test_shapes_from_the_config_are_those_of_the_modules(matrix, tmp_path, model_type):
    matrix.tiny_config(model_type).save_pretrained(tmp_path)
    by_config = asdict(model_from_config(json.loads((tmp_path / "config.json").read_text()), name=tmp_path.name))
    by_modules = asdict(describe_folder(tmp_path))
    if len(by_modules["moe_layers"]) == by_modules["layers"]:
        by_config["ffn"] = by_modules["ffn"]  # of no layer
    assert by_modules == by_config


@pytest.mark.distributed
@pytest.mark.parametrize(
    "model_type", [pytest.param(each, marks=pytest.mark.slow) for each in ("gemma4", "ernie4_5", "zamba2")]
)
def test_the_commands_plan_verify_and_train(matrix, tmp_path, model_type):
    """Of types that no table has: plain, with scans and layers that share parameters, with a language model inside."""
    config = matrix.tiny_config(model_type)
    matrix.write_run(tmp_path, config)
    assert matrix.run_seqloom("check", tmp_path / "run.toml", "--batches", 1).code == 0
    assert matrix.try_commands(config, tmp_path, stages=model_type == "ernie4_5") == ""
    said, trained = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("model", "stages-1/model"))
    assert trained["model_type"] == said.get("text_config", said)["model_type"]


def test_what_commands_do_wrong_is_found(matrix):
    right = matrix.Trained((3.0, 2.0), 1.0, 1.0)
    assert matrix.compare_runs(3.0, [right, right]) == ""
    for wrong in (right._replace(losses=(3.1, 2.0)), right._replace(read_back=1.1), right._replace(losses=(3.0, 3.0))):
        assert matrix.compare_runs(3.0, [wrong]).startswith("WRONG")
    assert "in 2 stages" in matrix.compare_runs(3.0, [right, right._replace(losses=(3.0, 2.1))])


@pytest.mark.slow
def test_refused_types_are_refused_by_check_with_the_reason_of_the_page(matrix, tmp_path):
    """With exit code 2, and the feature, where it is, why not, and the way out: `refusal` reads all of it."""
    refused = {name: each.what for name, each in matrix.what_page_says(PAGE).items() if each.what.startswith("refused")}
    assert len(refused) >= 60
    for model_type, what in refused.items():
        matrix.write_run(tmp_path / model_type, matrix.tiny_config(model_type))
        checked = matrix.run_seqloom("check", tmp_path / model_type / "run.toml", "--batches", 1)
        assert f"refused: {matrix.refusal(checked)}" == what, model_type
