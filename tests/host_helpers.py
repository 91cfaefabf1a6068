"""Host memory in tests: a stand-in for CUDA's registration, and what the system says of a mapping."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path

from kvtransfer.kernels.errors import CudaError


class FakeRuntime:
    """Registers ranges the way CUDA does: overlaps are errors, unregistering needs the exact address.

    ``fail_at`` names the call to `register` that fails; ``gate`` is waited for from call ``gate_at`` on;
    ``shifts`` are what the device adds, by registration.
    """

    def __init__(
        self,
        fail_at: int = -1,
        gate: threading.Event | None = None,
        gate_at: int = 2,
        shifts: tuple[int, ...] = (0,),
    ) -> None:
        self.needs_memlock = False
        self.calls: list[tuple[str, int, int]] = []
        self.live: dict[int, int] = {}
        self.fail_at, self.gate, self.gate_at, self.shifts = fail_at, gate, gate_at, shifts
        self.fail_unregister: set[int] = set()
        self.count = 0

    def register(self, address: int, nbytes: int) -> None:
        number, self.count = self.count, self.count + 1
        if self.gate is not None and number >= self.gate_at:
            assert self.gate.wait(10)
        if number == self.fail_at:
            raise CudaError("cudaHostRegister: expected success, got error 2: out of memory", 2)
        for start, length in self.live.items():
            if address < start + length and start < address + nbytes:
                raise CudaError("expected success, got error 712: already registered", 712)
        ctypes.string_at(address, 1)  # mapped, or this dies
        self.live[address] = nbytes
        self.calls.append(("register", address, nbytes))

    def unregister(self, address: int) -> None:
        nbytes = self.live.pop(address)
        self.calls.append(("unregister", address, nbytes))
        if len(self.live) in self.fail_unregister:
            raise CudaError("cudaHostUnregister: expected success, got error 713", 713)

    def device_address(self, address: int) -> int:
        return address + self.shifts[sorted(self.live).index(address) % len(self.shifts)]


def smaps(address: int) -> dict[str, str]:
    """The fields of the mapping at ``address`` in /proc/self/smaps."""
    text = Path("/proc/self/smaps").read_text()
    for block in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text)[1:]:
        head, *lines = block.splitlines()
        start, stop = (int(x, 16) for x in head.split()[0].split("-"))
        if start <= address < stop:
            return {"bytes": str(stop - start), "head": head} | dict(line.split(":", 1) for line in lines)
    return {}
