"""Samplers hit the published figures that they are made from."""

from __future__ import annotations

import numpy as np
import pytest

from seqloom.describe import SAMPLERS, Batch, drop_longer, sample, sampler
from seqloom.describe.samplers import (
    Sampler,
    atom,
    histogram,
    log_normal,
    mixture,
    pareto,
    quantile_table,
    truncated,
    uniform,
)
from seqloom.errors import SeqloomError

K = 1024
COUNT = 400_000
WIKIPEDIA_SEED_0 = [532, 155, 62, 45, 1179, 2383]
COMMONCRAWL_SEED_0 = [1243, 833, 2759, 1203, 446, 1791]


def token_share(lengths: np.ndarray, mask: np.ndarray) -> float:
    return float(lengths[mask].sum() / lengths.sum())


def test_every_preset_has_a_note_and_stand_ins_say_so():
    wanted = {
        "wikipedia",
        "prolong",
        "prolong-64k",
        "github",
        "github-flexsp",
        "arxiv",
        "commoncrawl",
        "web",
        "meta128k",
    }
    wanted |= {"byted2m", "longalign-mix", "llama3-sft", "agent-traces", "vlm", "megatron-mock", "libra"}
    assert set(SAMPLERS) == wanted
    for name, value in SAMPLERS.items():
        assert value.name == name and value.note and "\n" not in value.note
    for name in ("arxiv", "commoncrawl", "github", "github-flexsp", "byted2m", "libra"):
        assert sampler(name).note.startswith("stand-in:") and sampler(name).stand_in
    assert not sampler("wikipedia").stand_in


def test_the_seed_decides():
    assert np.array_equal(sample("web", 100, seed=3), sample("web", 100, seed=3))
    assert not np.array_equal(sample("web", 100, seed=3), sample("web", 100, seed=4))


def test_lengths_are_the_same_everywhere():
    """A change here changes every published figure that is drawn from a sampler."""
    assert sample("wikipedia", 6, seed=0).tolist() == WIKIPEDIA_SEED_0
    assert sample("commoncrawl", 6, seed=0).tolist() == COMMONCRAWL_SEED_0


def test_stand_in_is_the_plain_log_normal_cut_at_its_context():
    plain = np.rint(np.random.Generator(np.random.PCG64(1)).lognormal(6.93, 1.55, 20_480)).astype(np.int64)
    plain = plain[plain <= 384 * K]
    assert np.array_equal(sample("commoncrawl", len(plain), seed=1), plain)


def test_arxiv_has_the_published_mean():
    assert sample("arxiv", COUNT, seed=0).mean() == pytest.approx(18_000, rel=0.02)


def test_wikipedia_has_the_published_quantiles_and_shares():
    lengths = sample("wikipedia", COUNT, seed=0)
    published = {0.05: 67, 0.25: 146, 0.5: 347, 0.75: 862, 0.9: 2112, 0.95: 3721, 0.99: 10_921}
    for probability, length in published.items():
        assert np.quantile(lengths, probability) == pytest.approx(length, rel=0.03)
    assert lengths.mean() == pytest.approx(1013.6, rel=0.02)
    assert token_share(lengths, lengths <= K) == pytest.approx(0.249, abs=0.01)
    assert token_share(lengths, lengths <= 8 * K) == pytest.approx(0.725, abs=0.01)
    assert token_share(lengths, lengths <= 32 * K) == pytest.approx(0.924, abs=0.01)
    below = Batch.of(drop_longer(lengths, 192 * K)[0]).statistics()
    assert below.top1_square_share == pytest.approx(0.761, abs=0.02)


def test_prolong_has_the_published_quantiles_and_the_upsampled_form_its_spike():
    lengths = sample("prolong", COUNT, seed=0)
    assert lengths.min() >= 575 and lengths.max() <= 340_149
    assert np.median(lengths) == pytest.approx(1914, rel=0.01)
    assert lengths.mean() == pytest.approx(3051.9, rel=0.02)
    assert Batch.of(lengths).statistics().top1_square_share == pytest.approx(0.63, abs=0.03)
    upsampled = sample("prolong-64k", COUNT, seed=0)
    long = upsampled >= 10 * K
    assert np.mean(upsampled[long] == 64 * K) == pytest.approx(0.5, abs=0.02)
    assert long.mean() == pytest.approx(2 * np.mean(lengths >= 10 * K), rel=0.05)


def test_web_fills_its_bins_exactly():
    lengths = sample("web", COUNT, seed=0)
    for edge, share in {100: 0.0833, 500: 0.4675, 1024: 0.7138, 8192: 0.9742, 131_072: 0.9986}.items():
        assert np.mean(lengths <= edge) == pytest.approx(share, abs=0.003)
    assert lengths.max() <= 196_608


def test_mixtures_hit_the_published_shares():
    github = sample("github", COUNT, seed=0)
    assert np.mean(github <= 2 * K) == pytest.approx(0.72, abs=0.01)
    assert token_share(github, github > 128 * K) == pytest.approx(0.152, abs=0.03)
    byted = sample("byted2m", COUNT, seed=0)
    assert np.mean(byted <= 4 * K) == pytest.approx(0.79, abs=0.01)
    assert np.mean(byted >= 128 * K) == pytest.approx(0.0094, abs=0.001)
    assert token_share(byted, byted >= 128 * K) == pytest.approx(0.45, abs=0.03)
    meta = sample("meta128k", COUNT, seed=0)
    assert np.mean(meta <= 6250) == pytest.approx(0.9723, abs=0.002)
    assert np.mean(meta > 118_750) == pytest.approx(0.00126, abs=0.0003)
    assert np.mean(sample("agent-traces", COUNT, seed=0) > 32 * K) == pytest.approx(0.9, abs=0.01)
    llama = sample("llama3-sft", COUNT, seed=0)
    assert llama.mean() == pytest.approx(1000, rel=0.06)
    assert np.median(sample("libra", COUNT, seed=0)) == pytest.approx(644, rel=0.02)
    mock = sample("megatron-mock", COUNT, seed=0)
    assert (mock.min(), mock.max()) == (128, 8192)


def test_a_stream_with_its_long_sequences_keeps_the_wanted_count():
    stream = sampler("commoncrawl").stream(5000, seed=2, max_length=32 * K)
    kept, dropped = drop_longer(stream, 32 * K)
    assert len(kept) == 5000 and dropped > 0
    assert np.array_equal(kept, sample("commoncrawl", 5000, seed=2, max_length=32 * K))


def test_bad_requests_are_refused():
    with pytest.raises(SeqloomError, match=r"unknown sampler 'wikipedai'; did you mean wikipedia"):
        sample("wikipedai", 5, seed=0)
    with pytest.raises(SeqloomError, match="ask for at least 1"):
        sample("web", 0, seed=0)
    with pytest.raises(SeqloomError, match="seed -1 is negative"):
        sample("web", 1, seed=-1)
    with pytest.raises(SeqloomError, match="raise the maximum length"):
        sample("prolong", 1, seed=0, max_length=100)
    assert sampler("Wikipedia") is sampler("wikipedia")
    with pytest.raises(KeyError):
        SAMPLERS["no such sampler"]
    assert "wikipedia" in repr(SAMPLERS) and len(SAMPLERS) == 16


@pytest.mark.parametrize(
    "make",
    [
        lambda: quantile_table((0, 0.5), (1, 2)),
        lambda: quantile_table((0, 0.5, 0.5, 1), (1, 2, 3, 4)),
        lambda: quantile_table((0, 1), (2, 1)),
        lambda: quantile_table((0, 1), (2,)),
        lambda: histogram((1, 2), (1, 1)),
        lambda: histogram((3, 2), (1,)),
        lambda: histogram((1, 2), (0,)),
        lambda: histogram((1, 2), (1,), "square"),
        lambda: mixture((1,), ()),
        lambda: mixture((-1,), (atom(3),)),
        lambda: pareto(0, 1, 2),
        lambda: pareto(1, 2, 2),
        lambda: uniform(3, 2),
    ],
)
def test_impossible_distributions_are_refused(make):
    with pytest.raises(SeqloomError, match="distribution of lengths"):
        make()


def test_own_samplers_compose():
    mix = mixture((1, 1), (atom(10), truncated(log_normal(3, 1), 20, 30)))
    lengths = Sampler("mine", "made here", mix).sample(1000, seed=0)
    assert set(np.unique(lengths)) <= {10, *range(20, 31)}
    assert 400 < np.sum(lengths == 10) < 600
