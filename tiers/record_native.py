"""RecordTools: checks of many records in one call of C (``records.c``), where there is a compiler."""

from __future__ import annotations

import ctypes
import struct
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.native import build, once
from kvtransfer.tiers.keys import FORMAT_VERSION
from kvtransfer.tiers.parts import Parts
from kvtransfer.tiers.record import MAGIC

START = struct.pack("<8sI", MAGIC, FORMAT_VERSION)  # of each trailer
_AT_ONCE_BYTES = 1 << 20  # of payload, with the interpreter lock kept: 0.1 ms or so


class RecordTools:
    """The functions of ``records.c``, from ``library``."""

    def __init__(self, library: Path) -> None:
        giving, keeping = ctypes.CDLL(str(library)), ctypes.PyDLL(str(library))  # the interpreter lock
        pointer, number, image = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p
        check = number, image, pointer, pointer, image, number, number, ctypes.c_int, pointer
        self._giving = _function(giving, "kvt_records", *check)
        self._keeping = _function(keeping, "kvt_records", *check)
        self._pack = _function(giving, "kvt_pack", number, pointer, pointer, pointer, number)
        self._unpack = _function(giving, "kvt_unpack", number, pointer, image, pointer, pointer, image, pointer)

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

    def pack(self, parts: Parts, to: int, stride: int) -> None:
        """Copy each record, payload and trailer behind it, to ``to`` and every ``stride`` bytes from there. Gives the
        interpreter lock away."""
        count = len(parts.where)
        self._pack(count, *parts.addresses(0, count), to, stride)

    def unpack(self, places: Sequence[int], keys: Sequence[bytes], parts: Parts) -> bytes:
        """Copy records from the addresses ``places``, where each lies as one piece, to ``parts``; then `good` of them,
        whole. Gives the interpreter lock away."""
        count, joined = len(places), b"".join(keys)
        where, sizes = parts.addresses(0, count)
        assert len(joined) == 32 * count == 32 * len(parts.where)
        out, sources = ctypes.create_string_buffer(count), array("Q", places)
        self._unpack(count, sources.buffer_info()[0], joined, where, sizes, START, out)
        return out.raw


def _function(library: ctypes.CDLL, name: str, *arguments: Any) -> Any:
    found = getattr(library, name)
    found.argtypes, found.restype = arguments, None
    return found


@once
def record_tools() -> RecordTools | None:
    """The C functions, built at the first call; None where that fails, or on a machine of the other byte order."""
    if sys.byteorder != "little":
        return None
    try:
        return RecordTools(build(Path(__file__).with_name("records.c")))
    except (ConfigError, OSError):
        return None
