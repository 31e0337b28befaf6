"""Cached prefixes and a full pool: what earlier sequences left changes no token and no bit of a later one."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from decoding import held_out, same

from tpverify.errors import PoolFull
from tpverify.runtime.engine import Engine
from tpverify.runtime.generation import GenerationResult
from tpverify.runtime.ranks import RankGroup

pytestmark = pytest.mark.ray
TEXT = held_out(150)[0]
PROMPTS = {
    "first": TEXT[:120],
    "the same": TEXT[:120],
    "a prefix of it": TEXT[:60],
    "another end": TEXT[:90] + b"\n# elsewhere\n",
    "a longer one": TEXT,
    "nothing in common": held_out(40)[1],
}


@pytest.fixture(scope="module")
def group(ray_session: None) -> Iterator[RankGroup]:
    with RankGroup(2, "cpu", deadline_s=60) as group:
        yield group


@pytest.fixture
def build(group: RankGroup) -> Callable[..., Engine]:
    """An engine on the shared ranks, which ends the one before it."""
    return lambda tp=1, **options: Engine("tiny", tp=tp, group=group, **options)


def room(engine: Engine) -> int:
    stats = engine.stats()
    return stats["free"] + stats["evictable"] + stats["quarantined"]


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, pair in enumerate(zip(a, b, strict=False)) if len(set(pair)) == 2), min(len(a), len(b)))


def one_by_one(engine: Engine, **options: object) -> list[GenerationResult]:
    return [engine.generate(prompt, max_new_tokens=16, **options) for prompt in PROMPTS.values()]


@pytest.mark.parametrize(("tp", "temperature"), [(1, 0.0), (2, 0.9)])
def test_tokens_and_bits_are_those_without_the_cache(build: Callable[..., Engine], tp: int, temperature: float) -> None:
    """Rows left by one strategy are read by the next; the drafter too goes on from them as from its own."""
    options = {"temperature": temperature, "seed": 3, "budget": 16}
    strategies = ("autoregressive", "ddtree", "chain")
    plain = build(tp, prefix_cache=False)
    expected = {strategy: one_by_one(plain, strategy=strategy, **options) for strategy in strategies}
    engine = build(tp, prefill_chunk=50)
    left: list[list[int]] = []  # texts so far
    for strategy in (*strategies, "autoregressive"):
        for prompt, wanted in zip(PROMPTS.values(), expected[strategy], strict=True):
            result = engine.generate(prompt, max_new_tokens=16, strategy=strategy, **options)
            assert same(result, wanted)
            reused = max((common(list(prompt[:-1]), text[:-1]) for text in left), default=0)
            longest = max((common(list(prompt[:-1]), text) for text in left), default=0)
            assert reused <= result.stats["cached_tokens"] <= longest
            assert result.stats["prompt_steps"] == -(-(len(prompt) - result.stats["cached_tokens"]) // 50)
            left.append([*prompt, *result.tokens])
    assert all(result.stats["cached_tokens"] == 0 for results in expected.values() for result in results)
    assert engine.stats()["sequences"] == 0 and room(engine) == engine.setup.num_slots - 1


def test_a_batch_that_shares_a_prefix(build: Callable[..., Engine]) -> None:
    prompts = list(PROMPTS.values())
    expected = build(2, prefix_cache=False).generate(prompts, max_new_tokens=24)
    engine = build(2)
    for turn in range(3):
        results = engine.generate(prompts, max_new_tokens=24)
        assert all(map(same, results, expected))
        reused = [result.stats["cached_tokens"] for result in results]
        assert reused == [len(prompt) - 1 if turn else 0 for prompt in prompts]
    assert engine.hidden_states(TEXT[:120]).shape[0] == 120, "computed, not taken from the cache"


def test_a_conversation_computes_only_what_is_new(build: Callable[..., Engine]) -> None:
    engine, text = build(1), TEXT[:50]
    for turn in range(4):
        result = engine.generate(text, max_new_tokens=20)
        known = len(text) - 20 - 4 if turn else 0
        assert known <= result.stats["cached_tokens"] <= len(text) - 1
        text = text + bytes(result.tokens) + b"and\n"
        assert (result.stats["cached_tokens"] > 0) == bool(turn)


def test_the_least_recently_used_goes_first(build: Callable[..., Engine]) -> None:
    prompts = [bytes([65 + i]) * 80 for i in range(4)]
    options = {"max_new_tokens": 8, "budget": 8}
    expected = build(1, prefix_cache=False).generate(prompts, **options)
    engine = build(1, num_slots=300)

    def again(i: int) -> int:
        result = engine.generate(prompts[i], **options)
        assert same(result, expected[i]) and room(engine) == 299
        return result.stats["cached_tokens"]

    assert [again(i) for i in (0, 1, 2)] == [0, 0, 0]
    assert again(0) == 79
    assert again(3) == 0, "there was no room for four: number 1 went"
    assert again(0) == 79 and again(3) == 79 and again(1) < 79


def test_readers_of_one_prefix_need_its_slots_once(build: Callable[..., Engine]) -> None:
    """Four times 192 slots in a pool of 299."""
    engine = build(1, num_slots=300)
    options = {"max_new_tokens": 16, "budget": 8}
    expected = engine.generate(TEXT, **options)
    streams = [engine.stream(TEXT, **options) for _ in range(3)]
    for stream in streams:
        next(stream)
    assert engine.stats()["sequences"] == 3
    for stream in streams:
        *_, result = stream
        assert same(result, expected) and result.stats["cached_tokens"] == 149
    assert room(engine) == 299


class Holder:
    """A thread that has streams under way, and goes on with them when it is told to."""

    def __init__(self, engine: Engine, prompts: list[bytes], **options: object) -> None:
        self._pool, self._engine = ThreadPoolExecutor(1), engine
        self._streams = [engine.stream(prompt, **options) for prompt in prompts]
        self._pool.submit(lambda: [next(stream) for stream in self._streams]).result(60)

    def generate(self, prompt: bytes, **options: object) -> Future[GenerationResult]:
        return self._pool.submit(self._engine.generate, prompt, **options)

    def finish(self) -> list[GenerationResult]:
        return self._pool.submit(lambda: [list(stream)[-1] for stream in self._streams]).result(60)


def blocked(engine: Engine, count: int) -> bool:
    return sum(call.blocked for call in engine._admission._calls) == count


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(600):
        if condition():
            return
        pause.wait(0.05)
    pytest.fail("it did not come to that")


def test_what_does_not_fit_waits_in_order_of_arrival(
    build: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [bytes([65 + i]) * 90 for i in range(4)] + [b"small"]
    options = {"max_new_tokens": 16, "budget": 8}
    expected = build(1, prefix_cache=False).generate(prompts, **options)
    engine, started = build(1, num_slots=300), []
    start = engine._admission._start
    monkeypatch.setattr(
        engine._admission, "_start", lambda call: (started.append(bytes(call.waiting[0][1].prompt)), start(call))
    )
    holder = Holder(engine, prompts[:2], **options)
    with ThreadPoolExecutor(2) as pool:
        several = pool.submit(engine.generate, prompts[2:4], **options)
        until(lambda: blocked(engine, 1))
        small = pool.submit(engine.generate, prompts[4], max_new_tokens=4, budget=8)
        until(lambda: blocked(engine, 2))
        assert engine.stats()["sequences"] == 2, "room for the small one, but it came later"
        assert all(map(same, holder.finish(), expected[:2]))
        assert all(map(same, several.result(60), expected[2:4]))
        assert small.result(60).tokens == expected[4].tokens[:4]
    assert started == prompts
    assert engine.stats()["sequences"] == 0 and room(engine) == 299


def test_the_wait_has_an_end_and_takes_nothing(build: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(1, num_slots=300)
    options = {"max_new_tokens": 16, "budget": 8}
    holder = Holder(engine, [b"A" * 90, b"B" * 90], **options)
    monkeypatch.setattr(engine._admission, "_deadline_s", 0.3)
    before = engine.stats()
    with pytest.raises(PoolFull, match="a prompt may need 130 slots, 2 other sequences under way leave 39") as full:
        engine.generate(b"C" * 90, **options)
    assert (full.value.needed, full.value.free, full.value.evictable) == (130, before["free"], before["evictable"])
    assert engine.stats() == before
    with pytest.raises(PoolFull, match="^prompt: may need 340 slots, the pool has 299: raise num_slots"):
        engine.generate(b"C" * 300, **options)
    assert len(holder.finish()) == 2
    assert len(engine.generate(b"C" * 90, **options).tokens) == 16


@pytest.mark.parametrize(("first", "second"), [([b"A" * 90], [b"B" * 90]), ([], [b"B" * 90])])
def test_threads_that_wait_for_each_other_are_told_so(
    build: Callable[..., Engine], first: list[bytes], second: list[bytes]
) -> None:
    """Long before the deadline the later one fails: it holds what the earlier one, which goes on then, waits for."""
    engine = build(1, num_slots=300)
    options = {"max_new_tokens": 16, "budget": 8}
    waiting, later = Holder(engine, first, **options), Holder(engine, second, **options)
    prompt = b"C" * (90 if first else 200)
    result = waiting.generate(prompt, **options)
    until(lambda: blocked(engine, 1))
    with pytest.raises(PoolFull, match="a prompt may need"):
        later.generate(b"D" * 200, **options).result(30)
    assert not result.done() and len(later.finish()) == 1
    assert len(result.result(30).tokens) == 16 and len(waiting.finish()) == len(first)
    assert engine.stats()["sequences"] == 0 and room(engine) == 299


def test_many_threads_in_a_small_pool(build: Callable[..., Engine]) -> None:
    prompts = [bytes([65 + i % 5]) * (40 + i) for i in range(10)]
    options = {"max_new_tokens": 12, "budget": 8, "temperature": 0.7}
    expected = build(2, prefix_cache=False).generate(prompts, **options)
    engine = build(2, num_slots=220)
    with ThreadPoolExecutor(5) as pool:
        results = list(pool.map(lambda prompt: engine.generate(prompt, **options), prompts))
    assert all(map(same, results, expected))
    assert engine.stats()["sequences"] == 0 and room(engine) == 219
