"""The shape of the repository: imports point one way, files are short, documents name only what exists."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import tpverify

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tpverify"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
MAX_LINES = 400
SOURCES = {".py", ".h", ".cuh", ".cu", ".cc", ".map", ".txt", ".sh", ".cmake"}
TOP_LEVEL = {
    ".ci", ".gitignore", ".pre-commit-config.yaml", "LICENSE", "Makefile", "README.md", "bench", "cluster",
    "constraints.txt", "csrc", "plans", "pyproject.toml", "tests", "tpverify",
}  # fmt: skip

# A module imports from its own part and from earlier rows. The package itself gives its version and its folder.
ROWS = (
    {"tpverify"},
    {"errors"},
    {"config", "native", "ending"},
    {"communicator"},
    {"tree", "kv", "pynccl"},
    {"ops"},
    {"model"},
    {"runtime"},
    {"report", "doctor"},
    {"cli"},
    {"jobs", "__main__"},
)
PART_ROW = {part: row for row, parts in enumerate(ROWS) for part in parts}


def part(module: str) -> str:
    """The row's name for tpverify.a.b: a."""
    return module.split(".")[1] if "." in module else module


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path, source: str) -> Iterator[str]:
    """Modules of tpverify that the file imports, wherever in the file."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            levels = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*levels, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "tpverify")


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def wrong_imports(path: Path, source: str) -> list[str]:
    own = part(name_of(path))
    return [name for name in imported(path, source) if part(name) != own and PART_ROW[part(name)] >= PART_ROW[own]]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        return  # it gathers the public names; nothing but the version and the folder is taken from it
    assert wrong_imports(path, path.read_text()) == []


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        ("ops/plan.py", "from tpverify.runtime.engine import Engine", ["tpverify.runtime.engine"]),
        ("ops/plan.py", "def f():\n    from tpverify import cli", ["tpverify.cli"]),
        ("tree/draws.py", "from ..kv import log", ["tpverify.kv.log"]),
        ("tree/draws.py", "import tpverify.ops.gemm", ["tpverify.ops.gemm"]),
        ("kv/log.py", "from . import table\nfrom ..errors import PoolFull\nimport numpy", []),
        ("runtime/rank.py", "from tpverify import __version__", []),
    ],
)
def test_the_import_rule_sees_a_breach(file: str, source: str, wrong: list[str]) -> None:
    assert wrong_imports(PACKAGE / file, source) == wrong


def test_every_part_has_its_place() -> None:
    parts = {part(name_of(path)) for path in MODULES}
    assert parts == set(PART_ROW)


def test_files_can_be_read_in_one_sitting() -> None:
    files = [path for top in ("tpverify", "csrc", "tests", "bench", "cluster") for path in (ROOT / top).rglob("*")]
    lengths = {path: len(path.read_text().splitlines()) for path in files if path.suffix in SOURCES}
    assert len(lengths) > 50 and {str(path): n for path, n in lengths.items() if n > MAX_LINES} == {}


def test_top_level_is_fixed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    assert {line.split("/")[0] for line in listed.stdout.splitlines()} == TOP_LEVEL


TOPS = "|".join(map(re.escape, sorted(TOP_LEVEL)))
PATH = re.compile(rf"(?<![\w/.~$-])(?:{TOPS})/[\w./*<>-]*[\w*>]")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "cluster").glob("*.md")), *sorted((ROOT / "plans").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_only_files_that_exist(document: Path) -> None:
    named = set(PATH.findall(document.read_text()))
    assert {path for path in named if not list(ROOT.glob(path)) and "<" not in path} == set()


def test_the_path_pattern_finds_paths() -> None:
    text = "see `tpverify/ops/gemm.py`, [plan](plans/0001-x.md). bench/*.py; not a/tpverify/cli.py or tpverify.cli"
    assert PATH.findall(text) == ["tpverify/ops/gemm.py", "plans/0001-x.md", "bench/*.py"]


PICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
EVALUATORS = {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_executes_data(path: Path) -> None:
    """CVE-2025-32444, CVE-2025-30165 and others of vLLM: pickled messages on sockets run the sender's code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = {(module or alias.name).split(".")[0] for alias in node.names}
            assert not names & PICKLES, f"line {node.lineno}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in EVALUATORS | {"torch.load", "pickle.loads"}, f"line {node.lineno}"
            assert not any(keyword.arg == "allow_pickle" for keyword in node.keywords), f"line {node.lineno}"


ALIASES = re.compile(r"sm_scale|page_table|retrive")


def test_names_are_the_fields() -> None:
    files = [path for top in ("tpverify", "csrc", "bench") for path in (ROOT / top).rglob("*")]
    found = {str(path): set(ALIASES.findall(path.read_text())) for path in files if path.suffix in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}


def test_public_names_load_at_first_use_and_are_what_type_checkers_see() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    homes = {alias.name: node.module for node in checked.body for alias in node.names}  # type: ignore[attr-defined]
    assert homes == {name: f"tpverify.{module}" for name, module in tpverify._HOMES.items()}
    assert all(getattr(tpverify, name).__name__ == name for name in tpverify.__all__) and len(tpverify.__all__) > 15
    with pytest.raises(AttributeError, match="no attribute 'Beam'"):
        tpverify.Beam  # noqa: B018
