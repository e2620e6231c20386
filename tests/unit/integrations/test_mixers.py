"""Mixers of transformers that scan: whose forward is exchanged, for which calls, and what they cost."""

import copy
import inspect
import sys
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from seqloom.attention import KVCache
from seqloom.attention.linear_attention import CHUNK, decayed_linear_attention
from seqloom.dist import SingleRankTransport, bind, bind_single_rank
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import attach, inputs, mixers, model_adapter
from seqloom.integrations.transformers.describe import describe_model
from seqloom.layout import Span
from seqloom.models.adapter import ModelWithLoss
from seqloom.models.compile import compile_layers
from seqloom.plan import Checkpoint, Group, Remap, StageMicroBatch
from support.model_steps import assert_near, run_step, summed
from support.tiny_models import HYBRIDS, MODELS, SIZES, documents, gradients, one_by_one, targets, tiny_model

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of missing kernels


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_model_keeps_its_names_and_is_itself_again_under_another_attention(name):
    plain = tiny_model(name)
    model = attach(attach(copy.deepcopy(plain)))  # twice is once
    assert [*model.state_dict()] == [*plain.state_dict()]
    (ids,) = documents([11])
    model.set_attn_implementation("sdpa")
    plain.set_attn_implementation("sdpa")
    found, wanted = (each(input_ids=ids[None], use_cache=False).logits for each in (model, plain))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_mixer_that_does_not_get_the_context_of_the_call_is_refused(name):
    model, context = attach(tiny_model(name)), bind_single_rank([4])
    mixer = next(each for each in model.modules() if mixers.is_mixer(each))
    mixer.seqloom_call.has_context = True
    with pytest.raises(SeqloomError, match="without the context of the model's call"):
        mixer(torch.randn(1, 4, 16, dtype=torch.float64))
    with pytest.raises(SeqloomError, match=r"\[1, 3, \d+\] in a mixer, where rank 0 holds 4 tokens"):
        mixer(torch.randn(1, 3, 16, dtype=torch.float64), seqloom_context=context)


def test_other_recurrences_are_not_mixers():
    """Jamba calls a convolution that is known, and a scan that is not."""
    with torch.device("meta"):
        jamba = transformers.JambaForCausalLM(transformers.JambaConfig(**SIZES, num_experts=1))
    assert not any(mixers.is_mixer(each) for each in jamba.modules())
    assert not any(mixers.is_mixer(each) for name in MODELS for each in tiny_model(name).modules())


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_shapes_are_those_of_the_model(name, monkeypatch):
    model = tiny_model(name)
    spec, counted = describe_model(attach(model), name), {"scan_documents": 0, "convolve_documents": 0}

    def count(function, run, given, *args, **options):
        out = getattr(originals, function)(run, given, *args, **options)
        tensors = given if isinstance(given, list) else [given]
        counted[function] += sum(each[0].numel() for each in (*tensors, out))
        return out

    originals = SimpleNamespace(**{function: getattr(mixers, function) for function in counted})
    for function in counted:
        monkeypatch.setattr(mixers, function, partial(count, function))
    context = bind_single_rank([4])
    model(**inputs(documents([4])[0], context.positions, context))
    heads = max(getattr(each, "num_v_heads", getattr(each, "num_heads", 0)) for each in model.modules())
    scanned, convolved = (values // len(spec.mixer_layers) for values in counted.values())
    # Mamba-2 has one gate for a head, the delta rule two.
    assert scanned <= spec.mixer_exchange <= scanned + heads and bool(scanned) == (name != "lfm2")
    assert spec.mixer_values == spec.mixer_exchange + convolved
    scanning = [each for each in model.modules() if mixers.is_mixer(each)]
    assert len(scanning) == len(spec.mixer_layers)
    assert {sum(each.numel() for each in mixer.parameters()) for mixer in scanning} == {spec.mixer_parameters}
    attending = sum(map(spec.attention_parameters, range(spec.layers)))
    feed_forward = sum(each.numel() for name, each in model.named_parameters() if "mlp." in name or "forward." in name)
    outside = spec.vocabulary * spec.hidden * (1 if spec.tied else 2)
    own = attending + feed_forward + outside + len(scanning) * spec.mixer_parameters
    assert spec.parameters() == pytest.approx(own, abs=10 * spec.hidden)  # norms


@pytest.mark.parametrize("name", ["qwen3-next", "bamba"])
def test_the_operations_are_those_of_the_chunked_scan(name):
    """Counted in our own scan, whose triangular system is one solve: kernels multiply with its inverse instead."""
    model = tiny_model(name, **({"mamba_chunk_size": CHUNK} if name == "bamba" else {}))
    mixer = next(each for each in model.modules() if mixers.is_mixer(each))
    spec = describe_model(attach(model), name)
    heads, delta = spec.mixer_heads, name == "qwen3-next"
    key, value = (mixer.head_k_dim, mixer.head_v_dim) if delta else (mixer.ssm_state_size, mixer.head_dim)
    q, k, v, g = (torch.randn(heads, CHUNK, *width) for width in ((key,), (key,), (value,), ()))
    with FlopCounterMode(display=False) as counter:
        decayed_linear_attention(q, k, v, -g.abs(), g.sigmoid() if delta else None)
    shared = (
        0 if delta else (heads - mixer.n_groups) * 2 * CHUNK * key
    )  # keys and queries of a group are multiplied once
    inverse = heads * 2 * CHUNK * (key + value) if delta else 0
    (convolution,) = (each for each in mixer.modules() if isinstance(each, torch.nn.Conv1d))
    convolved = 2 * convolution.kernel_size[0] * convolution.out_channels
    assert spec.mixer_flops - convolved == counter.get_total_flops() // CHUNK + inverse - shared
    assert spec.mixer_halo == (convolution.kernel_size[0] - 1) * convolution.out_channels


@pytest.mark.parametrize("name", ["qwen3-next", "bamba"])
def test_states_between_ranks_in_half_precision(name):
    """Gradients of all parameters together: no further from float32 than twice what plain transformers is."""
    exact, ids = tiny_model(name, dtype=torch.float32, max_position_embeddings=128), documents([90, 30])
    half = copy.deepcopy(exact).to(torch.bfloat16)
    plain = copy.deepcopy(half)
    one_by_one(exact, ids)
    one_by_one(plain, ids)
    group = Group((0, 1), 1, 2, (Span(0, 0, 90), Span(1, 0, 30)), states=True)
    _, found = run_step(half, ids, [(group,)], 2, Checkpoint.NONE, None)
    wanted = gradients(exact)
    own, one = (
        sum(float((each[key].float() - true).square().sum()) for key, true in wanted.items())
        for each in (found, gradients(plain))
    )
    assert own <= 4 * one  # squares


def test_a_shared_expert_may_be_as_wide_as_there_are_experts():
    sizes = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 4,
        "moe_intermediate_size": 8,
        "mlp_only_layers": [],
    }
    spec = describe_model(attach(tiny_model("qwen3-next", **sizes, decoder_sparse_step=1)), "m")
    assert (spec.experts, spec.expert_ffn, spec.shared_ffn) == (4, 8, 4)


def test_tensor_parallelism_is_refused():
    adapter = model_adapter(attach(tiny_model("lfm2")))
    with pytest.raises(SeqloomError, match="mixers that scan, whose weights are not cut; plan with tensor = 1"):
        adapter.check_tp_degree(2)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("name", "target"), [("lfm2", "q_proj"), ("qwen3-next", "out_proj")])
def test_adapters_of_a_document_in_pieces(name, target, again):
    """Mixers below the first adapter are frozen, and pass gradients of states on; a stage may be run again."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model(name), LoraConfig(r=2, lora_dropout=0.0, target_modules=[target]))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.normal_(generator=torch.Generator().manual_seed(len(key)))
    plain, (ids,), pieces = copy.deepcopy(model), documents([20]), (Span(0, 0, 8), Span(0, 8, 9), Span(0, 9, 20))
    one_by_one(plain, [ids])
    adapter, cache = model_adapter(attach(model)), KVCache()

    def loss(piece):
        work = StageMicroBatch((Group((0,), 1, 1, (piece,)),), Checkpoint.STAGE)
        context = bind(work, SingleRankTransport(), pieces={0: pieces}, kv_cache=cache)
        rows = slice(piece.start, piece.stop)
        return ModelWithLoss(adapter)(ids[rows], targets(ids)[rows], context)

    with torch.no_grad() if again else nullcontext():
        losses = [loss(piece) for piece in pieces]
    for piece, first in zip(reversed(pieces), reversed(losses), strict=True):
        (loss(piece) if again else first).backward()
    cache.check_empty()
    wanted, found = gradients(plain), gradients(model)
    assert wanted and all(
        float((found[key] - each).norm()) <= 1e-5 * float(each.norm()) for key, each in wanted.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "qwen3-next"])
def test_compiled_layers_are_cut_around_mixers(name):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    types = [*HYBRIDS[name][1]["layer_types"]] * 2
    plain, model = (tiny_model(name, num_hidden_layers=4, layer_types=types, seed=1) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    ids = documents([7, 5])
    one_by_one(plain, ids)
    adapter = model_adapter(attach(model))
    compile_layers(adapter.layers, backend="aot_eager")
    labels = torch.cat([targets(each) for each in ids])
    ModelWithLoss(adapter)(torch.cat(ids), labels, bind_single_rank([7, 5])).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3  # attention; before and after a mixer
    for wanted, found in zip(gradients(plain).values(), gradients(model).values(), strict=True):
        assert float((found - wanted).norm()) <= 1e-5 * float(wanted.norm())


# -- packed calls of packages, which need a GPU: stand-ins with their published signatures


class PlainFLA:
    """Stands in for `fla`: every document of a pack by transformers' own function."""

    def __init__(self, torch_function):
        self.packs, self.torch_function = [], torch_function

    def chunk_gated_delta_rule(
        self,
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
    ):
        assert scale is None and q.dtype == k.dtype == v.dtype and len(beta.shape) == 3 and q.shape[0] == 1
        ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        assert ends[0] == 0 and ends[-1] == q.shape[1] and (cu_seqlens is None or cu_seqlens.dtype == torch.int64)
        assert initial_state is None or len(initial_state) == len(ends) - 1
        self.packs.append(len(ends) - 1)
        options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "output_final_state": output_final_state}
        found = [
            self.torch_function(
                *(x[:, a:b] for x in (q, k, v)),
                g=g[:, a:b],
                beta=beta[:, a:b],
                initial_state=None if initial_state is None else initial_state[n : n + 1],
                **options,
            )
            for n, (a, b) in enumerate(pairwise(ends))
        ]
        outs, states = zip(*found, strict=True)
        return torch.cat(outs, dim=1), torch.cat(states) if output_final_state else None


class PlainMamba:
    """Stands in for `mamba_ssm`: resets where `seq_idx` changes; states are of the whole batch only."""

    def __init__(self, torch_function):
        self.packs, self.torch_function = [], torch_function

    def mamba_chunk_scan_combined(
        self,
        x,
        dt,
        A,  # noqa: N803
        B,  # noqa: N803
        C,  # noqa: N803
        chunk_size,
        D=None,  # noqa: N803
        z=None,
        dt_bias=None,
        initial_states=None,
        seq_idx=None,
        cu_seqlens=None,
        dt_softplus=False,
        dt_limit=(0.0, float("inf")),
        return_final_states=False,
        return_varlen_states=False,
    ):
        assert z is None and cu_seqlens is None and not return_varlen_states and x.shape[0] == 1
        options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        if seq_idx is None:
            self.packs.append(1)
            states = {"initial_states": initial_states, "return_final_states": return_final_states}
            return self.torch_function(x, dt, A, B, C, chunk_size, **options, **states)
        assert seq_idx.dtype == torch.int32 and seq_idx.shape == x.shape[:2]
        assert initial_states is None and not return_final_states
        lengths = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
        self.packs.append(len(lengths))
        parts = zip(*(each.split(lengths, dim=1) for each in (x, dt, B, C)), strict=True)
        return torch.cat([self.torch_function(a, b, A, c, d, chunk_size, **options) for a, b, c, d in parts], dim=1)


PACKAGES = {
    "qwen3-next": ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule", "fla", PlainFLA),
    "bamba": ("mamba2_chunk_scan", "mamba_chunk_scan_combined", "mamba_ssm", PlainMamba),
}


@pytest.fixture
def package(request, monkeypatch):
    """A stand-in, chosen by transformers itself for the functions of a model's file, and used on CPUs."""
    name = request.param
    function, published, package_name, stand_in = PACKAGES[name]
    file = sys.modules[type(tiny_model(name)).__module__]
    torch_function = inspect.unwrap(getattr(file, function))
    plain = stand_in(torch_function)
    monkeypatch.setitem(sys.modules, package_name, SimpleNamespace(**{published: getattr(plain, published)}))
    chosen = use_kernel_func_from_hub_with_fallback(published, package_name, internal_path="")(torch_function)
    monkeypatch.setattr(file, function, chosen)
    monkeypatch.setattr(mixers, "takes_kernels", lambda _: True)
    return name, plain


@pytest.mark.parametrize("package", PACKAGES, indirect=True)
@pytest.mark.parametrize("remap", [None, Remap.ATTENTION])
def test_a_package_takes_all_whole_documents_in_one_call(package, remap):
    """Beside a document in pieces, whose states need calls of its own; heads of two ranks."""
    name, plain = package
    model, ids = tiny_model(name, dtype=torch.float32), documents([20, 7, 1, 9])
    expected = copy.deepcopy(model)
    logits = one_by_one(expected, ids)
    wanted = summed(logits, ids), gradients(expected)
    plain.packs.clear()
    rounds = [(Span(0, 0, 12), Span(1, 0, 7)), (Span(0, 12, 20), Span(2, 0, 1), Span(3, 0, 9))]
    groups = [(Group((0, 1), 2, 1, spans),) for spans in rounds]
    assert_near(run_step(model, ids, groups, 2, Checkpoint.NONE, remap), wanted, 1e-4)
    mixing = sum(mixers.is_mixer(each) for each in model.modules())
    assert sorted(plain.packs) == [1] * (3 * 2 * mixing) + [2] * (
        2 * mixing
    )  # two pieces and a pack of one, a pack of two


@pytest.mark.parametrize("package", PACKAGES, indirect=True)
def test_a_package_is_not_asked_where_it_does_not_serve(package, monkeypatch):
    name, plain = package
    monkeypatch.setattr(mixers, "takes_kernels", lambda x: x.is_cuda)
    model, context = attach(tiny_model(name, dtype=torch.float32)), bind_single_rank([4, 6])
    plain.packs.clear()
    model(**inputs(torch.cat(documents([4, 6])), context.positions, context))
    assert plain.packs == []
