"""Generate: streams, compares, proves; and says no when two ways of decoding differ."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tpverify.report.generation import Case, Comparison, Run, costs, divisors
from tpverify.report.screen import Screen
from tpverify.report.tables import proof_lines
from tpverify.runtime.engine import Engine
from tpverify.runtime.generation import GenerationResult

CASES = (Case("one", "a"), Case("two", "b", 0.8))


def run(case: Case, strategy: str, tp: int, tokens: str = "xyz", digest: str = "d1", lengths: Any = (1, 2)) -> Run:
    seconds = {"verify": 0.3, "draft": 0.06}
    stats = {"hidden_digest": digest, "seconds": seconds}
    return Run(case, strategy, tp, GenerationResult(list(tokens.encode()), tokens, list(lengths), stats), 0.5)


def comparison(change: Callable[[Run], Run] = lambda run: run) -> Comparison:
    ways = [("ddtree", 2), ("chain", 2), ("autoregressive", 2), ("ddtree", 1)]
    return Comparison(2, CASES, [change(run(case, *way)) for way in ways for case in CASES])


def test_equal_runs_are_equal() -> None:
    assert comparison().equal
    assert proof_lines(comparison()) == [
        "equal to autoregressive: yes (6 tokens, hidden states d1 d1)",
        "equal across tp 1, 2: yes",
    ]


CHANGES = {
    "another token": (
        ("chain", 2),
        {"tokens": "xYz"},
        ["equal to autoregressive: no (token 1 of 'two': chain on tp 2 gives 89, autoregressive on tp 2 gives 121)"],
    ),
    "a token less": (
        ("ddtree", 1),
        {"tokens": "xy"},
        ["equal across tp 1, 2: no (token 2 of 'two': ddtree on tp 1 ends, ddtree on tp 2 gives 122)"],
    ),
    "other hidden states": (
        ("ddtree", 2),
        {"digest": "d2"},
        [
            "equal to autoregressive: no (hidden states of 'two': ddtree on tp 2, autoregressive on tp 2)",
            "equal across tp 1, 2: no (hidden states of 'two': ddtree on tp 1, ddtree on tp 2)",
        ],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_is_found_and_placed(name: str) -> None:
    way, changed, lines = CHANGES[name]

    def change(given: Run) -> Run:
        return run(given.case, *way, **changed) if (given.strategy, given.tp, given.case) == (*way, CASES[1]) else given

    result = comparison(change)
    assert not result.equal and [line for line in proof_lines(result) if ": no" in line] == lines


def test_costs_are_sums_over_cases() -> None:
    some = [run(CASES[0], "ddtree", 2, "abcdef", lengths=[2, 4]), run(CASES[1], "ddtree", 2, "abcd", lengths=[4])]
    cost = costs(some)
    assert (cost["tokens"], cost["steps"], cost["accept_lengths"]) == (10, 3, {2: 1, 4: 2})
    assert cost["tau"] == pytest.approx(10 / 3) and cost["verify_calls_per_token"] == pytest.approx(0.3)
    assert cost["tokens_per_second"] == pytest.approx(10.0)
    assert cost["stage_ms_per_token"]["verify"] == pytest.approx(60.0) and cost["stage_ms_per_token"]["build"] == 0.0


def test_costs_of_runs_that_ended_with_the_prompt() -> None:
    cost = costs([run(CASES[0], "ddtree", 2, "", lengths=[])])
    assert (cost["tokens"], cost["steps"], cost["tau"], cost["accept_lengths"]) == (0, 0, 0.0, {})


def test_every_divisor_is_compared() -> None:
    assert (divisors(8), divisors(6), divisors(1)) == ([1, 2, 4, 8], [1, 2, 3, 6], [1])


def test_terminal_escapes_of_the_model_are_not_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    screen = Screen(False)
    screen.begin(CASES[0])
    screen.text("a\x1b[2Jb\x07\nc [bold]d")
    assert capfd.readouterr().out.endswith("a\ufffd[2Jb\ufffd\nc [bold]d")


@pytest.fixture(scope="module")
def short() -> tuple[str, ...]:
    return ("--prompt", "def add(a, b):\n    return", "--tp", "2", "--device", "cpu", "--max-new-tokens", "9")


@pytest.mark.ray
@pytest.mark.usefixtures("lent_ranks")
class TestCommand:
    def test_text_and_summary(self, tpverify: Callable, short: tuple[str, ...]) -> None:
        done = tpverify("generate", *short, "--strategy", "chain")
        assert done.code == 0 and "def add(a, b):\n    return" in done.out
        assert done.out.splitlines()[-1].startswith("9 tokens in ")

    def test_a_prompt_file_is_taken_byte_by_byte(self, tpverify: Callable, tmp_path: Path) -> None:
        data = "if caf\u00e9:\r\n    x = 1\r    y\n".encode()
        (tmp_path / "prompt").write_bytes(data)
        options = ("--prompt-file", str(tmp_path / "prompt"), "--tp", "2", "--device", "cpu", "--max-new-tokens", "2")
        done = tpverify("generate", *options, "--json")
        assert done.json["prompt"].encode() == data and done.json["stats"]["prompt_tokens"] == len(data)
        assert done.json["recoveries"] == []
        assert "if caf\u00e9:\n    x = 1\ufffd    y\n" in tpverify("generate", *options).out

    def test_compare_as_text(self, tpverify: Callable, short: tuple[str, ...]) -> None:
        done = tpverify("generate", *short, "--compare")
        assert done.code == 0
        first, second = done.out.splitlines()[-2:]
        assert first.startswith("equal to autoregressive: yes (9 tokens, hidden states ")
        assert second == "equal across tp 1, 2: yes"
        assert all(f" {word} " in done.out for word in ("ddtree", "chain", "autoregressive", "tau", "tokens/s"))

    def test_compare_as_json(self, tpverify: Callable, short: tuple[str, ...]) -> None:
        done = tpverify("generate", *short, "--compare", "--temperature", "0.7", "--seed", "3", "--json")
        found = done.json
        assert done.code == 0 and found["equal"] and found["differences"] == {"strategies": [], "tp": []}
        ways = [(row["strategy"], row["tp"]) for row in found["runs"]]
        assert ways == [("ddtree", 2), ("chain", 2), ("autoregressive", 2), ("ddtree", 1)]
        assert len({tuple(row["tokens"]) for row in found["runs"]}) == 1
        assert found["costs"]["autoregressive"]["accept_lengths"] == {"1": 8} and found["max_new_tokens"] == 9

    def test_stop_ends_the_text(self, tpverify: Callable, short: tuple[str, ...]) -> None:
        whole = tpverify("generate", *short, "--json").json["text"]
        done = tpverify("generate", *short, "--stop", whole[4:6], "--stop", "\x00never", "--json")
        assert done.json["text"] == whole[: whole.index(whole[4:6])] and done.json["stats"]["finish_reason"] == "stop"

    def test_difference_is_exit_code_1(
        self, tpverify: Callable, short: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        generate = Engine.generate

        def corrupted(self: Engine, prompt: Any, **options: Any) -> GenerationResult:
            result = generate(self, prompt, **options)
            wrong = options["strategy"] == "autoregressive"
            return replace(result, tokens=[*result.tokens[:-1], result.tokens[-1] ^ 1]) if wrong else result

        monkeypatch.setattr(Engine, "generate", corrupted)
        done = tpverify("generate", *short, "--compare")
        assert done.code == 1 and "equal to autoregressive: no (token 8 of 'prompt'" in done.out
        assert "equal across tp 1, 2: yes" in done.out

    def test_prompt_too_long_for_the_model(self, tpverify: Callable) -> None:
        done = tpverify("generate", "--prompt", "a" * 9000, "--tp", "2", "--device", "cpu", "--json")
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("tpverify: --prompt: expected at most ") and done.err.endswith(", got 9000\n")
