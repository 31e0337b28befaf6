"""Is verify attention right, and the same on every number of ranks? Random trees and prefixes decide."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpverify.config import MlaGeometry, RuntimeConfig
from tpverify.errors import ArgumentError
from tpverify.report import oracle
from tpverify.runtime.device import for_attention
from tpverify.runtime.ranks import RankGroup
from tpverify.runtime.runtime import Draft, VerifyRuntime
from tpverify.tree import DraftTree

# Around the 64-position chunks of the reference and the 64-bit words of the tree mask, and both far beyond.
PREFIXES = (0, 1, 63, 64, 65, 1000)
NODES = (1, 8, 33, 129)
HEADS = (8, 16, 64)
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}  # that ranks take, by device
BATCHES = (1, 3)
ROW_DIM = 576
SCALE = ROW_DIM**-0.5
Result = tuple[Tensor, Tensor]  # out and lse of a request
FARTHEST_PARENT = (8, 1024)  # of a node, counted in nodes back: narrow deep trees, and wide shallow ones


@dataclass(frozen=True)
class Case:
    """`batch` requests of a step. The first has `prefix` committed tokens and `n` nodes, the others draw theirs."""

    prefix: int
    n: int
    heads: int
    dtype: str
    batch: int
    seed: int


@dataclass(frozen=True)
class Outcome:
    """Largest errors on tp ranks against float64 and what is allowed; whether tp ranks gave the bits of one rank."""

    case: Case
    out_error: float
    out_tolerance: float
    lse_error: float
    lse_tolerance: float
    same_out: bool
    same_lse: bool

    @property
    def ok(self) -> bool:
        within = self.out_error <= self.out_tolerance and self.lse_error <= self.lse_tolerance  # false for NaN
        return within and self.same_out and self.same_lse

    def row(self) -> dict[str, Any]:
        return asdict(self.case) | {key: value for key, value in vars(self).items() if key != "case"} | {"ok": self.ok}


@dataclass(frozen=True)
class Request:
    """A sequence of a case: committed rows [S, 576], and a tree with queries [n, heads, 576] and rows [n, 576]."""

    prefix: Tensor
    tree: DraftTree
    q: Tensor
    latents: Tensor


def head_counts(tp: int) -> list[int]:
    """Those of HEADS that tp ranks can share. Raises ArgumentError if there is none."""
    fitting = [heads for heads in HEADS if heads % tp == 0]
    if not fitting:
        raise ArgumentError("tp", f"a divisor of {HEADS[-1]} heads", tp)
    return fitting


def device_for(device: str, tp: int) -> str:
    """`device` as RankGroup takes it. Raises ArgumentError for tp or a device that no case can have."""
    return for_attention(device, "bfloat16", MlaGeometry(head_counts(tp)[-1]), 1)[0]


def draw_cases(count: int, tp: int, seed: int, dtypes: Sequence[str] = DTYPES["cpu"]) -> list[Case]:
    """`count` random cases in which every value of every axis comes equally often."""
    draw = random.Random(seed)

    def column(values: Sequence[Any]) -> list[Any]:
        drawn = [values[i % len(values)] for i in range(count)]
        draw.shuffle(drawn)
        return drawn

    axes = [column(values) for values in (PREFIXES, NODES, head_counts(tp), dtypes, BATCHES)]
    axes.append([draw.getrandbits(32) for _ in range(count)])
    return [Case(*values) for values in zip(*axes, strict=True)]


def check(group: RankGroup, tp: int, cases: list[Case]) -> Iterator[Outcome]:
    """Run every case on one rank and on `tp` ranks of the group."""
    for case in cases:
        requests = _requests(case)
        one, many = _run(group, 1, case, requests), _run(group, tp, case, requests)
        yield judge(case, requests, one, many)


def judge(case: Case, requests: list[Request], one: list[Result], many: list[Result]) -> Outcome:
    """Compare each request's result on many ranks with that on one, and with the oracle."""
    measured = [_errors(case, *pair) for pair in zip(requests, many, strict=True)]
    worst = max(measured, key=lambda errors: max(_excess(*errors[:2]), _excess(*errors[2:])))
    pairs = list(zip(one, many, strict=True))
    same_out = all(_same_bits(a[0], b[0]) for a, b in pairs)
    same_lse = all(_same_bits(a[1], b[1]) for a, b in pairs)
    return Outcome(case, *worst, same_out, same_lse)


def _errors(case: Case, request: Request, result: Result) -> tuple[float, float, float, float]:
    """Largest error in out, what is allowed, and the same of lse."""
    dtype = getattr(torch, case.dtype)
    rows, mask = torch.cat([request.prefix, request.latents]), oracle.visible(request.tree, len(request.prefix))
    exact = oracle.attention(request.q, rows, mask, SCALE, torch.float64)
    plain = oracle.attention(request.q, rows, mask, SCALE, dtype)
    out_tolerance, lse_tolerance = oracle.tolerances(plain, exact, dtype)
    out_error, lse_error = (oracle.max_error(*pair) for pair in zip(result, exact, strict=True))
    return out_error, out_tolerance, lse_error, lse_tolerance


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _excess(error: float, tolerance: float) -> float:
    """Error as a multiple of what is allowed: NaN is the worst there is."""
    return error / tolerance if error == error else float("inf")


def _run(group: RankGroup, tp: int, case: Case, requests: list[Request]) -> list[Result]:
    slots = 1 + sum(len(request.prefix) + len(request.tree) for request in requests)
    cfg = RuntimeConfig(
        tp=tp,
        geometry=MlaGeometry(num_heads=case.heads),
        num_slots=slots,
        dtype=case.dtype,
        max_batch=case.batch,
        max_nodes=max(NODES),
    )
    with VerifyRuntime(cfg, group=group) as runtime:
        drafts = {}
        for request in requests:
            seq = runtime.open()
            if len(request.prefix):
                runtime.append(seq, request.prefix)
            drafts[seq] = Draft(request.tree, request.q, request.latents)
        verified = runtime.verify(drafts, softmax_scale=SCALE)
    return [(verified[seq].out, verified[seq].lse) for seq in drafts]


def _requests(case: Case) -> list[Request]:
    draw = np.random.default_rng(case.seed)
    sizes = [(case.prefix, case.n)] + [
        (int(draw.choice(PREFIXES)), int(draw.choice(NODES[:-1]))) for _ in range(case.batch - 1)
    ]
    return [_request(draw, prefix, n, case) for prefix, n in sizes]


def _request(draw: np.random.Generator, prefix: int, n: int, case: Case) -> Request:
    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(draw.standard_normal(shape, np.float32)).to(getattr(torch, case.dtype))

    farthest = draw.choice(FARTHEST_PARENT)
    parents = [-1] + [i - 1 - int(draw.integers(min(i, farthest))) for i in range(1, n)]
    tree = DraftTree.from_parents(np.arange(n), parents)
    return Request(normal(prefix, ROW_DIM), tree, normal(n, case.heads, ROW_DIM), normal(n, ROW_DIM))
