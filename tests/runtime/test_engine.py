"""Lossless generation: every strategy, tp, batch and chunking gives the tokens and hidden states of plain decoding."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers
from decoding import held_out
from safetensors.torch import load_file, save_file

from tpverify.errors import ArgumentError, ClusterError, PoolFull, RankFailure
from tpverify.model.checkpoint import resolve
from tpverify.runtime.engine import Engine
from tpverify.runtime.generation import GenerationResult
from tpverify.runtime.ranks import RankGroup

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def group(ray_session):
    with RankGroup(8, "cpu", deadline_s=120) as group:
        yield group


@pytest.fixture(scope="module")
def engine(group):
    """tp 2: the one that most tests share. A test that builds another engine on the group must not use this one
    after. Every text is computed anew."""
    return Engine("tiny", tp=2, group=group, prefix_cache=False)


@pytest.fixture
def fresh(group, engine):
    """Builds engines on the shared ranks, and gives the ranks back to `engine` at the end."""
    yield lambda tp, **options: Engine("tiny", tp=tp, group=group, **options)
    engine.__init__("tiny", tp=2, group=group, prefix_cache=False)


def room(engine: Engine) -> int:
    """Slots that sequences can have: those that only the prefix cache has are evicted when needed, and those that rows
    have moved out of, by themselves, are free soon."""
    stats = engine.stats()
    return stats["free"] + stats["evictable"] + stats["quarantined"]


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
    free = room(engine)
    for cut in range(1, 40):
        stop = bytes(whole.tokens[cut : cut + 3])
        first = bytes(whole.tokens).index(stop)
        for strategy in ("ddtree", "autoregressive") if cut % 8 == 0 else ("ddtree",):
            result = engine.generate(prompt, max_new_tokens=60, stop=[b"\xff\xfe", stop], strategy=strategy)
            assert result.tokens == whole.tokens[:first]
            assert result.stats["finish_reason"] == "stop"
    assert room(engine) == free
    assert max(whole.accept_lengths) == 1 or any(cut not in edges for cut in range(1, 40))


def test_slots_balance_after_many_rounds(engine):
    """SGLang #13826, sglang-jax #1147: slots of rejected drafts never returned."""
    before = room(engine)
    for seed in range(6):
        engine.generate(held_out(30)[:4], max_new_tokens=20, temperature=1.0, seed=seed, budget=64)
    after = engine.stats()
    assert room(engine) == before == engine.setup.num_slots - 1
    assert after["live"] == after["scratch"] == after["sequences"] == 0


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
    free = room(engine)
    stream = engine.stream(held_out(50)[0], max_new_tokens=40)
    next(stream)
    assert room(engine) < free
    stream.close()
    assert room(engine) == free
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


def test_the_models_end_of_text_ends_generation(fresh, group, tmp_path):
    """As transformers' generate does: the tokens before eos_token_id, in whatever way they are decoded."""
    prompt = held_out(120)[0]
    whole = fresh(2).generate(prompt, max_new_tokens=48)
    shutil.copytree(resolve("tiny"), tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__*"))
    config = json.loads((tmp_path / "config.json").read_text())
    for eos in (whole.tokens[11], [whole.tokens[30], whole.tokens[20]], 255):
        (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
        ends = [end for end, token in enumerate(whole.tokens) if token in np.atleast_1d(eos)]
        expected, reason = (whole.tokens[: ends[0]], "stop") if ends else (whole.tokens, "length")
        engine = Engine(tmp_path, tp=1, group=group)
        for strategy in ("ddtree", "chain", "autoregressive"):
            result = engine.generate(prompt, max_new_tokens=48, strategy=strategy, stop=b"\xff\xfe")
            assert (result.tokens, result.stats["finish_reason"]) == (expected, reason)
        *pieces, result = engine.stream(prompt, max_new_tokens=48)
        assert sum(pieces, []) == result.tokens == expected
        assert engine.stats()["sequences"] == 0


def test_interleaved_streams_share_the_slots(fresh):
    """Each counted only its own sequences, and both ran into a full pool in mid-step, which ended them all."""
    engine = fresh(1, num_slots=300)
    prompts = [bytes([65 + i]) * 90 for i in range(3)]
    alone = [engine.generate(prompt, max_new_tokens=16, budget=8) for prompt in prompts]
    streams = [engine.stream(prompt, max_new_tokens=16, budget=8) for prompt in prompts]
    results = [next(stream) for stream in streams[:2]]
    with pytest.raises(PoolFull, match="a prompt may need 130 slots, 2 other sequences under way leave 39"):
        next(streams[2])
    for i, stream in enumerate(streams[:2]):
        *_, results[i] = stream
    assert all(same(a, b) for a, b in zip(results, alone, strict=False))
    assert same(engine.generate(prompts[2], max_new_tokens=16, budget=8), alone[2])
    assert room(engine) == 299


def test_threads_take_turns(fresh):
    engine = fresh(2)
    prompts = held_out(60)[:3]
    alone = [engine.generate(prompt, max_new_tokens=24, temperature=0.7) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda prompt: engine.generate(prompt, max_new_tokens=24, temperature=0.7), prompts))
    assert all(same(a, b) and a.accept_lengths == b.accept_lengths for a, b in zip(together, alone, strict=True))
    assert engine.stats()["sequences"] == 0 and room(engine) == engine.setup.num_slots - 1


def test_a_stream_that_is_dropped_in_the_middle_of_anothers_step(fresh, monkeypatch):
    """The garbage collector may do so at any moment. Its Close then entered the log while the ranks were stepping."""
    engine = fresh(2)
    expected = engine.generate(b"import ", max_new_tokens=8)
    stream = engine.stream(b"def ", max_new_tokens=40)
    next(stream)
    attempt = engine._group.attempt

    def drop_and_attempt(*arguments):
        stream.close()
        return attempt(*arguments)

    monkeypatch.setattr(engine._group, "attempt", drop_and_attempt)
    assert same(engine.generate(b"import ", max_new_tokens=8), expected)
    assert engine.stats()["sequences"] == 0


def test_closing_waits_for_another_threads_step(ray_session):
    """Its ranks are not taken from under it: the call's error is that the engine ended, not that a rank died."""
    with ThreadPoolExecutor(3) as pool, Engine("tiny", tp=2, device="cpu") as engine:
        calls = [pool.submit(engine.generate, held_out(9)[0], max_new_tokens=2000) for _ in range(3)]
        while engine.stats()["steps"] < 5 and not calls[0].done():
            pass
        engine.close()
        for call in calls:
            with pytest.raises(ClusterError, match="ended|closed"):
                call.result(timeout=60)


def test_an_ended_engine_is_an_error_and_keeps_its_stats(fresh):
    engine = fresh(1)
    engine.generate(b"x", max_new_tokens=2)
    stream = engine.stream(b"x", max_new_tokens=9)
    next(stream)
    before = engine._coordinator.stats()
    engine.close()
    for call in (lambda: engine.generate(b"x"), lambda: next(stream)):
        with pytest.raises(ClusterError, match="has ended"):
            call()
    assert engine.stats() == before | {"device": "cpu", "device_reason": ""}


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
    "array without axes": ({"prompt": np.array(5)}, "prompt: expected a str, bytes or a list of token ids"),
    "array of floats": ({"prompt": np.array([5.0])}, "prompt: expected token ids"),
    "array of two axes": ({"prompt": np.ones((2, 2), int)}, "prompt: expected a str, bytes or a list of token ids"),
    "strategy of another type": ({"strategy": ["ddtree"]}, "strategy: expected one of"),
    "budget as an array": ({"budget": np.array([1, 2])}, "budget: expected an int"),
    "temperature as text": ({"temperature": "1"}, "temperature: expected a number"),
    "temperature beyond any float": ({"temperature": 10**400}, "temperature: expected a number"),
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


def test_numpy_numbers_are_numbers(fresh):
    engine = fresh(np.int64(2), num_slots=np.int32(900), max_batch=np.uint8(2))
    options = {"max_new_tokens": 8, "budget": 5, "temperature": 0.5, "seed": 3}
    numpy = {"max_new_tokens": np.int64(8), "budget": np.int16(5), "temperature": np.float32(0.5), "seed": np.uint64(3)}
    assert same(engine.generate(b"def ", **options), engine.generate(np.frombuffer(b"def ", np.uint8), **numpy))


BAD_ENGINES = {
    "model": [None, 3, b"tiny", "no-such-model", "a\0b"], "group": [0, "group"], "tp": [None, True, 3, 9],
    "max_batch": [0, "8"], "num_slots": [1, 2.0, 2**31 - 1], "prefill_chunk": [1025], "device": ["tpu", None],
    "deadline_s": ["60", True, None, 0.0],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_ENGINES.items() for value in values])
def test_a_bad_engine_names_its_argument_and_starts_no_ranks(name, value, monkeypatch):
    monkeypatch.setattr(RankGroup, "_start", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(ArgumentError, match=f"^{name}: expected "):
        Engine(**{name: value})


def test_a_checkpoint_that_lacks_a_tensor_is_refused_before_ranks_start(tmp_path, monkeypatch):
    monkeypatch.setattr(RankGroup, "_start", lambda *_: pytest.fail("ranks were started"))
    tensors = load_file(resolve("tiny") / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(resolve("tiny") / "config.json", tmp_path)
    with pytest.raises(ArgumentError, match=r"^model\.layers\.2\.mlp\.up_proj\.weight: expected a tensor in"):
        Engine(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ArgumentError, match="^model: expected model.safetensors or .* got no weights"):
        Engine(tmp_path)


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
