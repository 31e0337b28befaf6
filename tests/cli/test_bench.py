"""Bench: runs the scripts of a source checkout, passes their JSON on, and reports the ones that fail."""

from collections.abc import Callable
from pathlib import Path

import pytest

import tpverify as package

SCRIPT = "import json, sys\nprint(json.dumps({'row': 1}) if '--json' in sys.argv else 'a table')\n"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty bench/ beside the package."""
    monkeypatch.setattr(package, "__file__", str(tmp_path / "tpverify" / "__init__.py"))
    (tmp_path / "bench").mkdir()
    return tmp_path / "bench"


def test_all_scripts_run_in_order(tpverify: Callable, checkout: Path) -> None:
    for name in ("bench_b.py", "bench_a.py", "helper.py"):
        (checkout / name).write_text(SCRIPT)
    assert tpverify("bench") == (0, "bench/bench_a.py\na table\nbench/bench_b.py\na table\n", "")


def test_json_is_one_object_and_progress_is_on_stderr(tpverify: Callable, checkout: Path) -> None:
    for name in ("bench_a.py", "bench_b.py"):
        (checkout / name).write_text(SCRIPT)
    done = tpverify("bench", "b", "--json")
    assert (done.code, done.json, done.err) == (0, {"b": {"row": 1}}, "bench/bench_b.py\n")


def test_a_script_that_fails_is_named(tpverify: Callable, checkout: Path) -> None:
    (checkout / "bench_a.py").write_text("raise SystemExit(3)")
    done = tpverify("bench", "--json")
    assert (done.code, done.out) == (1, "") and done.err.endswith(
        "tpverify: bench: bench_a.py ended with exit code 3\n"
    )


def test_an_installed_package_has_none(tpverify: Callable, checkout: Path) -> None:
    done = tpverify("bench")
    assert (done.code, done.out) == (1, "")
    assert done.err == f"tpverify: bench: the benchmarks come with a source checkout, and {checkout} has none\n"
