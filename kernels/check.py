"""Validation at the door: page ids on the CPU at the call, ids in GPU tensors on the GPU.

On the CPU a bad id raises before anything is written. On the GPU `check_ids` writes a status word that
gates every write of the launches behind it; the error is read when the transfer ends, and the caller never
synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kvtransfer.kernels.errors import LayoutError
from kvtransfer.kernels.ids import NumpyIds, id_tools

Ids = NDArray[np.int64]

STATUS_WORDS = 4  # [flags, position of the first id out of range, position of a duplicate, unused]
OUT_OF_RANGE = 1
DUPLICATE = 2
NO_POSITION = 2**31 - 1


def host_ids(ids: Any, limit: int, what: str, *, distinct: bool) -> Ids:
    """Ids given on the CPU (ints, numpy, list, CPU tensor) as an int64 array of its own, checked.

    Raises LayoutError with the first bad id: not an integer, outside 0 to ``limit - 1``, or (``distinct``) given
    twice.
    """
    if isinstance(ids, torch.Tensor):
        if ids.device.type != "cpu":
            raise LayoutError(f"{what} ids: expected CPU ids here, got a tensor on {ids.device}")
        if ids.numel() and (ids.is_floating_point() or ids.is_complex()):  # some of them numpy can't even show
            raise LayoutError(f"{what} ids: expected one axis of integers, got shape {tuple(ids.shape)} of {ids.dtype}")
        raw = ids.numpy()
    elif isinstance(ids, (int, np.integer)) and not isinstance(ids, bool):
        raw = np.asarray([ids])
    elif isinstance(ids, (np.ndarray, Sequence, range)) and not isinstance(ids, (str, bytes)):
        try:
            raw = np.asarray(ids)
        except ValueError as error:
            raise LayoutError(f"{what} ids: expected one axis of integers, got a ragged sequence") from error
    else:
        raise LayoutError(f"{what} ids: expected integers, a numpy array or a tensor, got {type(ids).__name__}")
    if raw.shape == (0,):
        return np.empty(0, dtype=np.int64)
    if raw.ndim != 1 or raw.dtype.kind not in "iu":
        raise LayoutError(f"{what} ids: expected one axis of integers, got shape {raw.shape} of {raw.dtype}")
    plain = raw.dtype.kind == "i" and raw.itemsize >= 4 and raw.dtype.isnative and raw.flags.c_contiguous
    out = (id_tools() if plain else NumpyIds()).checked(raw, limit, distinct=distinct)
    if out is not None:
        return out
    if int(raw.min()) < 0 or int(raw.max()) >= limit:
        at = int(np.argmax((raw < 0) | (raw >= limit)))
        raise LayoutError(f"{what} ids: expected 0 to {limit - 1}, got {int(raw[at])} at position {at}")
    ranked = np.sort(raw)
    twice = ranked[1:][ranked[1:] == ranked[:-1]]
    where = np.flatnonzero(raw == twice[0])[:2].tolist()
    raise LayoutError(f"{what} ids: expected distinct ids, got {int(twice[0])} at positions {where}")


@triton.jit(do_not_specialize=["count", "limit", "stamp"], do_not_specialize_on_alignment=["ids", "status"])
def check_kernel(ids, count, limit, seen, stamp, status, DISTINCT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    page = tl.load(ids + at, mask=live, other=0).to(tl.int64)
    bad = live & ((page < 0) | (page >= limit))
    first_bad = tl.min(tl.where(bad, at, 2147483647), axis=0)
    if first_bad < 2147483647:
        tl.atomic_or(status, 1)
        tl.atomic_min(status + 1, first_bad)
    if DISTINCT:
        before = tl.atomic_xchg(seen + page, stamp, mask=live & (bad == 0))
        again = live & (bad == 0) & (before == stamp)
        first_again = tl.min(tl.where(again, at, 2147483647), axis=0)
        if first_again < 2147483647:
            tl.atomic_or(status, 2)
            tl.atomic_min(status + 2, first_again)


def check_ids(ids: torch.Tensor, limit: int, status: torch.Tensor, seen: torch.Tensor, stamp: int) -> None:
    """Check ids on the GPU, on the current stream. Mutates ``status`` and ``seen``.

    ids     int32/int64 [n], on the device
    status  int32 [STATUS_WORDS], set to `fresh_status` before; word 0 stays 0 when all is well
    seen    int32 [limit]: scratch that remembers ``stamp``; give every call a stamp of its own, never 0
    """
    count = ids.numel()
    check_kernel[(triton.cdiv(count, 1024),)](ids, count, limit, seen, stamp, status, DISTINCT=True, BLOCK=1024)


def fresh_status() -> tuple[int, ...]:
    """The words that ``status`` holds before a check."""
    return (0, NO_POSITION, NO_POSITION, 0)


def explain_status(words: Sequence[int], limit: int, what: str) -> str | None:
    """The message for the words that `check_ids` left, or None when the ids were good."""
    found = []
    if words[0] & OUT_OF_RANGE:
        found.append(f"expected 0 to {limit - 1}, got an id outside it at position {words[1]}")
    if words[0] & DUPLICATE:
        found.append(f"expected distinct ids, got one for the second time at position {words[2]}")
    return f"{what} ids on the GPU: {'; '.join(found)}; nothing was written" if found else None


def device_ids(ids: torch.Tensor, device: torch.device, what: str) -> torch.Tensor:
    """Shape, dtype and device of ids that live on the GPU; their values are checked by `check_ids`."""
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous():
        raise LayoutError(
            f"{what} ids: expected a contiguous int32 or int64 vector, got {tuple(ids.shape)} of {ids.dtype}"
        )
    if ids.device != device:
        raise LayoutError(f"{what} ids: expected them on {device}, got {ids.device}")
    return ids
