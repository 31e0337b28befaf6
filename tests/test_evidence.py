"""What is said of GPUs rests on files that the GPU suite wrote, for the kernels that this checkout builds."""

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))

import cubins  # noqa: E402
import evidence  # noqa: E402
import runs  # noqa: E402
import suite  # noqa: E402
from verify_case import SHAPES  # noqa: E402

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "plans").glob("*.md"))]
BUILT = {"sm_90": {"flash": "a1", "combine": "b1"}, "sm_120": {"flash": "a2", "combine": "b2"}}
NOW = {"csrc": "c", "tpverify/ops": "d"}
TESTS = {"test_heads"}

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="NOT run: no nvcc")


def recorded() -> dict:
    """Evidence as the suite writes it, with made-up numbers."""
    rows = [
        {
            "shape": shape.name, "us": 10.0 + i, "gb_s": 5.0, "tflop_s": 6.0, "of_floor": 0.5, "error": 2e-3,
            "peers": {"A": {"us": 20.0, "x": 2.0}, "B": {"not_run": "does not take this shape"}},
        }
        for i, shape in enumerate(SHAPES)
    ]  # fmt: skip
    found = {
        "gpu": {"name": "GPU X", "driver_version": "1.2", "torch": "3.4"}, "toolkit": "13.0.88",
        "cubins": copy.deepcopy(BUILT), "sources": dict(NOW), "tests": {"test_verify_cuda::test_heads[8]": "passed"},
        "sass": {}, "peers": {"A": "1.0", "B": "2.0", "C": None}, "rows": rows, "ladder": [],
        "plan_us": 5.5, "move": {},
    }  # fmt: skip
    return found | {"seal": evidence.seal(found)}


def problems(found: dict, toolkit: str | None = "13.0.88", built: dict = BUILT, now: dict = NOW) -> list[str]:
    return evidence.problems(found, evidence.Checkout(toolkit, built, now, TESTS))


def test_evidence_that_holds() -> None:
    assert problems(recorded()) == []


def test_a_change_by_hand_breaks_the_seal() -> None:
    found = recorded()
    found["rows"][3]["us"] = 1.0
    assert problems(found) == ["the seal is broken: the file was changed after the suite wrote it"]


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (("toolkit",), None, "toolkit is missing or no str"),
        (("rows",), {}, "rows is missing or no list"),
        (("plan_us",), None, "plan_us is missing or no float"),
        (("rows", 0, "us"), float("nan"), "4,096 q=1: a time or rate is no positive number"),
        (("rows", 0, "us"), "10", "4,096 q=1: a time or rate is no positive number"),
        (("rows", 0, "error"), 0.1, "4,096 q=1: error 0.1 is above 0.004"),
        (("rows", 0, "error"), float("nan"), "4,096 q=1: error nan is above 0.004"),
        (("rows", 0, "shape"), "5 q=1", "the rows are not those of the shapes that the bench has"),
        (("tests", "test_verify_cuda::test_heads[8]"), "failed", "test_verify_cuda::test_heads[8] failed"),
        (("tests", "test_verify_cuda::test_heads[8]"), "skipped", "test_verify_cuda::test_heads[8] skipped"),
        (("tests",), {}, "test_heads was not run"),
        (("cubins", "sm_120", "flash"), "zz", "stale: sm_120 flash is not what ran"),
        (("cubins", "sm_90"), {"flash": "a1"}, "stale: sm_90 combine is not what ran"),
        (("sources", "tpverify/ops"), "zz", "stale: tpverify/ops has changed"),
    ],
)
def test_what_is_wrong_is_named(at: tuple, value: object, said: str) -> None:
    """Malformed, stale or failed: sealed again, so that the seal does not give it away."""
    found = recorded()
    place = found
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = value
    found["seal"] = evidence.seal(found)
    assert problems(found) == [said]


@pytest.mark.parametrize("toolkit", [None, "13.1.5"])
def test_without_the_same_compiler_any_change_of_the_sources_is_stale(toolkit: str | None) -> None:
    assert problems(recorded(), toolkit, {}) == []
    said = "stale: csrc has changed (no nvcc 13.0.88 here to compare the machine code)"
    assert problems(recorded(), toolkit, {}, NOW | {"csrc": "other"}) == [said]


def test_comments_in_the_sources_change_nothing_where_the_machine_code_is_the_same() -> None:
    assert problems(recorded(), now=NOW | {"csrc": "other"}) == []


def test_a_quote_is_exactly_the_evidence() -> None:
    found = {"gpu-x": recorded()}
    text = evidence.requote("# Title\n<!-- measured: gpu-x -->\n<!-- end -->\nrest\n", found)
    assert evidence.quoted_otherwise(text, found) == [] and "| 4,096 q=1 | 10.0 | 6 | 50 | 2.00 | - |" in text
    assert (
        text.startswith("# Title\n") and text.endswith("<!-- end -->\nrest\n") and evidence.requote(text, found) == text
    )
    said = ["gpu-x: the quoted table is not that of the evidence"]
    assert evidence.quoted_otherwise(text.replace("| 10.0 |", "| 9.0 |"), found) == said
    assert evidence.quoted_otherwise(text.replace("x -->", "y -->"), found) == ["gpu-y: no such evidence"]


def test_outcomes_are_read_from_a_junit_report() -> None:
    report = """<testsuites><testsuite><testcase classname="tests.gpu.test_a" name="test_x[1]"/>
    <testcase classname="tests.gpu.test_a" name="test_y"><failure message="m">text</failure></testcase>
    <testcase classname="tests.gpu.test_a" name="test_z"><skipped message="m"/></testcase>
    <testcase classname="tests.gpu.test_a" name="test_w"><error/></testcase></testsuite></testsuites>"""
    assert runs.outcomes(report) == {
        "test_a::test_x[1]": "passed",
        "test_a::test_y": "failed",
        "test_a::test_z": "skipped",
        "test_a::test_w": "failed",
    }


def test_the_suite_writes_what_the_check_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a made-up build, tests and bench."""
    made = recorded()
    bench = {name: made[name] for name in ("gpu", "peers", "rows", "ladder", "plan_us", "move")}
    for module, name, value in (
        (cubins, "build_library", tmp_path / "library"),
        (cubins, "toolkit", made["toolkit"]),
        (cubins, "hashes", made["cubins"]),
        (cubins, "tile_loops", {}),
        (runs, "tests", "a report"),
        (runs, "outcomes", made["tests"]),
        (runs, "bench", bench),
        (evidence, "sources", NOW),
        (evidence, "gpu_tests", TESTS),
    ):
        monkeypatch.setattr(module, name, lambda *_, value=value: value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["suite.py", "--results", str(tmp_path)])
    assert suite.main() == 0
    assert json.loads((tmp_path / "gpu-x.json").read_text()) == made
    monkeypatch.setattr(runs, "outcomes", lambda *_: {"test_verify_cuda::test_heads[8]": "failed"})
    assert suite.main() == 1
    assert json.loads((tmp_path / "gpu-x.json").read_text())["tests"] == {"test_verify_cuda::test_heads[8]": "failed"}


def test_the_suite_has_gpu_tests_to_run() -> None:
    assert {"test_float64_and_repeats", "test_graph_replays_other_steps_and_clears_padding"} <= evidence.gpu_tests()


# Of this checkout.


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    return evidence.load()


def test_recorded_evidence_is_of_these_kernels(found: dict[str, dict]) -> None:
    """With no file there is nothing to be stale; the next test then allows no claim either."""
    for name, one in found.items():
        assert name == evidence.slug(one["gpu"]["name"])
        here = evidence.Checkout(*evidence.fresh_cubins(one), evidence.sources(), evidence.gpu_tests())
        assert evidence.problems(one, here) == [], name


def test_documents_quote_the_evidence_and_nothing_else(found: dict[str, dict]) -> None:
    """The README quotes every file that there is, and no document one that there is not."""
    for document in DOCUMENTS:
        assert evidence.quoted_otherwise(document.read_text(), found) == [], document
    quoted = {name for name, _ in evidence.QUOTED.findall((ROOT / "README.md").read_text())}
    assert quoted == set(found)


def test_evidence_once_committed_stays() -> None:
    """A file that history has must still be there: stale evidence is run again, not removed."""
    command = ["git", "log", "--format=", "--name-only", "--diff-filter=A", "--", "bench/results/*.json"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout
    assert {Path(line).stem for line in listed.split()} <= {path.stem for path in evidence.RESULTS.glob("*.json")}


@pytest.mark.parametrize(
    ("toolkit", "second", "built", "builds"),
    [("13.0.88", "b", "b", 3), ("13.0.88", "never", "c", 1 + evidence.BUILDS), ("12.9", "b", "a", 1)],
)
def test_a_kernel_of_two_codes_is_compiled_until_it_is_that_of_the_evidence(
    toolkit: str, second: str, built: str, builds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made-up files with a hash a line; the other file is compiled once."""
    codes, made = iter(["a", "c", "b", *"c" * 20]), []

    def build(*command: str) -> None:
        folder = Path(command[-1]) if "--build" in command else None
        for name, code in (("plan.cu.o", codes), ("move.cu.o", iter("m"))) if folder else ():
            if not (folder / name).exists():
                (folder / name).write_text(json.dumps({"sm_90": {name: next(code)}}))
                made.append(name)
        if folder:
            texts = [json.loads((folder / name).read_text())["sm_90"] for name in ("plan.cu.o", "move.cu.o")]
            (folder / "libtpverify_cuda.so").write_text(json.dumps({"sm_90": texts[0] | texts[1]}))

    monkeypatch.setattr(cubins, "_run", build)
    monkeypatch.setattr(cubins, "hashes", lambda path: json.loads(path.read_text()))
    monkeypatch.setattr(cubins, "toolkit", lambda: "13.0.88")
    ran = {"toolkit": toolkit, "cubins": {"sm_90": {"plan.cu.o": second, "move.cu.o": "m"}}}
    version, found = evidence.fresh_cubins(ran)
    assert version == "13.0.88" and found == {"sm_90": {"plan.cu.o": built, "move.cu.o": "m"}}
    assert made.count("plan.cu.o") == builds and made.count("move.cu.o") == 1


@needs_nvcc
def test_hashes_do_not_depend_on_the_folder_but_on_the_code(tmp_path: Path) -> None:
    """nvcc writes paths into debug information, and a hash of the path into the names of unnamed namespaces."""

    def compiled(folder: str, change: tuple[str, str] = ("", ""), *options: str) -> dict[str, dict[str, str]]:
        place = tmp_path / folder
        shutil.copytree(ROOT / "csrc", place)
        source = place / "verify/planner.cu"
        assert change[0] in source.read_text()
        source.write_text(source.read_text().replace(*change) if change[0] else source.read_text())
        command = ["nvcc", "-std=c++20", "-O3", "-arch=sm_120", f"-I{place}", *options, "-cubin", str(source)]
        subprocess.run([*command, "-o", str(place / "out")], check=True, capture_output=True, timeout=120)
        return cubins.hashes(place / "out")

    usual = compiled("a")
    (name,) = usual["sm_120"]
    assert "plan_kernel" in name and not re.search("_cu_|GLOBAL", name) and usual["sm_90"] == {}
    assert compiled("b/deeper", ("", ""), "-lineinfo") == usual
    assert compiled("c", ("kItemCost = 10.0f", "kItemCost = 5.0f")) != usual
    assert compiled("d", ("{1, 2, 3, 4,", "{1, 2, 3, 5,")) != usual  # a constant's value, no instruction


def test_a_hash_of_sources_sees_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x")
    first = cubins.sources_hash(tmp_path)
    (tmp_path / "a.py").write_text("y")
    second = cubins.sources_hash(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    third = cubins.sources_hash(tmp_path)
    assert len({first, second, third}) == 3
    (tmp_path / "notes.md").write_text("z")
    assert cubins.sources_hash(tmp_path) == third


def test_hashes_of_sources_leave_out_what_only_cpus_run(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "kernel.cu").write_text("int a;")
    (tmp_path / "host/tree.cc").write_text("int b;")
    everything, kernels = cubins.sources_hash(tmp_path), cubins.sources_hash(tmp_path, ("host",))
    (tmp_path / "host/tree.cc").write_text("int c;")
    assert cubins.sources_hash(tmp_path) != everything
    assert cubins.sources_hash(tmp_path, ("host",)) == kernels
    (tmp_path / "kernel.cu").write_text("int d;")
    assert cubins.sources_hash(tmp_path, ("host",)) != kernels
    for folder, without in evidence.CPU_ONLY.items():
        assert all((evidence.ROOT / folder / name).exists() for name in without), folder
