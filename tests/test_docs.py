"""What the documents say can be run: Python examples run, commands parse, make targets exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tpverify.cli import parser
from tpverify.runtime import cluster

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "cluster/README.md"]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(document: Path, language: str) -> list[str]:
    return [text for name, text in FENCE.findall(document.read_text()) if name == language]


def commands(document: Path) -> list[list[str]]:
    lines = [line for block in blocks(document, "bash") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.fixture(scope="module")
def namespace() -> Iterator[dict[str, Any]]:
    """The examples build on one another, in order, and share one Ray."""
    with cluster.session():
        yield {"__name__": "readme"}


@pytest.mark.ray
@pytest.mark.parametrize("index", range(len(blocks(README, "python"))))
def test_python_example_runs(index: int, namespace: dict[str, Any]) -> None:
    code = blocks(README, "python")[index]
    assert "assert" in code  # an example shows what holds, not only what can be called
    exec(compile(code, f"README.md, example {index}", "exec"), namespace)


def test_there_are_examples_of_both_kinds() -> None:
    assert len(blocks(README, "python")) >= 3 and len(commands(README)) >= 2


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(document: Path) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    known = 0
    for words in commands(document):
        if "--" in words:  # ray job submit ... -- python -m tpverify...
            words = words[words.index("--") + 1 :]
        if words[:2] == ["python", "-m"]:
            job = re.fullmatch(r"tpverify\.jobs\.(\w+)", words[2])
            words = ["tpverify", *([job[1]] if job else []), *words[3:]]
        known += words[0] in ("make", "tpverify")
        if words[0] == "make":
            assert set(words[1:]) <= targets, words
        elif words[0] == "tpverify":
            assert parser().parse_args(words[1:]), words
        elif "/" in words[0]:
            assert (ROOT / words[0]).is_file(), words
    assert known >= 1


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert ["make", "test"] in commands(README)
    assert "make --no-print-directory test" in (ROOT / ".ci/run").read_text().splitlines()[-1]
