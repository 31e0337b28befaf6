"""Help, and bad arguments: one line on stderr that names the argument, what was expected and what came; exit code 2."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tpverify.errors import ClusterError, PoolFull, RankFailure
from tpverify.model.checkpoint import resolve

COMMANDS = ("generate", "parity", "bench", "doctor", "report")


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
        "tpverify: command: expected one of generate, parity, bench, doctor, report, got none: see tpverify --help\n"
    )


INT = "expected an int from"
BAD = {
    "frobnicate": r"command: expected one of .*generate.*parity.*bench.*doctor.*, got 'frobnicate'",
    "--version": r"arguments: expected those in --help, got --version",
    "report": r"what: expected a value, got none",
    "report plan": r"what: expected one of kv, got 'plan'",
    "report kv --out": r"--out: expected a value, got none",
    "report kv --out /no/such/folder/a.png": r"--out: expected a file that can be written, got .*No such file.*",
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
    def fail(*_: object, **__: object) -> None:
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


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpverify.runtime.ranks.RankGroup", lambda *_: pytest.fail("ranks were started"))


def checkpoint(folder: Path, *names: str, **config: object) -> str:
    """The shipped model with only these files beside its changed config.json."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((resolve("tiny") / name).read_bytes())
    raw = json.loads((resolve("tiny") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))
    return str(folder)


WEIGHTS, DRAFTER = "model.safetensors", "drafter/config.json"
BEFORE_RANKS: dict[str, tuple[tuple[str, ...], dict[str, object], list[str], str]] = {
    "no weights": ((), {}, [], r"--model: expected model.safetensors or .*, got no weights"),
    "no drafter": ((WEIGHTS,), {}, [], r"--strategy: expected 'autoregressive': this checkpoint has no drafter, .*"),
    "no drafter to compare with": (
        (WEIGHTS,), {}, ["--strategy", "autoregressive", "--compare"], "--strategy: expected 'autoregressive': .*",
    ),
    "drafter without weights": ((WEIGHTS, DRAFTER), {}, [], r"--model: expected model.safetensors .*, got no weights"),
    "another shape": ((WEIGHTS,), {"intermediate_size": 99}, [], r"model.layers.0.mlp.*: expected shape \(99, .*"),
    "rope_parameters": ((WEIGHTS,), {"rope_parameters": "yarn"}, [], r"rope_parameters: expected an object, .*"),
    "wide latents": ((WEIGHTS,), {"kv_lora_rank": 5000}, [], r".*kv_a_proj_with_mqa.weight: expected shape .*"),
    "few positions": (
        (WEIGHTS,), {"max_position_embeddings": 64}, ["--strategy", "autoregressive"],
        r"--max-new-tokens: expected at most 63 with this model, got 64",
    ),
    "long prompt": (
        (WEIGHTS,), {"max_position_embeddings": 66}, ["--strategy", "autoregressive", "--prompt", "abc"],
        r"--prompt: expected at most 2 tokens before 64 new ones, got 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BEFORE_RANKS)
def test_what_a_checkpoint_cannot_do_is_said_before_ranks_start(
    tpverify: Callable, no_ranks: None, tmp_path: Path, case: str
) -> None:
    files, config, arguments, line = BEFORE_RANKS[case]
    done = tpverify("generate", "--model", checkpoint(tmp_path, *files, **config), *arguments)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(f"tpverify: {line}\n", done.err), done.err


def test_a_prompt_beyond_the_pool_is_said_before_ranks_start(
    tpverify: Callable, no_ranks: None, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path, WEIGHTS, max_position_embeddings=50_000)
    done = tpverify("generate", "--model", model, "--strategy", "autoregressive", "--max-new-tokens", "20000")
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(r"tpverify: prompt: may need \d+ slots, the pool has 16383: raise num_slots\n", done.err)


COMMAND = [sys.executable, "-m", "tpverify"]


@pytest.mark.parametrize("setting", ["1", "2", ""])
@pytest.mark.parametrize("command", ["generate", "doctor"])
def test_a_native_setting_that_cannot_be_met(tmp_path: Path, command: str, setting: str) -> None:
    """A traceback in the middle of the first step, and a doctor that saw nothing in the way."""
    env = os.environ | {"TPVERIFY_NATIVE": setting, "TPVERIFY_LIB_DIR": str(tmp_path)}
    done = subprocess.run([*COMMAND, command], env=env, capture_output=True, text=True, timeout=60)
    expected = "expected 0 where there is no native host library, got 1:" if setting == "1" else "expected 0 or 1, got"
    assert "Traceback" not in done.stderr
    if command == "doctor":
        assert done.returncode == 1 and expected in done.stdout and "cannot run" in done.stdout
    else:
        assert done.returncode == 2 and done.stderr.startswith(f"tpverify: TPVERIFY_NATIVE: {expected}")


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["--help"], ["generate", "--help"]])
def test_output_that_cannot_be_written_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "tpverify: [Errno 28] No space left on device\n")


def test_a_reader_that_has_left_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        done = subprocess.run([*COMMAND, "doctor"], stdout=gone, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_terminal_of_ascii_shows_what_it_can() -> None:
    code = (
        "import sys; from tpverify import cli; from tpverify.report.screen import Screen\n"
        "def run(args): Screen(False).text('caf\\u00e9 \\u2500 x'); return 0\n"
        "cli._doctor = run; sys.exit(cli.main(['doctor']))"
    )
    env = os.environ | {"PYTHONIOENCODING": "ascii", "LANG": "C", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf? ? x", "")


def test_interrupt_is_one_line(tpverify: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpverify.doctor.inspect", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert tpverify("doctor") == (130, "", "tpverify: interrupted\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(closed: str) -> None:
    """As a service may start it: what would be printed is lost, the exit code is not."""
    for command, code in (("report kv", 0), ("report kv --out", 2)):
        script = f'exec "$0" -m tpverify {command} {closed}'
        done = subprocess.run(["sh", "-c", script, sys.executable], capture_output=True, text=True, timeout=60)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
