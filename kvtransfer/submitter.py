"""Submitter: a whole pipeline of copies, waits and launches handed to the driver in one call without the GIL.

Python in a second thread costs a forward that is being launched, and costs it again for each call that must
take the GIL back. A `Script` is made of plain numbers on the engine's thread, then run by ``submitter.c``,
which is compiled at first use with the compiler that Triton needs anyway and kept in the user cache folder.
Where there is no compiler, `Submitter.create` returns None and transfers are submitted call by call.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.dma import Copier, CopyEngine
from kvtransfer.kernels.errors import ConfigError, CudaError
from kvtransfer.kernels.events import Observer
from kvtransfer.model_file import cache_folder

U64 = NDArray[np.uint64]
WORDS = 8  # of a command: op, stream, six arguments
_WAIT, _RECORD, _BATCH, _LAUNCH, _COPY_2D, _CHUNK = range(6)


class Script:
    """Commands in order. Arrays and launch arguments handed in are kept alive by the script."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self.keep: list[object] = []
        self.progress = np.zeros(1, dtype=np.uint32)  # chunks submitted so far; read it from any thread
        self.stop = np.zeros(1, dtype=np.uint32)  # set it to 1 and nothing is submitted after the chunk under way

    def wait(self, stream: int, event: int) -> None:
        """Later work of ``stream`` starts after ``event`` (raw handles)."""
        self._rows.append((_WAIT, stream, event))

    def record(self, stream: int, event: int) -> None:
        """``event`` passes when ``stream`` gets here."""
        self._rows.append((_RECORD, stream, event))

    def batch(self, stream: int, dst: U64, src: U64, sizes: U64, *, any_order: bool) -> None:
        """`kvtransfer.dma.Copier.batch`; the arrays must be contiguous uint64 of one length."""
        self.keep += [dst, src, sizes]
        pointers = (dst.ctypes.data, src.ctypes.data, sizes.ctypes.data)
        self._rows.append((_BATCH, stream, *pointers, len(dst), int(any_order)))

    def launch(self, stream: int, kernel: Launch, arguments: Sequence[int], grid: tuple[int, int]) -> None:
        """A compiled kernel with ``arguments`` (integers and addresses), in the order of its parameters."""
        values, pointers = kernel.pack(arguments)
        shape = np.array([grid[0], grid[1], 1, kernel.threads, kernel.shared_bytes], dtype=np.uint32)
        self.keep += [values, pointers, shape, kernel]
        self._rows.append((_LAUNCH, stream, kernel.function, shape.ctypes.data, pointers.ctypes.data))

    def chunk_done(self) -> None:
        """All of one chunk has been enqueued: `progress` goes up by one."""
        self._rows.append((_CHUNK, 0, 1 + sum(row[0] == _CHUNK for row in self._rows)))

    def commands(self) -> U64:
        """[n, WORDS] uint64."""
        out = np.zeros((len(self._rows), WORDS), dtype=np.uint64)
        for i, row in enumerate(self._rows):
            out[i, : len(row)] = row
        return out


class Launch:
    """What it takes to launch a Triton-compiled kernel without Triton: function, threads, shared bytes, parameters.

    ``widths``: bytes of each parameter, from the kernel's PTX. The trailing ones that the kernel's signature does
    not name are Triton's own scratch pointers, null for kernels that use none.
    """

    def __init__(self, function: int, threads: int, shared_bytes: int, widths: Sequence[int]) -> None:
        self.function, self.threads, self.shared_bytes = function, threads, shared_bytes
        self.widths = tuple(widths)

    @classmethod
    def of(cls, compiled: Any) -> Launch:
        """From what a Triton launch returns."""
        ptx: str = compiled.asm["ptx"]
        start = ptx.index(".entry")
        widths = [int(bits) // 8 for bits in re.findall(r"\.param\s+\.[busf](\d+)", ptx[start : ptx.index(")", start)])]
        return cls(compiled.function, 32 * compiled.metadata.num_warps, compiled.metadata.shared, widths)

    def pack(self, arguments: Sequence[int]) -> tuple[U64, U64]:
        """(values, pointers to them): what cuLaunchKernel takes; little-endian, so 8 bytes fit all widths."""
        if len(arguments) > len(self.widths):
            raise ConfigError(f"launch: expected at most {len(self.widths)} arguments, got {len(arguments)}")
        values = np.zeros(len(self.widths), dtype=np.uint64)
        values[: len(arguments)] = np.array([a & 0xFFFFFFFFFFFFFFFF for a in arguments], dtype=np.uint64)
        pointers = values.ctypes.data + 8 * np.arange(len(self.widths), dtype=np.uint64)
        return values, pointers.astype(np.uint64)


class _Driver(ctypes.Structure):
    """driver_t of submitter.c."""

    _fields_ = [
        ("batch_version", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("batch", "wait", "record", "launch", "copy_2d", "ordered", "any_order")),
    ]


class Submitter:
    """`submitter.c`, loaded, with the driver's entry points."""

    def __init__(self, library: Path, copier: CopyEngine) -> None:
        self._run = ctypes.CDLL(str(library)).kvt_submit  # CDLL: the GIL is released for the whole call
        self._run.restype = ctypes.c_int
        self._run.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] + [ctypes.c_void_p] * 3
        points = copier.entry_points()
        self._copier = copier
        self._driver = _Driver(copier.batch_version, *points)

    @classmethod
    def create(cls, copier: Copier, observer: Observer) -> Submitter | None:
        """A submitter for ``copier``, or None (said through the observer) without a driver or a compiler."""
        if not isinstance(copier, CopyEngine):
            return None
        try:
            return cls(build(), copier)
        except (ConfigError, OSError) as error:
            observer.fell_back("submitter", f"{error}; transfers are submitted call by call")
            return None

    def submit(self, script: Script) -> None:
        """Run ``script`` to its end, or to the first chunk after ``script.stop`` was set. Raises CudaError."""
        commands = script.commands()
        failed_at = ctypes.c_uint64(0)
        code = self._run(
            ctypes.addressof(self._driver),
            commands.ctypes.data,
            len(commands),
            script.progress.ctypes.data,
            script.stop.ctypes.data,
            ctypes.addressof(failed_at),
        )
        if code:
            op = int(commands[failed_at.value, 0])
            name = ("wait", "record", "batch", "launch", "2-D copy", "chunk")[op]
            raise CudaError(f"submitter: command {failed_at.value} of {len(commands)} ({name}) returned {code}", code)


def build(folder: Path | None = None) -> Path:
    """The compiled library, made at first use; the name holds the hash of source and compiler flags.

    Safe for several processes (written aside, then renamed). Raises ConfigError without a compiler, or with its
    message when it fails.
    """
    source = files("kvtransfer").joinpath("submitter.c").read_bytes()
    flags = ["-O2", "-shared", "-fPIC"]
    digest = hashlib.sha256(source + " ".join(flags).encode()).hexdigest()[:16]
    target = (folder or cache_folder()) / f"submitter-{sysconfig.get_platform()}-{digest}.so"
    if target.exists():
        return target
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None:
        raise ConfigError("no C compiler: expected gcc, clang or CC")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        path = Path(work) / "submitter.c"
        path.write_bytes(source)
        made = subprocess.run(
            [compiler, *flags, "-o", f"{work}/out.so", str(path)], capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise ConfigError(f"{compiler} failed: {made.stderr.strip()[-500:]}")
        os.replace(f"{work}/out.so", target)
    return target
