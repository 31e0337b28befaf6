"""Random operations on a log, with faulty ranks and a faulty channel; everything is compared after each.

TPVERIFY_KV_OPERATIONS sets how many (10,000 if unset; more than that are drawn afresh at each run).
"""

import os
import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from kv_world import OPERATIONS, World

USUAL = 10_000
TOTAL = int(os.environ.get("TPVERIFY_KV_OPERATIONS", USUAL))
NAMES = [name for name, weight in OPERATIONS.items() for _ in range(weight)]


class WorldMachine(RuleBasedStateMachine):
    @initialize(ranks=st.integers(1, 3), vocabulary=st.integers(1, 3), faults=st.sampled_from([0.0, 0.1, 0.5]))
    def begin(self, ranks, vocabulary, faults):
        self.world = World(ranks=ranks, vocabulary=vocabulary, faults=faults)

    @rule(name=st.sampled_from(NAMES), seed=st.integers(0, 2**32))
    def operate(self, name, seed):
        getattr(self.world, name)(random.Random(seed))
        self.world.check_states()

    def teardown(self):
        self.world.end()


TestWorld = WorldMachine.TestCase
TestWorld.settings = settings(
    max_examples=max(1, TOTAL // 80),
    stateful_step_count=80,
    deadline=None,
    derandomize=TOTAL <= USUAL,
    suppress_health_check=list(HealthCheck),
)
