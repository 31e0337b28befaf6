"""The three stages in miniature, and the parts of them a silent mistake could hide in."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tpverify.model.checkpoint import load_checkpoint
from tpverify.model.drafter import Drafter
from tpverify.model.tiny import corpus as texts
from tpverify.model.tiny import evaluate
from tpverify.model.tiny.distill import block_losses, target_features
from tpverify.model.tiny.generate import continued
from tpverify.model.tiny.optim import orthogonalized, schedule
from tpverify.model.tiny.target import Target
from tpverify.model.tiny.train import SMOKE, load, train

MINIATURE = replace(
    SMOKE,
    pretrain=replace(SMOKE.pretrain, steps=80, batch_bytes=1024),
    generate=replace(SMOKE.generate, sequences=64, batch=64),
    distill=replace(SMOKE.distill, steps=40),
    judged=replace(SMOKE.judged, windows=16, prompts=4, new_bytes=16),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small run no faster on more threads, and much slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def split() -> texts.Corpus:
    corpus = texts.load()
    return texts.Corpus(dict(list(corpus.train.items())[:200]), corpus.lib, {})


@pytest.fixture(scope="module")
def shipped() -> tuple[Target, Drafter]:
    return load(Path(texts.__file__).parent, "cpu")


@pytest.mark.slow
def test_all_stages_learn(split: texts.Corpus, tmp_path: Path) -> None:
    """Eight bits are chance; a drafter that learned nothing keeps tau at 1."""
    target, drafter = train(MINIATURE, split, tmp_path, "cpu")
    assert evaluate.bits_per_byte(target, split.lib, 128, 16) < 4.5
    given = evaluate.held_out_prompts(split, [64] * 4)
    assert evaluate.decode(target, drafter, given, 16, evaluate.chain).tau > 1.1
    config, tensors = load_checkpoint(tmp_path)
    assert config == MINIATURE.target
    assert torch.equal(tensors["model.embed_tokens.weight"].float(), target.embed)


def test_shipped_pair_speculates_without_loss_and_pays(split: texts.Corpus, shipped: tuple[Target, Drafter]) -> None:
    """On a few held-out prompts: the text of plain decoding, in far fewer rounds, sampled too."""
    target, drafter = shipped
    given = evaluate.held_out_prompts(split, [384] * 4)
    for temperature, least in ((0.0, 4.0), (1.0, 2.0)):
        plain = evaluate.decode(target, drafter, given, 48, evaluate.root_only, temperature)
        assert plain.tau == 1.0
        for strategy in (evaluate.chain, evaluate.ddtree(32)):
            decoded = evaluate.decode(target, drafter, given, 48, strategy, temperature)
            assert decoded.tokens == plain.tokens
        assert decoded.tau > least


def test_bits_per_byte_by_hand(split: texts.Corpus, shipped: tuple[Target, Drafter]) -> None:
    target, _ = shipped
    text = next(iter(split.lib.values()))[:130]
    got = evaluate.bits_per_byte(target, {"x": text}, 64)
    total = 0.0
    for start in (0, 64):
        window = torch.tensor(list(text[start : start + 65]))
        p = target(window[None, :-1])[0].double().softmax(-1)
        total -= p[torch.arange(64), window[1:]].log2().sum().item()
    assert got == pytest.approx(total / 128, rel=1e-4)


def test_generation_equals_scoring_from_scratch(shipped: tuple[Target, Drafter]) -> None:
    """Every greedy byte is the argmax of a full forward pass over what precedes it; prompts stay as they are."""
    target, _ = shipped
    text = b"class Queue:\n    def __init__(self):\n        self"
    tokens = torch.tensor([list(text), list(text[::-1])])
    out = continued(target, tokens.clone(), torch.tensor([20, 3]), torch.tensor([0, 0]), torch.Generator())
    choices = target(out.long()).argmax(-1)
    for row, prompt in enumerate((20, 3)):
        assert torch.equal(out[row, :prompt].long(), tokens[row, :prompt])
        assert torch.equal(out[row, prompt:].long(), choices[row, prompt - 1 : -1])


def test_training_sees_what_inference_sees(shipped: tuple[Target, Drafter]) -> None:
    """The many-blocks-a-sequence loss equals cross-entropies of the drafter's own logits, a block at a time."""
    target, drafter = shipped
    data = Path(evaluate.__file__).read_bytes()
    tokens = torch.tensor([list(data[:200]), list(data[1000:1200])])
    features = target_features(target, tokens.to(torch.uint8), drafter.feature_layers)
    anchors = torch.tensor([[1, 60, 150], [128, 129, 184]])
    with torch.no_grad():
        losses = block_losses(drafter, features, tokens, anchors)
    for row in range(2):
        rows = drafter.context(features[row], torch.arange(200))
        for k, at in enumerate(anchors[row].tolist()):
            window = rows[max(0, at - drafter.window) : at][None]
            logits = drafter(window, torch.tensor([window.shape[1]]), tokens[row, at : at + 1], torch.tensor([at]))[0]
            p = logits.double().log_softmax(-1)[torch.arange(15), tokens[row, at + 1 : at + 16]]
            torch.testing.assert_close(losses[row, k].double(), -p, atol=2e-3, rtol=1e-3)


def test_newton_schulz_flattens_the_spectrum() -> None:
    matrices = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0))
    values = np.linalg.svd(orthogonalized(matrices).double().numpy(), compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.3


def test_schedule() -> None:
    values = [schedule(step, 1000) for step in range(1000)]
    assert values[0] == pytest.approx(0.05) and max(values) == 1.0 and values[-1] == pytest.approx(0.02, abs=1e-3)
    assert values[20:] == sorted(values[20:], reverse=True)
