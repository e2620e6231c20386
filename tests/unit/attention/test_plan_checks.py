"""What attention refuses: with the value, the rule and the way out, and before anything is sent."""

import pytest
import torch

from seqloom.attention import attention
from seqloom.attention.kernels.cpu import CpuFlash
from seqloom.dist.rank_tokens import bind, bind_single_rank
from seqloom.dist.thread_transport import SingleRankTransport, run_ranks
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, StageMicroBatch
from support.transports import CountingTransport

torch.set_num_threads(1)
WORK = StageMicroBatch((Group((0, 1), 2, 1, (Span(0, 0, 6),)),), Checkpoint.NONE)


def assert_refused(call, *words, work=WORK):
    """Every rank refuses, says all the words, and has sent nothing."""

    def body(transport):
        counting = CountingTransport(transport)
        with pytest.raises(SeqloomError) as error:
            call(bind(work, counting))
        assert counting.traffic("all_to_all").calls == counting.traffic("exchange").calls == 0
        return str(error.value)

    for message in run_ranks(2, body):
        for word in words:
            assert word in message, message


def tensors(heads=4, kv_heads=2, tokens=3, dtype=torch.float32):
    return [torch.zeros(tokens, n, 8, dtype=dtype) for n in (heads, kv_heads, kv_heads)]


def with_options(**options):
    return lambda context: attention(*tensors(), context, **options)


def test_dropout():
    assert_refused(with_options(dropout=0.1), "dropout 0.1", "without a seed", "dropout_seed=step")
    keyed = bind_single_rank([3], dropout_seed=1)
    for options, words in (
        ({"dropout": 0.1}, r"dropout 0\.1 .*without a layer.*layer=number"),
        ({"dropout": 1.0, "layer": 0}, r"dropout 1\.0 .*from 0 to below 1"),
        ({"dropout": -0.1, "layer": 0}, r"dropout -0\.1 "),
        ({"dropout": 0.1, "layer": 0, "kernels": CpuFlash()}, r"cpu_flash: dropout 0\.1 .*it drops none"),
    ):
        with pytest.raises(SeqloomError, match=words):
            attention(*tensors(), keyed, **options)
    with torch.no_grad():  # evaluation: nothing is dropped
        whole, one = bind_single_rank([3]), [torch.rand(each.shape) for each in tensors()]
        assert torch.equal(attention(*one, whole, dropout=0.1), attention(*one, whole))


def test_prefixes():
    for prefix in (4, -1, 1.5):
        with pytest.raises(
            SeqloomError, match=rf"a prefix of {prefix} tokens for document 0, which has 3.*from 0 to 3"
        ):
            bind_single_rank([3], prefixes={0: prefix})
    with pytest.raises(SeqloomError, match=r"attention_chunk 2 for document 0, whose first 3 tokens see each other"):
        attention(*tensors(), bind_single_rank([3], prefixes={0: 3}), attention_chunk=2)
    one = [torch.rand(each.shape) for each in tensors()]
    plain, shown = bind_single_rank([3]), bind_single_rank([3], prefixes={0: 3})
    assert torch.allclose(attention(*one, shown), attention(*one, plain, causal=False))
    assert torch.equal(attention(*one, shown, causal=False), attention(*one, plain, causal=False))
    assert torch.equal(attention(*one, bind_single_rank([3], prefixes={0: 1})), attention(*one, plain))


def test_a_prefix_ends_in_the_first_piece():
    pieces = {0: (Span(0, 0, 4), Span(0, 4, 6))}
    first = StageMicroBatch((Group((0,), 1, 1, (Span(0, 0, 4),)),), Checkpoint.NONE)
    with pytest.raises(SeqloomError, match=r"a prefix of 5 tokens for document 0, whose first piece ends at token 4"):
        bind(first, SingleRankTransport(), pieces=pieces, prefixes={0: 5})


@pytest.mark.parametrize("softcap", [0.0, -30.0, float("nan"), float("inf")])
def test_caps(softcap):
    assert_refused(with_options(softcap=softcap), f"softcap {softcap}", "give a positive number, or None")


@pytest.mark.parametrize("sinks", [torch.zeros(2), torch.zeros(4, dtype=torch.int64), torch.zeros(4, 1)], ids=str)
def test_sinks(sinks):
    assert_refused(with_options(sinks=sinks), f"sinks {tuple(sinks.shape)} of {sinks.dtype}", "each of the 4 heads")


@pytest.mark.parametrize("chunk", [0, -3, 2.5])
def test_attention_chunks(chunk):
    assert_refused(with_options(attention_chunk=chunk), f"attention_chunk {chunk}", "from 1 up", "leave it out")


@pytest.mark.parametrize("window, causal", [(0, True), (-3, True), (2.5, True), (4, False)])
def test_windows(window, causal):
    assert_refused(with_options(window=window, causal=causal), f"window {window}", f"causal={causal}", "leave it out")


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0, -1.0])
def test_scales(scale):
    assert_refused(with_options(scale=scale), f"scale {scale}", "positive")


def test_dtypes():
    assert_refused(
        lambda c: attention(*tensors(dtype=torch.int32), c), "torch.int32", "float64, float32, bfloat16, float16"
    )
    q, k, v = tensors()
    assert_refused(lambda c: attention(q, k.double(), v, c), "k torch.float64", "one dtype")


def test_head_counts():
    assert_refused(lambda c: attention(*tensors(heads=4, kv_heads=3), c), "3 kv heads for 4 heads", "[1, 2, 4]")
    assert_refused(lambda c: attention(*tensors(heads=1, kv_heads=1), c), "ulysses 2", "1 heads", "a ring for the rest")


def test_all_ranks_refuse_what_concerns_one():
    """Rank 0 is not in the group that cannot be served, but it would wait for one that has failed."""
    work = StageMicroBatch(
        (Group((0, 1), 1, 2, (Span(0, 0, 6),)), Group((1,), 1, 1, (Span(1, 3, 4),))), Checkpoint.NONE
    )
    assert_refused(lambda c: attention(*tensors(tokens=c.tokens), c), "document 1 from token 3 on", work=work)


def test_shapes():
    q, k, v = tensors()
    assert_refused(lambda c: attention(q[None], k, v, c), "q (1, 3, 4, 8)", "[tokens, heads, dim]")
    assert_refused(lambda c: attention(q, k, v[:, :1], c), "v (3, 1, 8)", "[tokens, kv_heads, dim]")
    assert_refused(lambda c: attention(q, k[..., :4], v[..., :4], c), "k (3, 2, 4)", "same tokens and dim")
    assert_refused(lambda c: attention(q, k[:2], v[:2], c), "k (2, 2, 8)", "same tokens")


def test_lengths():
    assert_refused(lambda c: attention(*tensors(tokens=5), c), "5 rows", "holds 3 tokens", "context.spans")


def test_devices():
    q, k, v = tensors()
    assert_refused(lambda c: attention(q.to("meta"), k, v, c), "q on meta", "bound to cpu")
    everything = [x.to("meta") for x in (q, k, v)]
    assert_refused(lambda c: attention(*everything, c), "device='meta'")


def test_pieces_of_documents():
    work = StageMicroBatch((Group((0, 1), 1, 2, (Span(4, 2, 8),)),), Checkpoint.NONE)
    assert_refused(lambda c: attention(*tensors(), c), "document 4 from token 2 on", "bind_plan", work=work)


def test_what_a_kernel_cannot_do():
    class Narrow:
        from seqloom.attention.kernels.interface import Capabilities

        capabilities = Capabilities("narrow", ("cpu",), (torch.float32,), max_dim=4)

        def prepare(self, segments, shape):
            raise AssertionError("it must be asked first")

    assert_refused(lambda c: attention(*tensors(), c, kernels=Narrow()), "narrow: head dim 8", "at most 4")
