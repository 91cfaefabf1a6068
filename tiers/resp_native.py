"""NativeWire: records received, checked and sent by C (``resp.c``), where there is a compiler. Without one resp.py does
it, page by page."""

from __future__ import annotations

import ctypes
import enum
import os
from array import array
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from kvtransfer.kernels.errors import ConfigError, UnavailableError
from kvtransfer.kernels.native import build, once
from kvtransfer.tiers.parts import Parts
from kvtransfer.tiers.record_native import START, RecordTools, record_tools

AHEAD_BYTES = 64  # room of `ahead` in resp.c
_ALL, _OTHER_ANSWER, _NO_LINE_END, _CLOSED, _BROKEN = range(5)


class Got(enum.Enum):
    """What came of a GET whose record has the length that it should have; as in resp.c. No numbers: a value of another
    length is told by its length, which must not be taken for one of these."""

    NONE = 0  # there is no value
    FILLED = 1  # the record's memory is filled
    WHOLE = 2  # and the record is right: `sealed.check_whole`


_GOT = tuple(Got)


class Asking(ctypes.Structure):
    """GETs that C sends, so that at most ``window`` answers are under way; as in resp.c. ``asked`` were sent; those
    from ``limit`` on are not to be."""

    _fields_ = (
        ("_texts", ctypes.c_char_p), ("_ends", ctypes.c_uint64),
        ("asked", ctypes.c_uint64), ("limit", ctypes.c_uint64), ("window", ctypes.c_uint64),
    )  # fmt: skip
    asked: int
    limit: int
    window: int

    def __init__(self, commands: Sequence[bytes], window: int) -> None:
        self._kept = array("Q", accumulate(map(len, commands)))
        super().__init__(b"".join(commands), self._kept.buffer_info()[0], 0, len(commands), window)


class NativeWire:
    """The functions of ``resp.c``, from ``library``. ``tools`` check records as they come, if there are any."""

    def __init__(self, library: Path, tools: RecordTools | None = None) -> None:
        lib = ctypes.CDLL(str(library))  # gives Python's lock away for the whole of a call
        self._tools = tools  # kept: its code is called
        self._check = None if tools is None else tools.address
        self._get = lib.kvt_resp_get
        pointer, number, image = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p
        self._get.argtypes = [
            ctypes.c_int, pointer, number, number, number, pointer, pointer, pointer, image, image, pointer, pointer,
            pointer, pointer, pointer,
        ]  # fmt: skip
        self._put = lib.kvt_resp_put
        self._put.argtypes = [ctypes.c_int, number, image, pointer, pointer, pointer, pointer]
        self._get.restype = self._put.restype = ctypes.c_int

    def receive(
        self,
        fd: int,
        asking: Asking,
        keys: Sequence[bytes],
        parts: Parts,
        places: range,
        until_ns: int,
        ahead: bytes,
        answers: list[Any],
    ) -> tuple[bytes, bool]:
        """Append to ``answers`` what came (`Got`) of the GETs of ``places``, and ask for more meanwhile; until one of
        another kind comes, or, after one at least, it is ``until_ns`` of `time.monotonic_ns`. ``keys``: stored keys of
        32 bytes, for the check; ``ahead`` was read already. The caller keeps the memory of all ``parts`` alive, and
        writable. Returns what is read ahead of the next answer, and whether that is of another kind.

        Raises OSError; UnavailableError where the server closed the connection or a value has no end.
        """
        count = len(places)
        joined = b"".join(keys[places.start : places.stop])
        check = self._check if len(joined) == 32 * count else None
        early = ctypes.create_string_buffer(ahead, AHEAD_BYTES)
        held, answered, code = ctypes.c_uint64(len(ahead)), ctypes.c_uint64(), ctypes.c_int()
        got = ctypes.create_string_buffer(count)
        where, sizes = parts.addresses(places.start, count)
        ended = self._get(
            fd, ctypes.byref(asking), places.start, count, until_ns, where, sizes, check, joined, START, early,
            ctypes.byref(held), got, ctypes.byref(answered), ctypes.byref(code),
        )  # fmt: skip
        answers += [_GOT[kind] for kind in got.raw[: answered.value]]
        if ended == _BROKEN:
            raise OSError(code.value, os.strerror(code.value))
        if ended == _CLOSED:
            raise UnavailableError("the server closed the connection before the end of an answer")
        if ended == _NO_LINE_END:
            raise UnavailableError("expected the end of a value, got more of it: out of step")
        return early.raw[: held.value], ended == _OTHER_ANSWER

    def send(self, fd: int, texts: Sequence[bytes], parts: Parts) -> None:
        """Send ``texts[0]``, the first record, ``texts[1]``, ... and the last text: one more than there are records.

        The caller keeps the memory of all ``parts`` alive. Raises OSError.
        """
        count, code = len(texts) - 1, ctypes.c_int()
        where, sizes = parts.addresses(0, count)
        ends = array("Q", accumulate(map(len, texts)))
        ended = self._put(fd, count, b"".join(texts), ends.buffer_info()[0], where, sizes, ctypes.byref(code))
        if ended != _ALL:
            raise OSError(code.value, os.strerror(code.value))


@once
def native_wire() -> NativeWire | None:
    """The C functions, built at the first call; None where that fails."""
    try:
        return NativeWire(build(Path(__file__).with_name("resp.c")), record_tools())
    except (ConfigError, OSError):
        return None
