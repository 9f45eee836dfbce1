"""Budgets: what does not fit is refused before a byte is read, by a limit that is the real one."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparkd.config import LimitSettings, MemorySettings, ModelSettings, Settings
from sparkd.errors import BudgetError, ConfigError, ModelFileError
from sparkd.ipc.mapping import HUGE_PAGE
from sparkd.residency.budget import GIB, Limit, Needs, Scope, tightest
from sparkd.store import plan as plan_module
from sparkd.store.layout import ArenaLayout
from sparkd.store.limits import host_limits, pool_bytes
from sparkd.store.plan import PROCESSES, host_needs, make_plan, open_model, state_bytes

NEEDS = Needs(core=2 * GIB, records=18 * GIB, headers=GIB // 64, directory=GIB // 64, state=GIB, slack=GIB // 2)


def test_the_limit_that_leaves_least_is_the_one_that_counts():
    limits = [Limit("a", 40 * GIB), Limit("b", 23 * GIB), Limit("memory.host_gib", 30 * GIB, Scope.ARENA)]
    assert tightest(NEEDS, limits).limit.name == "b"
    assert tightest(NEEDS, [*limits, Limit("c", NEEDS.arena + 1, Scope.ARENA)]).limit.name == "c"


@pytest.mark.parametrize(("scope", "need"), [(Scope.ALL, NEEDS.total), (Scope.ARENA, NEEDS.arena)])
def test_the_exact_need_fits_and_one_byte_less_does_not(scope, need):
    assert tightest(NEEDS, [Limit("limit", need, scope)]).missing == 0
    short = tightest(NEEDS, [Limit("limit", need - 1, scope)])
    assert (short.need, short.missing) == (need, 1)
    assert short.weights == NEEDS.core + NEEDS.records - 1


def test_a_limit_that_is_exceeded_already_counts_as_zero():
    fit = tightest(NEEDS, [Limit("full", -5 * GIB)])
    assert (fit.limit.size, fit.missing, fit.weights) == (0, NEEDS.total, 0)


def _tree(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


_MEMINFO = {"proc/meminfo": "MemTotal:       32000000 kB\nMemFree:  1 kB\nMemAvailable:   20000000 kB"}
_V2_MOUNT = {"proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"}


def _sizes(limits: list[Limit]) -> dict[str, int]:
    return {limit.name: limit.size for limit in limits}


def test_without_cgroups_the_machine_and_the_setting_limit(tmp_path):
    limits = _sizes(host_limits(16.0, root=_tree(tmp_path, _MEMINFO)))
    available = "the memory available on this machine (MemAvailable)"
    assert limits == {"memory.host_gib": 16 * GIB, available: 20000000 * 1024}
    assert list(_sizes(host_limits(0.0, root=tmp_path))) == [available]


def test_a_setting_of_a_fraction_of_a_gib_is_taken_exactly(tmp_path):
    assert host_limits(0.5, root=tmp_path) == [Limit("memory.host_gib", GIB // 2, Scope.ARENA)]


def test_every_cgroup_above_the_process_limits(tmp_path):
    root = _tree(
        tmp_path,
        _MEMINFO
        | _V2_MOUNT
        | {
            "proc/self/cgroup": "0::/user.slice/sparkd.service",
            "sys/fs/cgroup/user.slice/sparkd.service/memory.max": 9 * GIB,
            "sys/fs/cgroup/user.slice/sparkd.service/memory.current": GIB,
            "sys/fs/cgroup/user.slice/memory.max": 12 * GIB,
            "sys/fs/cgroup/user.slice/memory.current": 6 * GIB,
        },
    )
    limits = _sizes(host_limits(0.0, root=root))
    assert limits["memory.max of cgroup /sys/fs/cgroup/user.slice/sparkd.service"] == 8 * GIB
    assert limits["memory.max of cgroup /sys/fs/cgroup/user.slice"] == 6 * GIB


def test_reclaimable_cache_counts_as_free_so_that_a_second_load_works(tmp_path):
    files = _MEMINFO | _V2_MOUNT | {
        "proc/self/cgroup": "0::/a",
        "sys/fs/cgroup/a/memory.max": 10 * GIB,
        "sys/fs/cgroup/a/memory.current": 10 * GIB,
        "sys/fs/cgroup/a/memory.stat": f"anon {GIB}\nactive_file {GIB}\ninactive_file {8 * GIB}",
    }  # fmt: skip
    limits = _sizes(host_limits(0.0, root=_tree(tmp_path, files)))
    assert limits["memory.max of cgroup /sys/fs/cgroup/a"] == 9 * GIB


def test_a_cgroup_that_would_be_slowed_down_is_limited_before_that(tmp_path):
    files = _MEMINFO | _V2_MOUNT | {
        "proc/self/cgroup": "0::/a",
        "sys/fs/cgroup/a/memory.max": 10 * GIB,
        "sys/fs/cgroup/a/memory.high": 7 * GIB,
        "sys/fs/cgroup/a/memory.current": GIB,
    }  # fmt: skip
    limits = _sizes(host_limits(0.0, root=_tree(tmp_path, files)))
    assert limits["memory.max of cgroup /sys/fs/cgroup/a"] == 9 * GIB
    assert limits["memory.high of cgroup /sys/fs/cgroup/a"] == 6 * GIB


def test_a_cgroup_that_uses_more_than_its_limit_leaves_less_than_nothing_and_nothing_fits(tmp_path):
    files = _V2_MOUNT | {
        "proc/self/cgroup": "0::/a",
        "sys/fs/cgroup/a/memory.max": GIB,
        "sys/fs/cgroup/a/memory.current": 3 * GIB,
        "sys/fs/cgroup/a/memory.stat": "anon 1\n\nbroken\ninactive_file x\nactive_file 5 6",
    }
    fit = tightest(NEEDS, host_limits(0.0, root=_tree(tmp_path, files)))
    assert (fit.limit.size, fit.missing) == (0, NEEDS.total)


@pytest.mark.parametrize(
    ("told", "name", "size"),
    [
        ("MemTotal: 100 kB\nMemAvailable: 40 kB", "MemAvailable)", 40 << 10),
        ("MemTotal: 100 kB\nMemAvailable: 101 kB", "MemTotal; MemAvailable is even more)", 100 << 10),
        ("MemTotal: 0 kB\nMemAvailable: 5 kB", "MemTotal; MemAvailable is even more)", 0),
        ("MemTotal: 100 kB\nMemAvailable: 0 kB", "MemAvailable)", 0),
        ("MemTotal: 0 kB\nMemAvailable: 0 kB", "MemAvailable)", 0),
        ("MemAvailable: 7 kB", "MemAvailable)", 7 << 10),
    ],
)
def test_more_free_memory_than_there_is_is_not_believed(tmp_path, told, name, size):
    (limit,) = host_limits(0.0, root=_tree(tmp_path, {"proc/meminfo": told}))
    assert limit.name.endswith(name)
    assert limit.size == size


@pytest.mark.parametrize("files", [{}, {"proc/meminfo": "MemAvailable:\nMemTotal: much"}])
def test_a_machine_that_tells_nothing_needs_the_setting(tmp_path, files):
    root = _tree(tmp_path, files)
    with pytest.raises(BudgetError, match=r"tells how much memory there is; set memory\.host_gib"):
        host_limits(0.0, root=root)
    assert host_limits(1.0, root=root) == [Limit("memory.host_gib", GIB, Scope.ARENA)]


@pytest.mark.parametrize(("free", "reserved", "pages"), [("8", "3", 5), ("8", "", 8), ("2", "3", 0), ("", "", 0)])
def test_the_pool_of_huge_pages_has_what_is_free_and_not_reserved(tmp_path, free, reserved, pages):
    folder = "sys/kernel/mm/hugepages/hugepages-2048kB"
    files = {f"{folder}/free_hugepages": free, f"{folder}/resv_hugepages": reserved}
    assert pool_bytes(_tree(tmp_path, files)) == pages * HUGE_PAGE
    assert pool_bytes(tmp_path / "nowhere") == 0


@pytest.mark.parametrize(("huge_pages", "pages", "counts"), [("auto", 1 << 20, 1), ("auto", 0, 0), ("off", 1 << 20, 0)])
def test_an_arena_that_the_pool_has_room_for_takes_no_other_memory(model_path, monkeypatch, huge_pages, pages, counts):
    settings = _settings(model_path("laguna-tiny-s1-q4_k_m"))
    settings = dataclasses.replace(settings, memory=MemorySettings(huge_pages=huge_pages))
    monkeypatch.setattr(plan_module, "host_limits", lambda host_gib, held: [Limit("limit", 99 * GIB + held)])
    monkeypatch.setattr(plan_module, "pool_bytes", lambda: pages * HUGE_PAGE)
    plan = make_plan(settings)
    assert plan.limit_bytes == 99 * GIB + counts * plan.arena_bytes


def test_an_arena_that_is_kept_is_no_new_need(tmp_path):
    root = _tree(tmp_path, _MEMINFO)
    (limit,) = host_limits(0.0, held=GIB, root=root)
    assert limit.size == 20000000 * 1024 + GIB


@pytest.mark.parametrize(
    "files",
    [
        {"sys/fs/cgroup/a/memory.max": "max", "sys/fs/cgroup/a/memory.current": 5},
        {"sys/fs/cgroup/a/memory.max": ""},
        {},
    ],
)
def test_no_limit_is_no_limit(tmp_path, files):
    root = _tree(tmp_path, _MEMINFO | _V2_MOUNT | {"proc/self/cgroup": "0::/a"} | files)
    assert len(host_limits(0.0, root=root)) == 1


def test_usage_that_cannot_be_read_leaves_the_whole_limit(tmp_path):
    files = {"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/memory.max": 5}
    root = _tree(tmp_path, _V2_MOUNT | files)
    assert [limit.size for limit in host_limits(0.0, root=root)] == [5]


def test_cgroup_v1_beside_an_empty_v2_hierarchy(tmp_path):
    mounts = [
        "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory",
        "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw",
    ]
    files = {
        "proc/self/mountinfo": "\n".join(mounts),
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/x\n0::/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 0x7FFFFFFFFFFFF000,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
        "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": 8 * GIB,
        "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": 7 * GIB,
        "sys/fs/cgroup/memory/docker/x/memory.stat": f"total_inactive_file {3 * GIB}\ntotal_active_file {2 * GIB}",
    }
    limits = _sizes(host_limits(0.0, root=_tree(tmp_path, _MEMINFO | files)))
    assert limits["memory.limit_in_bytes of cgroup /sys/fs/cgroup/memory/docker/x"] == 6 * GIB
    assert min(limits.values()) == 6 * GIB


def test_a_container_that_sees_only_its_own_cgroup_finds_its_limit(tmp_path):
    files = {
        "proc/self/mountinfo": "35 31 0:32 /docker/x /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory",
        "proc/self/cgroup": "4:memory:/docker/x",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 3 * GIB,
    }
    assert [limit.size for limit in host_limits(0.0, root=_tree(tmp_path, files))] == [3 * GIB]


def test_this_machine_has_some_limit():
    limits = host_limits(0.0)
    assert limits
    assert all(limit.size > 0 for limit in limits)


def _settings(path: Path | str, host_gib: float = 0.0, **limits: int) -> Settings:
    return Settings(
        model=ModelSettings(path=str(path)),
        memory=MemorySettings(host_gib=host_gib),
        limits=LimitSettings(**limits),
    )


def test_the_plan_needs_the_arena_and_the_state_and_reads_no_tensor(model_path):
    path = model_path("laguna-tiny-s1-q4_k_m")
    plan = make_plan(_settings(path), limits=[Limit("limit", GIB)])
    model, _ = open_model(_settings(path))
    assert plan.model == "laguna-tiny-s1-q4_k_m"
    assert plan.fingerprint == model.fingerprint
    assert plan.core_bytes + plan.records_bytes >= model.tensor_bytes
    assert plan.core_bytes + plan.records_bytes < plan.arena_bytes < plan.need_bytes
    assert plan.records == sum(layer.experts for layer in open_model(_settings(path))[1].expert_layers)


def _least(path: Path) -> Needs:
    """What the smallest arena that serves the model needs."""
    settings = _settings(path)
    model, program = open_model(settings)
    return host_needs(program, ArenaLayout.within(program, model, 0), settings)


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("name", ["laguna-tiny-s1-q4_k_m", "laguna-tinyk-s1-f32"])
def test_a_limit_one_percent_below_the_need_is_refused_naming_need_limit_and_what_would_fit(model_path, scope, name):
    path = model_path(name)
    needs = _least(path)
    need = needs.total if scope is Scope.ALL else needs.arena
    assert make_plan(_settings(path), limits=[Limit("enough", need, scope)]).arena_bytes == needs.arena
    size = need * 99 // 100
    with pytest.raises(BudgetError) as caught:
        make_plan(_settings(path), limits=[Limit("far", 99 * GIB), Limit("memory.max of cgroup /a", size, scope)])
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(f"{path}: needs {need / GIB:.2f} GiB ({need} bytes) of {scope.value} at least (")
    assert f"memory.max of cgroup /a allows {size / GIB:.2f} GiB ({size} bytes)" in said
    assert "GiB of weights would fit" in said
    assert "raise the limit by 0." in said
    assert f"({need - size} bytes)" in said


def _bytes_read() -> int:
    """All that this process has read so far, from the page cache or not."""
    return int(re.search(r"^rchar: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)[1])


def test_a_model_that_does_not_fit_is_refused_when_only_its_headers_have_been_read(model_path):
    path = model_path("laguna-tinyk-s1-f32")
    need = _least(path).total
    model, _ = open_model(_settings(path))
    headers = sum(shard.data_offset for shard in model.shards)
    piece = 1 << 20
    assert model.tensor_bytes > 3 * (headers + piece)
    before = _bytes_read()
    with pytest.raises(
        BudgetError, match=rf"needs .* \({need} bytes\) .* limit allows .* \({need * 99 // 100} bytes\)"
    ):
        make_plan(_settings(path), limits=[Limit("limit", need * 99 // 100)])
    assert 0 < _bytes_read() - before < headers + piece


def test_a_model_larger_than_host_gib_gets_as_many_slots_as_fit_exactly(model_path):
    path = model_path("laguna-tinyk-s1-f32")
    whole = make_plan(_settings(path), limits=[Limit("limit", GIB)])
    assert (whole.partial, whole.slots) == (False, whole.records)
    least = _least(path).arena
    slots = 0
    for share in (0.0, 0.05, 0.25, 0.6, 0.95):
        size = least + int((whole.arena_bytes - least) * share)
        plan = make_plan(_settings(path), limits=[Limit("memory.host_gib", size, Scope.ARENA)])
        assert plan.partial
        assert size - HUGE_PAGE < plan.arena_bytes <= size
        assert plan.need_bytes == plan.arena_bytes + plan.state_bytes + PROCESSES
        assert slots <= plan.slots < plan.records
        slots = plan.slots
        model, program = open_model(_settings(path))
        layout = ArenaLayout.within(program, model, plan.arena_bytes)
        assert (layout.total_bytes, sum(slab.slots for slab in layout.slabs)) == (plan.arena_bytes, plan.slots)


def test_memory_that_others_may_take_is_not_filled_to_the_last_byte_and_a_kept_arena_is_used_again(model_path):
    path = model_path("laguna-tinyk-s1-f32")
    whole = make_plan(_settings(path), limits=[Limit("limit", GIB)])
    size = whole.need_bytes - 3 * HUGE_PAGE
    plan = make_plan(_settings(path), limits=[Limit("MemAvailable", size)])
    assert plan.partial
    free = size - plan.need_bytes
    room = plan.arena_bytes + free
    assert room // 32 <= free < room // 32 + HUGE_PAGE
    for change in (-free, -free // 2, 0):
        again = make_plan(_settings(path), limits=[Limit("MemAvailable", size + change)], kept=plan.arena_bytes)
        assert (again.arena, again.arena_bytes) == (plan.arena, plan.arena_bytes)
    for change in (-free - 1, 3 * HUGE_PAGE):
        other = make_plan(_settings(path), limits=[Limit("MemAvailable", size + change)], kept=plan.arena_bytes)
        assert other.arena != plan.arena


def test_a_model_smaller_than_host_gib_is_loaded_whole_and_a_larger_one_refused_with_need_and_limit(model_path):
    path = model_path("laguna-tinyk-s1-f32")
    need = make_plan(_settings(path), limits=[Limit("limit", GIB)]).arena_bytes
    with pytest.raises(BudgetError, match=r"at least .* memory\.host_gib allows 0\.00 GiB \(1073741 bytes\)"):
        make_plan(_settings(path, host_gib=0.001))
    assert make_plan(_settings(path, host_gib=need / GIB + 0.001)).limit in (
        "memory.host_gib",
        "the memory available on this machine (MemAvailable)",
    )


def test_only_layers_with_a_cache_and_only_windows_are_counted_as_state(model_path):
    _, program = open_model(_settings(model_path("laguna-tiny-s1-q4_k_m")))
    path = model_path("laguna-tiny-s1-q4_k_m")
    short, long = (state_bytes(program, _settings(path, context=c, sequences=1)) for c in (2048, 4096))
    full = [c for c in program.caches if not c.window]
    growth = sum(
        2 * (min(4096, program.context) - min(2048, program.context)) * c.kv_heads * c.head_dim * 2 for c in full
    )
    assert long - short == growth
    assert state_bytes(program, _settings(path, context=2048, sequences=3)) == 3 * short


def _plan_process(settings: Settings) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sparkd.store.plan", "--settings", settings.to_json()]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_plan_process_prints_one_line_of_json(model_path):
    done = _plan_process(_settings(model_path("laguna-tiny-s1-q4_k_m")))
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout)["arena_bytes"] > 0


@pytest.mark.parametrize(
    ("path", "code"),
    [("", ConfigError.code), ("/nowhere/m.gguf", ModelFileError.code), (__file__, ModelFileError.code)],
)
def test_a_plan_that_cannot_be_made_says_why_in_one_line(path, code):
    done = _plan_process(_settings(path))
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert answer["code"] == code
    assert "\n" not in answer["error"]
    assert done.stderr == ""


def test_a_vocabulary_that_contradicts_itself_is_refused_by_the_plan_with_file_and_reason(model_path, tmp_path):
    source, path = Path(model_path("laguna-tiny-s1-f32")), tmp_path / "model.gguf"
    merges = open_model(_settings(source))[0].metadata["tokenizer.ggml.merges"]
    content = bytearray(source.read_bytes())
    assert merges[1] == "h e"
    content[content.index(b"h e", merges.offset)] = ord("\n")  # never a token: the alphabet of bytes has another
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=f"{path}: .*merges does not fit the vocabulary") as caught:
        make_plan(_settings(path), limits=[Limit("limit", GIB)])
    assert "\n" not in str(caught.value)
