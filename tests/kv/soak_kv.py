"""Random operations on a pool kept 95 % full, with faulty ranks and a faulty channel, for as long as asked.

python tests/kv/soak_kv.py [--minutes 30] [--seed 0]

Everything is compared after every step, as in the tests. The last line is one JSON object: what happened, and that all
slots were free again at the end.
"""

import argparse
import json
import random
import time

from kv_world import OPERATIONS, World

LOAD = 0.95
GROWTH = ["open", "append", "append", "draft", "commit", "commit"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    world = World(num_slots=1000, ranks=4, max_sequences=40, vocabulary=2, faults=0.02)
    names, weights = list(OPERATIONS), list(OPERATIONS.values())
    loads, operations = [], 0
    start = shown = time.monotonic()
    while time.monotonic() < start + 60 * args.minutes:
        stats = world.log.stats()
        load = 1 - stats["free"] / max(1, sum(stats[k] for k in ("free", "scratch", "live", "quarantined")))
        loads.append(load)
        name = rng.choice(GROWTH) if load < LOAD and rng.random() < 0.8 else rng.choices(names, weights)[0]
        getattr(world, name)(rng)
        operations += 1
        if time.monotonic() > shown + 60:
            shown = time.monotonic()
            print(f"{(shown - start) / 60:.0f} min, {operations} operations, {world.counts}", flush=True)
    last = world.log.stats()
    world.end()
    result = {"minutes": args.minutes, "seed": args.seed, "operations": operations, "counts": world.counts}
    print(json.dumps(result | {"mean_load": sum(loads) / len(loads), "last": last, "balanced": True}))


if __name__ == "__main__":
    main()
