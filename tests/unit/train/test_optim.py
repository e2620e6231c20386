"""The optimiser, clipping and the learning rate."""

import math

import pytest
import torch
from torch import nn

from seqloom.errors import SeqloomError
from seqloom.train.config import Optimiser, Schedule
from seqloom.train.optim import (
    BLOCK,
    DYNAMIC_CODES,
    check_gradients,
    decode,
    encode,
    learning_rate,
    make_optimiser,
    set_learning_rate,
    state_by_name,
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_adapter():
    torch.manual_seed(0)
    layers = {"embed": nn.Embedding(5, 4), "norm": nn.LayerNorm(4), "linear": nn.Linear(4, 3)}
    return nn.ModuleDict(layers).double()


def give_gradients(module, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def test_matrices_are_decayed_and_vectors_are_not():
    optimiser = make_optimiser(dict(model_adapter().named_parameters()), Optimiser(weight_decay=0.3))
    decay = {name: group["weight_decay"] for group in optimiser.param_groups for name in group["param_names"]}
    assert decay == {
        "embed.weight": 0.3,
        "linear.weight": 0.3,
        "linear.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
    }
    assert all(group["fused"] for group in optimiser.param_groups)


def test_a_step_is_the_formula_of_adamw():
    module, settings = model_adapter(), Optimiser(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    optimiser = make_optimiser(dict(module.named_parameters()), settings)
    give_gradients(module, 1)
    set_learning_rate(optimiser, 0.02)
    optimiser.step()
    for name, parameter in module.named_parameters():
        # After one step the corrected moments are the gradient and its square.
        decay = 0.5 if parameter.ndim == 2 else 0.0
        moved = parameter.grad / (parameter.grad.abs() + 1e-6)
        torch.testing.assert_close(parameter.detach(), before[name] * (1 - 0.02 * decay) - 0.02 * moved)


def test_only_one_kind_of_parameter_makes_one_group():
    norm = nn.LayerNorm(4)
    assert len(make_optimiser(dict(norm.named_parameters()), Optimiser()).param_groups) == 1


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon", "sgd"])
def test_a_rank_without_trained_parameters_has_nothing_to_do(name):
    optimiser = make_optimiser({}, Optimiser(name=name))
    set_learning_rate(optimiser, 0.1)
    optimiser.step()
    assert state_by_name(optimiser) == {}


def test_state_by_name_is_the_optimisers_own_and_carries_over_to_another_order():
    module = model_adapter()
    optimiser = make_optimiser(dict(module.named_parameters()), Optimiser())
    give_gradients(module, 1)
    optimiser.step()
    state = state_by_name(optimiser)
    assert set(state) == set(dict(module.named_parameters()))

    twin = model_adapter()
    twin.load_state_dict(module.state_dict())
    other = make_optimiser(dict(reversed(list(twin.named_parameters()))), Optimiser())
    for name, tensors in state_by_name(other).items():
        for key, tensor in tensors.items():
            tensor.copy_(state[name][key])
    for each, its in ((module, optimiser), (twin, other)):
        give_gradients(each, 2)
        its.step()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, twin.get_parameter(name))


def test_the_state_before_the_first_step_is_what_torch_begins_with():
    module = model_adapter()
    blank = state_by_name(make_optimiser(dict(module.named_parameters()), Optimiser()))
    stepped = make_optimiser(dict(module.named_parameters()), Optimiser())
    give_gradients(module, 1)
    stepped.step()
    for group in stepped.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            assert set(stepped.state[parameter]) == set(blank[name])
            for key, tensor in stepped.state[parameter].items():
                assert (tensor.shape, tensor.dtype) == (blank[name][key].shape, blank[name][key].dtype)
                assert not blank[name][key].any()


def test_gradients_that_are_no_numbers_update_nothing():
    check_gradients(1.0, 4.0)
    check_gradients(0.0, 0.0)  # every label is certain
    with pytest.raises(SeqloomError, match="the loss is 1 and the gradient's norm 0; nothing was updated"):
        check_gradients(1.0, 0.0)
    for norm in (float("nan"), float("inf")):
        with pytest.raises(SeqloomError, match=f"the gradient's norm {norm}; nothing was updated"):
            check_gradients(1.0, norm)
        with pytest.raises(SeqloomError, match=f"the loss is {norm}"):
            check_gradients(norm, 1.0)


def rates(steps, peak=2.0, **settings):
    return [learning_rate(step, steps=steps, peak=peak, schedule=Schedule(**settings)) for step in range(1, steps + 1)]


def test_warm_up_rises_evenly_and_ends_at_the_peak():
    assert rates(8, warmup=4, kind="constant") == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert rates(3, kind="constant") == [2.0, 2.0, 2.0]


def test_linear():
    assert rates(6, warmup=2, kind="linear", final=0.5) == [1.0, 2.0, 1.75, 1.5, 1.25, 1.0]
    assert rates(5, kind="linear", final=0.0) == [2.0, 1.5, 1.0, 0.5, 0.0]


def test_cosine():
    half = math.sqrt(0.5)
    expected = [1 + 1, 1 + half, 1, 1 - half, 0]
    assert rates(5, final=0.0) == pytest.approx(expected, abs=1e-15)
    assert rates(7, warmup=3, final=0.1)[2::2] == pytest.approx([2.0, 2 * 0.55, 0.2])


def test_the_last_step_has_the_final_share_and_later_ones_keep_it():
    schedule = Schedule(kind="cosine", warmup=2, final=0.25)
    assert learning_rate(10, steps=10, peak=1.0, schedule=schedule) == pytest.approx(0.25)
    assert learning_rate(99, steps=10, peak=1.0, schedule=schedule) == pytest.approx(0.25)


def test_runs_of_one_step_and_of_warm_up_only():
    assert rates(1) == [2.0]
    assert rates(2, warmup=2) == [1.0, 2.0]


def test_steps_begin_at_one():
    with pytest.raises(SeqloomError, match="step 0 of 5; steps are counted from 1"):
        learning_rate(0, steps=5, peak=1.0, schedule=Schedule())


def nearest_codes(values, codes):
    """The index of the nearest of 256 values, by comparing with all of them."""
    return (values[..., None] - torch.tensor(codes, dtype=values.dtype)).abs().argmin(-1)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("width", [1, 255, 256, 700])
def test_codes_are_the_nearest_in_blocks_of_a_row(signed, width):
    generator = torch.Generator().manual_seed(width)
    values = torch.randn(3, width, generator=generator, dtype=torch.float64) ** 5
    values = values if signed else values.abs()
    values[1] = 0.0
    codes, scales = torch.zeros(3, width, dtype=torch.uint8), torch.zeros(3, -(-width // BLOCK))
    encode(values, codes, scales, signed=signed)
    found = decode(codes, scales, torch.float64, signed=signed)
    assert found[1].eq(0).all() and found.isfinite().all()
    for row in (0, 2):
        for block, start in enumerate(range(0, width, BLOCK)):
            part = slice(start, start + BLOCK)
            scale = values[row, part].abs().max().float()
            assert scales[row, block] == scale
            wanted = nearest_codes(values[row, part] / scale.double(), DYNAMIC_CODES[signed])
            wanted = wanted if signed else wanted.clamp(min=1)
            assert torch.equal(codes[row, part].long(), wanted)
    widest = 0.9 / (64 if signed else 128)  # between two codes
    assert ((found - values).abs() <= 0.51 * widest * values.abs().amax(-1, keepdim=True)).all()


def test_codes_are_those_of_the_published_optimiser():
    """256 values each, symmetric but for 0 and 1, ten times finer from decade to decade."""
    means, squares = (DYNAMIC_CODES[signed] for signed in (True, False))
    assert len(set(means)) == len(set(squares)) == 256 and means[-1] == squares[-1] == 1 and squares[0] == 0
    assert sorted(-each for each in means if each not in (0, 1)) == [each for each in means if each not in (0, 1)]
    decades = [sum(10.0 ** (k - 7) <= each < 10.0 ** (k - 6) for each in squares) for k in range(7)]
    assert decades == [2, 4, 8, 16, 32, 64, 128]


def test_a_step_with_8_bits_is_that_of_adamw_by_decoded_moments():
    module, plain = nn.Linear(700, 5).double(), nn.Linear(700, 5).double()
    plain.load_state_dict(module.state_dict())
    settings = Optimiser(name="adamw8bit", lr=0.01, weight_decay=0.3)
    optimiser = make_optimiser(dict(module.named_parameters()), settings)
    oracle = make_optimiser(dict(plain.named_parameters()), Optimiser(lr=0.01, weight_decay=0.3))
    for step in range(4):
        give_gradients(module, step)
        give_gradients(plain, step)
        optimiser.step()
        oracle.step()
        assert torch.allclose(module.weight, plain.weight, rtol=0, atol=1e-14)
        assert torch.equal(module.bias, plain.bias), "vectors have moments of full width"
        state, wide = state_by_name(optimiser)["weight"], oracle.state[plain.weight]
        assert state["step"] == step + 1 and state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.uint8
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            stored = decode(state[name], state[f"{name}_scale"], torch.float64, signed=signed)
            assert torch.allclose(stored, wide[name], rtol=0.02, atol=float(wide[name].abs().max()) / 50)
            wide[name].copy_(stored)  # the next step begins from what is stored
    held = sum(each.nbytes for each in state.values())
    assert held < 2.05 * module.weight.numel()


def test_8_bits_train_about_as_well_as_32():
    torch.manual_seed(0)
    inputs, teacher = torch.randn(256, 300), nn.Linear(300, 4)
    targets = teacher(inputs).detach()
    ends = {}
    for name in ("adamw", "adamw8bit"):
        torch.manual_seed(1)
        student = nn.Linear(300, 4)
        optimiser = make_optimiser(dict(student.named_parameters()), Optimiser(name=name, lr=0.01, weight_decay=0.0))
        for _ in range(200):
            loss = (student(inputs) - targets).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        ends[name] = loss.item()
    assert ends["adamw8bit"] < 0.01 and abs(math.log(ends["adamw8bit"] / ends["adamw"])) < math.log(4)


def test_muon_is_that_of_torch():
    module, plain = nn.Linear(6, 9, bias=False).double(), nn.Linear(6, 9, bias=False).double()
    plain.load_state_dict(module.state_dict())
    settings = Optimiser(name="muon", lr=0.01, weight_decay=0.3, momentum=0.9)
    optimiser = make_optimiser(dict(module.named_parameters()), settings, hidden=["weight"])
    options = {"weight_decay": 0.3, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    oracle = torch.optim.Muon(plain.parameters(), lr=0.01, **options)
    for step in range(3):
        give_gradients(module, step)
        give_gradients(plain, step)
        optimiser.step()
        oracle.step()
        assert torch.allclose(module.weight, plain.weight, rtol=0, atol=1e-14)
    assert set(state_by_name(optimiser)["weight"]) == {"momentum_buffer"}
