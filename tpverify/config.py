"""The nouns that every other module shares: what an MLA layer looks like and how a runtime is laid out."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real

from tpverify.errors import ArgumentError, describe

DTYPES = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
MAX_NODES = 1024  # root included: the widest tree one verify step takes
MAX_TOKENS = 7 << 28  # of all prefixes of a step, read for each request: TPV_MAX_TOKENS
MAX_DEPTH = 64  # drafted nodes below the root


def check_int(argument: str, value: object, low: int, high: int) -> int:
    """`value`, of any integer type (numpy's too, but no bool), as an int in [low, high]. Raises ArgumentError."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = low - 1
    if isinstance(value, bool) or not low <= number <= high:
        raise ArgumentError(argument, f"an int from {low} to {high}", describe(value))
    return number


def check_number(argument: str, value: object, expected: str, low: float, high: float) -> float:
    """`value`, of any real type but bool, as a float in [low, high]. Raises ArgumentError saying `expected`."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an int beyond any float
        number = math.nan
    if not low <= number <= high:
        raise ArgumentError(argument, expected, describe(value))
    return number


def check_choice(argument: str, value: object, choices: Sequence[str]) -> str:
    """`value` if it is one of `choices`. Raises ArgumentError."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(argument, f"one of {', '.join(choices)}", describe(value))
    return value


def check_type(argument: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise ArgumentError saying `expected` unless `value` is of (one of) the `kind`."""
    if not isinstance(value, kind):
        raise ArgumentError(argument, expected, describe(value))


def check_deadline(value: object) -> float:
    return check_number("deadline_s", value, "seconds above 0", math.ulp(0.0), 1e6)


def set_ints(instance: object, prefix: str, limits: Sequence[tuple[str, int, int]]) -> None:
    """Check the fields (name, low, high) of a frozen dataclass, and keep them as plain ints."""
    for name, low, high in limits:
        object.__setattr__(instance, name, check_int(prefix + name, getattr(instance, name), low, high))


@dataclass(frozen=True)
class MlaGeometry:
    """Multi-head latent attention after absorption: every head reads the same row of kv_lora_rank +
    qk_rope_head_dim."""

    num_heads: int
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64

    def __post_init__(self) -> None:
        limits = (("num_heads", 1, 1024), ("kv_lora_rank", 1, 4096), ("qk_rope_head_dim", 0, 4096))
        set_ints(self, "geometry.", limits)

    @property
    def row_dim(self) -> int:
        """Width of one latent row: the normed latent, then the rotated k_pe."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class RuntimeConfig:
    """A tensor-parallel verify runtime: `tp` ranks, each with a shard of the heads and a replica of the latent pool.

    num_slots counts rows of the pool per layer (slot 0 is the padding sink); deadline_s bounds every wait on the ranks.
    oversubscribe lets several ranks share one GPU: for parity tests only.
    """

    tp: int = 8
    device: str = "auto"
    geometry: MlaGeometry = field(default_factory=lambda: MlaGeometry(num_heads=64))
    num_layers: int = 1
    num_slots: int = 65536
    dtype: str = "float32"
    max_batch: int = 8
    max_nodes: int = 129
    deadline_s: float = 30.0
    oversubscribe: bool = False

    def __post_init__(self) -> None:
        check_type("geometry", self.geometry, MlaGeometry, "an MlaGeometry")
        set_ints(self, "", (("tp", 1, 1024), ("num_layers", 1, 1024), ("num_slots", 2, 2**31 - 1)))
        set_ints(self, "", (("max_batch", 1, 4096), ("max_nodes", 1, MAX_NODES)))
        if self.geometry.num_heads % self.tp:
            raise ArgumentError("tp", f"a divisor of the {self.geometry.num_heads} heads", self.tp)
        check_choice("device", self.device, DEVICES)
        check_choice("dtype", self.dtype, DTYPES)
        object.__setattr__(self, "deadline_s", check_deadline(self.deadline_s))
        check_type("oversubscribe", self.oversubscribe, bool, "a bool")
