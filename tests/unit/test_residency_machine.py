"""The residency engine under random operations, each command checked by a model (`residency_model`) that knows every
byte: no slot with two owners, nothing read before it is complete, nothing in use overwritten, coldest first,
everything admitted published or given back, every lease granted in the end."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from residency_model import Tier

from sparkd.residency.leases import Use
from sparkd.residency.slabs import LayerSize, SlabSize

#: (layers, slabs): scarce, scarcer, with spare slots, and one slab that holds all its records.
TIERS = {
    "two slabs": ([LayerSize(0, 6), LayerSize(0, 6), LayerSize(1, 6)], [SlabSize(6, 2), SlabSize(4, 1)]),
    "two slots": ([LayerSize(0, 5)], [SlabSize(2, 1)]),
    "spare": ([LayerSize(0, 8), LayerSize(0, 8)], [SlabSize(9, 3, spare=2)]),
    "parts alone": ([LayerSize(0, 5)], [SlabSize(2, 2)]),
    "one is full": ([LayerSize(0, 4), LayerSize(1, 6)], [SlabSize(4, 0), SlabSize(5, 2)]),
}
WORKERS = 2
WORKER = st.integers(0, WORKERS - 1)
USE = st.sampled_from(Use)
PICK = st.integers(0, 1 << 16)
PICKS = st.lists(PICK, min_size=1, max_size=4)


class Machine(RuleBasedStateMachine):
    tier: Tier

    @initialize(name=st.sampled_from(sorted(TIERS)))
    def start(self, name):
        self.tier = Tier(*TIERS[name], workers=WORKERS)

    def pick(self, number, items):
        items = list(items)
        assume(items)
        return items[number % len(items)]

    def records(self, picks):
        return list(dict.fromkeys(self.pick(number, self.tier.records) for number in picks))

    @rule(worker=WORKER, picks=PICKS, layer=PICK, use=USE)
    def stage(self, worker, picks, layer, use):
        assume(self.tier.workers[worker].alive)
        layer %= len(self.tier.layers)
        experts = [number % self.tier.layers[layer].experts for number in picks]
        self.tier.stage(worker, self.tier.part(layer, experts), use)

    @precondition(lambda self: self.tier.asked)
    @rule(number=PICK)
    def release(self, number):
        self.tier.release(self.pick(number, self.tier.asked))

    @rule(worker=WORKER, picks=PICKS)
    def foresee(self, worker, picks):
        assume(self.tier.workers[worker].alive)
        self.tier.foresee(worker, self.records(picks))

    @rule(picks=PICKS)
    def admit(self, picks):
        self.tier.admit(self.records(picks))

    @rule(worker=WORKER, picks=PICKS, use=USE)
    def used(self, worker, picks, use):
        self.tier.used(worker, self.records(picks), use)

    @rule(seed=PICK, ring=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    def place(self, seed, ring):
        self.tier.place(*placement(self.tier, random.Random(seed), ring))

    @rule(limit=st.integers(0, 3))
    def swap(self, limit):
        self.tier.swap(limit)

    @rule(number=PICK, picks=PICKS)
    def close(self, number, picks):
        """Of a slab that nobody counts on holding everything; an ordinary slot stays."""
        slab = number % len(self.tier.slabs)
        size = self.tier.slabs[slab]
        open_slots = [slot for slot in range(1, size.ordinary) if (slab, slot) not in self.tier.closed]
        assume(size.reserve and open_slots)
        self.tier.close(slab, {self.pick(pick, open_slots) for pick in picks})

    @precondition(lambda self: self.tier.closed)
    @rule(number=PICK)
    def reopen(self, number):
        slab, slot = self.pick(number, sorted(self.tier.closed))
        self.tier.reopen(slab, [slot])

    @rule(number=PICK)
    def cancel(self, number):
        self.tier.cancel(self.pick(number, self.tier.records))

    @precondition(lambda self: self.tier.copies)
    @rule(number=PICK)
    def copied(self, number):
        self.tier.copied(self.pick(number, self.tier.copies))

    @precondition(lambda self: self.tier.copies)
    @rule(number=PICK)
    def copy_failed(self, number):
        self.tier.failed(self.pick(number, self.tier.copies))

    @rule()
    def publish(self):
        self.tier.publish()

    @rule(worker=WORKER)
    def begin(self, worker):
        assume(self.tier.workers[worker].alive and len(self.tier.workers[worker].running) < 2)
        self.tier.begin(worker)

    @rule(worker=WORKER)
    def end(self, worker):
        assume(self.tier.workers[worker].running)
        self.tier.end(worker)

    @rule()
    def observe(self):
        self.tier.observe()

    @rule(worker=WORKER)
    def attach(self, worker):
        self.tier.attach(worker)

    @rule(worker=WORKER)
    def gone(self, worker):
        self.tier.gone(worker)

    @rule()
    def restart_owner(self):
        self.tier.restart_owner()

    @invariant()
    def check(self):
        if hasattr(self, "tier"):
            self.tier.check()

    def teardown(self):
        if hasattr(self, "tier"):
            self.tier.settle()


TestRandomOperations = Machine.TestCase
TestRandomOperations.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def placement(tier: Tier, rng: random.Random, ring: float) -> tuple[list[list[int]], float, float]:
    """Hot sets that fill what the ring leaves, or less, and any half-life."""
    sizes = [SlabSize(use.slots, use.reserve) for use in tier.engine.slab_use()]
    room = [size.hot(ring) for size in sizes]
    hot: list[list[int]] = []
    for layer in tier.layers:
        count = rng.randint(0, min(room[layer.slab], layer.experts))
        room[layer.slab] -= count
        hot.append(rng.sample(range(layer.experts), count))
    return hot, ring, rng.choice([1.0, 2.5, 64.0])


OPERATIONS = 20_000
#: How often each operation is tried.
MIX = {
    "stage": 20,
    "release": 14,
    "copied": 40,
    "failed": 2,
    "publish": 14,
    "begin": 12,
    "end": 14,
    "observe": 14,
    "admit": 12,
    "used": 14,
    "place": 1,
    "swap": 5,
    "cancel": 2,
    "attach": 0.6,
    "gone": 0.3,
    "restart": 0.1,
}


@pytest.mark.parametrize("name", sorted(TIERS))
def test_a_long_random_life_breaks_no_promise(name):
    rng = random.Random(name)
    tier = Tier(*TIERS[name], workers=WORKERS)
    operations = rng.choices(list(MIX), list(MIX.values()), k=OPERATIONS)
    for number, operation in enumerate(operations):
        perform(tier, operation, rng)
        tier.check()
        if number % 500 == 0:
            tier.settle()
    tier.settle()
    assert tier.granted > 100


def perform(tier: Tier, operation: str, rng: random.Random) -> None:
    worker = rng.randrange(WORKERS)
    one = tier.workers[worker]
    some = rng.sample(tier.records, rng.randint(1, min(5, len(tier.records))))
    use = rng.choice(list(Use))
    match operation:
        case "stage" if one.alive:
            layer = rng.randrange(len(tier.layers))
            experts = rng.choices(range(tier.layers[layer].experts), k=4)
            tier.stage(worker, tier.part(layer, experts), use)
        case "release" if tier.asked:
            tier.release(rng.choice(list(tier.asked)))
        case "copied" if tier.copies:
            tier.copied(rng.choice(tier.copies))
        case "failed" if tier.copies:
            tier.failed(rng.choice(tier.copies))
        case "publish":
            tier.publish()
        case "begin" if one.alive and len(one.running) < 2:
            tier.begin(worker)
        case "end" if one.running:
            tier.end(worker)
        case "observe":
            tier.observe()
        case "admit":
            tier.admit(some)
        case "used":
            tier.used(worker, some, use)
        case "place":
            tier.place(*placement(tier, rng, rng.choice([0.0, 0.3, 0.5, 1.0])))
        case "swap":
            tier.swap(rng.randint(0, 3))
        case "cancel":
            tier.cancel(some[0])
        case "attach":
            tier.attach(worker)
        case "gone":
            tier.gone(worker)
        case "restart":
            tier.restart_owner()
