"""A tier that lacks room and learns from traffic: what it answers never changes, what it holds does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon, daemon, until
from many_experts import ARCHITECTURES, many_experts

from spark_client import Client

GIB = 1 << 30
HUGE_PAGE = 2 << 20
ANSWER_S = 600.0
LIMITS = {"context": 4096, "sequences": 4}
#: Sequences at once, round by round; each has other favourite tokens, so that the hot set moves.
ROUNDS = (4, 1, 3, 2)
SHARES = (0.05, 0.10, 0.25, 0.50, 0.60)


def ask(client: Client, prompt: list[int], count: int, favourites: int = 0) -> Any:
    """Sampled tokens, most of them 40 of the vocabulary: the favourites of this number."""
    bias = dict.fromkeys(range(40 * favourites + 10, 40 * favourites + 50), 6.0)
    return client.generate(
        tokens=prompt, max_tokens=count, ignore_eos=True, temperature=0.8, seed=len(prompt), logit_bias=bias
    )


class Small:
    """A model, and what a daemon with room for all of it answers and needs."""

    def __init__(self, arch: str, folder: Path) -> None:
        self.model = many_experts(arch, folder)
        self._folder = folder
        self._expected: dict[int, list[list[int]]] = {}
        with self.serving("measured") as one:
            self._memory = one.status()["memory"]

    def serving(self, name: str, share: float | None = None, **limits: int) -> Any:
        """A daemon with room for this share of the experts (None: for all); arenas are whole huge pages."""
        memory = {}
        if share is not None:
            need = self._memory["arena_bytes"] - (1 - share) * self._memory["records_bytes"]
            memory = {"host_gib": -(-need // HUGE_PAGE) * HUGE_PAGE / GIB}
        return daemon(self.model, self._folder / name, limits=LIMITS | limits, memory=memory)

    def expected(self, count: int) -> list[list[int]]:
        """What `converse` gives without a limit."""
        if count not in self._expected:
            with self.serving(f"whole-{count}") as one:
                self._expected[count] = converse(one, count)
                one.stop()
        return self._expected[count]


def converse(one: Daemon, count: int) -> list[list[int]]:
    """The answers of all rounds, `count` tokens each."""
    answers = []
    with one.client() as client:
        for number, together in enumerate(ROUNDS):
            prompts = [[(31 * number + 7 * n + 3 * i) % 600 + 5 for i in range(3 + 20 * n)] for n in range(together)]
            streams = [ask(client, prompt, count, 4 * number) for prompt in prompts]
            for stream in streams:
                stream.read(ANSWER_S)
                answers.append(stream.tokens)
    return answers


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Small]]:
    made: dict[str, Small] = {}

    def get(arch: str) -> Small:
        if arch not in made:
            made[arch] = Small(arch, tmp_path_factory.mktemp(arch))
        return made[arch]

    return get


def residency(one: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = one.status()["residency"]
    return found


def hot(one: Daemon) -> set[tuple[int, int]]:
    layers = residency(one)["layers"]
    return {(n, e) for n, layer in enumerate(layers) for e, tier in enumerate(layer["experts"]) if tier == "h"}


#: Tokens of an answer: of ten, at six residencies (all experts too), of two architectures, 100,000 in the soak.
SOAK = 834


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("arch", "share", "count"),
    [
        (ARCHITECTURES[1], 0.05, 12),
        *(pytest.param(arch, share, SOAK, marks=pytest.mark.soak) for arch in ARCHITECTURES for share in SHARES),
    ],
)
def test_output_is_identical_while_the_ring_churns_and_placements_are_swapped(
    small: Callable[[str], Small], arch: str, share: float, count: int
) -> None:
    expected = small(arch).expected(count)
    assert sum(map(len, expected)) == sum(ROUNDS) * count
    with small(arch).serving(f"share-{share}-{count}", share) as one:
        before = hot(one)
        assert converse(one, count) == expected
        after = residency(one)
        assert after["records"] * (share - 0.03) < after["slots"] < after["records"] * (share + 0.05)
        assert after["uses"]["decode"]["misses"] > 0
        if count == SOAK:
            assert after["placement"]["version"] > 1 and hot(one) != before, "the hot set has moved"


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_prompt_of_20000_tokens_costs_decode_none_of_its_hits(small: Callable[[str], Small], arch: str) -> None:
    prompt = [(7 * n * n + 3 * n) % 600 + 5 for n in range(20_000)]
    with small(arch).serving("prompt", 0.5, context=20_480) as one, one.client() as client:

        def hits() -> float:
            with ask(client, [5, 6, 7], 400) as stream:
                stream.read(ANSWER_S)
                return float(stream.hit_rate)

        hits()
        before = hits()
        client.generate(tokens=prompt, max_tokens=1, ignore_eos=True).read(ANSWER_S)
        after = hits()
        assert residency(one)["uses"]["prefill"]["misses"] > 0
    print(f"{arch}: {before:.4f} before, {after:.4f} after")
    assert 0.3 < before <= 1.0 and after >= 0.95 * before, f"{before:.3f} before, {after:.3f} after"


def test_a_live_tier_follows_its_traffic_and_the_status_shows_it(
    small: Callable[[str], Small], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    model = small(ARCHITECTURES[0])

    def traffic(one: Daemon, favourites: int) -> None:
        with one.client() as client:
            streams = [ask(client, [5] * length, 300, favourites) for length in (3, 4, 5, 6)]
            for stream in streams:
                stream.read(ANSWER_S)

    with model.serving("first", 0.4) as one:
        assert residency(one)["placement"]["version"] is None and not hot(one), "there is no profile yet"
        traffic(one, 0)
        assert one.stop() == 0
    with model.serving("second", 0.4) as one:
        until(lambda: residency(one)["placement"]["version"] == 1 and not residency(one)["placement"]["swaps_left"])
        learned = hot(one)
        assert len(learned) > 0.4 * residency(one)["slots"], "the tier is filled by the profile"
        assert one.status()["calibration"]["tier"]["rule"].startswith("pinned")
        for _ in range(3):
            traffic(one, 8)
        until(lambda: residency(one)["placement"]["version"] > 1 and not residency(one)["placement"]["swaps_left"])
        status = one.status()
        moved = hot(one)
        assert moved != learned or not status["calibration"]["tier"]["rule"].startswith("pinned")
        assert status["residency"]["placement"]["version"] == status["calibration"]["tier"]["placement"]
        assert status["residency"]["placement"]["refused"] == ""
