"""One decision on host memory for all ranks, over invented machines."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.kernels.errors import CapacityError, ConfigError
from kvtransfer.tiers.sizing import (
    Budget,
    MemoryLimits,
    cgroup_budget,
    holds_ipc_lock,
    parse_cgroup_paths,
    parse_meminfo,
    plan_host_size,
    read_limits,
)

GIB = 1 << 30
MEMINFO = """MemTotal:       1056000000 kB
MemFree:          10000000 kB
MemAvailable:   1048576000 kB
HugePages_Total:    4096
HugePages_Free:     3000
HugePages_Rsvd:      500
Hugepagesize:       2048 kB
"""


def limits(*free_gib: float, **more: Any) -> MemoryLimits:
    names = ("available memory", "cgroup limit /a", "cgroup limit /a/b")
    return MemoryLimits(
        tuple(Budget(n, int(f * GIB)) for n, f in zip(names, free_gib, strict=False)),
        Budget("reserved huge pages", int(more.get("huge_gib", 0) * GIB)),
        more.get("memlock_bytes"),
    )


def plan(free: MemoryLimits, **asked: Any) -> Any:
    settings = {"slot_bytes": (1 << 20) - 4096, "trailer_bytes": 4096, "reserve_bytes": 0} | asked
    return plan_host_size(limits=free, **settings)


@pytest.mark.parametrize(
    ("free", "asked", "slots", "limited_by"),
    [
        (limits(100), {"requested_bytes": 40 * GIB}, 40 * 1024, "request"),
        (limits(100), {"requested_slots": 7}, 7, "request"),
        (limits(100), {"requested_bytes": 40 * GIB + (1 << 20) - 1}, 40 * 1024, "request"),
        (limits(100), {"ratio": 2.5, "device_pool_bytes": 16 * GIB}, 40 * 1024, "request"),
        (limits(100), {"requested_bytes": 40 * GIB, "ranks": 2}, 40 * 1024, "request"),
        (limits(100), {"requested_bytes": 90 * GIB, "reserve_bytes": 10 * GIB}, 90 * 1024, "request"),
        (limits(100), {}, 100 * 1024, "available memory"),
        (limits(100), {"reserve_bytes": None}, 90 * 1024, "available memory"),
        (limits(1000), {"reserve_bytes": None}, 990 * 1024, "available memory"),
        (limits(100, 50), {}, 50 * 1024, "cgroup limit /a"),
        (limits(100, 50, 20), {"ranks": 8}, 20 * 1024 // 8, "cgroup limit /a/b"),
        (limits(100, 50), {"ranks": 3, "reserve_bytes": 2 * GIB}, 16 * 1024, "cgroup limit /a"),
        (limits(100, huge_gib=5), {"reserved_huge": True, "reserve_bytes": None}, 5 * 1024, "reserved huge pages"),
        (limits(100, memlock_bytes=GIB), {}, 100 * 1024, "available memory"),
        (limits(100, memlock_bytes=None), {"locked": True}, 100 * 1024, "available memory"),
        (
            limits(100, memlock_bytes=GIB),
            {"locked": True},
            1024,
            "RLIMIT_MEMLOCK (per process; raise it with ulimit -l)",
        ),
    ],
)
def test_decisions(free: MemoryLimits, asked: dict[str, Any], slots: int, limited_by: str) -> None:
    got = plan(free, **asked)
    assert (got.num_slots, got.limited_by) == (slots, limited_by)
    assert got.bytes_per_rank == slots << 20
    assert got.bytes_total == (slots << 20) * asked.get("ranks", 1)
    assert limited_by in got.message


@pytest.mark.parametrize(
    ("free", "asked", "says"),
    [
        (
            limits(1000),
            {"requested_bytes": 512 * GIB, "ranks": 8, "reserve_bytes": None},
            [
                "wanted 4096.00 GiB in total = 8 rank(s) x 512.00 GiB",
                "available memory leaves 1000.00 GiB",
                "10.00 GiB stay in reserve",
                "the largest size that fits is 123.75 GiB per rank (126720 slots), 990.00 GiB in total",
            ],
        ),
        (
            limits(44.875),
            {"requested_bytes": 40 * GIB, "reserve_bytes": 10 * GIB},
            [
                "wanted 40.00 GiB in total",
                "leaves 44.88 GiB, of which 10.00 GiB",
                "largest size that fits is 34.88 GiB",
            ],
        ),
        (limits(100, 50), {"requested_bytes": 51 * GIB}, ["cgroup limit /a leaves 50.00 GiB", "fits is 50.00 GiB"]),
        (
            limits(100, huge_gib=4),
            {"requested_bytes": 5 * GIB, "reserved_huge": True},
            ["reserved huge pages leaves 4.00"],
        ),
        (
            limits(100, memlock_bytes=8 << 20),
            {"requested_slots": 9, "locked": True},
            ["RLIMIT_MEMLOCK", "leaves 8.00 MiB", "fits is 8.00 MiB per rank (8 slots)"],
        ),
        (limits(0.0001), {}, ["wanted 1.00 MiB", "the largest size that fits is 0 B per rank (0 slots)"]),
        (limits(5), {"reserve_bytes": 6 * GIB}, ["6.00 GiB stay in reserve", "fits is 0 B"]),
        (limits(5), {"requested_bytes": 1000}, ["room for at least one slot of 1.00 MiB"]),
    ],
)
def test_refusals_say_everything(free: MemoryLimits, asked: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(CapacityError) as caught:
        plan(free, **asked)
    for words in says:
        assert words in str(caught.value)


def test_what_a_refusal_offers_fits() -> None:
    with pytest.raises(CapacityError, match=r"\(126720 slots\)"):
        plan(limits(1000), requested_slots=126_721, ranks=8, reserve_bytes=None)
    assert plan(limits(1000), requested_slots=126_720, ranks=8, reserve_bytes=None).num_slots == 126_720


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("asked", [{}, {"requested_bytes": 11 * GIB}, {"requested_bytes": 200 * GIB}], ids=str)
def test_every_rank_decides_the_same_whenever_it_arrives(ranks: int, asked: dict[str, Any]) -> None:
    outcomes = []
    taken = 0
    for _ in range(ranks):
        free = limits(100 - taken / GIB, 95 - taken / GIB)
        try:
            got = plan(free, ranks=ranks, taken_bytes=taken, reserve_bytes=None, **asked)
        except CapacityError as error:
            outcomes.append(str(error))
            continue
        outcomes.append(got.message)
        taken += got.bytes_per_rank
    assert len(set(outcomes)) == 1


@pytest.mark.parametrize(
    "asked",
    [
        {"requested_bytes": 1 << 30, "ratio": 1.0, "device_pool_bytes": 1},
        {"requested_bytes": 0},
        {"requested_slots": -1},
        {"ratio": 2.0},
        {"ratio": 0.0, "device_pool_bytes": 1},
        {"ranks": 0},
        {"taken_bytes": -1},
        {"slot_bytes": 0},
        {"reserve_bytes": -1},
    ],
    ids=str,
)
def test_senseless_settings_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        plan(limits(100), **asked)


def test_meminfo() -> None:
    memory = parse_meminfo(MEMINFO)
    assert memory["MemAvailable"] == 1_048_576_000 * 1024
    assert memory["HugePages_Free"] == 3000
    assert memory["Hugepagesize"] == 2 << 20
    assert parse_meminfo("") == {}


@pytest.mark.parametrize(
    ("limit", "usage", "stat", "free"),
    [
        ("max\n", "5\n", "", None),
        ("", "", "", None),
        ("9223372036854771712\n", "5\n", "", None),
        ("1000\n", "300\n", "", 700),
        ("1000\n", "300\n", "anon 100\ninactive_file 200\n", 900),
        ("1000\n", "300\n", "inactive_file 1\ntotal_inactive_file 250\n", 950),
        ("1000\n", "1300\n", "", 0),
        ("1000\n", "100\n", "inactive_file 300\n", 1000),
        ("1000\n", "", "", 1000),
    ],
)
def test_cgroup_budget(limit: str, usage: str, stat: str, free: int | None) -> None:
    got = cgroup_budget("here", limit, usage, stat)
    assert got == (None if free is None else Budget("here", free))


def test_cgroup_paths() -> None:
    assert parse_cgroup_paths("0::/user.slice/x\n") == {"v2": "/user.slice/x"}
    mixed = "9:name=systemd:/\n4:memory:/pod/c\n3:cpu,cpuacct:/\n0::/\n"
    assert parse_cgroup_paths(mixed) == {"v2": "/", "memory": "/pod/c"}
    assert parse_cgroup_paths("4:memory,hugetlb:/a:b\n") == {"memory": "/a:b"}
    assert parse_cgroup_paths("") == {}


def test_ipc_lock() -> None:
    assert holds_ipc_lock("Name:\tx\nCapEff:\t0000003fffffffff\n")
    assert holds_ipc_lock("CapEff:\t0000000000004000\n")
    assert not holds_ipc_lock("CapEff:\t00000000a80425fb\nCapBnd:\t0000003fffffffff\n")
    assert not holds_ipc_lock("")


def write(root: Path, **files: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write(tmp_path / "proc", meminfo=MEMINFO)
    write(tmp_path / "proc/self", cgroup="0::/pod/box\n", status="CapEff:\t0\n")
    return tmp_path / "proc"


def test_reads_every_cgroup_on_the_way_up_v2(proc: Path, tmp_path: Path) -> None:
    write(tmp_path / "cg", memory__max="max", memory__current="1")
    write(tmp_path / "cg/pod", memory__max="9000", memory__current="4000", memory__stat="inactive_file 500")
    write(tmp_path / "cg/pod/box", memory__max="8000", memory__current="100")
    found = read_limits(proc, tmp_path / "cg")
    assert [b.free_bytes for b in found.memory] == [1_048_576_000 * 1024, 7900, 5500]
    assert "pod/box/memory.max" in found.memory[1].source
    assert found.reserved_huge.free_bytes == 2500 * (2 << 20)
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert found.memlock_bytes == (None if soft == resource.RLIM_INFINITY else soft)


def test_reads_the_containers_own_root(proc: Path, tmp_path: Path) -> None:
    """In a container the path in /proc/self/cgroup is the host's, and the limit lies at the root."""
    write(tmp_path / "cg", memory__max="9000", memory__current="0")
    assert [b.free_bytes for b in read_limits(proc, tmp_path / "cg").memory[1:]] == [9000]


def test_reads_version_1(proc: Path, tmp_path: Path) -> None:
    write(proc / "self", cgroup="4:memory:/box\n0::/\n", status="CapEff:\tffff\n")
    unlimited, root = "9223372036854771712", tmp_path / "cg/memory"
    write(root, memory__limit_in_bytes=unlimited, memory__usage_in_bytes="5")
    write(root / "box", memory__limit_in_bytes="7000", memory__usage_in_bytes="5", memory__stat="total_inactive_file 3")
    found = read_limits(proc, tmp_path / "cg")
    assert [b.free_bytes for b in found.memory[1:]] == [6998]
    assert found.memlock_bytes is None


def test_reads_this_machine() -> None:
    found = read_limits()
    assert found.memory[0].free_bytes > 0
