"""Pinning: registering a slab with CUDA in chunks that never cut a slot, and undoing it in reverse.

One registration of half a terabyte fails on some drivers, and a page that straddles two registrations
can't be copied in one piece; hence chunks of a bounded size whose boundaries lie between slots.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from dataclasses import dataclass
from typing import Protocol

import torch

from kvtransfer.kernels.errors import ConfigError, CudaError, KVTransferError


@dataclass(frozen=True)
class Chunk:
    """``nbytes`` at byte ``offset`` of the mapping, holding slots ``first`` to ``stop - 1``."""

    offset: int
    nbytes: int
    first: int
    stop: int


def plan_chunks(
    num_slots: int, stride_bytes: int, chunk_bytes: int, *, offset: int = 0, align_bytes: int = mmap.PAGESIZE
) -> list[Chunk]:
    """Cut ``num_slots`` rows of ``stride_bytes`` each, the first at ``offset``, into chunks for registration.

    Each chunk is as long as ``chunk_bytes`` allows; its boundaries lie between rows and on pages of
    ``align_bytes`` (two registrations must not share one). Raises ConfigError if not even the fewest whole
    rows that end on a page fit ``chunk_bytes``.
    """
    if num_slots < 1 or stride_bytes < 1 or offset % align_bytes:
        raise ConfigError(
            f"chunks: expected at least one slot of at least one byte, and an offset that is a multiple of "
            f"{align_bytes}, got {num_slots} x {stride_bytes} at {offset}"
        )
    rows = align_bytes // math.gcd(stride_bytes, align_bytes)  # fewest rows that end on a page
    step = min(chunk_bytes // (rows * stride_bytes) * rows, -(-num_slots // rows) * rows)
    if step < 1:
        raise ConfigError(f"chunk_bytes: expected at least {rows * stride_bytes} (no slot is cut), got {chunk_bytes}")
    chunks = []
    for first in range(0, num_slots, step):
        stop = min(first + step, num_slots)
        chunks.append(Chunk(offset + first * stride_bytes, (stop - first) * stride_bytes, first, stop))
    return chunks


class Registrar(Protocol):
    """What pins memory for a device. Tests pass a fake one.

    ``needs_memlock``: whether it locks pages against RLIMIT_MEMLOCK (CUDA's driver does not).
    """

    needs_memlock: bool

    def register(self, address: int, nbytes: int) -> None:
        """Pin and map ``nbytes`` at ``address``, for all contexts. Raises CudaError, leaving nothing behind."""

    def unregister(self, address: int) -> None:
        """Undo `register` of exactly this ``address``. Raises CudaError."""

    def device_address(self, address: int) -> int:
        """The address by which the device must use the registered byte at ``address``."""


class CudaRegistrar:
    """cudaHostRegister and its kin, in the CUDA runtime that torch has loaded. Calls release the GIL.

    The device's context is made current for each call. A failed call's error is taken off the runtime's
    per-thread record at once, so that no later, unrelated launch reports it. Thread-safe.

    Raises ConfigError where torch has no CUDA device or its runtime can't be found in this process.
    """

    needs_memlock = False
    _PORTABLE_AND_MAPPED = 1 | 2

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("pinning: expected a CUDA device, got none; pass pin=False")
        wanted = torch.device("cuda") if device is None else torch.device(device)
        self.device = torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
        self._runtime = ctypes.CDLL(_loaded_library("libcudart.so"))
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p

    def register(self, address: int, nbytes: int) -> None:
        """Pin and map ``nbytes`` at ``address``, usable from every context (portable, mapped)."""
        with torch.cuda.device(self.device):
            code = self._runtime.cudaHostRegister(
                ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(self._PORTABLE_AND_MAPPED)
            )
            self._check(code, f"cudaHostRegister({address:#x}, {nbytes} bytes)")

    def unregister(self, address: int) -> None:
        """Undo `register` of this address; waits for nothing: the caller knows that no copy is in flight."""
        with torch.cuda.device(self.device):
            code = self._runtime.cudaHostUnregister(ctypes.c_void_p(address))
            self._check(code, f"cudaHostUnregister({address:#x})")

    def device_address(self, address: int) -> int:
        """The device's address of a registered byte: the same number where addressing is unified."""
        out = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            code = self._runtime.cudaHostGetDevicePointer(ctypes.byref(out), ctypes.c_void_p(address), ctypes.c_uint(0))
            self._check(code, f"cudaHostGetDevicePointer({address:#x})")
        return out.value or 0

    def _check(self, code: int, call: str) -> None:
        if code:
            self._runtime.cudaGetLastError()
            text = (self._runtime.cudaGetErrorString(code) or b"").decode()
            raise CudaError(f"{call}: expected success, got error {code}: {text}", code)


def choose_registrar(
    device: torch.device | None, pin: bool | None, registrar: Registrar | None
) -> tuple[Registrar | None, str]:
    """What pins for ``device``, or None, and the reason.

    ``pin`` None means: where there is a CUDA device, and ``device`` is not another kind. ``registrar`` stands
    in for CUDA. Raises ConfigError on ``pin=True`` without a CUDA device.
    """
    if pin is False:
        return None, "pin=False was asked for"
    if registrar is not None:
        return registrar, f"registered with {type(registrar).__name__}"
    other = device is not None and device.type != "cuda"
    if torch.cuda.is_available() and not other:
        made = CudaRegistrar(device)
        return made, f"registered with {made.device}"
    reason = f"the device is {device}" if other else "there is no CUDA device"
    if pin:
        raise ConfigError(f"pin=True: expected a CUDA device, but {reason}; pass pin=None to do without")
    return None, reason


class Registrations:
    """The chunks of one slab that are registered now, in order. Register and release from one thread at a time."""

    def __init__(self, registrar: Registrar) -> None:
        self.registrar = registrar
        self.addresses: list[int] = []
        self._aliases: dict[int, int] = {}  # of chunks that were dropped: where the device saw them

    def add(self, address: int, nbytes: int) -> None:
        """Register one more chunk. CudaError if the device sees it elsewhere than before it was dropped: who copies
        knows the old address."""
        self.registrar.register(address, nbytes)
        self.addresses.append(address)
        was = self._aliases.pop(address, None)
        if was is not None and (now := self.registrar.device_address(address)) != was:
            self.drop(address)
            raise CudaError(f"expected the device to see {address:#x} at {was:#x}, as it did before, got {now:#x}")

    def drop(self, address: int) -> None:
        """Unregister the chunk at ``address``, if it is registered. It counts as gone if CudaError is raised, too."""
        if address in self.addresses:
            self._aliases[address] = self.registrar.device_address(address)
            self.addresses.remove(address)
            self.registrar.unregister(address)

    def shift(self) -> int:
        """What a device adds to a host address of any chunk. Raises CudaError where chunks differ in that."""
        shifts = {self.registrar.device_address(address) - address for address in list(self.addresses)}
        if len(shifts) > 1:
            raise CudaError(f"expected chunks whose device addresses all differ by one shift, got {sorted(shifts)}")
        return next(iter(shifts), 0)

    def release(self) -> None:
        """Unregister everything, the last first. Goes on after a failure and raises the first one at the end."""
        first: KVTransferError | None = None
        while self.addresses:
            try:
                self.registrar.unregister(self.addresses.pop())
            except KVTransferError as error:
                first = first or error
        if first is not None:
            raise first


def _loaded_library(name: str) -> str:
    """The path of a shared library that this process has mapped already. Raises ConfigError."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if f"/{path}".rpartition("/")[2].startswith(name):
                return f"/{path}"
    raise ConfigError(f"pinning: expected {name} among the loaded libraries, got none; is this torch built for CUDA?")
