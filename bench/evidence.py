"""What was measured on a GPU, tied to the code that ran: reading, checking and quoting bench/results/<gpu>.json.

    python bench/evidence.py [DOCUMENT ...]     check all of it; rewrite the tables that these documents quote

bench/suite.py alone writes such a file. It is stale when the kernels of a fresh build, or the Python that launches
them, have other hashes than those recorded. A document quotes it between the two MARKERS, where a test expects exactly
what `quote` says.
"""

import hashlib
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cubins
from verify_case import SHAPES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
MARKERS = "<!-- measured: {} -->", "<!-- end -->"
QUOTED = re.compile(r"<!-- measured: ([\w-]+) -->\n(.*?)<!-- end -->", re.S)
OF_RANKS = re.compile(r"-x\d+$")  # the names of files of several GPUs, which are suite_ranks.py's
CPU_ONLY = {"csrc": ("host",), "tpverify/ops": ("host.py", "dense.py", "gemm.py", "reference.py")}
GPU_TESTS = "tests/gpu", "tests/c_abi"
BUILDS = 10  # of a file, more than the first: of two codes, about as frequent, that of the evidence is then among them
LARGEST_ERROR = 4e-3  # relative, against float64: twice what plain bf16 rounding makes of these shapes
SECTIONS = {
    "gpu": dict, "toolkit": str, "cubins": dict, "sources": dict, "tests": dict, "sass": dict, "peers": dict,
    "rows": list, "ladder": list, "plan_us": float, "move": dict,
}  # fmt: skip


def slug(gpu: str) -> str:
    """The file's name for a GPU."""
    return re.sub(r"\W+", "-", gpu.lower())


def seal(found: dict[str, Any]) -> str:
    """Of everything else in the file, so that a change by hand shows."""
    rest = {key: value for key, value in found.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write(found: dict[str, Any], folder: Path, suffix: str = "") -> Path:
    """Add the seal and write <folder>/<gpu><suffix>.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{slug(found['gpu']['name'])}{suffix}.json"
    path.write_text(json.dumps(found | {"seal": seal(found)}, indent=1, sort_keys=True) + "\n")
    return path


def sources() -> dict[str, str]:
    """Hashes of what is launched and of what launches it, without what only CPUs run."""
    return {name: cubins.sources_hash(ROOT / name, without) for name, without in CPU_ONLY.items()}


def fresh_cubins(found: dict[str, Any]) -> tuple[str | None, dict[str, dict[str, str]]]:
    """The toolkit here and the hashes of what it builds, (None, {}) without one: those of the evidence, if it makes
    them in one of a few builds. Raises CalledProcessError."""
    version = cubins.toolkit()
    if version is None:
        return None, {}
    with tempfile.TemporaryDirectory() as folder:
        library = cubins.build_library(Path(folder))
        for _ in range(BUILDS if found["toolkit"] == version else 0):
            if not cubins.compile_again(Path(folder), found["cubins"]):
                break
        return version, cubins.hashes(library)


def gpu_tests() -> set[str]:
    """Names of the test functions that a GPU suite has to have run."""
    files = (path for folder in GPU_TESTS for path in (ROOT / folder).glob("test_*.py"))
    marked = [text for text in (path.read_text() for path in files) if "pytest.mark.gpu" in text]
    return {name for text in marked for name in re.findall(r"^def (test_\w+)\(", text, re.M)}


class Checkout(NamedTuple):
    """What evidence has to be of. toolkit, built: as fresh_cubins; sources: as sources(); tests: the names of the test
    functions that have to have passed."""

    toolkit: str | None
    built: dict[str, dict[str, str]]
    sources: dict[str, str]
    tests: set[str]


def problems(found: dict[str, Any], checkout: Checkout) -> list[str]:
    """Why the evidence does not hold for this checkout."""
    return unsound(found, SECTIONS, checkout, lambda: row_problems(found["rows"]))


def unsound(
    found: dict[str, Any], sections: dict[str, type], checkout: Checkout, own: Callable[[], list[str]]
) -> list[str]:
    """What is wrong with any evidence: a section is missing, it was changed by hand, is stale, or lacks a passed test;
    then its own problems."""
    missing = [f"{name} is missing or no {kind.__name__}" for name, kind in sections.items()
               if not isinstance(found.get(name), kind)]  # fmt: skip
    if missing:
        return missing
    sealed = found.get("seal") == seal(found)
    broken = [] if sealed else ["the seal is broken: the file was changed after the suite wrote it"]
    return broken + stale(found, checkout) + not_passed(found["tests"], checkout.tests) + own()


def stale(found: dict[str, Any], checkout: Checkout) -> list[str]:
    """What has changed since it ran."""
    wrong = []
    if checkout.toolkit == found["toolkit"]:
        for arch in sorted(set(checkout.built) | set(found["cubins"])):
            ran, have = found["cubins"].get(arch, {}), checkout.built.get(arch, {})
            differing = sorted(kernel for kernel in set(ran) | set(have) if ran.get(kernel) != have.get(kernel))
            wrong += [f"stale: {arch} {kernel} is not what ran" for kernel in differing]
    elif found["sources"].get("csrc") != checkout.sources["csrc"]:
        wrong.append(f"stale: csrc has changed (no nvcc {found['toolkit']} here to compare the machine code)")
    if found["sources"].get("tpverify/ops") != checkout.sources["tpverify/ops"]:
        wrong.append("stale: tpverify/ops has changed")
    return wrong


def not_passed(outcomes: dict[str, str], tests: set[str]) -> list[str]:
    """outcomes by test; tests: the functions that have to be among them."""
    ran = {re.split(r"::|\[", name)[1] for name in outcomes}
    return [f"{name} {outcome}" for name, outcome in outcomes.items() if outcome != "passed"] + [
        f"{name} was not run" for name in sorted(tests - ran)
    ]


def row_problems(rows: list[dict[str, Any]]) -> list[str]:
    wrong = []
    named = [row.get("shape") for row in rows]
    if named != [shape.name for shape in SHAPES]:
        wrong.append("the rows are not those of the shapes that the bench has")
    for row in rows:
        numbers = [row.get(name) for name in ("us", "gb_s", "tflop_s")]
        if not all(isinstance(number, float) and math.isfinite(number) and number > 0 for number in numbers):
            wrong.append(f"{row.get('shape')}: a time or rate is no positive number")
        if not row.get("error", math.inf) <= LARGEST_ERROR:
            wrong.append(f"{row.get('shape')}: error {row.get('error')} is above {LARGEST_ERROR}")
    return wrong


def quote(found: dict[str, Any]) -> str:
    """What documents say of the evidence, as Markdown."""
    gpu, peers = found["gpu"], [name for name, version in found["peers"].items() if version]
    versions = ", ".join(f"{name} {found['peers'][name]}" for name in peers)
    lines = [
        f"{gpu['name']}, driver {gpu['driver_version']}, CUDA {found['toolkit']}, torch {gpu['torch']}; "
        f"{len(found['tests'])} GPU tests passed. us: main + combine. x: the peer's time over ours, in the same run. "
        f"{versions}.",
        "",
        "| prefix, nodes | us | TFLOP/s | % of floor | " + " | ".join(f"x {name}" for name in peers) + " |",
        "|---|" + "---|" * (3 + len(peers)),
    ]
    for row in found["rows"]:
        floor = f"{100 * row['of_floor']:.0f}" if row.get("of_floor") else "-"
        cells = [row["shape"], f"{row['us']:.1f}", f"{row['tflop_s']:.0f}", floor]
        cells += [f"{x:.2f}" if (x := row["peers"].get(name, {}).get("x")) else "-" for name in peers]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def quoted_otherwise(text: str, evidence: dict[str, dict[str, Any]]) -> list[str]:
    """Quotes in a document that the evidence, by its file's name, does not bear out."""
    wrong = []
    for name, said in QUOTED.findall(text):
        if name not in evidence:
            wrong.append(f"{name}: no such evidence")
        elif said != quote(evidence[name]):
            wrong.append(f"{name}: the quoted table is not that of the evidence")
    return wrong


def requote(text: str, evidence: dict[str, dict[str, Any]]) -> str:
    """The document with its quotes brought up to date."""
    begin, end = MARKERS
    return QUOTED.sub(lambda match: f"{begin.format(match[1])}\n{quote(evidence[match[1]])}{end}", text)


def load() -> dict[str, dict[str, Any]]:
    """The files of one GPU by name. Raises JSONDecodeError."""
    files = (path for path in sorted(RESULTS.glob("*.json")) if not OF_RANKS.search(path.stem))
    return {path.stem: json.loads(path.read_text()) for path in files}


def main() -> int:
    evidence = load()
    wrong = [
        f"{name}: {problem}"
        for name, found in evidence.items()
        for problem in problems(found, Checkout(*fresh_cubins(found), sources(), gpu_tests()))
    ]
    for document in map(Path, sys.argv[1:]):
        document.write_text(requote(document.read_text(), evidence))
    print(*wrong or [f"{name}: holds" for name in evidence], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
