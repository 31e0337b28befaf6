"""The verify bench without a GPU: what it computes of times, its tensors, its floors, and how it reads machine code."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))

import bench_verify  # noqa: E402
import cubins  # noqa: E402
import roofline  # noqa: E402
from peers import Peer, Unsupported  # noqa: E402
from verify_case import SCALE, SHAPES, Shape, VerifyCase  # noqa: E402

from tpverify.ops.attention import verify_attention  # noqa: E402


def chain_peer(case: VerifyCase) -> Callable[[], torch.Tensor]:
    out, _ = verify_attention(case.q, case.pool, case.chains, softmax_scale=SCALE)
    return lambda: out


def refusing_peer(case: VerifyCase) -> Callable[[], torch.Tensor]:
    raise Unsupported


def broken_peer(case: VerifyCase) -> Callable[[], torch.Tensor]:
    raise RuntimeError("no kernel image")


PEERS = [
    Peer("chain", "x", False, chain_peer),
    Peer("refusing", "x", False, refusing_peer),
    Peer("broken", "x", True, broken_peer),
]


def measure(shape: Shape, times: list[float]) -> dict:
    """times: what the timer says, call after call."""
    left = iter(times)
    return bench_verify.measure(
        VerifyCase(shape, "cpu"),
        PEERS,
        lambda run: next(left),
        lambda run: (run, False),
        lambda run, names: dict.fromkeys(names, 3.0),
    )


@pytest.mark.parametrize("shape", [Shape(100, 5), Shape(70, 9, batch=2, heads=4)], ids=lambda shape: shape.name)
def test_a_row_holds_ours_and_the_peers_side_by_side(shape: Shape) -> None:
    """Ours is timed before and after each peer, and the median counts."""
    row = measure(shape, [10.0, 36.0, 14.0])
    assert row["us"] == 12.0 and row["peers"]["chain"]["x"] == 3.0 and row["main_us"] == row["combine_us"] == 3.0
    assert row["error"] < 3e-3 and row["peers"]["chain"]["error"] < 3e-3  # a chain by a chain, a tree by a tree
    assert row["peers"]["refusing"] == {"not_run": "does not take this shape"}
    assert row["peers"]["broken"] == {"not_run": "RuntimeError: no kernel image"}
    tokens = shape.prefix + shape.nodes
    moved = 2 * shape.batch * (tokens * 576 + shape.nodes * shape.heads * 1088)
    assert row["gb_s"] == round(moved / 12e-6 / 1e9, 1)
    assert row["tflop_s"] == round(2 * shape.batch * shape.nodes * shape.heads * tokens * 1088 / 12e-6 / 1e12, 2)


def test_errors_are_found() -> None:
    case = VerifyCase(Shape(50, 6), "cpu")
    tree, _ = verify_attention(case.q, case.pool, case.trees, softmax_scale=SCALE)
    assert case.error(tree, tree=True) < 3e-3 < 1e-2 < case.error(tree, tree=False)
    assert case.error(tree * 1.05, tree=True) > 1e-2


def test_pages_hold_the_rows() -> None:
    case = VerifyCase(Shape(100, 70, batch=2), "cpu")
    pool, pages = case.paged()
    assert pool.shape == (6, 64, 1, 576) and pages.shape == (2, 3)
    assert torch.equal(pool[pages.long()].reshape(2, -1, 576)[:, :170], case.rows)
    assert not torch.equal(pages.flatten(), torch.arange(6))


def test_the_table_names_absent_peers_and_missing_kernels() -> None:
    row = measure(Shape(40, 3), [1.0] * 9) | {"of_floor": None}
    found = {
        "gpu": {"name": "GPU X", "clocks.sm": "5 MHz", "after": {}},
        "peers": {"chain": "1.2", "refusing": "3", "broken": "4", "absent": None},
        "rows": [row],
        "ladder": [{"shape": "40 q=3", "kernel": "naive", "not_run": "no such kernel"}],
        "plan_us": 6.0,
        "move": {"us": 200.0, "hashed_us": 210.0, "copy_us": 160.0, "gb_s": 3000.0},
    }
    text = "\n".join(bench_verify.table(found))
    assert "name GPU X, clocks.sm 5 MHz" in text and "peer: absent is not installed" in text
    assert "x chain | x refusing | x broken" in text and "1.00" in text and "no such kernel" in text
    assert "plan of 64 requests: 6.0 us" in text and "200 us, 3000 GB/s, 80 % of a copy" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="NOT run: there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, str(ROOT / "bench/bench_verify.py"), "--json"]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout)["not_measured"], done.stderr


def test_floors_are_the_arithmetic_of_the_plan() -> None:
    """185,000 tokens are 213 MB; 64 nodes of 8 heads are 206 GFLOP: 48 us of memory, 343 us of mma.sync on an H200."""
    shapes = {shape.name: shape for shape in SHAPES}
    one, many = shapes["185,000 q=1"], shapes["185,000 q=64"]
    assert round(one.bytes / 1e6) == 213 and round(many.flop / 1e9) == 206
    assert round(roofline.H200.floor_us(one)) == 48 and round(roofline.H200.floor_us(many)) == 344
    assert round(roofline.PRO_6000.floor_us(one)) == 119 and round(roofline.PRO_6000.floor_us(many)) == 409
    assert roofline.of("NVIDIA H200") is roofline.H200 and roofline.of("NVIDIA H100") is None


LOOP = {"HMMA": 72, "LDSM.4": 18, "LDS.128": 6, "STS.128": 4, "IADD3": 50}, {"HMMA": 32, "LDSM.4": 8, "MUFU": 160}


def test_a_tile_keeps_units_busy_as_counted_by_hand() -> None:
    """64 rows: 4 QK and 8 PV warps; 544 products of 4 clk on sm_120; shared memory moves 128 B a clk."""
    busy = roofline.PRO_6000.tile_clk(64, dict(zip(("qk", "pv"), LOOP, strict=True)))
    assert busy == {
        "tensor": (4 * 72 + 8 * 32) * 4,
        "shared": 144 + 4 * (18 * 4 + 6 * 4 + 4 * 4) + 8 * 8 * 4,
        "issue": (4 * 150 + 8 * 200) / 4,
    }


@pytest.mark.parametrize("counted", [True, False])
def test_the_roofline_prints_with_and_without_instruction_counts(
    counted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    of_arch = {rows: dict(zip(("qk", "pv"), LOOP, strict=True)) for rows in ("16", "32", "64")}
    found = {"sass": {"sm_90": of_arch, "sm_120": of_arch}, "rows": [{"shape": "185,000 q=64", "us": 555.5}]}
    monkeypatch.setattr(roofline, "evidence", lambda: found if counted else None)
    monkeypatch.setattr(cubins, "disassembler", lambda: None)
    monkeypatch.setattr(sys, "argv", ["roofline.py", "--json"])
    roofline.main()
    printed = json.loads(capsys.readouterr().out)
    row = {row["shape"]: row for row in printed["shapes"]}["185,000 q=64"]
    assert row["RTX PRO 6000 floor us"] == "409.3 tensor" and "model" in printed["sources"]["RTX PRO 6000"]
    if counted:
        assert row["H200 measured us"] == 555.5 and float(row["RTX PRO 6000 model us"]) > 409.3
        assert len(printed["tiles"]) == 6 and printed["sources"]["instructions"] == "of the evidence file"
    else:
        assert row["H200 measured us"] is row["RTX PRO 6000 model us"] is None and printed["tiles"] == []


SASS = """
.text.kernel:
.L_x_1:
        /*0010*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0030*/              @!P0 BRA `(.L_x_2) ;
        /*0040*/                   FMUL R1, R2, R3 ;
        /*0050*/                   FMUL R1, R2, R3 ;
.L_x_2:
        /*0060*/               @P1 BRA `(.L_x_1) ;
.L_x_3:
        /*0070*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0080*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0090*/              @!UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        /*00a0*/                   STS.128 [R2], R4 ;
        /*00b0*/               @P1 BRA `(.L_x_3) ;
.L_x_4:
        /*00c0*/                   IADD3 R1, R1, 0x1, RZ ;
        /*00d0*/               @P2 BRA `(.L_x_4) ;
        /*00e0*/               @P3 BRA `(.L_x_1) ;
        /*00f0*/                   EXIT ;
"""


def test_loops_are_read_from_machine_code() -> None:
    """Innermost loops with tensor instructions: no outer loop, none without, nothing that a branch skips."""
    pv, qk = cubins.loops_with_mma(SASS)
    assert pv == {"BRA": 2, "HMMA": 1, "LDSM.4": 1}
    assert qk == {"BRA": 1, "HMMA": 2, "STS.128": 1, "UIADD3": 1}
    assert cubins.roles([pv, qk, qk | {"LOP3": 9}]) == {"qk": qk, "pv": pv}


needs_tools = pytest.mark.skipif(
    not (shutil.which("nvcc") and cubins.disassembler()), reason="NOT run: no nvcc and nvdisasm"
)


@needs_tools
def test_tensor_instructions_of_a_tile_are_those_that_the_arithmetic_needs(tmp_path: Path) -> None:
    """No product is computed twice: 16 tokens x rows x (576 + 512) of multiply-adds, in pieces of 16 x 8 x 16."""
    for loops in cubins.tile_loops(cubins.build_library(tmp_path), tmp_path).values():
        assert set(loops) == {"16", "32", "64"}
        for rows, of_roles in loops.items():
            counted = sum(roofline.WARPS[rows][role] * loop["HMMA"] for role, loop in of_roles.items())
            assert counted == int(rows) * 16 * 1088 // (16 * 8 * 16)
