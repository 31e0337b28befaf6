"""The nouns that every other module shares: what an MLA layer looks like and how a runtime is laid out."""

from dataclasses import dataclass, field

from tpverify.errors import ArgumentError

DTYPES = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
MAX_NODES = 1024  # root included: the widest tree one verify step takes
MAX_DEPTH = 64  # drafted nodes below the root


def check_range(argument: str, value: object, low: int, high: int) -> None:
    """Raise ArgumentError unless `value` is an int (not a bool) with low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ArgumentError(argument, f"an int from {low} to {high}", repr(value))


@dataclass(frozen=True)
class MlaGeometry:
    """Multi-head latent attention after absorption: every head reads the same row of kv_lora_rank +
    qk_rope_head_dim."""

    num_heads: int
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64

    def __post_init__(self) -> None:
        check_range("geometry.num_heads", self.num_heads, 1, 1024)
        check_range("geometry.kv_lora_rank", self.kv_lora_rank, 1, 4096)
        check_range("geometry.qk_rope_head_dim", self.qk_rope_head_dim, 0, 4096)

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
        check_range("tp", self.tp, 1, 1024)
        if self.geometry.num_heads % self.tp:
            raise ArgumentError("tp", f"a divisor of the {self.geometry.num_heads} heads", self.tp)
        if self.device not in DEVICES:
            raise ArgumentError("device", f"one of {', '.join(DEVICES)}", repr(self.device))
        if self.dtype not in DTYPES:
            raise ArgumentError("dtype", f"one of {', '.join(DTYPES)}", repr(self.dtype))
        check_range("num_layers", self.num_layers, 1, 1024)
        check_range("num_slots", self.num_slots, 2, 2**31 - 1)
        check_range("max_batch", self.max_batch, 1, 4096)
        check_range("max_nodes", self.max_nodes, 1, MAX_NODES)
        if not 0 < self.deadline_s < 1e6:
            raise ArgumentError("deadline_s", "seconds above 0", self.deadline_s)
