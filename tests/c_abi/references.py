"""Writes the reference files that the C program reads: "TPVREF01", then arrays of a name in 24 bytes, uint64 bytes,
data, padding to 8. Attention in float64, a node at a time; moves row by row."""

import random
import struct
from pathlib import Path

import numpy as np
import torch

MAGIC = b"TPVREF01"


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with open(path, "wb") as file:
        file.write(MAGIC)
        for name, array in arrays.items():
            data = np.ascontiguousarray(array).tobytes()
            file.write(struct.pack("<24sQ", name.encode(), len(data)) + data + bytes(-len(data) % 8))


def random_bits(n: int, rng: random.Random) -> np.ndarray:
    """bool [n, n]: row i is true at i and its ancestors in a random tree whose parents come first."""
    bits = np.zeros((n, n), bool)
    for i in range(n):
        if i:
            bits[i] = bits[rng.randrange(max(0, i - rng.choice((1, 8, n))), i)]
        bits[i, i] = True
    return bits


def verify_arrays(heads: int, lengths: list[tuple[int, int]], padded: int, seed: int) -> dict[str, np.ndarray]:
    """A step of (prefix, nodes) requests and a padded one, with NaN where nobody looks, and `padded` rows more."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens, nodes = sum(s + n for s, n in lengths), sum(n for _, n in lengths)
    q = torch.randn(nodes + padded, heads, 576, generator=generator).bfloat16()
    pool = torch.full((tokens + 9, 576), torch.nan, dtype=torch.bfloat16)
    slots = torch.randperm(tokens + 8, generator=generator)[:tokens] + 1
    pool[slots] = torch.randn(tokens, 576, generator=generator).bfloat16()
    scale = np.float32(576**-0.5)
    out = torch.zeros(nodes + padded, heads, 512, dtype=torch.float64)
    lse = torch.full((nodes + padded, heads), -torch.inf, dtype=torch.float64)
    plain = out.clone()
    words, begins = [], {"slot_begin": [], "node_begin": [], "word_begin": []}
    row = slot = word = 0
    for prefix, n in lengths:
        bits = random_bits(n, rng)
        for name, value in (("slot_begin", slot), ("node_begin", row), ("word_begin", word)):
            begins[name].append(value)
        kv = pool[slots[slot : slot + prefix + n]].double()
        for node in range(n):
            seen = kv[np.concatenate([np.ones(prefix, bool), bits[node]])]
            scores = q[row + node].double() @ seen.T * float(scale)
            weights = scores.softmax(1)
            out[row + node], lse[row + node] = weights @ seen[:, :512], scores.logsumexp(1)
            plain[row + node] = (weights.bfloat16().double() @ seen[:, :512]).bfloat16().double()
        wide = np.zeros((n, -(-n // 64) * 64), bool)
        wide[:, :n] = bits
        words.append(np.packbits(wide, axis=1, bitorder="little").view(np.uint64).reshape(-1))
        row, slot, word = row + n, slot + prefix + n, word + len(words[-1])
    norms = out.norm(dim=2).float() * 1e-5 + 1e-9
    return {
        "sizes": np.array(
            [heads, len(lengths) + 1, max(n for _, n in lengths), sum(s for s, _ in lengths), nodes + padded], np.int32
        ),
        "softmax_scale": scale,
        "slots": slots.numpy().astype(np.int32),
        **{name: np.array([*values, 0], np.int32) for name, values in begins.items()},
        "prefix_len": np.array([*(s for s, _ in lengths), 0], np.int32),
        "nodes": np.array([*(n for _, n in lengths), 0], np.int32),
        "words": np.concatenate(words),
        "q": q.view(torch.int16).numpy(),
        "kv": pool.view(torch.int16).numpy(),
        "out": out.float().numpy(),
        "lse": lse.float().numpy(),
        "fp32_error": norms.numpy(),
        "bf16_error": (2 * (plain - out).norm(dim=2).float() + norms).numpy(),
    }


def hash_of(row: bytes) -> int:
    """As csrc/tpverify.h defines it, with Python's integers."""
    total, mask = 0, 2**64 - 1
    for i in range(len(row) // 8):
        z = int.from_bytes(row[8 * i : 8 * i + 8], "little") + (i + 1) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        total += z ^ z >> 31
    return total & mask


def move_arrays(layers: int, slots: int, row_bytes: int, count: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 256, (layers, slots, row_bytes), np.uint8)
    src, dst = rng.permutation(slots)[: 2 * count].reshape(2, count).astype(np.int32)
    after = before.copy()
    for source, target in zip(src, dst, strict=True):
        after[:, target] = before[:, source]
    hashes = [[hash_of(before[layer, s].tobytes()) for s in src] for layer in range(layers)]
    return {
        "sizes": np.array([layers, slots, row_bytes, count], np.int32),
        "before": before,
        "src": src,
        "dst": dst,
        "after": after,
        "hashes": np.array(hashes, np.uint64),
    }


def write_all(folder: Path) -> list[tuple[Path, Path]]:
    """Pairs of a verify and a move file."""
    verify = [(8, [(1000, 33), (0, 70), (65, 1)], 3, 0), (3, [(17, 5)], 0, 1), (20, [(130, 9), (31, 64)], 1, 2)]
    moves = [(3, 50, 1152, 20, 0), (2, 20, 16, 10, 1), (2, 30, 2304, 9, 2)]
    pairs = []
    for i, (a, b) in enumerate(zip(verify, moves, strict=True)):
        pair = folder / f"verify{i}.bin", folder / f"move{i}.bin"
        write(pair[0], verify_arrays(*a))
        write(pair[1], move_arrays(*b))
        pairs.append(pair)
    return pairs
