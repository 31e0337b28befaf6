"""Lossless generation: every strategy, tp, batch and chunking gives the tokens and hidden states of plain decoding."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tpverify.errors import ArgumentError, PoolFull, RankFailure
from tpverify.model.checkpoint import resolve
from tpverify.runtime.engine import Engine
from tpverify.runtime.generation import GenerationResult
from tpverify.runtime.ranks import RankGroup

pytestmark = pytest.mark.ray
STDLIB = Path(sysconfig.get_paths()["stdlib"])
HELD_OUT = ["calendar.py", "configparser.py", "pprint.py", "sched.py", "timeit.py", "traceback.py"]


def held_out(length: int) -> list[bytes]:
    """Prompts from modules that the model was not trained on."""
    return [(STDLIB / name).read_bytes()[800 : 800 + length] for name in HELD_OUT]


@pytest.fixture(scope="module")
def group(ray_session):
    with RankGroup(8, "cpu", deadline_s=120) as group:
        yield group


@pytest.fixture(scope="module")
def engine(group):
    """tp 2: the one that most tests share. A test that builds another engine on the group must not use this one
    after."""
    return Engine("tiny", tp=2, group=group)


@pytest.fixture
def fresh(group, engine):
    """Builds engines on the shared ranks, and gives the ranks back to `engine` at the end."""
    yield lambda tp, **options: Engine("tiny", tp=tp, group=group, **options)
    engine.__init__("tiny", tp=2, group=group)


def same(a: GenerationResult, b: GenerationResult) -> bool:
    return a.tokens == b.tokens and a.stats["hidden_digest"] == b.stats["hidden_digest"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_strategy_gives_the_tokens_of_plain_decoding(engine, temperature):
    prompts = held_out(100)
    options = {"max_new_tokens": 40, "temperature": temperature, "seed": 5}
    plain = engine.generate(prompts, strategy="autoregressive", **options)
    assert all(len(result.tokens) == 40 and set(result.accept_lengths) == {1} for result in plain)
    for strategy, budget in (
        ("chain", 32),
        ("ddtree", 0),
        ("ddtree", 5),
        ("ddtree", 32),
        ("ddtree", 200),
        ("ddtree", "auto"),
    ):
        results = engine.generate(prompts, strategy=strategy, budget=budget, **options)
        assert all(same(a, b) for a, b in zip(results, plain, strict=True)), (strategy, budget)
        assert all(sum(r.accept_lengths) + 1 >= 40 > sum(r.accept_lengths[:-1]) for r in results)


def test_greedy_tokens_are_those_of_transformers(engine):
    """Teacher forcing in float64: every emitted token has the largest logit, to within float32's error."""
    oracle = transformers.DeepseekV3ForCausalLM.from_pretrained(resolve("tiny"), dtype=torch.float64).eval()
    for prompt in held_out(150)[:3]:
        tokens = engine.generate(prompt, max_new_tokens=48).tokens
        with torch.no_grad():
            logits = oracle(torch.tensor([list(prompt) + tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = logits[torch.arange(48), torch.tensor(tokens)]
        assert (logits.max(dim=1).values - chosen).max() < 1e-4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_tp_batch_and_chunking_gives_the_same(fresh, temperature):
    prompts = [b"d", held_out(70)[0], held_out(300)[1], b"import os\n"]
    options = {"max_new_tokens": 24, "temperature": temperature, "seed": 11}
    runs = []
    for tp, extra in (
        (1, {}),
        (2, {"prefill_chunk": 7}),
        (4, {"max_batch": 1, "prefill_chunk": 64}),
        (8, {"max_batch": 3, "prefill_chunk": 100}),
    ):
        runs.append(fresh(tp, **extra).generate(prompts, **options))
    for run in runs[1:]:
        for a, b in zip(run, runs[0], strict=True):
            assert same(a, b) and a.accept_lengths == b.accept_lengths


def test_seeds_matter_only_when_sampling(engine):
    prompt = held_out(60)[2]
    sampled = [engine.generate(prompt, max_new_tokens=24, temperature=1.0, seed=seed) for seed in (1, 2, 1)]
    assert sampled[0].tokens == sampled[2].tokens != sampled[1].tokens
    assert same(*[engine.generate(prompt, max_new_tokens=8, seed=seed) for seed in (1, 2)])


@pytest.mark.parametrize("count", [1, 2, 3, 7, 17])
@pytest.mark.parametrize("strategy", ["autoregressive", "chain", "ddtree"])
def test_max_new_tokens_is_exact(engine, count, strategy):
    prompt = held_out(64)[3]
    longest = engine.generate(prompt, max_new_tokens=20, strategy="autoregressive").tokens
    result = engine.generate(prompt, max_new_tokens=count, strategy=strategy)
    assert result.tokens == longest[:count]
    assert result.text == bytes(longest[:count]).decode(errors="replace")
    assert result.stats["finish_reason"] == "length"


def test_stop_inside_an_accepted_path_cuts_there(engine):
    """SGLang #2723: EOS inside the accepted path not checked token by token, and its tail's KV not freed."""
    prompt = held_out(200)[0]
    whole = engine.generate(prompt, max_new_tokens=60)
    edges = np.cumsum([1, *whole.accept_lengths])
    free = engine.stats()["free"]
    for cut in range(1, 40):
        stop = bytes(whole.tokens[cut : cut + 3])
        first = bytes(whole.tokens).index(stop)
        for strategy in ("ddtree", "autoregressive") if cut % 8 == 0 else ("ddtree",):
            result = engine.generate(prompt, max_new_tokens=60, stop=[b"\xff\xfe", stop], strategy=strategy)
            assert result.tokens == whole.tokens[:first]
            assert result.stats["finish_reason"] == "stop"
    assert engine.stats()["free"] == free
    assert max(whole.accept_lengths) == 1 or any(cut not in edges for cut in range(1, 40))


def test_slots_balance_after_many_rounds(engine):
    """SGLang #13826, sglang-jax #1147: slots of rejected drafts never returned."""
    before = engine.stats()
    for seed in range(6):
        engine.generate(held_out(30)[:4], max_new_tokens=20, temperature=1.0, seed=seed, budget=64)
    after = engine.stats()
    assert (after["free"], after["sequences"]) == (before["free"], before["sequences"])
    assert after["live"] == after["scratch"] == 0


def test_drafting_goes_on_as_if_from_a_fresh_prompt(engine):
    """vLLM #9730 / #5765, mlxcel #994: the bonus token's KV or the drafter's context one token behind after a round."""
    prompt = held_out(120)[4]
    whole = engine.generate(prompt, max_new_tokens=60, budget=16)
    committed = 0
    for round_, accepted in enumerate(whole.accept_lengths[:6]):
        committed += accepted
        rest = engine.generate(prompt + bytes(whole.tokens[:committed]), max_new_tokens=60 - committed, budget=16)
        assert rest.tokens == whole.tokens[committed:]
        assert rest.accept_lengths == whole.accept_lengths[round_ + 1 :]


def test_a_larger_tree_accepts_at_least_as_much(engine):
    """TRT-LLM #10343, lucebox #414: adding siblings lowered the accept length."""
    for prompt in held_out(90):
        first = [engine.generate(prompt, max_new_tokens=20, budget=b).accept_lengths[0] for b in (0, 1, 4, 16, 64, 255)]
        assert first == sorted(first) and first[0] == 1


def test_stream_yields_what_generate_returns(engine):
    prompt, options = held_out(80)[5], {"max_new_tokens": 40, "stop": b"\n\n"}
    whole = engine.generate(prompt, **options)
    *pieces, result = engine.stream(prompt, **options)
    assert [token for piece in pieces for token in piece] == whole.tokens == result.tokens
    assert len(pieces) > 1 or len(whole.tokens) < 3


def test_an_abandoned_stream_gives_its_slots_back(engine):
    free = engine.stats()["free"]
    stream = engine.stream(held_out(50)[0], max_new_tokens=40)
    next(stream)
    assert engine.stats()["free"] < free
    stream.close()
    assert engine.stats()["free"] == free
    assert len(engine.generate(b"x", max_new_tokens=4).tokens) == 4


def test_prompts_beyond_the_batch_and_the_pool_wait_their_turn(fresh):
    small = fresh(1, num_slots=400, max_batch=2)
    prompts = [bytes([65 + i]) * 90 for i in range(5)]
    results = small.generate(prompts, max_new_tokens=16, budget=8)
    assert [same(a, small.generate(p, max_new_tokens=16, budget=8)) for a, p in zip(results, prompts, strict=True)] == [
        True
    ] * 5
    with pytest.raises(PoolFull, match=r"prompt: may need \d+ slots, the pool has 399"):
        small.generate(b"x" * 380, max_new_tokens=16)
    assert len(small.generate(b"x", max_new_tokens=4).tokens) == 4


BAD = {
    "empty prompt": ({"prompt": ""}, "prompt: expected at least one token"),
    "no prompts": ({"prompt": []}, "prompt: expected"),
    "prompt of another type": ({"prompt": 3}, "prompt: expected"),
    "token outside the vocabulary": ({"prompt": [1, 256]}, "prompt: expected token ids from 0 to 255, got 256"),
    "one bad prompt of two": ({"prompt": ["a", ""]}, r"prompt\[1\]: expected at least one token"),
    "prompt too long": ({"prompt": b"a" * 9000}, "prompt: expected at most"),
    "lone surrogate": ({"prompt": "a\ud800"}, "prompt: expected text that UTF-8 can encode"),
    "more new tokens than positions": ({"max_new_tokens": 10**9}, "max_new_tokens: expected at most 8176 with this"),
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens: expected an int from 1"),
    "unknown strategy": ({"strategy": "medusa"}, "strategy: expected one of ddtree, chain, autoregressive"),
    "negative budget": ({"budget": -1}, "budget: expected an int from 0 to 1023, got -1"),
    "budget past the limit": ({"budget": 1024}, "budget: "),
    "budget as text": ({"budget": "many"}, "budget: "),
    "negative temperature": ({"temperature": -0.1}, "temperature: "),
    "NaN temperature": ({"temperature": float("nan")}, "temperature: "),
    "negative seed": ({"seed": -1}, "seed: "),
    "empty stop": ({"stop": b""}, "stop: expected at least one token"),
    "stop of another type": ({"stop": 10}, "stop: "),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_names_the_argument_and_runs_nothing(engine, case):
    change, message = BAD[case]
    arguments = {"prompt": b"a", "max_new_tokens": 4} | change
    steps = engine.stats()["steps"]
    with pytest.raises(ArgumentError, match=f"^{message}"):
        engine.generate(arguments.pop("prompt"), **arguments)
    assert engine.stats()["steps"] == steps


def test_engine_arguments(group):
    with pytest.raises(ArgumentError, match="^tp: expected a divisor of the model's 8 heads, got 3"):
        Engine("tiny", tp=3, group=group)
    for model in ("no-such-model", "a" * 300):
        with pytest.raises(ArgumentError, match="^model: "):
            Engine(model, group=group)
    with pytest.raises(ArgumentError, match="^prefill_chunk: "):
        Engine("tiny", prefill_chunk=0, group=group)


def test_a_checkpoint_without_a_drafter_decodes_plainly(fresh, group, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((resolve("tiny") / name).read_bytes())
    prompt = held_out(40)[0]
    expected = fresh(1).generate(prompt, max_new_tokens=12)
    bare = Engine(tmp_path, tp=1, group=group)
    assert same(bare.generate(prompt, max_new_tokens=12, strategy="autoregressive"), expected)
    with pytest.raises(ArgumentError, match="^strategy: expected 'autoregressive': this checkpoint has no drafter"):
        bare.generate(prompt)


def test_a_rank_whose_hidden_states_differ_is_named(ray_session, monkeypatch):
    """Equal tables are not enough: a rank that computed something else is found out."""
    import msgspec

    with RankGroup(2, "cpu", deadline_s=60) as group:
        engine = Engine("tiny", tp=2, group=group)
        step = engine._coordinator.step

        def altered(work, *frames):
            answers = step(work, *frames)
            if type(work).__name__ == "HiddenDigest":
                reply = msgspec.structs.replace(answers[1].reply, result=msgspec.msgpack.encode("0" * 16))
                answers[1] = answers[1]._replace(reply=reply)
            return answers

        monkeypatch.setattr(engine._coordinator, "step", altered)
        with pytest.raises(RankFailure, match="^rank 1 failed at step .*hidden states differ"):
            engine.generate(b"abc", max_new_tokens=4)
        assert group.closed
