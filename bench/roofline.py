"""How fast the verify kernel can be: floors for H200 and RTX PRO 6000 side by side, and a model of each.

    python bench/roofline.py [--json]

A floor is the longer of moving every byte once and of all tensor work, at a GPU's best rates. The model takes the
instructions of a tile from the machine code (SASS) of each architecture, finds which of an SM's units they keep busy
longest, and adds what a launch costs. It knows nothing of latencies. Nothing was ever run on an RTX PRO 6000.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cubins
from verify_case import ROW, SHAPES, Shape

from tpverify.ops.cuda import choose_tile_rows

RESULTS = Path(__file__).parent / "results"
TILE_TOKENS = 16
MMA_FLOP = 2 * 16 * 8 * 16  # of mma.m16n8k16
SHARED_BYTES_PER_CLK = 128
WARPS = {"16": {"qk": 2, "pv": 4}, "32": {"qk": 4, "pv": 8}, "64": {"qk": 4, "pv": 8}}  # of a block, by its rows
# Clocks of the data pipe for what one warp reads or writes at once.
SHARED_CLK = {
    "LDSM.4": 4, "LDSM.2": 2, "LDS.128": 4, "LDS.64": 2, "LDS": 1,
    "STSM.4": 4, "STSM.2": 2, "STS.128": 4, "STS.64": 2, "STS": 1,
}  # fmt: skip
LAUNCH_US = 8.0  # of a short prefix on a cold H200, before bandwidth matters


@dataclass(frozen=True)
class Gpu:
    """Best rates for the floor; sustained ones for the model."""

    name: str
    arch: str
    multiprocessors: int
    tb_s: float
    tflop_s: float
    sustained_tb_s: float
    ghz: float
    mma_clk: float  # of an SM's tensor cores for one mma.m16n8k16
    source: str

    def memory_us(self, shape: Shape) -> float:
        return shape.bytes / self.tb_s / 1e6

    def tensor_us(self, shape: Shape) -> float:
        return shape.flop / self.tflop_s / 1e6

    def floor_us(self, shape: Shape) -> float:
        return max(self.memory_us(shape), self.tensor_us(shape))

    def tile_clk(self, rows: int, loops: dict[str, dict[str, int]]) -> dict[str, float]:
        """Clocks that a tile of 16 tokens keeps each unit of an SM busy. loops: as cubins.tile_loops has them."""
        warps = WARPS[str(rows)]

        def total(cost: dict[str, float]) -> float:
            return sum(warps[role] * cost.get(kind, 0) * n for role, loop in loops.items() for kind, n in loop.items())

        issued = sum(warps[role] * sum(loop.values()) for role, loop in loops.items())
        fill = TILE_TOKENS * ROW * 2 / SHARED_BYTES_PER_CLK
        return {"tensor": total({"HMMA": self.mma_clk}), "shared": fill + total(dict(SHARED_CLK)), "issue": issued / 4}

    def modelled_us(self, shape: Shape, loops: dict[str, dict[str, dict[str, int]]]) -> float:
        requests = [(shape.prefix, shape.nodes)] * shape.batch
        rows = choose_tile_rows(requests, shape.heads, self.multiprocessors)
        blocks = shape.batch * -(-shape.nodes * shape.heads // rows)
        tiles = blocks * -(-(shape.prefix + shape.nodes) // TILE_TOKENS) / self.multiprocessors
        busy = tiles * max(self.tile_clk(rows, loops[str(rows)]).values()) / self.ghz / 1e3
        return LAUNCH_US + max(busy, shape.bytes / self.sustained_tb_s / 1e6)


H200 = Gpu(
    "NVIDIA H200", "sm_90", 132, 4.4, 600.0, 4.3, 1.98, MMA_FLOP / (600e12 / 132 / 1.98e9),
    "measured: 4.36 to 4.44 TB/s read, mma.sync 560 to 632 TFLOP/s",
)  # fmt: skip
PRO_6000 = Gpu(
    "RTX PRO 6000", "sm_120", 188, 1.792, 503.8, 1.53, 2.06, MMA_FLOP / 1024,
    "model: data sheet 1,792 GB/s and 504 TFLOP/s; sustained 1,532 GB/s and 2.06 GHz as others measured",
)  # fmt: skip
GPUS = (H200, PRO_6000)


def of(name: str) -> Gpu | None:
    """The GPU that a driver calls `name`."""
    return next((gpu for gpu in GPUS if gpu.name in name), None)


def evidence() -> dict[str, Any] | None:
    """The evidence file of the H200, which holds instruction counts and times."""
    path = RESULTS / "nvidia-h200.json"
    return json.loads(path.read_text()) if path.is_file() else None


def instruction_counts(found: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str]:
    """Of a fresh build where a compiler and a disassembler are; else those of the evidence file. And which."""
    if cubins.disassembler() and cubins.toolkit():
        with tempfile.TemporaryDirectory() as folder:
            return cubins.tile_loops(cubins.build_library(Path(folder)), Path(folder)), "of a fresh build"
    return (found["sass"], "of the evidence file") if found else (None, "no disassembler and no evidence file")


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a table of aligned columns."""
    cells = [list(rows[0]), *[["-" if value is None else str(value) for value in row.values()] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [" | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def shape_rows(loops: dict[str, Any] | None, measured: dict[str, float]) -> list[dict[str, Any]]:
    rows = []
    for shape in SHAPES:
        row: dict[str, Any] = {"shape": shape.name}
        for gpu in GPUS:
            bound = "memory" if gpu.memory_us(shape) > gpu.tensor_us(shape) else "tensor"
            row[f"{gpu.name} floor us"] = f"{gpu.floor_us(shape):.1f} {bound}"
            row[f"{gpu.name} model us"] = f"{gpu.modelled_us(shape, loops[gpu.arch]):.1f}" if loops else None
        row["H200 measured us"] = measured.get(shape.name)
        rows.append(row)
    return rows


def tile_rows(loops: dict[str, Any]) -> list[dict[str, Any]]:
    """Per tile of 16 tokens: instructions of a warp of each role, and clocks of each unit of an SM."""
    rows = []
    for gpu in GPUS:
        for size, of_roles in sorted(loops[gpu.arch].items()):
            row: dict[str, Any] = {"arch": gpu.arch, "rows": size}
            for role, loop in of_roles.items():
                row[f"{role} warps"] = WARPS[size][role]
                row[f"{role} mma"], row[f"{role} all"] = loop["HMMA"], sum(loop.values())
            busy = gpu.tile_clk(int(size), of_roles)
            rows.append(row | {f"{unit} clk": round(clk) for unit, clk in busy.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = evidence()
    loops, source = instruction_counts(found)
    measured = {row["shape"]: row["us"] for row in found["rows"]} if found else {}
    shapes, tiles = shape_rows(loops, measured), tile_rows(loops) if loops else []
    if args.json:
        sources = {gpu.name: gpu.source for gpu in GPUS} | {"instructions": source}
        print(json.dumps({"sources": sources, "shapes": shapes, "tiles": tiles}, indent=2))
        return
    for gpu in GPUS:
        print(f"{gpu.name}: {gpu.source}")
    print(
        f"\nBusy clocks of an SM a tile of 16 tokens, instructions {source}", *(table(tiles) if tiles else []), sep="\n"
    )
    print("\nmain + combine", *table(shapes), sep="\n")


if __name__ == "__main__":
    main()
