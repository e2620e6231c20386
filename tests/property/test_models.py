"""The plan never changes the result: any pack on any ulysses x ring gives the gradients of one process."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from seqloom.describe import ModelSpec
from seqloom.dist.rank_tokens import bind
from seqloom.dist.thread_transport import run_ranks
from seqloom.layout import Span
from seqloom.models import Transformer, TransformerOptions
from seqloom.plan import Checkpoint, Group, StageMicroBatch

torch.set_num_threads(1)


@st.composite
def cases(draw):
    """(spec, details, document lengths, ulysses, ring, order in which the group lists its documents)."""
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    layers = draw(st.integers(1, 2))
    spec = ModelSpec(
        name="drawn",
        layers=layers,
        hidden=8,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=4,
        ffn=12,
        gated=True,
        vocabulary=11,
        tied=draw(st.booleans()),
        windows=tuple(draw(st.lists(st.none() | st.integers(1, 20), min_size=layers, max_size=layers))),
    )
    details = TransformerOptions(qk_norm=draw(st.booleans()), qkv_bias=draw(st.booleans()))
    ulysses = draw(st.integers(1, min(heads, 4)))
    ring = draw(st.integers(1, 6 // ulysses))
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
    return spec, details, lengths, ulysses, ring, draw(st.permutations(range(len(lengths))))


def loss_and_gradients(spec, details, lengths, ulysses, ring, order):
    """Summed over ranks, in the order of ranks."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(spec.vocabulary, (n,), generator=generator) for n in lengths]
    targets = [torch.randint(spec.vocabulary, (n,), generator=generator) for n in lengths]
    spans = tuple(Span(k, 0, lengths[k]) for k in order)
    work = StageMicroBatch((Group(tuple(range(ulysses * ring)), ulysses, ring, spans),), Checkpoint.NONE)

    def body(transport):
        model = Transformer(spec, details, seed=2, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 15 if parameter.ndim == 2 else 1
        context = bind(work, transport, device=torch.device("cpu"))
        mine = work.attention_layout().spans(transport.rank)
        local = [
            torch.cat([x[d][a:b] for d, a, b in mine] or [torch.empty(0, dtype=torch.int64)]) for x in (ids, targets)
        ]
        logits = model(local[0], context.positions, context)
        loss = torch.nn.functional.cross_entropy(logits, local[1], reduction="sum")
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    results = run_ranks(ulysses * ring, body, strict=True)
    return [sum(values) for values in zip(*results, strict=True)]


@given(cases())
def test_loss_and_gradients_equal_those_of_one_process(case):
    spec, details, lengths, *_ = case
    got = loss_and_gradients(*case)
    wanted = loss_and_gradients(spec, details, lengths, 1, 1, range(len(lengths)))
    floor = 1e-3 * max(float(x.norm()) for x in wanted[1:])
    for a, b in zip(got, wanted, strict=True):
        assert float((a - b).norm()) <= 1e-10 * max(float(b.norm()), floor)
