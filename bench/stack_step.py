"""A step of the attention stack at Kimi-K2's depth and width, and what of it is products, kernel, gather and the rest.

Products, kernel and gather are timed together, as a graph that holds these three and nothing else; products and kernel
also alone, and the gather as what a step without it saves. Together they take longer than one by one: each finds the
caches full of what the other read. All is timed in one run. A GPU that has been given all of a step before it begins,
by a pause, waits for no launch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from stage_table import measured

from tpverify.kv.pacer import Pacer
from tpverify.model.stack import KIMI_K2, PARTS, PAUSE
from tpverify.runtime.coordinator import Coordinator
from tpverify.runtime.messages import Decode, DecodeRequest
from tpverify.runtime.ranks import RankGroup

PREFIX, NODES = 32768, 32
GRAPHS = {
    "step": PARTS,
    "all": (PAUSE, *PARTS),
    "gemm": (PAUSE, "gemm"),
    "attention": (PAUSE, "attention"),
    "gather": (PAUSE, "gather"),
    "three": (PAUSE, "gemm", "attention", "gather"),
    "all but gather": (PAUSE, *(part for part in PARTS if part != "gather")),
}


def drafted(seq: int, number: int) -> DecodeRequest:
    """A random tree; siblings differ, and tokens and parents change from step to step."""
    draw = np.random.default_rng(number)
    tokens = (np.arange(NODES) + NODES * number) % KIMI_K2.vocab_size
    parents = np.array([-1, *(draw.integers(0, node) for node in range(1, NODES))])
    return DecodeRequest(seq, tokens.astype("<i8").tobytes(), parents.astype("<i4").tobytes(), False, 0.0, 0, 0)


def run(group: RankGroup, parts: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Wall times of draft, step and commit, and rank 0's stages, with graphs that hold `parts`."""
    num_slots = PREFIX + (NODES + 1) * (steps + 100)
    options = {
        "config": vars(KIMI_K2), "num_slots": num_slots, "buckets": [[1, NODES]], "parts": list(parts), "seed": 0,
    }  # fmt: skip
    coordinator = Coordinator(group, "stack", options, num_slots=num_slots)
    coordinator.pacer = Pacer(share=0.0)  # nothing moves by itself: without all parts, ranks compute rows that differ
    seq = coordinator.log.open()
    coordinator.log.append(seq, PREFIX)
    drafts = iter([drafted(seq, number) for number in range(steps + 100)])  # made before the step, as by a drafter

    def step() -> dict[str, float]:
        coordinator.log.draft(seq, NODES)
        answer = coordinator.step(Decode([next(drafts)]))[0]
        [(path, *_)], seconds = answer.result()
        coordinator.log.commit(seq, np.frombuffer(path, "<i4"))
        return seconds

    return measured(step, steps)


def stack_step(group: RankGroup, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The row of the whole step, with its parts' shares."""
    found = {}
    for name, parts in GRAPHS.items():
        say(f"stack: {name}")
        found[name] = run(group, parts, steps)
    return {"ranks": group.size, **row(found, group.size)}


def row(found: dict[str, dict[str, Any]], ranks: int) -> dict[str, Any]:
    """found: by name of GRAPHS, what `measured` says. other_share: what neither products, kernel nor gather take;
    other_share_alone: the same with each of the three counted by itself.

    Products outside the layers, the first ones ("plan") and the head's: what those stages take longer with products
    than without.
    """
    layers, head, plan = (
        {name: one["stages_us"][stage] for name, one in found.items()} for stage in ("layers", "head", "plan")
    )
    known = {part: layers[part] for part in ("gemm", "attention")}
    known["gather"] = round(layers["all"] - layers["all but gather"], 1)
    between = round(layers["three"] - sum(known.values()), 1)
    rest = round(layers["step"] - layers["three"], 1)
    first, last = plan["gemm"] - plan["attention"], head["step"] - head["attention"]
    known["gemm"] = round(known["gemm"] + first + last, 1)
    stages = {name: us for name, us in found["step"]["stages_us"].items() if name != "layers"}
    stages |= {"plan": round(stages["plan"] - first, 1), "head": head["attention"]}
    wall_us = 1e3 * found["step"]["p50_ms"]
    return found["step"] | {
        "row": f"{KIMI_K2.num_hidden_layers} attention layers of Kimi-K2, no FFN, {NODES} nodes, {PREFIX} committed",
        "stages_us": known | {"between the three": between, "rest of the layers": rest} | stages,
        "other_share": round(1 - (sum(known.values()) + between) / wall_us, 4),
        "other_share_alone": round(1 - sum(known.values()) / wall_us, 4),
        "gather": {
            "in_step_us": known["gather"],
            "alone_us": layers["gather"],
            "layers": KIMI_K2.num_hidden_layers,
            "bytes_a_rank": KIMI_K2.num_attention_heads // ranks * NODES * KIMI_K2.v_head_dim * 2,
        },
    }
