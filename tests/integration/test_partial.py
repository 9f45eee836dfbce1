"""A daemon whose host memory is too small for its model: the same tokens, wherever the experts were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon import PATIENCE_S, Daemon, daemon

from spark_client import Client

GIB = 1 << 30
HUGE_PAGE = 2 << 20
#: Tokens of an answer, and of those in whose middle processes are killed.
COUNT, LONG = 16, 160
LIMITS = {"context": 1024, "sequences": 4}
PROMPTS = [
    [7 * n % 600 + 5 for n in range(first, first + length)] for first, length in ((0, 3), (50, 90), (9, 1), (30, 40))
]
#: Of both architectures; the experts take most of their bytes.
MODELS = ("laguna-tinyk-s1-f32", "qwen35moe-tinyk-s1-f32")


def ask(client: Client, prompt: list[int], count: int) -> Any:
    return client.generate(tokens=prompt, max_tokens=count, ignore_eos=True, temperature=0.8, seed=len(prompt))


def answers(one: Daemon, prompts: list[list[int]], count: int = COUNT) -> tuple[list[list[int]], list[float]]:
    """Tokens of requests that run at once, and their hit rates."""
    with one.client() as client:
        streams = [ask(client, prompt, count) for prompt in prompts]
        for stream in streams:
            stream.read(PATIENCE_S)
        return [stream.tokens for stream in streams], [stream.hit_rate for stream in streams]


class Unlimited:
    """What a daemon with room for everything answers."""

    def __init__(self, model: Path, run_dir: Path) -> None:
        self.model = model
        with daemon(model, run_dir, limits=LIMITS) as one:
            self.tokens, rates = answers(one, PROMPTS)
            self.long, _ = answers(one, PROMPTS[:3], LONG)
            self.memory = one.status()["memory"]
        assert rates == [1.0] * len(PROMPTS)

    def gib(self, share: float) -> float:
        """A limit that leaves room for about this share of the experts: arenas are whole huge pages."""
        records = self.memory["records_bytes"]
        need = self.memory["arena_bytes"] - (1 - share) * records
        return -(-need // HUGE_PAGE) * HUGE_PAGE / GIB


@pytest.fixture(scope="module")
def unlimited(
    model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Unlimited]:
    made: dict[str, Unlimited] = {}

    def get(name: str) -> Unlimited:
        if name not in made:
            made[name] = Unlimited(model_path(name), tmp_path_factory.mktemp("unlimited") / "run")
        return made[name]

    return get


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [0.05, pytest.param(0.25, marks=pytest.mark.soak), 0.6])
def test_output_is_identical_at_every_residency(
    unlimited: Callable[[str], Unlimited], tmp_path: Path, name: str, share: float
) -> None:
    expected = unlimited(name)
    with daemon(expected.model, tmp_path / "run", limits=LIMITS, memory={"host_gib": expected.gib(share)}) as one:
        residency = one.status()["residency"]
        assert 0 < residency["resident"] <= residency["records"] * (share + 0.2)
        together, rates = answers(one, PROMPTS)
        assert together == expected.tokens
        assert all(0 <= rate < 1 for rate in rates)
        assert answers(one, PROMPTS[1:2])[0] == expected.tokens[1:2]


def test_a_killed_store_and_a_killed_worker_cost_a_pause_and_no_token(
    unlimited: Callable[[str], Unlimited], tmp_path: Path
) -> None:
    expected = unlimited(MODELS[0])
    with daemon(expected.model, tmp_path / "run", limits=LIMITS, memory={"host_gib": expected.gib(0.25)}) as one:
        with one.client() as client:
            streams = [ask(client, prompt, LONG) for prompt in PROMPTS[:3]]
            victims = ["store", "store", "worker", "store"]
            for _ in streams[0].events(PATIENCE_S):
                if victims and len(streams[0].tokens) > LONG * (5 - len(victims)) // 6:
                    one.kill(victims.pop(0))
            for stream in streams:
                stream.read(PATIENCE_S)
            assert not victims
            assert [stream.tokens for stream in streams] == expected.long
        restarts = {p["role"]: p["restarts"] for p in one.status()["processes"]}
        assert (restarts["store"], restarts["worker"]) == (3, 1)
