"""RecordTools: checks of many records in one call of C (``records.c``), where there is a compiler."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.native import build
from kvtransfer.tiers.keys import FORMAT_VERSION
from kvtransfer.tiers.parts import Parts
from kvtransfer.tiers.record import MAGIC

START = struct.pack("<8sI", MAGIC, FORMAT_VERSION)  # of each trailer
_AT_ONCE_BYTES = 1 << 20  # of payload, with the interpreter lock kept: 0.1 ms or so


class RecordTools:
    """The functions of ``records.c``, from ``library``."""

    def __init__(self, library: Path) -> None:
        self._giving, self._keeping = (
            _function(loaded) for loaded in (ctypes.CDLL(str(library)), ctypes.PyDLL(str(library)))
        )

    @property
    def address(self) -> int:
        """Of ``kvt_records``, for other C."""
        return ctypes.cast(self._giving, ctypes.c_void_p).value or 0

    def good(
        self,
        keys: Sequence[bytes],
        parts: Parts,
        *,
        whole: bool,
        payload_bytes: int = 0,
        trailer_bytes: int = 0,
        gives_lock: bool = True,
    ) -> bytes:
        """For each stored key of 32 bytes and record: 1 where the trailer is sealed for the key, says ``payload_bytes``
        and is ``trailer_bytes`` long (0: any that fit the memory), and, if ``whole``, the payload has the checksum that
        it names. 0 where Python must look closer: something is wrong, or the record is longer or shorter than C takes.

        ``gives_lock``: other Python threads run meanwhile; else they wait for 1 MiB at most.
        """
        count = len(keys)
        joined = b"".join(keys)
        where_at, sizes_at = parts.addresses(0, count)
        assert len(joined) == 32 * count
        out = ctypes.create_string_buffer(count)
        step = count
        if whole and not gives_lock:
            step = max(1, _AT_ONCE_BYTES * count // max(1, int(parts.sizes[:, 0].sum())))
        call = self._giving if gives_lock else self._keeping
        for at in range(0, count, max(1, step)):
            n = min(step, count - at)
            call(
                n, joined[32 * at :], where_at + 16 * at, sizes_at + 16 * at, START, payload_bytes,
                trailer_bytes, whole, ctypes.byref(out, at),
            )  # fmt: skip
        return out.raw


def _function(library: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    found = library.kvt_records
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    found.argtypes = [
        number, ctypes.c_char_p, pointer, pointer, ctypes.c_char_p, number, number, ctypes.c_int, pointer,
    ]  # fmt: skip
    found.restype = None
    return found


@cache
def record_tools() -> RecordTools | None:
    """The C functions, built at the first call; None where that fails, or on a machine of the other byte order."""
    if sys.byteorder != "little":
        return None
    try:
        return RecordTools(build(Path(__file__).with_name("records.c")))
    except (ConfigError, OSError):
        return None
