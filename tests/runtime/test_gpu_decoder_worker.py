"""The worker of GPU ranks on the CPU: its stages run as they are, over the reference attention, without graphs."""

import numpy as np
import pytest
import torch
from decoding import Ranks, held_out, same

from tpverify.runtime.generation import GenerationResult
from tpverify.runtime.messages import Decode, DecodeRequest

DRAFTED = [("chain", 0), ("ddtree", 5), ("ddtree", 32)]


@pytest.fixture(scope="module")
def alone() -> Ranks:
    return Ranks()


def agreement(some: list[GenerationResult], others: list[GenerationResult]) -> float:
    """Share of prompts with the same tokens. Rounding differs between shapes, so one near tie makes two texts."""
    return float(np.mean([a.tokens == b.tokens for a, b in zip(some, others, strict=True)]))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_strategy_decodes_the_same_text(alone: Ranks, temperature: float) -> None:
    prompts = held_out(60)[:4]
    options = {"max_new_tokens": 16, "temperature": temperature, "seed": 5}
    plain = alone.generate(prompts, strategy="autoregressive", **options)
    assert all(set(result.accept_lengths) == {1} and len(result.tokens) == 16 for result in plain)
    for strategy, budget in DRAFTED:
        results = alone.generate(prompts, strategy=strategy, budget=budget, **options)
        assert agreement(results, plain) >= 0.75
        assert np.mean([np.mean(result.accept_lengths) for result in results]) > 1.5


def test_drafts_are_as_good_as_the_cpus(alone: Ranks) -> None:
    """Context rows, windows and positions: were one of them off, the drafter would be wrong about nearly everything."""
    (result,) = alone.generate([held_out(200)[1]], max_new_tokens=64, budget=32)
    assert np.mean(result.accept_lengths) > 3
    chunked = alone.generate([held_out(200)[1]], prefill_chunk=23, max_new_tokens=64, budget=32)
    assert np.mean(chunked[0].accept_lengths) == pytest.approx(np.mean(result.accept_lengths), rel=0.3)


@pytest.mark.parametrize(("tp", "strategy", "temperature"), [(2, "autoregressive", 0.0), (8, "ddtree", 0.7)])
def test_tp_changes_no_token_and_no_bit(alone: Ranks, tp: int, strategy: str, temperature: float) -> None:
    options = {"max_new_tokens": 8, "strategy": strategy, "budget": 8, "temperature": temperature}
    for a, b in zip(*(r.generate(held_out(30)[:2], **options) for r in (alone, Ranks(tp))), strict=True):
        assert same(a, b)


def test_a_step_of_more_requests_than_a_pass_holds() -> None:
    ranks = Ranks(max_batch=11)
    prompts = [bytes([97 + i]) * (i + 1) for i in range(11)]
    results = ranks.generate(prompts, max_new_tokens=4, strategy="chain")
    assert all(len(result.tokens) == 4 for result in results)
    together = ranks.generate(prompts[:8], max_new_tokens=4, strategy="chain")
    assert all(map(same, results, together))


def test_rows_that_move_between_steps_change_no_bit() -> None:
    """Latents, hidden states and the drafter's context: one left behind would show in tokens, digests or lengths."""
    prompts, options = held_out(70)[:3], {"max_new_tokens": 16, "budget": 16, "prefill_chunk": 30}
    ranks = Ranks(2)
    plain = ranks.generate(prompts, **options)
    assert all(map(same, ranks.generate(prompts, defrag=True, **options), plain))
    assert ranks.moves > 30


@pytest.mark.parametrize("strategy", ["autoregressive", "ddtree"])
def test_drafts_are_as_good_after_a_cached_prompt(alone: Ranks, strategy: str) -> None:
    """Whoever left it: plain decoding writes the drafter's context rows too."""
    prompt, options = held_out(200)[1], {"max_new_tokens": 48, "budget": 32}
    (fresh,) = alone.generate([prompt], **options)
    ranks = Ranks()
    ranks.generate([prompt], cache=True, max_new_tokens=4, strategy=strategy)
    (result,) = ranks.generate([prompt], cache=True, defrag=True, **options)
    assert result.stats["cached_tokens"] == 199
    assert np.mean(result.accept_lengths) == pytest.approx(np.mean(fresh.accept_lengths), rel=0.3)


def request(tokens: list[int], parents: list[int], seq: int, prompt: bool = False) -> DecodeRequest:
    arrays = np.array(tokens, "<i8").tobytes(), np.array(parents, "<i4").tobytes()
    return DecodeRequest(seq, *arrays, prompt, 0.0, 0, 1)


BAD = {
    "a token outside the vocabulary": ([1, 256], [-1, 0], "tokens: expected ids from 0 to 255, got 256"),
    "a negative token": ([-1, 2], [-1, 0], "tokens: expected ids from 0 to 255, got -1"),
    "a parent that comes later": ([1, 2, 3], [-1, 2, 0], "parents.1.: expected an earlier node"),
    "a second root": ([1, 2], [-1, -1], "parents.1.: expected an earlier node"),
    "a tree that is too deep": (list(range(17)), list(range(-1, 16)), "at most 15 nodes below the root, got 16"),
    "a token short": ([1], [-1, 0], "a node's token, parent and slot: 1, 2, 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_no_device_survives_is_refused(alone: Ranks, case: str) -> None:
    tokens, parents, text = BAD[case]
    seq = alone.log.open()
    alone.log.draft(seq, len(parents))
    with pytest.raises(ValueError, match=text):
        alone.step(Decode([request(tokens, parents, seq)]))
    alone.log.close(seq)


def test_positions_beyond_the_models_are_refused() -> None:
    ranks = Ranks(num_slots=8300)
    seq = ranks.log.open()
    ranks.log.append(seq, 8191)
    ranks.log.draft(seq, 2)
    with pytest.raises(ValueError, match="positions: expected less than 8192, got 8192"):
        ranks.step(Decode([request([1, 2], [-1, 0], seq)]))


def test_logits_that_are_not_finite_are_an_error() -> None:
    ranks = Ranks()
    ranks.workers[0].stages.decoder.head[3] = torch.nan
    seq = ranks.log.open()
    ranks.log.draft(seq, 2)
    with pytest.raises(ValueError, match="logits: expected finite numbers, got others in sequence 0"):
        ranks.step(Decode([request([1, 2], [-1, 0], seq)]))
