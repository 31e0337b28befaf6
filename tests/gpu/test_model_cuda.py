"""The shipped model on one GPU, without Ray: graphs, ranks as threads, tokens scored again, device accept."""

import gc
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from decoding import Meeting, Ranks, held_out, same

from tpverify.errors import ArgumentError
from tpverify.model.checkpoint import load_checkpoint, resolve
from tpverify.model.gpu_accept import choose, paths, rank_tokens, walk
from tpverify.ops import cuda
from tpverify.report.rescore import Reference, score
from tpverify.runtime.generation import GenerationResult
from tpverify.runtime.gpu_decoder_worker import GpuDecoderWorker

MISSING = cuda.why_not()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=f"NOT run: {MISSING}")]
WAYS = [("autoregressive", 0), ("chain", 0), ("ddtree", 8), ("ddtree", 32), ("ddtree", 128), ("ddtree", 500)]
TEMPERATURES = [0.0, 0.8]
NEW = 40


@pytest.fixture(scope="module")
def graphs() -> Iterator[Ranks]:
    """One rank whose steps are CUDA graphs."""
    yield Ranks(device="cuda:0", graphs=True)


def decode(ranks: Ranks, strategy: str, budget: int, temperature: float, count: int = 3) -> list[GenerationResult]:
    options = {"max_new_tokens": NEW, "temperature": temperature, "seed": 3}
    return ranks.generate(held_out(300)[:count], strategy=strategy, budget=budget, **options)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_replays_are_the_bits_of_eager_steps_and_of_other_numbers_of_ranks(graphs: Ranks, temperature: float) -> None:
    """One rank without graphs; two and eight ranks, which share the GPU as threads. Digests of all layers' rows too."""
    others = {tp: Ranks(tp, "cuda:0") for tp in (1, 2, 8)}
    for way in (("autoregressive", 0), ("chain", 0), ("ddtree", 32), ("ddtree", 500)):
        expected = decode(graphs, *way, temperature, 1)
        for tp, ranks in others.items():
            assert all(map(same, decode(ranks, *way, temperature, 1), expected)), (way, tp)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_tokens_are_those_of_float32_but_for_rounding(graphs: Ranks, temperature: float) -> None:
    reference, prompts = Reference("tiny"), held_out(300)[:3]
    plain, equal, exact = decode(graphs, "autoregressive", 0, temperature), [], 0
    for way in WAYS:
        results = decode(graphs, *way, temperature)
        equal += [result.tokens == other.tokens for result, other in zip(results, plain, strict=True)]
        for prompt, result in zip(prompts, results, strict=True):
            hidden = graphs.hidden_states([*prompt, *result.tokens[:-1]])
            found = score(reference, prompt, result.tokens, temperature, 3, hidden)
            assert found.ok and found.error < 0.5, (way, found)
            exact += found.exact
    print(f"\n{exact} of {len(WAYS) * 3 * NEW} tokens are float32's own, {sum(equal)} of {len(equal)} texts plain ones")
    assert exact > 0.97 * len(WAYS) * 3 * NEW and np.mean(equal) > 0.5


def test_runs_repeat(graphs: Ranks) -> None:
    for way in WAYS[2:4]:
        first, *others = (decode(graphs, *way, 0.8) for _ in range(4))
        assert all(all(map(same, other, first)) for other in others)


def test_drafts_are_accepted_as_on_cpus(graphs: Ranks) -> None:
    host = Ranks()
    for way in (("chain", 0), ("ddtree", 32)):
        gpu, cpu = (
            np.mean([np.mean(result.accept_lengths) for result in decode(ranks, *way, 0.0)]) for ranks in (graphs, host)
        )
        assert gpu == pytest.approx(cpu, rel=0.15)


def test_steps_of_many_requests_and_passes() -> None:
    """Batches change shapes, so texts may part at a near tie; each is scored."""
    ranks, reference = Ranks(device="cuda:0", graphs=True, num_slots=16384, max_batch=20), Reference("tiny")
    prompts = [held_out(40 * (i % 6 + 1))[i % 6] + bytes([97 + i]) for i in range(20)]
    for prompt, result in zip(prompts, ranks.generate(prompts, max_new_tokens=24, budget=100), strict=True):
        hidden = ranks.hidden_states([*prompt, *result.tokens[:-1]])
        assert score(reference, prompt, result.tokens, 0.0, 0, hidden).ok


def test_a_pool_is_refused_for_what_lies_beside_it_too() -> None:
    """Slots whose latent rows alone would fit: what fell short was an out-of-memory error of the rows beside them. As
    many as it says do fit, with graphs."""
    config, _ = load_checkpoint("tiny")
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    slots = free // (config.num_hidden_layers * 1152 + 512)
    options = {"checkpoint": str(resolve("tiny")), "num_slots": slots, "max_batch": 8, "drafter": True}
    said = ""
    try:
        GpuDecoderWorker(Meeting(1, True).rank(0), "cuda:0", options)  # type: ignore[arg-type]
    except ArgumentError as error:
        said = str(error)
    found = re.match(rf"num_slots: expected a pool of at most .*: (\d+) slots, got {slots} slots", said)
    assert found is not None, said
    gc.collect()
    torch.cuda.empty_cache()
    GpuDecoderWorker(Meeting(1, True).rank(0), "cuda:0", options | {"num_slots": int(found[1])})  # type: ignore[arg-type]
    gc.collect()
    torch.cuda.empty_cache()


def stages(device: str, *given: torch.Tensor) -> list[torch.Tensor]:
    logits, tokens, parents, temperatures, draws, cells = (tensor.to(device) for tensor in given)
    choices = choose(logits, temperatures, draws)
    reached = walk(tokens, parents, choices, 64)
    found = choices, reached, paths(reached, cells, 1, len(cells)), *rank_tokens(logits, 200)
    return [tensor.cpu() for tensor in found]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [256, 5000])
def test_accept_and_ranking_are_those_of_the_cpu(vocab: int, ties: bool) -> None:
    """Where every maximum is shared too: the lowest id wins."""
    generator = torch.Generator().manual_seed(vocab + ties)
    for n in (16, 48, 272):
        logits = torch.randn(n, vocab, generator=generator) * 2
        logits = logits.round() if ties else logits
        tokens = torch.randint(0, 6, (n,), generator=generator)
        parents = (torch.rand(n, generator=generator) * torch.arange(n)).long()
        agreed = torch.rand(n, generator=generator) < 0.5
        logits[parents[agreed], tokens[agreed]] = 10.0
        temperatures = torch.where(torch.rand(n, generator=generator) < 0.5, 0.0, 0.9).double()
        draws, cells = torch.rand(n, generator=generator).double(), torch.randperm(n, generator=generator)

        given = logits, tokens, parents, temperatures, draws, cells
        *exact, logprobs, token_ids = stages("cuda", *given)
        *expected, expected_logprobs, expected_ids = stages("cpu", *given)
        assert all(map(torch.equal, exact, expected)) and expected[1].any() and not expected[1].all()
        torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-6, atol=1e-6)
        swapped = token_ids != expected_ids  # only where rounding made two of them equal, or no longer equal
        assert swapped.double().mean() < (1e-9 if ties else 1e-3)
