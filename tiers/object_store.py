"""ObjectStoreTier: records as objects in S3, Google Cloud Storage, Azure or a local folder, through ``obstore``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    JoinError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import from_url

from kvtransfer.kernels.errors import ConfigError, TierError, UnavailableError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.jobs import Job, Outcome, Outcomes
from kvtransfer.tiers.worker_tier import WorkerTier

_T = TypeVar("_T")
_SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "https", "file")
# Answers that say that nobody can be served: no network, no right, no answer.
_AWAY = (GenericError, JoinError, PermissionDeniedError, UnauthenticatedError)


class ObjectStoreTier(WorkerTier):
    """Records as objects ``<prefix>/<2 hex digits>/<stored key in hex>`` under ``url``. Thread-safe.

    A put is conditional: the first writer's object stays, and is never seen in part. Buffers are the tier's until a
    put has returned: the client sends from them. A get costs one copy, from the client's memory into the buffers.
    Reads are verified; an object that does not verify is deleted. Nothing is ever evicted from here, so `pin` only
    refuses `remove`; a life-cycle rule of the bucket is the way to bound it, and what it deletes is a miss.

    Args:
        url: ``s3://bucket/path``, ``gs://bucket/path``, ``az://container/path``, an https address of one of these, or
            ``file:///folder`` (made where it is missing).
        options: the client's settings of that store by name (region, endpoint, access_key_id ...); what is not
            given comes from the environment, as the store's own tools do it.
        client_options: of its HTTP client; the time-outs are set from ``timeout_s`` unless given.
        timeout_s: for connecting and for each request. retries: of each, within the time-out.
        workers: requests at once.

    Raises ConfigError on a url or an option that the client doesn't take. Stores in memory are not taken: the client
    keeps references to the caller's buffers there.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "object_store",
        prefix: str = "kvtransfer",
        options: Mapping[str, Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
        timeout_s: float = 10.0,
        retries: int = 1,
        workers: int = 8,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        scheme = url.partition("://")[0]
        if scheme not in _SCHEMES:
            raise ConfigError(f"{name}: url: expected a scheme among {', '.join(_SCHEMES)}, got {url!r}")
        if retries < 0 or not timeout_s > 0:
            raise ConfigError(f"{name}: expected 0 or more retries and a time-out above 0, got {retries}, {timeout_s}")
        limit = timedelta(seconds=timeout_s)
        settings: dict[str, Any] = dict(options or {})
        if scheme == "file":
            settings["mkdir"] = True
        else:
            settings["client_options"] = {"timeout": limit, "connect_timeout": limit, **(client_options or {})}
            settings["retry_config"] = {"max_retries": retries, "retry_timeout": limit}
        try:
            self._store: Any = from_url(url, **settings)
        except (BaseError, ValueError, TypeError, OSError) as error:
            raise ConfigError(f"{name}: url {url!r}: {_first_line(error)}") from error
        self._prefix = prefix
        super().__init__(
            name,
            shared=True,
            workers=workers,
            job_pages=4,
            timeout_s=2 * timeout_s,  # the client's own limit comes first
            observer=observer,
        )
        self.start()

    def do_lookup(self, job: Job) -> Outcomes:
        for at, path in enumerate(self._paths(job)):
            yield Outcome(at, self._unless_missing(partial(obstore.head, self._store, path)))

    def do_get(self, job: Job) -> Outcomes:
        for at, (path, buffer) in enumerate(zip(self._paths(job), job.buffers, strict=True)):
            expected = buffer.payload.size + buffer.trailer.size
            try:
                found: Any = self._call(partial(obstore.get, self._store, path))
            except _Missing:
                yield Outcome(at, PageStatus.MISS)
                continue
            size = found.meta["size"]
            if size == expected:
                record = np.frombuffer(self._call(found.bytes), dtype=np.uint8)
                size = record.size
            if size != expected:
                error = TierError(f"{self.name}: expected a record of {expected} bytes, got {size}")
                yield Outcome(at, PageStatus.CORRUPT, error)
                continue
            buffer.payload[:] = record[: buffer.payload.size]
            buffer.trailer[:] = record[buffer.payload.size :]
            yield Outcome(at, PageStatus.OK, moved_bytes=expected)

    def do_put(self, job: Job) -> Outcomes:
        for at, (path, buffer) in enumerate(zip(self._paths(job), job.buffers, strict=True)):
            parts = [buffer.payload.data, buffer.trailer.data]
            moved_bytes = buffer.payload.size + buffer.trailer.size
            try:
                # One request: a multi-part upload could not be conditional.
                self._call(partial(obstore.put, self._store, path, parts, mode="create", use_multipart=False))
            except _Exists:
                moved_bytes = 0
            yield Outcome(at, PageStatus.OK, moved_bytes=moved_bytes)

    def do_remove(self, job: Job) -> Outcomes:
        for at, path in enumerate(self._paths(job)):
            status = self._unless_missing(partial(obstore.head, self._store, path))
            if status is PageStatus.OK:  # S3 deletes what is not there without a word
                status = self._unless_missing(partial(obstore.delete, self._store, path))
            yield Outcome(at, status)

    def do_pin(self, job: Job) -> Outcomes:
        return self.do_lookup(job)

    def do_probe(self) -> None:
        self._unless_missing(partial(obstore.head, self._store, f"{self._prefix}/probe"))

    # --- inside

    def _paths(self, job: Job) -> Iterator[str]:
        for key in job.keys:
            name = key.hex()
            yield f"{self._prefix}/{name[:2]}/{name}"  # a folder with all of them would be slow to search

    def _unless_missing(self, request: Callable[[], object]) -> PageStatus:
        try:
            self._call(request)
        except _Missing:
            return PageStatus.MISS
        return PageStatus.OK

    def _call(self, request: Callable[[], _T]) -> _T:
        """The answer; the client's errors as ours."""
        try:
            return request()
        except FileNotFoundError as error:
            raise _Missing(f"{self.name}: {_first_line(error)}") from error
        except AlreadyExistsError as error:
            raise _Exists(f"{self.name}: {_first_line(error)}") from error
        except _AWAY as error:
            raise UnavailableError(f"{self.name}: {_first_line(error)}") from error
        except BaseError as error:
            raise TierError(f"{self.name}: {_first_line(error)}") from error


class _Missing(TierError):
    """The object, or its bucket, is not there."""


class _Exists(TierError):
    """The object is there already."""


def _first_line(error: BaseException) -> str:
    """Without the client's dump of its own state."""
    return str(error).partition("\n")[0]
