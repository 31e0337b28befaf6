"""How long it takes to replace a rank that is lost, by part, with the shipped model.

    python bench/bench_recovery.py [--tp 8] [--prefix 1000 8000] [--json]

A rank is killed while it decodes; its tokens are compared with those of a run without the fault.
"""

import argparse
import json
import os
import signal
import sys
import sysconfig
from pathlib import Path
from typing import Any

from tpverify.ending import ended
from tpverify.runtime.engine import Engine

TEXT = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20])
OPTIONS = {"max_new_tokens": 24, "budget": 32}


def measure(engine: Engine, prefix: int, rank: int) -> dict[str, Any]:
    """The rank is killed after the first tokens of a text of so many others."""
    prompt = TEXT[:prefix]
    undisturbed = engine.generate(prompt, **OPTIONS)
    steps = engine.stream(prompt, **OPTIONS)
    next(steps)
    os.kill(engine._group.pids[rank], signal.SIGKILL)
    *_, result = steps
    recovered = engine.stats()["recoveries"][-1]
    same = (result.tokens, result.stats["hidden_digest"]) == (undisturbed.tokens, undisturbed.stats["hidden_digest"])
    seconds = recovered["seconds"]
    return {
        "prefix": prefix,
        "rank": rank,
        "same": same,
        "rows": recovered["rows"],
        "total": sum(seconds.values()),
    } | seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--prefix", type=int, nargs="+", default=[1000, 8000])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with Engine("tiny", arguments.tp, device="cpu", max_restarts=1000) as engine:
        rows = [measure(engine, n, rank) for n in arguments.prefix for rank in {0, arguments.tp - 1}]
    if arguments.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(", ".join(f"{name} {round(value, 2)}" for name, value in row.items()))
    if not all(row["same"] for row in rows):
        raise SystemExit("tokens or hidden states differ from those of a run without the fault")


if __name__ == "__main__":
    sys.exit(ended(Path(__file__).name, main))
