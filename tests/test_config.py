"""Arguments are checked alike everywhere: any integer or real type is taken, a bool is neither, nothing else leaks."""

from typing import Any

import numpy as np
import pytest
import torch

from tpverify.config import MlaGeometry, RuntimeConfig, check_choice, check_int, check_number, check_type
from tpverify.errors import ArgumentError

GEOMETRY = MlaGeometry(num_heads=8)


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.array(3), torch.tensor(3)])
def test_any_integer_type_becomes_an_int(value: Any) -> None:
    assert type(check_int("n", value, 0, 3)) is int and check_int("n", value, 0, 3) == 3


@pytest.mark.parametrize(
    "value",
    [
        True,
        np.True_,
        3.0,
        np.float32(3),
        "3",
        None,
        -1,
        4,
        np.int64(4),
        pytest.param(10**5000, id="5001 digits"),
        [3],
        np.arange(2),
        Broken(),
    ],
)
def test_what_is_no_integer_of_the_range_is_named(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^n: expected an int from 0 to 3, got .+$") as error:
        check_int("n", value, 0, 3)
    assert len(str(error.value)) < 150


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.float64(1), np.int16(1)])
def test_any_real_type_becomes_a_float(value: Any) -> None:
    assert type(check_number("x", value, "a number", 0, 1)) is float


@pytest.mark.parametrize(
    "value",
    [True, "1", None, 1j, float("nan"), float("inf"), 10**400, pytest.param(10**5000, id="5001 digits"), 1.5, [1.0]],
)
def test_what_is_no_number_of_the_range_is_named(value: Any) -> None:
    with pytest.raises(ArgumentError, match="^x: expected a number, got "):
        check_number("x", value, "a number", 0, 1)


@pytest.mark.parametrize("value", ["d", None, 1, ["a"], np.array(["a", "b"])])
def test_what_is_no_choice_or_no_such_type_is_named(value: Any) -> None:
    with pytest.raises(ArgumentError, match="^kind: expected one of a, b, got "):
        check_choice("kind", value, ("a", "b"))
    with pytest.raises(ArgumentError, match="^kind: expected bytes, got "):
        check_type("kind", value, bytes, "bytes")


BAD_CONFIGS: list[tuple[str, Any]] = [
    ("geometry", None), ("geometry", 64), ("tp", None), ("tp", True), ("tp", 3), ("device", None), ("device", ["cpu"]),
    ("dtype", 32), ("num_layers", 1.0), ("num_slots", "65536"), ("max_batch", np.float64(8)), ("max_nodes", 1025),
    ("deadline_s", "30"), ("deadline_s", True), ("deadline_s", None), ("deadline_s", 0), ("deadline_s", float("nan")),
    ("oversubscribe", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_CONFIGS)
def test_a_bad_runtime_config_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: expected "):
        RuntimeConfig(**{"tp": 2, "geometry": GEOMETRY} | {name: value})


def test_configs_keep_plain_numbers() -> None:
    """Messages to ranks carry ints and floats; numpy's own types are not among what they can encode."""
    cfg = RuntimeConfig(
        tp=np.int64(2), geometry=MlaGeometry(np.int32(8)), num_slots=np.uint16(9), deadline_s=np.float32(2)
    )
    assert (cfg.tp, cfg.geometry.num_heads, cfg.num_slots, cfg.deadline_s) == (2, 8, 9, 2.0)
    values = (cfg.tp, cfg.geometry.num_heads, cfg.num_slots, cfg.deadline_s)
    assert [type(value) for value in values] == [int, int, int, float]


@pytest.mark.parametrize("name", ["num_heads", "kv_lora_rank", "qk_rope_head_dim"])
@pytest.mark.parametrize("value", [None, "8", True, -1])
def test_a_bad_geometry_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^geometry.{name}: expected an int from "):
        MlaGeometry(**{"num_heads": 8} | {name: value})
