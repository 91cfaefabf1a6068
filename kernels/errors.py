"""The error tree. Every error that kvtransfer raises on purpose derives from `KVTransferError`.

Messages say what was expected, what was got, and what to do. Errors of other libraries (CUDA, the
operating system, a tier's client) are mapped at the edge with ``raise ... from``.
"""

from __future__ import annotations

from collections.abc import Sequence


class KVTransferError(Exception):
    """Base of every error raised by kvtransfer."""


class ConfigError(KVTransferError, ValueError):
    """A setting is wrong, or this machine can't do what was asked (no GPU, no such path)."""


class LayoutError(KVTransferError, ValueError):
    """A layout, a tensor or a list of page ids does not fit what was declared. Nothing was written."""


class TierError(KVTransferError, RuntimeError):
    """A storage tier failed."""


class CapacityError(TierError):
    """There is no room: the message gives what was asked, what is free, and the source of the limit."""


class UnavailableError(TierError):
    """A store does not answer, or gave no answer in time: its tier leaves it alone until it does."""


class RecordError(TierError):
    """A stored page can't be used: wrong magic, version, key, length or checksum. Treat it as a miss."""


class OwnershipError(KVTransferError, RuntimeError):
    """A page or slot is used against its state: freed twice, or freed while a transfer owns it."""


class ServerError(KVTransferError, RuntimeError):
    """An inference server did not answer, or refused: `status` is the HTTP status, None where there is no answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class RankError(KVTransferError, RuntimeError):
    """Ranks that share a cache can't agree: `ranks` are those that died, are late, or do something else.

    The survivors raise it alike. What has been agreed before stays; nothing more can be.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(ranks)


class TransferError(KVTransferError, RuntimeError):
    """A transfer did not complete. `pages` holds positions in the call's id list that are not usable."""

    def __init__(self, message: str, pages: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.pages: tuple[int, ...] = tuple(pages)


class TransferCancelled(TransferError):
    """The transfer was cancelled before every page was moved."""


class DeadlineExceeded(TransferError, TimeoutError):
    """The transfer, or a wait for it, passed its deadline."""


class CudaError(TransferError):
    """A CUDA call failed; `code` is the driver's CUresult (or the runtime's cudaError)."""

    def __init__(self, message: str, code: int = -1) -> None:
        super().__init__(message)
        self.code = code
