"""Scoring again: what rounding explains passes, what it does not is found."""

import pytest
import torch
import transformers
from decoding import Ranks, held_out

from tpverify.model.checkpoint import resolve
from tpverify.report.generation import Case, Comparison, Run
from tpverify.report.rescore import Reference, Score, score
from tpverify.report.tables import proof_lines, score_lines
from tpverify.runtime.generation import GenerationResult
from tpverify.tree import uniform


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference("tiny")


@pytest.fixture(scope="module")
def alone() -> Ranks:
    return Ranks()


def test_the_reference_is_that_of_transformers(reference: Reference) -> None:
    tokens = list(held_out(300)[0])
    oracle = transformers.DeepseekV3ForCausalLM.from_pretrained(resolve("tiny"), dtype=torch.float64).eval()
    with torch.no_grad():
        exact = oracle(torch.tensor([tokens])).logits[0]
    found = reference.logits(reference.hidden_states(tokens))
    assert (found - exact).abs().max() < 2e-5 * exact.abs().max()


@pytest.mark.parametrize("strategy", ["ddtree", "chain", "autoregressive"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_of_bf16_ranks_pass(alone: Ranks, reference: Reference, strategy: str, temperature: float) -> None:
    prompt = held_out(80)[2]
    (result,) = alone.generate([prompt], max_new_tokens=24, strategy=strategy, temperature=temperature, seed=4)
    hidden = alone.hidden_states([*prompt, *result.tokens[:-1]])
    found = score(reference, prompt, result.tokens, temperature, 4, hidden)
    assert found.ok and found.tokens == 24 and found.exact >= 22
    assert 0 < found.error < 1 and found.allowed > 0
    for place in (0, 11, 23):  # a token that the logits do not say
        wrong = list(result.tokens)
        wrong[place] = 0 if uniform(4, len(prompt) + place) > 0.5 else 255
        hidden = alone.hidden_states([*prompt, *wrong[:-1]])
        assert not score(reference, prompt, wrong, temperature, 4, hidden).ok


def test_ranks_that_are_wrong_rather_than_rounded_allow_nothing_more(reference: Reference) -> None:
    prompt = list(held_out(60)[0])
    hidden = reference.hidden_states(prompt)
    logits = reference.logits(hidden)
    found = score(reference, prompt, [int(logits[-1].argmax())], 0.0, 0, (hidden * 0.5).numpy())
    assert found.exact == 1 and found.gap == 0
    assert found.error > logits.abs().max() / 32 and found.allowed == pytest.approx(2 * logits.abs().max().item() / 32)


def test_nothing_emitted_is_nothing_wrong(reference: Reference) -> None:
    hidden = reference.hidden_states([65, 66]).numpy()
    assert score(reference, [65, 66], [], 0.0, 0, hidden) == Score(0, 0, 0.0, 0.0, 0.0)


GOOD, BAD = Score(10, 9, 0.01, 0.02, 0.04), Score(10, 9, 0.05, 0.02, 0.04)


@pytest.mark.parametrize(("greedy", "sampled"), [(GOOD, GOOD), (BAD, GOOD), (GOOD, BAD)])
def test_lines_and_verdict(greedy: Score, sampled: Score) -> None:
    cases, stats = (Case("one", "a"), Case("two", "b", 0.8)), {"hidden_digest": "d", "seconds": {}}
    texts = {"ddtree": "xy", "chain": "xz", "autoregressive": "xy"}
    runs = [
        Run(case, strategy, 1, GenerationResult([0, 1], text, [1], stats), 1.0)
        for strategy, text in texts.items()
        for case in cases
    ]
    comparison = Comparison(1, cases, runs, [greedy, sampled] * 3)
    assert comparison.equal == (greedy.ok and sampled.ok)
    first, second, third = proof_lines(comparison)
    assert first.startswith(
        f"greedy tokens scored again in float32: {'yes' if greedy.ok else 'no'} (27 of 30 are its own"
    )
    assert second.startswith(f"sampled tokens scored again in float32: {'yes' if sampled.ok else 'no'} (27 of 30 are")
    assert f"largest gap {greedy.gap}, 0.04 allowed" in first and f"{sampled.gap} of probability, 0.04" in second
    assert third == "equal across tp 1: yes"
    assert score_lines(runs[:1], [greedy]) == [first.replace("27 of 30", "9 of 10")]
    assert score_lines([], []) == []
