"""Evidence of ranks on several GPUs: their tests, the faults they were put through, and a step's stages.

    python bench/suite_ranks.py [--results FOLDER] [--again] [--quote DOCUMENT ...]

Needs two GPUs or more, and nvcc or TPVERIFY_LIB_DIR with the library of cubins.py. Writes FOLDER/<gpu>-x<GPUs>.json,
bench/results by default, whatever the outcome; the exit code is 0 if the evidence holds. --quote runs nothing: it
rewrites the tables between RANKS_MARKERS in these documents. bench/suite.py runs it where there are two GPUs.

All of it takes ten minutes. --again runs the tests alone that FOLDER's file does not have as passed, if it is of the
same kernels, launches and GPUs: for tests that were wrong themselves. The file says which these were.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import cubins
import evidence
import runs
import stage_table
import torch
from gpu_time import header

from tpverify.ending import ended
from tpverify.errors import ClusterError

RANKS_MARKERS = "<!-- ranks: {} -->", "<!-- end of ranks -->"
QUOTED = re.compile(r"<!-- ranks: ([\w-]+) -->\n(.*?)<!-- end of ranks -->", re.S)
TESTS = ("tests/multi_gpu", "tests/runtime/test_pynccl.py")
SECTIONS = {"gpu": dict, "toolkit": str, "cubins": dict, "sources": dict, "tests": dict, "faults": list, "steps": dict}
STEPS = 1000
SAME_GPU = "name", "driver_version", "torch", "count"


def faults(report: str) -> list[dict[str, Any]]:
    """Rows that tests left in a JUnit report: the fault, the error it ended with, and after how many seconds."""
    properties = ElementTree.fromstring(report).iter("property")
    return [json.loads(one.get("value", "")) for one in properties if one.get("name") == "fault"]


def needed_tests() -> set[str]:
    """Names of the test functions that have to have run."""
    return {name for names in functions().values() for name in names}


def functions() -> dict[Path, list[str]]:
    """Those of each file."""
    paths = (evidence.ROOT / TESTS[0]).glob("test_*.py")
    return {path: re.findall(r"^def (test_\w+)\(", path.read_text(), re.M) for path in sorted(paths)}


def problems(found: dict[str, Any], checkout: evidence.Checkout) -> list[str]:
    """Why the evidence does not hold for this checkout."""
    return evidence.unsound(found, SECTIONS, checkout, lambda: [] if found["faults"] else ["no fault was recorded"])


def quote(found: dict[str, Any]) -> str:
    """What documents say of the evidence, as Markdown: stages, then faults."""
    gpu = found["gpu"]
    lines = [
        f"{gpu['count']} x {gpu['name']}, driver {gpu['driver_version']}, CUDA {found['toolkit']}, "
        f"torch {gpu['torch']}; {gpu['collectives']}. {len(found['tests'])} tests passed{_later(found)}.",
        "",
        *stage_table.table(found["steps"]["rows"]),
    ]
    for row in found["steps"]["rows"]:
        if "gather" in row:
            gather = row["gather"]
            lines += [
                "",
                f"Of the last kind of step, {100 * row['other_share']:.1f} % is neither product, attention kernel nor "
                f"gather as they run together, {100 * row['other_share_alone']:.1f} % with each by itself. "
                f"Its {gather['layers']} gathers of {gather['bytes_a_rank']} B a rank add "
                f"{gather['in_step_us']:.0f} us; alone in a graph they take {gather['alone_us']:.0f} us.",
            ]
    lines += ["", "| fault | s | error |", "|---|---|---|"]
    lines += [f"| {row['fault']} | {row['seconds']:.1f} | {row['error']} |" for row in found["faults"]]
    return "\n".join(lines) + "\n"


def _later(found: dict[str, Any]) -> str:
    again = found.get("again", [])
    return f", {len(again)} of them when run again on the same code" if again else ""


def requote(text: str, found: dict[str, dict[str, Any]]) -> str:
    """The document with its quotes brought up to date."""
    begin, end = RANKS_MARKERS
    return QUOTED.sub(lambda match: f"{begin.format(match[1])}\n{quote(found[match[1]])}{end}", text)


def load() -> dict[str, dict[str, Any]]:
    """All files of several GPUs by name."""
    files = sorted(evidence.RESULTS.glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in files if evidence.OF_RANKS.search(path.stem)}


def lacking(found: dict[str, Any]) -> list[str]:
    """Tests that evidence does not have as passed, as pytest takes them."""
    paths = {path.stem: path for path in (*functions(), evidence.ROOT / TESTS[1])}
    ran = {name.partition("[")[0] for name in found["tests"]}
    names = [name for name, outcome in found["tests"].items() if outcome != "passed"]
    names += [name for path, some in functions().items() for one in some if (name := f"{path.stem}::{one}") not in ran]
    return [f"{paths[name.partition('::')[0]]}::{name.partition('::')[2]}" for name in names]


def run_again(library: Path, folder: Path, results: Path) -> list[str]:
    """Complete the evidence in `results` by the tests that it lacks, and return what is still wrong with it."""
    environment = runs.environment_of(library.parent)
    gpu = header() | {"count": torch.cuda.device_count()}
    path = results / f"{evidence.slug(gpu['name'])}-x{gpu['count']}.json"
    found = json.loads(path.read_text())
    checkout = evidence.Checkout(str(cubins.toolkit()), cubins.hashes(library), evidence.sources(), needed_tests())
    wrong = [] if found["seal"] == evidence.seal(found) else ["the seal is broken"]
    wrong += evidence.stale(found, checkout)
    wrong += [f"{key} was {found['gpu'][key]}, is {gpu[key]}" for key in SAME_GPU if found["gpu"][key] != gpu[key]]
    if wrong:
        return wrong
    if missing := lacking(found):
        report = runs.tests(environment, folder, missing)
        outcomes = runs.outcomes(report)
        rows = {row["fault"]: row for row in (*found["faults"], *faults(report))}
        found |= {"tests": found["tests"] | outcomes, "faults": list(rows.values())}
        found["again"] = sorted({*found.get("again", []), *outcomes})
        print(evidence.write(found, results, f"-x{gpu['count']}"))
        found["seal"] = evidence.seal(found)
    return problems(found, checkout)


def collect(library: Path, folder: Path, results: Path) -> list[str]:
    """Run everything with this library, write the file, and return what is wrong with it."""
    environment = runs.environment_of(library.parent)
    toolkit, hashes = str(cubins.toolkit()), cubins.hashes(library)
    report = runs.tests(environment, folder, [*TESTS, "-m", "gpu or multi_gpu"])
    steps = runs.bench(environment, "bench_step.py", ["--device", "cuda", "--steps", str(STEPS)])
    gathering = next(row["collectives"] for row in steps["rows"] if "collectives" in row)
    gpu = header() | {
        "count": torch.cuda.device_count(),
        "collectives": f"{gathering['backend']} by {', '.join(gathering.get('paths', []))}",
    }
    found = {
        "gpu": gpu,
        "toolkit": toolkit,
        "cubins": hashes,
        "sources": evidence.sources(),
        "tests": runs.outcomes(report),
        "faults": faults(report),
        "steps": steps,
    }
    print(evidence.write(found, results, f"-x{gpu['count']}"))
    found["seal"] = evidence.seal(found)
    print(quote(found))
    return problems(found, evidence.Checkout(toolkit, hashes, evidence.sources(), needed_tests()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=evidence.RESULTS, metavar="FOLDER")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--quote", type=Path, nargs="+", metavar="DOCUMENT")
    args = parser.parse_args()
    if args.quote:
        for document in args.quote:
            document.write_text(requote(document.read_text(), load()))
        return 0
    if torch.cuda.device_count() < 2:
        raise ClusterError(f"the suite needs two GPUs, torch sees {torch.cuda.device_count()}")
    given = os.environ.get("TPVERIFY_LIB_DIR")
    with tempfile.TemporaryDirectory() as name:
        library = Path(given) / "libtpverify_cuda.so" if given else cubins.build_library(Path(name))
        wrong = (run_again if args.again else collect)(library, Path(name), args.results)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(ended(Path(__file__).name, main))
