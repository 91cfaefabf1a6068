"""How much host memory a tier may take: a pure decision over limits, and a thin reader of the limits.

One call decides for all ranks of a machine. Sizes asked for are *per rank*; the reserve and the limits are
the machine's (or the container's). Every message says which is which. A leader decides once and hands
`HostSizePlan.num_slots` to the others; a rank that decides for itself after others have taken their share
passes what they took as ``taken_bytes`` and comes to the same answer.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.kernels.errors import CapacityError, ConfigError

MAX_RESERVE_BYTES = 10 << 30
_CAP_IPC_LOCK = 14
_V1_UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True)
class Budget:
    """What one source leaves: ``source`` names it in messages."""

    source: str
    free_bytes: int


@dataclass(frozen=True)
class MemoryLimits:
    """What the machine allows, read at one moment.

    memory          budgets that all hold at once: available memory, and each cgroup on the way up
    reserved_huge   what is left in the pool of reserved huge pages (hugetlb); ordinary and transparent huge
                    pages never come from it, and available memory does not hold it
    memlock_bytes   RLIMIT_MEMLOCK, a limit per process; None where there is none (or CAP_IPC_LOCK is held)
    """

    memory: tuple[Budget, ...]
    reserved_huge: Budget = Budget("reserved huge pages", 0)
    memlock_bytes: int | None = None


@dataclass(frozen=True)
class HostSizePlan:
    """``num_slots`` a rank; bytes of one rank and of all; what decided it; a sentence for the log."""

    num_slots: int
    bytes_per_rank: int
    bytes_total: int
    limited_by: str
    message: str


def plan_host_size(
    *,
    slot_bytes: int,
    trailer_bytes: int,
    limits: MemoryLimits,
    requested_slots: int | None = None,
    requested_bytes: int | None = None,
    ratio: float | None = None,
    device_pool_bytes: int | None = None,
    ranks: int = 1,
    reserve_bytes: int | None = None,
    taken_bytes: int = 0,
    reserved_huge: bool = False,
    locked: bool = False,
) -> HostSizePlan:
    """Decide the host tier's size, once for all ``ranks`` of this machine.

    Args:
        slot_bytes, trailer_bytes: of one slot; a slot costs their sum.
        requested_slots | requested_bytes | ratio (of ``device_pool_bytes``): what one rank wants; at most one
            of them. None of them: what is left, in equal parts.
        reserve_bytes: left alone on the machine; None is a tenth of what is left, at most 10 GiB.
        taken_bytes: what ranks of this job have taken already, added back to what is left.
        reserved_huge: memory comes from the pool of reserved huge pages, and from nothing else.
        locked: pages are locked against RLIMIT_MEMLOCK. CUDA's registration is not: the driver pins pages
            itself and does not charge them to that limit.
    Raises CapacityError if what is wanted does not fit, with the wanted total, the share of a rank, the
    reserve, the source of the limit, and the largest size that fits.
    """
    asked = [x for x in (requested_slots, requested_bytes, ratio) if x is not None]
    if len(asked) > 1:
        raise ConfigError("host size: expected at most one of requested_slots, requested_bytes and ratio, got several")
    if asked and asked[0] <= 0:
        raise ConfigError(f"host size: expected more than 0, got {asked[0]}")
    if ratio is not None and not device_pool_bytes:
        raise ConfigError(f"host size by ratio: expected device_pool_bytes, got {device_pool_bytes}")
    if min(ranks, slot_bytes) < 1 or min(trailer_bytes, taken_bytes, reserve_bytes or 0) < 0:
        raise ConfigError(
            f"host size: expected ranks and slot_bytes of at least 1, and trailer_bytes, taken_bytes and reserve_bytes "
            f"of at least 0, got {ranks}, {slot_bytes}, {trailer_bytes}, {taken_bytes} and {reserve_bytes}"
        )
    per_slot = slot_bytes + trailer_bytes
    budgets = (limits.reserved_huge,) if reserved_huge else limits.memory
    tightest = min(budgets, key=lambda b: b.free_bytes)
    left = max(0, tightest.free_bytes + taken_bytes)
    reserve = min(MAX_RESERVE_BYTES, left // 10) if reserve_bytes is None else reserve_bytes
    if reserved_huge and reserve_bytes is None:
        reserve = 0  # that pool was set aside for us
    source, most_bytes = tightest.source, max(0, left - reserve) // ranks
    if locked and limits.memlock_bytes is not None and limits.memlock_bytes < most_bytes:
        source, most_bytes = "RLIMIT_MEMLOCK (per process; raise it with ulimit -l)", limits.memlock_bytes
    most = most_bytes // per_slot
    if requested_slots is not None:
        wanted = requested_slots
    elif requested_bytes is not None:
        wanted = requested_bytes // per_slot
    elif ratio is not None:
        wanted = int(ratio * (device_pool_bytes or 0)) // per_slot
    else:
        wanted = max(1, most)
    budget = f"{source} leaves {_size(left if source == tightest.source else most_bytes)}"
    kept = f"of which {_size(reserve)} stay in reserve"
    if wanted < 1:
        raise CapacityError(
            f"host tier: expected room for at least one slot of {_size(per_slot)} a rank, got less; "
            f"ask for more ({budget}, {kept})"
        )
    if wanted > most:
        raise CapacityError(
            f"host tier: wanted {_size(wanted * per_slot * ranks)} in total = {ranks} rank(s) x "
            f"{_size(wanted * per_slot)} ({wanted} slots), but {budget}, {kept}; the largest size that fits is "
            f"{_size(most * per_slot)} per rank ({most} slots), {_size(most * per_slot * ranks)} in total"
        )
    limited_by = "request" if asked else source
    message = (
        f"host tier: {_size(wanted * per_slot * ranks)} in total = {ranks} rank(s) x {_size(wanted * per_slot)} "
        f"({wanted} slots), limited by {limited_by}; {budget}, {kept}"
    )
    return HostSizePlan(wanted, wanted * per_slot, wanted * per_slot * ranks, limited_by, message)


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes; lines without a unit (HugePages_Free) as plain counts."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name.strip()] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return values


def parse_cgroup_paths(text: str) -> dict[str, str]:
    """/proc/self/cgroup as {"v2": path, "memory": path of version 1's memory controller}, as far as there."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths["v2"] = path
        elif "memory" in controllers.split(","):
            paths["memory"] = path
    return paths


def cgroup_budget(source: str, limit: str, usage: str, stat: str = "") -> Budget | None:
    """What one cgroup leaves, from the text of its files; None where it has no limit.

    ``limit`` is memory.max ("max" is none) or version 1's memory.limit_in_bytes (a huge number is none);
    ``usage`` memory.current or memory.usage_in_bytes; ``stat`` memory.stat, whose inactive file pages the
    kernel gives back when asked, so that they count as free.
    """
    if limit.strip() in ("", "max") or int(limit) >= _V1_UNLIMITED_BYTES:
        return None
    counts = {words[0]: int(words[1]) for words in map(str.split, stat.splitlines()) if len(words) == 2}
    reclaimable = counts.get("total_inactive_file", counts.get("inactive_file", 0))
    return Budget(source, max(0, int(limit) - max(0, int(usage or 0) - reclaimable)))


def holds_ipc_lock(status: str) -> bool:
    """Whether /proc/self/status shows CAP_IPC_LOCK, under which RLIMIT_MEMLOCK does not hold."""
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def read_limits(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MemoryLimits:
    """What this machine and container allow now. Reads /proc and the cgroup files; changes nothing."""
    memory = parse_meminfo((proc / "meminfo").read_text())
    budgets = [Budget("available memory (/proc/meminfo)", memory.get("MemAvailable", memory.get("MemFree", 0)))]
    paths = parse_cgroup_paths(_read(proc / "self/cgroup"))
    if "v2" in paths:
        for root in (cgroup, cgroup / "unified"):
            budgets += _budgets(root, paths["v2"], "memory.max", "memory.current")
    if "memory" in paths:
        budgets += _budgets(cgroup / "memory", paths["memory"], "memory.limit_in_bytes", "memory.usage_in_bytes")
    pages = max(0, memory.get("HugePages_Free", 0) - memory.get("HugePages_Rsvd", 0))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free_of_limit = soft == resource.RLIM_INFINITY or holds_ipc_lock(_read(proc / "self/status"))
    return MemoryLimits(
        tuple(budgets),
        Budget("reserved huge pages (/proc/meminfo)", pages * memory.get("Hugepagesize", 0)),
        None if free_of_limit else soft,
    )


def _budgets(root: Path, path: str, limit: str, usage: str) -> list[Budget]:
    """The budgets of the cgroup at ``path`` and of all above it; in a container the root is its own cgroup."""
    found = []
    inner = root / path.lstrip("/")
    for folder in (inner, *inner.parents):
        if folder == root.parent:
            break
        text, used = _read(folder / limit), _read(folder / usage)
        budget = cgroup_budget(f"cgroup limit ({folder / limit})", text, used, _read(folder / "memory.stat"))
        if budget is not None:
            found.append(budget)
    return found


def _read(path: Path) -> str:
    """The file's text, or "" where it is not there or not ours to read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _size(nbytes: int) -> str:
    """Bytes for people: GiB with two digits, or smaller units below one."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"
