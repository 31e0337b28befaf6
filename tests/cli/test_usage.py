"""Help, and bad arguments: one line on stderr that names the argument, what was expected and what came; exit code 2."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tpverify.errors import ClusterError, PoolFull, RankFailure

COMMANDS = ("generate", "parity", "bench", "doctor")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_and_shows_examples(tpverify: Callable, command: str) -> None:
    done = tpverify(command, "--help")
    assert done.code == 0 and done.err == ""
    assert f"usage: tpverify {command}" in done.out and "examples:" in done.out and "--json" in done.out


def test_top_help_lists_the_commands(tpverify: Callable) -> None:
    done = tpverify("--help")
    assert done.code == 0 and all(re.search(rf"^ +{command} ", done.out, re.M) for command in COMMANDS)


def test_help_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from tpverify.cli import main\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit: print({'torch', 'ray', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("set()\n")


def test_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "tpverify"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "tpverify: command: expected one of generate, parity, bench, doctor, got none: see tpverify --help\n"
    )


INT = "expected an int from"
BAD = {
    "frobnicate": r"command: expected one of .*generate.*parity.*bench.*doctor.*, got 'frobnicate'",
    "--version": r"arguments: expected those in --help, got --version",
    "generate --frob": r"arguments: expected those in --help, got --frob",
    "generate stray": r"arguments: expected those in --help, got stray",
    "generate --prom text": r"arguments: expected those in --help, got --prom text",
    "generate --prompt": r"--prompt: expected a value, got none",
    "generate --tp x": rf"--tp: {INT} 1 to 1024, got 'x'",
    "generate --tp 0": rf"--tp: {INT} 1 to 1024, got '0'",
    "generate --tp 2.0": rf"--tp: {INT} 1 to 1024, got '2.0'",
    "generate --tp 3": r"--tp: expected a divisor of the model's 8 heads, got 3",
    "generate --tp 16": r"--tp: expected a divisor of the model's 8 heads, got 16",
    "generate --device tpu": r"--device: expected one of auto, cpu, cuda, got 'tpu'",
    "generate --strategy beam": r"--strategy: expected one of ddtree, chain, autoregressive, got 'beam'",
    "generate --budget -1": rf"--budget: {INT} 0 to 1023, got '-1'",
    "generate --budget 1024": rf"--budget: {INT} 0 to 1023, got '1024'",
    "generate --budget many": rf"--budget: {INT} 0 to 1023, got 'many'",
    "generate --temperature hot": r"--temperature: expected a number, got 'hot'",
    "generate --temperature -0.5": r"--temperature: expected a number from 0 .*, got -0.5",
    "generate --temperature nan": r"--temperature: expected a number from 0 .*, got nan",
    "generate --temperature inf": r"--temperature: expected a number from 0 .*, got inf",
    "generate --seed -1": rf"--seed: {INT} 0 to {2**64 - 1}, got '-1'",
    f"generate --seed {2**64}": rf"--seed: {INT} 0 to {2**64 - 1}, got '{2**64}'",
    "generate --max-new-tokens 0": rf"--max-new-tokens: {INT} 1 to {2**31 - 1}, got '0'",
    "generate --model /no/such": r"--model: expected one of .*tiny.* or a directory .*, got /no/such",
    "generate --prompt-file /no/such": r"--prompt-file: expected a readable text file, got .*No such file.*",
    "generate --prompt-file /": r"--prompt-file: expected a readable text file, got .*",
    "generate --prompt a --prompt-file b": r"--prompt-file: expected no other source of text, got --prompt as well",
    "parity --tp 7": r"--tp: expected a divisor of 64 heads, got 7",
    "parity --cases 0": rf"--cases: {INT} 1 to 100000, got '0'",
    "parity --cases": r"--cases: expected a value, got none",
    "parity --seed one": rf"--seed: {INT} 0 to {2**64 - 1}, got 'one'",
    "parity --device ''": r"--device: expected one of auto, cpu, cuda, got \"''\"",
    "doctor --tp 8": r"arguments: expected those in --help, got --tp 8",
    "doctor everything": r"arguments: expected those in --help, got everything",
    "bench warp": r"name: expected one of .*, got 'warp'",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_arguments_are_one_line(tpverify: Callable, arguments: str) -> None:
    done = tpverify(*arguments.split())
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(f"tpverify: {BAD[arguments]}\n", done.err)


FAILURES = {
    "rank 3 failed at step 7: its process is gone": RankFailure(3, 7, "its process is gone"),
    "asked for 8 ranks; the cluster has no GPUs": ClusterError("asked for 8 ranks;\n the cluster has no GPUs"),
    "prompt: may need 99 slots": PoolFull("prompt: may need 99 slots"),
}


@pytest.mark.parametrize("line", FAILURES)
@pytest.mark.parametrize("arguments", ["generate", "generate --compare --json", "parity --json"])
def test_a_failed_run_is_one_line_and_exit_code_1(
    tpverify: Callable, monkeypatch: pytest.MonkeyPatch, arguments: str, line: str
) -> None:
    def fail(*_: object) -> None:
        raise FAILURES[line]

    monkeypatch.setattr("tpverify.runtime.ranks.RankGroup", fail)
    assert tpverify(*arguments.split()) == (1, "", f"tpverify: {line}\n")


@pytest.mark.parametrize("argument", ["--prompt", "--stop"])
def test_empty_text_is_refused(tpverify: Callable, argument: str) -> None:
    done = tpverify("generate", argument, "")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"tpverify: {argument}: expected at least one token, got none\n"


def test_a_file_that_is_not_text_is_refused(tpverify: Callable, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"\xff\xfe\xfd")
    done = tpverify("generate", "--prompt-file", str(tmp_path / "prompt"))
    assert done.code == 2 and re.fullmatch(r"tpverify: --prompt-file: expected .*, got .*decode.*\n", done.err)


def test_interrupt_is_one_line(tpverify: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpverify.doctor.inspect", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert tpverify("doctor") == (130, "", "tpverify: interrupted\n")
