"""`tpverify report kv`: numbers and a picture of one defrag."""

import struct
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tpverify.report import png


def decode(data: bytes) -> np.ndarray:
    """Of an indexed PNG without filters, uint8 [height, width, 3]. Every checksum is compared."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        body, (check,) = data[at + 8 : at + 8 + size], struct.unpack(">I", data[at + 8 + size : at + 12 + size])
        assert zlib.crc32(kind + body) == check
        chunks[kind], at = body, at + 12 + size
    assert list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"] and at == len(data)
    width, height, *rest = struct.unpack(">2I5B", chunks[b"IHDR"])
    assert rest == [8, 3, 0, 0, 0]
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    return np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)[lines[:, 1:]]


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (20, 5)])
def test_a_picture_reads_back_as_it_was(shape: tuple[int, int]) -> None:
    draw = np.random.default_rng(shape[0])
    colours = draw.integers(0, 256, (6, 3)).astype(np.uint8)
    pixels = draw.integers(0, 6, shape).astype(np.uint8)
    assert np.array_equal(decode(png.encode(pixels, colours)), colours[pixels])


def test_numbers(tpverify: Callable) -> None:
    done = tpverify("report", "kv", "--json")
    assert (done.code, done.err) == (0, "")
    found = done.json
    before, after = found["before"], found["after"]
    kept = ("live", "cached", "free", "sequences")
    assert [before[name] for name in kept] == [after[name] for name in kept]
    assert before["live"] + before["free"] == found["num_slots"] - 1
    assert after["extents"] < before["extents"] / 20 and after["worst"] <= 4 < before["worst"]
    assert found["moves"] <= 1.4 * before["live"] and found["bytes"] == found["moves"] * 61 * 576 * 2
    assert tpverify("report", "kv", "--json").json == found, "the same whenever it is asked"


def test_the_picture_shows_the_same_slots_before_and_after(tpverify: Callable, tmp_path: Path) -> None:
    done = tpverify("report", "kv", "--out", str(tmp_path / "kv.png"), "--json")
    assert (done.code, done.err) == (0, "")
    picture, before = decode((tmp_path / "kv.png").read_bytes()), done.json["before"]
    assert picture.shape == (32 * 5 + 10 + 32 * 5, 128 * 5, 3)
    maps = [
        [tuple(cell) for line in half[::5, ::5].tolist() for cell in line] for half in (picture[:160], picture[170:])
    ]
    colours = Counter(maps[0])
    assert colours == Counter(maps[1]) and len(colours) == before["sequences"] + 2
    assert colours[226, 226, 226] == before["free"] + 1, "and the sink"
    assert colours[120, 120, 120] == before["cached"]
    changes = [sum(a != b for a, b in zip(cells, cells[1:], strict=False)) for cells in maps]
    assert changes[1] < changes[0] / 20


def test_the_table(tpverify: Callable, tmp_path: Path) -> None:
    done = tpverify("report", "kv", "--out", str(tmp_path / "kv.png"))
    assert (done.code, done.err) == (0, "")
    assert all(word in done.out for word in ("before", "after", "extents", "free runs", "rows moved in", "B of log"))
    assert "kv.png: before above, after below" in done.out
