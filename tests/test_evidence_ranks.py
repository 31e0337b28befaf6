"""Evidence of several GPUs: how it is read from reports, checked, quoted, and kept apart from that of one."""

import copy
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))

import cubins  # noqa: E402
import evidence  # noqa: E402
import runs  # noqa: E402
import suite_ranks  # noqa: E402

BUILT = {"sm_90": {"flash": "a1"}, "sm_120": {"flash": "a2"}}
NOW = {"csrc": "c", "tpverify/ops": "d"}
TESTS = {"test_bits"}
FAULT = {"fault": "SIGKILL in a gather", "error": "RankFailure: rank 1 failed at step 3: gone", "seconds": 0.31}
STEPS = {
    "gpu": "GPU X",
    "rows": [
        {"row": "deep", "ranks": 2, "device": "cuda", "p50_ms": 12.5, "p99_ms": 13.0, "stages_us": {"gather": 500.0},
         "other_share": 0.042, "other_share_alone": 0.05,
         "gather": {"in_step_us": 550.0, "alone_us": 500.0, "layers": 61, "bytes_a_rank": 9}},
        {"row": "empty", "ranks": 2, "device": "cuda", "p50_ms": 0.1, "p99_ms": 0.2, "stages_us": {"reply": 100.0},
         "collectives": {"backend": "nccl", "paths": ["P2P/CUMEM"]}},
    ],
}  # fmt: skip
REPORT = """<testsuites><testsuite>
<testcase classname="tests.multi_gpu.test_a" name="test_bits[2]"><properties>
<property name="fault" value="{fault}"/><property name="other" value="1"/></properties></testcase>
<testcase classname="tests.multi_gpu.test_a" name="test_more"/></testsuite></testsuites>"""


def recorded() -> dict:
    gpu = {"name": "GPU X", "driver_version": "1.2", "torch": "3.4", "count": 2, "collectives": "nccl by P2P/CUMEM"}
    found = {
        "gpu": gpu, "toolkit": "13.0.88", "cubins": copy.deepcopy(BUILT), "sources": dict(NOW),
        "tests": {"test_a::test_bits[2]": "passed"}, "faults": [dict(FAULT)], "steps": copy.deepcopy(STEPS),
    }  # fmt: skip
    return found | {"seal": evidence.seal(found)}


def problems(found: dict) -> list[str]:
    return suite_ranks.problems(found, evidence.Checkout("13.0.88", BUILT, NOW, TESTS))


def test_faults_are_read_from_a_junit_report() -> None:
    report = REPORT.format(fault=json.dumps(FAULT).replace('"', "&quot;"))
    assert suite_ranks.faults(report) == [FAULT]
    assert runs.outcomes(report) == {"test_a::test_bits[2]": "passed", "test_a::test_more": "passed"}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("steps", None, "steps is missing or no dict"),
        ("faults", [], "no fault was recorded"),
        ("tests", {"test_a::test_bits[2]": "skipped"}, "test_a::test_bits[2] skipped"),
        ("tests", {}, "test_bits was not run"),
        ("cubins", {}, "stale: sm_120 flash is not what ran"),
        ("sources", {"csrc": "c"}, "stale: tpverify/ops has changed"),
    ],
)
def test_what_is_wrong_is_named(key: str, value: object, said: str) -> None:
    assert problems(recorded()) == []
    found = recorded() | {key: value}
    found["seal"] = evidence.seal(found)
    assert said in problems(found)
    assert problems(recorded() | {"faults": [FAULT, FAULT]}) == [
        "the seal is broken: the file was changed after the suite wrote it"
    ]


def test_a_quote_is_the_evidence() -> None:
    text = suite_ranks.requote("a\n<!-- ranks: gpu-x-x2 -->\nold\n<!-- end of ranks -->\nb\n", {"gpu-x-x2": recorded()})
    assert text.startswith("a\n<!-- ranks: gpu-x-x2 -->\n2 x GPU X, driver 1.2") and text.endswith("ranks -->\nb\n")
    assert "| SIGKILL in a gather | 0.3 | RankFailure: rank 1 failed at step 3: gone |" in text and "old" not in text
    assert "| deep | 2 cuda | 12.500 |" in text and "4.2 % is neither" in text and "add 550 us" in text


def test_the_suite_writes_what_the_check_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a made-up build, tests and bench; and the file is none of one GPU's."""
    made = recorded()
    for module, name, value in (
        (cubins, "toolkit", made["toolkit"]),
        (cubins, "hashes", made["cubins"]),
        (runs, "tests", "a report"),
        (runs, "outcomes", made["tests"]),
        (suite_ranks, "faults", made["faults"]),
        (runs, "bench", made["steps"]),
        (suite_ranks, "needed_tests", TESTS),
        (suite_ranks, "header", {key: made["gpu"][key] for key in ("name", "driver_version", "torch")}),
        (evidence, "sources", NOW),
    ):
        monkeypatch.setattr(module, name, lambda *_, value=value: value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert suite_ranks.collect(tmp_path / "library.so", tmp_path, tmp_path) == []
    assert json.loads((tmp_path / "gpu-x-x2.json").read_text()) == made
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    assert evidence.load() == {} and suite_ranks.load() == {"gpu-x-x2": made}


def made_up(monkeypatch: pytest.MonkeyPatch, made: dict, report: str, asked: list[list[str]]) -> None:
    """Two GPUs, a build and tests, as the evidence `made` says; what pytest is asked for goes to `asked`."""
    for module, name, value in (
        (cubins, "toolkit", made["toolkit"]),
        (cubins, "hashes", copy.deepcopy(BUILT)),
        (suite_ranks, "functions", {Path("tests/multi_gpu/test_a.py"): ["test_bits", "test_more"]}),
        (suite_ranks, "header", {key: made["gpu"][key] for key in ("name", "driver_version", "torch")}),
        (evidence, "sources", NOW),
    ):
        monkeypatch.setattr(module, name, lambda *_, value=value: value)
    monkeypatch.setattr(runs, "tests", lambda _, folder, options: asked.append(options) or report)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)


def again(folder: Path) -> list[str]:
    return suite_ranks.run_again(folder / "library.so", folder, folder)


def test_what_evidence_lacks_is_run_again_on_the_same_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that failed and a test that is new; then nothing."""
    made, asked = recorded(), list[list[str]]()
    made["tests"] = {"test_a::test_bits[2]": "failed", "test_a::test_bits[3]": "passed"}
    fault = FAULT | {"fault": "another"}
    made_up(monkeypatch, made, REPORT.format(fault=json.dumps(fault).replace('"', "&quot;")), asked)
    path = evidence.write(made, tmp_path, "-x2")
    assert again(tmp_path) == again(tmp_path) == []
    assert asked == [["tests/multi_gpu/test_a.py::test_bits[2]", "tests/multi_gpu/test_a.py::test_more"]]
    found = json.loads(path.read_text())
    assert set(found["tests"].values()) == {"passed"} and len(found["tests"]) == 3
    assert found["again"] == ["test_a::test_bits[2]", "test_a::test_more"] and found["faults"] == [FAULT, fault]
    assert found["steps"] == made["steps"] and "3 tests passed, 2 of them when run again" in suite_ranks.quote(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cubins": {}}, "stale: sm_120 flash is not what ran"),
        ({"sources": NOW | {"tpverify/ops": "e"}}, "stale: tpverify/ops has changed"),
        ({"gpu": recorded()["gpu"] | {"torch": "3.5"}}, "torch was 3.5, is 3.4"),
        ({"steps": {"rows": []}, "seal": "by hand"}, "the seal is broken"),
    ],
)
def test_evidence_of_other_code_is_not_completed(
    change: dict, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[list[str]]()
    made_up(monkeypatch, recorded(), REPORT, asked)
    found = recorded() | {"tests": {"test_a::test_bits[2]": "failed"}} | change
    path = evidence.write(found, tmp_path, "-x2")
    if "seal" in change:
        path.write_text(json.dumps(found))
    text = path.read_text()
    assert said in again(tmp_path)
    assert asked == [] and path.read_text() == text


def test_there_are_tests_to_run() -> None:
    needed = {"test_two_gpus_give_the_bits_of_one", "test_rank_that_is_lost", "test_collectives_in_a_graph"}
    assert needed <= suite_ranks.needed_tests()


# Of this checkout.


def test_recorded_evidence_is_of_these_kernels() -> None:
    """With no file there is nothing to be stale, and no document may quote one."""
    found = suite_ranks.load()
    for name, one in found.items():
        assert name == f"{evidence.slug(one['gpu']['name'])}-x{one['gpu']['count']}"
        here = evidence.Checkout(*evidence.fresh_cubins(one), evidence.sources(), suite_ranks.needed_tests())
        assert suite_ranks.problems(one, here) == [], name
    for document in (ROOT / "README.md", *sorted((ROOT / "plans").glob("*.md"))):
        text = document.read_text()
        assert suite_ranks.requote(text, found) == text, document
