"""Host memory for a slab: one mapping, exactly as long as asked, touched by many threads on one NUMA node.

Nothing here knows slots, records or pinning.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.kernels.errors import CapacityError, ConfigError
from kvtransfer.kernels.events import NO_OBSERVER, Observer

HugePages = bool | Literal["reserved"]
_HUGE_BYTES = 2 << 20
_TOUCH_BYTES = 64 << 20  # a thread's piece of work: some 15 ms at 4 GB/s
_MAP_HUGETLB, _MFD_HUGETLB, _MAP_NORESERVE = 0x40000, 4, 0x4000
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MPOL_PREFERRED = 1
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}


class Mapping:
    """One mapping of ``nbytes`` (a multiple of the page size), zero-filled, not inherited by a fork.

    ``bytes`` is a numpy view of all of it. Views keep the memory mapped: `close` unmaps at once where none
    is left, else the memory goes when the last view does. Never is a view left without its memory.

    ``fd`` is the memfd's descriptor, or -1 for anonymous memory.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        shared: bool = False,
        huge: HugePages = True,
        whole: bool = True,
        name: str = "slab",
    ) -> None:
        """Reserve it. ``whole``: all of it will be used, so the system may refuse here and now (CapacityError)."""
        reserved = huge == "reserved"
        self._shared = shared
        self._unit = _HUGE_BYTES if reserved else mmap.PAGESIZE  # in which memory can be given back
        later = 0 if whole else _MAP_NORESERVE
        self.nbytes = -(-nbytes // _HUGE_BYTES) * _HUGE_BYTES if reserved else nbytes
        self.fd = -1
        try:
            if shared:
                flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (_MFD_HUGETLB if reserved else 0)
                self.fd = os.memfd_create(name, flags)
                os.ftruncate(self.fd, self.nbytes)
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
                self._map = mmap.mmap(self.fd, self.nbytes, flags=mmap.MAP_SHARED | later)
            else:
                anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_HUGETLB if reserved else 0) | later
                self._map = mmap.mmap(-1, self.nbytes, flags=anonymous)
        except OSError as error:
            self._close_fd()
            kind = "reserved huge pages" if reserved else "a memfd" if shared else "anonymous memory"
            raise CapacityError(f"{name}: expected {self.nbytes} bytes of {kind}, got {error}") from error
        self._advise(mmap.MADV_HUGEPAGE if huge is True else None)

    @classmethod
    def attached(cls, fd: int, nbytes: int) -> Mapping:
        """Map another process's memfd; ``fd`` is duplicated. Raises ConfigError unless it is ``nbytes`` long."""
        got = os.fstat(fd).st_size
        if got not in (nbytes, -(-nbytes // _HUGE_BYTES) * _HUGE_BYTES):
            raise ConfigError(
                f"attach: expected a memfd of {nbytes} bytes, got {got}; are spec and num_slots the same?"
            )
        mapping = cls.__new__(cls)
        mapping.nbytes, mapping.fd = got, os.dup(fd)
        mapping._shared, mapping._unit = True, mmap.PAGESIZE
        try:
            mapping._map = mmap.mmap(mapping.fd, got, flags=mmap.MAP_SHARED)
        except OSError as error:
            mapping._close_fd()
            raise CapacityError(f"attach: expected to map {got} bytes, got {error}") from error
        mapping._advise(None)
        return mapping

    def _advise(self, advice: int | None) -> None:
        self.bytes: NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)
        self.address: int = self.bytes.ctypes.data
        self._map.madvise(mmap.MADV_DONTFORK)
        if advice is not None:
            try:
                self._map.madvise(advice)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a kernel without transparent huge pages
                    raise

    def populate(self, offset: int, nbytes: int, *, threads: int, node: int | None, observer: Observer) -> None:
        """Back ``nbytes`` at ``offset`` with memory, with ``threads`` threads, on NUMA node ``node`` if given.

        Contents stay as they are (never touched pages are zeros). Raises CapacityError if memory runs out.
        """
        cpus: set[int] = set()
        if node is not None:
            cpus = _prefer_node(self.address + offset, nbytes, node, observer)
        start, stop = self.address + offset, self.address + offset + nbytes
        cuts = [start, *range((start // _TOUCH_BYTES + 1) * _TOUCH_BYTES, stop, _TOUCH_BYTES), stop]
        pieces = [(a, b - a) for a, b in itertools.pairwise(cuts)]
        if threads == 1 or len(pieces) == 1:
            for address, length in pieces:
                _touch(address, length)
            return

        def settle() -> None:
            if cpus:
                os.sched_setaffinity(0, cpus)  # 0: this thread alone

        with ThreadPoolExecutor(min(threads, len(pieces)), "first-touch", settle) as pool:
            for _ in pool.map(_touch, *zip(*pieces, strict=True)):
                pass

    def give_back(self, offset: int, nbytes: int, observer: Observer) -> None:
        """Let the system have the memory behind ``nbytes`` at ``offset``: what lay there is lost, also for others who
        map it, and zeros are read there until somebody writes (or calls `populate`). Addresses stay as they are.

        Nothing may be registered there: a device that has pinned the old memory goes on using that. What the system
        does not take back (reserved huge pages before Linux 5.18) is told to ``observer`` and stays.
        """
        start = -(-offset // self._unit) * self._unit
        length = (offset + nbytes) // self._unit * self._unit - start
        if length <= 0:
            return
        try:
            self._map.madvise(mmap.MADV_REMOVE if self._shared else mmap.MADV_DONTNEED, start, length)
        except OSError as error:
            observer.fell_back("give_back", f"{length} bytes of a slab stay with this process: {error}")

    def close(self) -> bool:
        """Drop this object's hold on the memory. True if it is unmapped now, False if views still hold it."""
        self.bytes = None
        self._close_fd()
        try:
            self._map.close()
        except BufferError:
            return False
        return True

    def _close_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def parse_cpulist(text: str) -> set[int]:
    """ "0-3,8" as {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def pci_numa_node(address: str, sys: Path = Path("/sys")) -> int | None:
    """The NUMA node of a PCI device ("0000:3b:00.0"), or None where the system does not tell."""
    try:
        node = int((sys / "bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def gpu_numa_node(device: torch.device | None, observer: Observer = NO_OBSERVER) -> int | None:
    """The NUMA node next to a CUDA device (the current one if None), or None where there is no such thing."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return None
    facts = torch.cuda.get_device_properties(torch.device("cuda") if device is None else device)
    domain, bus, slot = (getattr(facts, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    node = None
    if isinstance(domain, int) and isinstance(bus, int) and isinstance(slot, int):
        node = pci_numa_node(f"{domain:04x}:{bus:02x}:{slot:02x}.0")
    if node is None:
        observer.fell_back("numa", "the system does not tell which NUMA node the GPU is on; memory comes from any")
    return node


def _prefer_node(address: int, nbytes: int, node: int, observer: Observer) -> set[int]:
    """Ask for pages of ``node`` there; returns the CPUs of the node that this process may run on.

    Two means, since containers often forbid one: a memory policy, and first touch by the node's own CPUs.
    What can't be had is told to the observer; the memory then comes from wherever there is some.
    """
    mask = (ctypes.c_ulong * 16)()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    number = _SYS_MBIND.get(platform.machine())
    if number is None or node >= 16 * bits:
        observer.fell_back("numa", f"no memory policy on {platform.machine()} for node {node}")
    else:
        mask[node // bits] = 1 << node % bits
        libc = ctypes.CDLL(None, use_errno=True)
        args = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_int(_MPOL_PREFERRED), mask)
        if libc.syscall(ctypes.c_long(number), *args, ctypes.c_ulong(16 * bits), ctypes.c_uint(0)):
            observer.fell_back("numa", f"mbind to node {node}: {os.strerror(ctypes.get_errno())}")
    try:
        cpus = parse_cpulist(Path(f"/sys/devices/system/node/node{node}/cpulist").read_text())
    except OSError as error:
        observer.fell_back("numa", f"the CPUs of node {node}: {error}")
        return set()
    return cpus & os.sched_getaffinity(0)


def _touch(address: int, nbytes: int) -> None:
    """Fault ``nbytes`` at ``address`` in, keeping their contents. Releases the GIL."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(_MADV_POPULATE_WRITE)):
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise CapacityError(f"expected {nbytes} bytes of memory at {address:#x}, got {os.strerror(code)}")
    ctypes.memset(address, 0, nbytes)  # before Linux 5.14: only ever called on memory that is all zeros
