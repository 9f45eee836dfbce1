"""A daemon whose worker computes on a device (the host, behind the seam): the tokens of one that has none."""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon import PATIENCE_S, Daemon, daemon, running, until
from host_device import HostDevice
from many_experts import ARCHITECTURES, many_experts
from pairs import loaded

from sparkd.config import KvSettings, LimitSettings, Settings, WorkerSettings
from sparkd.demo.main import MODEL
from sparkd.graph.state import StateLayout
from sparkd.residency.device_budget import CARD_MARGIN, RESERVE_PARTS
from sparkd.worker.device_backend import DeviceBackend
from sparkd.worker.state import PoolSize

MIB = 1 << 20
MODELS = ["laguna-tinyk-s1-q4_k_m", "qwen35moe-tinyk-s1-q4_k_m"]
LIMITS = {"context": 128, "sequences": 2}
#: The last one is read by tiles of rows, in more chunks than one.
PROMPTS = [[7, 3, 9, 200, 41], [5], [(7 * i) % 250 for i in range(50)]]
COUNT = 8
_SCRIPT = """
from sparkd.supervisor import children
from sparkd.supervisor.main import main
children._MODULES["worker"] = "host_worker"
raise SystemExit(main())
"""


class DeviceDaemon(Daemon):
    """A daemon whose worker has a device of `size` bytes; its driver pins so many bytes at once, and in all."""

    PROGRAM = ("-c", _SCRIPT)

    def __init__(
        self,
        model: Path,
        run_dir: Path,
        size: int,
        seed: int,
        misses: str = "auto",
        pinned: tuple[float, float] = (math.inf, math.inf),
        **settings: dict[str, Any],
    ) -> None:
        self.folder = run_dir.parent
        self.ENVIRONMENT = {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            # Where compiled kernels lie.
            "SPARKD_TEST_MODELS": os.environ.get("SPARKD_TEST_MODELS") or tempfile.gettempdir(),
            "HOST_DEVICE_SIZE": str(size),
            "HOST_DEVICE_PINNED": ",".join(map(str, pinned)),
            "HOST_DEVICE_SEED": str(seed),
            "HOST_DEVICE_FOLDER": str(self.folder),
        }
        super().__init__(model, run_dir, limits=LIMITS, worker={"device": "cuda", "misses": misses}, **settings)


def answers(one: Daemon, count: int = COUNT) -> list[list[int]]:
    with one.client() as client:
        streams = [client.generate(tokens=prompt, max_tokens=count, ignore_eos=True) for prompt in PROMPTS]
        for stream in streams:
            stream.read(10 * PATIENCE_S)
        return [stream.tokens for stream in streams]


def card_for(path: Path, share: float) -> int:
    """Bytes of a card on which about this share of the slots finds room beside what every token uses."""
    settings = Settings(limits=LimitSettings(**LIMITS), kv=KvSettings("f32"), worker=WorkerSettings(misses="in_place"))
    with loaded(path) as arena:
        layout = StateLayout.of(arena.program, 4)
        size_for = functools.partial(PoolSize.worst_case, layout, LIMITS["sequences"], LIMITS["context"])
        made = DeviceBackend(
            HostDevice(size=64 * MIB), "", settings, arena, layout, size_for, LIMITS["context"], lambda: None
        )
        made.close()
        records = arena.layout.records_bytes
        reserve = sum(
            RESERVE_PARTS * arena.program.expert_layers[0].top_k * slab.record_bytes for slab in arena.layout.slabs
        )
        used = made.status()["device"]["used_bytes"] - records + reserve + share * records
        return int((used + min(slab.record_bytes for slab in arena.layout.slabs) / 2) / (1 - CARD_MARGIN))


@pytest.mark.parametrize(("name", "misses"), [(MODELS[0], "host"), (MODELS[1], "auto")])
def test_a_worker_on_a_device_says_the_same_and_is_replaced_when_that_is_lost(
    name: str, misses: str, model_path: Callable[[str], Path], tmp_path: Path, seed: int
) -> None:
    """Also while others take memory of the card, and slots are given back, and when they are taken back.

    Its driver pins no whole slab of the second size at once; of one card three quarters of that in all.
    """
    path = model_path(name)
    with loaded(path) as arena:
        pinned = [slab.slots * slab.record_bytes for slab in arena.layout.slabs]
        most = max(pinned) - 1, sum(pinned) - (0 if misses == "host" else pinned[1] // 4)
        kept = arena.layout.slabs[1].slots // 4 if misses != "host" else 0
    with daemon(path, tmp_path / "cpu", limits=LIMITS) as one:
        wanted = answers(one)
        assert one.status()["device"] == {}
    size = card_for(path, 0.3)
    with running(DeviceDaemon(path, tmp_path / "run", size, seed, misses, most)) as one:
        one.ready()
        assert answers(one) == wanted
        status = one.status()
        border = status["device"]
        assert status["executor"]["kind"] == "cuda"
        assert border["used_bytes"] <= border["limit_bytes"] < size
        assert 0 < border["slots"] < border["records"] == border["in_place"] + kept
        assert ("host memory cannot be pinned" in border["in_place_note"]) == (kept > 0)
        assert 0 < border["uses"]["decode"]["misses"] < border["uses"]["decode"]["uses"]
        assert status["calibration"]["tier"]["name"] == "device"
        chosen = border["misses"]
        assert chosen["setting"] == misses and f"misses={chosen['policy']}" in one.said()
        if misses == "host":
            assert (chosen["policy"], chosen["why"]) == ("host", "worker.misses says so")
        else:
            assert chosen["link_bytes_s"] > 0 < chosen["host_bytes_s"] and " GB/s" in chosen["why"]
        (tmp_path / "FOREIGN").write_text(str(border["free_bytes"]))
        until(lambda: one.status()["device"]["given_back_bytes"] > 0, one.said)
        assert "others use the card" in one.said()
        assert one.status()["device"]["slots"] < border["slots"]
        (tmp_path / "FOREIGN").write_text("0")
        until(lambda: one.status()["device"]["given_back_bytes"] == 0, one.said)
        assert "the card has room again" in one.said()
        assert one.status()["device"]["slots"] == border["slots"]
        assert answers(one) == wanted
        (tmp_path / ("CONFUSED" if misses == "host" else "LOST")).touch()
        assert answers(one) == wanted
        worker = next(process for process in one.status()["processes"] if process["role"] == "worker")
        assert worker["restarts"] == 1, one.said()
        failed = "the CPU's part of a step failed: expert layer 0: expert 9999 is wanted, there are"
        assert f"the worker has lost its GPU: {failed if misses == 'host' else 'the GPU refuses'}" in one.said()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "demo"])
def test_a_worker_says_the_same_at_every_residency(name: str, share: float, tmp_path: Path, seed: int) -> None:
    """While placements follow each other faster than their swaps."""
    path = MODEL if name == "demo" else many_experts(name, tmp_path, 32, 4)
    with daemon(path, tmp_path / "cpu", limits=LIMITS) as one:
        wanted = answers(one, 24)
    (tmp_path / "RESTLESS").touch()
    with running(DeviceDaemon(path, tmp_path / "run", card_for(path, share), seed)) as one:
        one.ready()
        assert answers(one, 24) == wanted
        border = one.status()["device"]
        uses = border["uses"]["decode"]
        print(name, share, {key: border[key] for key in ("slots", "records", "moved_bytes", "placement")}, uses)
        assert border["slots"] / border["records"] == pytest.approx(share, abs=0.07 if share % 1 else 0)
        assert (uses["misses"] == uses["uses"]) == (share == 0)
        assert share == 1 or uses["misses"] > 0
        assert border["placement"]["version"] > 5
        # More than what fills the slots at first: swaps were made.
        slots = sum(slab["record_bytes"] * slab["slots"] for slab in border["slabs"])
        assert share in (0, 1) or border["moved_bytes"] > 1.5 * share * slots
