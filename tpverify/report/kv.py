"""The KV pool before and after defrag: a scripted life of sequences, on the host alone, as a picture and a table."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from rich.table import Table

from tpverify.errors import ArgumentError
from tpverify.kv import extents
from tpverify.kv.log import CACHE, NOBODY, KvLog, Move, Replica
from tpverify.kv.slots import FREE
from tpverify.report import png
from tpverify.report.screen import Screen

NUM_SLOTS, SEQUENCES, STEPS, BUDGET, SEED = 4096, 12, 40, 8, 1
ROW_BYTES = 61 * 576 * 2  # of one position in Kimi-K2: 61 layers, 512 + 64 wide, bfloat16
ROWS_AT_ONCE = 512  # of a wave
ACROSS, CELL, GAP = 128, 5, 10  # slots a line; pixels of a slot, and between the two maps
BLANK, FREE_COLOUR, CACHE_COLOUR, FIRST = range(4)  # the sequences' from there on
COLOURS = np.array(
    [
        *((255, 255, 255), (226, 226, 226), (120, 120, 120)),
        *((31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189), (140, 86, 75)),
        *((227, 119, 194), (188, 189, 34), (23, 190, 207), (102, 194, 255), (255, 200, 120), (150, 220, 150)),
    ],
    np.uint8,
)


@dataclass(frozen=True)
class Pool:
    """What one moment of the pool looks like. worst: extents of the most scattered sequence."""

    extents: int
    worst: int
    free: int
    free_runs: int
    longest_free_run: int
    live: int
    cached: int
    sequences: int

    @classmethod
    def of(cls, log: KvLog) -> "Pool":
        counts, stats = log.extents().values(), log.stats()
        free = np.flatnonzero(log.slot_map()[0] == FREE).astype(np.int32)
        first = np.flatnonzero(extents.begins(free))
        runs = np.diff(first, append=free.size)
        kept = (stats[name] for name in ("live", "cached", "sequences"))
        return cls(sum(counts), max(counts), free.size, runs.size, int(runs.max(initial=0)), *kept)


@dataclass(frozen=True)
class Defragged:
    """A defrag from start to end. bytes: of rows, on each rank of Kimi-K2. log_bytes: of the moves' entries."""

    before: Pool
    after: Pool
    waves: int
    moves: int
    bytes: int
    log_bytes: int


def defragged() -> tuple[Defragged, bytes]:
    """And its picture. Sequences decode side by side with trees, some on a shared prefix, and some end; then defrag
    until it is done. A replica follows the log, and its digest is checked."""
    log, replica = KvLog(NUM_SLOTS), Replica(NUM_SLOTS)
    _live(log)
    _follow(log, replica)
    before, first_map = Pool.of(log), _map(log)
    waves = moves = log_bytes = 0
    while not (moved := log.defrag(ROWS_AT_ONCE)).done:
        waves, moves = waves + (moved.moves > 0), moves + moved.moves
        log_bytes += _follow(log, replica)
    gap = np.full((GAP, ACROSS * CELL), BLANK, np.uint8)
    picture = png.encode(np.concatenate([first_map, gap, _map(log)]), COLOURS)
    return Defragged(before, Pool.of(log), waves, moves, moves * ROW_BYTES, log_bytes), picture


def show(out: str | None, screen: Screen) -> None:
    """Print it; write the picture to the file `out`, if there is one. Raises ArgumentError if it cannot be written."""
    result, picture = defragged()
    if out is not None:
        try:
            Path(out).write_bytes(picture)
        except (OSError, ValueError) as error:
            raise ArgumentError("out", "a file that can be written", error) from error
    if screen.as_json:
        pools = {"before": vars(result.before), "after": vars(result.after)}
        screen.json(vars(result) | pools | {"num_slots": NUM_SLOTS, "out": out})
        return
    screen.print(
        _table(result),
        f"{result.moves} rows moved in {result.waves} waves, {result.moves / result.before.live:.2f} a live row: "
        f"{result.bytes / 1e6:.0f} MB on each rank at {ROW_BYTES:,} B a row (Kimi-K2), {result.log_bytes:,} B of log",
    )
    if out is not None:
        screen.print(f"{out}: before above, after below; a colour a sequence, dark grey the cache's, light grey free")


def _live(log: KvLog) -> None:
    draw = np.random.default_rng(SEED)
    prompt = draw.integers(0, 1000, 150)
    texts: dict[int, list[int]] = {}

    def begin(shared: int) -> None:
        text = [*prompt[:shared].tolist(), *draw.integers(0, 1000, int(draw.integers(20, 120))).tolist()]
        seq = log.open(text)
        log.append(seq, len(text) - log.length(seq))
        texts[seq] = text

    def end(seq: int) -> None:
        log.close(seq, texts.pop(seq))

    begin(150)
    end(next(iter(texts)))
    for index in range(SEQUENCES):
        begin(150 if index % 3 == 0 else 0)
    for step in range(STEPS):
        for seq, text in texts.items():
            log.draft(seq, BUDGET + 1)
            path = np.flatnonzero(draw.random(BUDGET + 1) < 0.3)
            path = np.union1d(path, [0])
            log.commit(seq, path)
            text += draw.integers(0, 1000, path.size).tolist()
        log.acknowledge()
        if step % 10 == 9:
            end(next(iter(texts)))
            begin(150 if step % 20 == 9 else 0)


def _follow(log: KvLog, replica: Replica) -> int:
    """A step: the replica applies what is pending. Returns the bytes of its moves."""
    first, entries = log.pending()
    digest = replica.apply(first, entries)
    assert digest == log.digest()
    log.acknowledge()
    return sum(len(msgspec.msgpack.encode(entry)) for entry in entries if isinstance(entry, Move))


def _map(log: KvLog) -> npt.NDArray[np.uint8]:
    """A cell a slot, ACROSS in a line."""
    _, owners = log.slot_map()
    sequences = np.unique(owners[owners >= 0])
    colours = FIRST + np.searchsorted(sequences, owners) % (len(COLOURS) - FIRST)
    colours[owners == CACHE] = CACHE_COLOUR
    colours[owners == NOBODY] = FREE_COLOUR
    cells = colours.astype(np.uint8).reshape(-1, ACROSS)
    return cells.repeat(CELL, axis=0).repeat(CELL, axis=1)


def _table(result: Defragged) -> Table:
    table = Table(title=f"{NUM_SLOTS} slots, {result.before.sequences} sequences open", title_justify="left")
    table.add_column("")
    for heading in ("live", "cached", "free", "extents", "of the worst", "free runs", "longest"):
        table.add_column(heading, justify="right")
    for name, pool in (("before", result.before), ("after", result.after)):
        numbers = (
            *(pool.live, pool.cached, pool.free, pool.extents, pool.worst),
            *(pool.free_runs, pool.longest_free_run),
        )
        table.add_row(name, *map(str, numbers))
    return table
