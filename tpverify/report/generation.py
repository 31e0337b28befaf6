"""One model, three ways to decode, several numbers of ranks: what each costs, and that all give the same tokens."""

import codecs
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tpverify.report.rescore import Reference, Score, score
from tpverify.runtime.engine import STAGES, Engine
from tpverify.runtime.generation import BYTES, STRATEGIES, GenerationResult, encode
from tpverify.runtime.ranks import RankGroup

TREE, *OTHERS = STRATEGIES
PLAIN = "autoregressive"
WARM_UP_TOKENS = 4  # untimed: the first steps of a rank load code and probe its BLAS


@dataclass(frozen=True)
class Case:
    """A prompt to continue at a temperature, 0 for greedy."""

    name: str
    prompt: str
    temperature: float = 0.0


@dataclass(frozen=True)
class Run:
    """A case decoded with a strategy on tp ranks, in `seconds` from the prompt to the last token."""

    case: Case
    strategy: str
    tp: int
    result: GenerationResult
    seconds: float

    def difference(self, other: "Run") -> str | None:
        """What tells the two apart, in tokens or in the hidden states behind them; None for equal runs."""
        mine, theirs = self.result, other.result
        if mine.tokens != theirs.tokens:
            pairs = zip([*mine.tokens, None], [*theirs.tokens, None], strict=False)
            at = next(i for i, (a, b) in enumerate(pairs) if a != b)
            return (
                f"token {at} of {self.case.name!r}: {_label(self)} {_at(mine, at)}, {_label(other)} {_at(theirs, at)}"
            )
        if mine.stats["hidden_digest"] != theirs.stats["hidden_digest"]:
            return f"hidden states of {self.case.name!r}: {_label(self)}, {_label(other)}"
        return None


class Listener(Protocol):
    """Hears a case begin, and then what the model says."""

    def begin(self, case: Case) -> None: ...

    def text(self, text: str) -> None: ...


@dataclass(frozen=True)
class Comparison:
    """All runs on `tp` ranks, and those of the tree strategy on fewer.

    scores: of the runs on `tp` ranks, where rounding differs between strategies, as it does on GPUs.
    """

    tp: int
    cases: Sequence[Case]
    runs: Sequence[Run]
    scores: Sequence[Score] = ()

    def of(self, strategy: str, tp: int | None = None) -> list[Run]:
        """One run a case, in the order of the cases."""
        return [run for run in self.runs if (run.strategy, run.tp) == (strategy, tp or self.tp)]

    @property
    def sizes(self) -> list[int]:
        return sorted({run.tp for run in self.runs})

    def strategy_differences(self) -> list[str]:
        """Where chain or tree decoding left the tokens or hidden states of plain decoding."""
        return [text for strategy in (TREE, "chain") for text in _differences(self.of(strategy), self.of(PLAIN))]

    def tp_differences(self) -> list[str]:
        """Where fewer ranks gave other tokens or hidden states."""
        return [text for tp in self.sizes for text in _differences(self.of(TREE, tp), self.of(TREE))]

    @property
    def equal(self) -> bool:
        """Whether all is as it must be: equal across tp, and equal to plain decoding or, if there are scores, near."""
        same = all(score.ok for score in self.scores) if self.scores else not self.strategy_differences()
        return same and not self.tp_differences()


def compare(
    group: RankGroup, model: str, tp: int, cases: Sequence[Case], options: dict[str, Any], listener: Listener
) -> Iterator[Run]:
    """Decode every case in all three ways on `tp` ranks of the group, and with trees on every proper divisor of tp.

    The first len(cases) runs are the tree runs on tp ranks, which the listener hears as they go. options: what
    Engine.generate takes besides the prompt, strategy and temperature.
    """
    with Engine(model, tp, group=group, prefix_cache=False) as engine:  # each run pays for its own prompt
        for strategy in STRATEGIES:
            engine.generate(cases[0].prompt, strategy=strategy, max_new_tokens=WARM_UP_TOKENS)
        for case in cases:
            yield decode(engine, case, TREE, options, listener)
        for strategy in OTHERS:
            for case in cases:
                yield decode(engine, case, strategy, options)
    for fewer in divisors(tp)[:-1]:
        with Engine(model, fewer, group=group, prefix_cache=False) as engine:
            for case in cases:
                yield decode(engine, case, TREE, options)


def score_runs(engine: Engine, runs: Sequence[Run], seed: int) -> list[Score]:
    """A score a run, of this engine's model; a run without tokens has a perfect one."""
    reference, scores = Reference(engine.setup.directory), []
    for run in runs:
        prompt, emitted = encode("prompt", run.case.prompt, engine.config.vocab_size), run.result.tokens
        hidden = engine.hidden_states([*prompt, *emitted[:-1]])
        scores.append(score(reference, prompt, emitted, run.case.temperature, seed, hidden))
    return scores


def divisors(tp: int) -> list[int]:
    return [size for size in range(1, tp + 1) if tp % size == 0]


def decode(engine: Engine, case: Case, strategy: str, options: dict[str, Any], listener: Listener | None = None) -> Run:
    """One run; the listener hears its text as it comes (token ids, if the model is not byte-level)."""
    options = options | {"strategy": strategy, "temperature": case.temperature}
    start = time.perf_counter()
    if listener is None:
        return Run(case, strategy, engine.tp, engine.generate(case.prompt, **options), time.perf_counter() - start)
    listener.begin(case)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    result = None
    for item in engine.stream(case.prompt, **options):
        if isinstance(item, GenerationResult):
            result = item
        elif engine.config.vocab_size == BYTES:
            listener.text(decoder.decode(bytes(item)))
        else:
            listener.text("".join(f"{token} " for token in item))
    assert result is not None
    listener.text(decoder.decode(b"", True) + "\n")
    return Run(case, strategy, engine.tp, result, time.perf_counter() - start)


def costs(runs: Sequence[Run]) -> dict[str, Any]:
    """Sums over the runs. tau: mean accept length of a step. accept_lengths: {length: steps}. Stages in ms a token.

    verify_calls_per_token counts the steps after the prompt; tokens_per_second the whole time, prompt included.
    """
    tokens = sum(len(run.result.tokens) for run in runs)
    lengths = Counter(length for run in runs for length in run.result.accept_lengths)
    steps = sum(lengths.values())
    per_token = 1 / max(tokens, 1)
    stages = {
        stage: sum(run.result.stats["seconds"].get(stage, 0.0) for run in runs) * 1e3 * per_token for stage in STAGES
    }
    return {
        "tokens": tokens,
        "steps": steps,
        "tau": sum(length * count for length, count in lengths.items()) / max(steps, 1),
        "verify_calls_per_token": steps * per_token,
        "tokens_per_second": tokens / sum(run.seconds for run in runs),
        "accept_lengths": dict(sorted(lengths.items())),
        "stage_ms_per_token": stages,
    }


def _differences(some: list[Run], others: list[Run]) -> list[str]:
    return [text for pair in zip(some, others, strict=True) if (text := pair[0].difference(pair[1]))]


def _label(run: Run) -> str:
    return f"{run.strategy} on tp {run.tp}"


def _at(result: GenerationResult, index: int) -> str:
    return f"gives {result.tokens[index]}" if index < len(result.tokens) else "ends"
