"""RedisTier: records in a Redis or Valkey server.

Pages are received into the caller's buffers and sent from them (resp.py); connecting, authentication, TLS and all
other commands are the client library's (package ``redis``, of the extra of that name).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvtransfer.kernels.errors import ConfigError, TierError, UnavailableError
from kvtransfer.kernels.events import NO_OBSERVER, Observer
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.batch_book import KEY_BYTES
from kvtransfer.tiers.jobs import Job, Outcome, Outcomes, Same
from kvtransfer.tiers.resp import Answer, RespError, RespSocket, shut
from kvtransfer.tiers.resp_native import Got, native_wire
from kvtransfer.tiers.worker_tier import WorkerTier

# Answers that say that the server can't serve anybody now.
_AWAY = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "READONLY", "TRYAGAIN")
_USAGE_AGE_S = 1.0


class RedisTier(WorkerTier):
    """Records as strings under ``<prefix>:<stored key in hex>``. Thread-safe.

    A page that the server evicted or that expired is a miss. Where its memory is full and it may not evict, puts are
    NO_ROOM. Reads are verified; a record that does not verify is deleted. A put sends its bytes even if the key is
    there (the server compares): ask `lookup` first where that is likely.

    `pin` works where the server evicts nothing (no ``maxmemory``, or policy ``noeviction``): it lifts or moves the
    page's expiry. Elsewhere it is ERROR: no command protects one key.

    Args:
        url: ``redis://[[user]:password@]host[:port][/db]``, ``rediss://`` for TLS, or ``unix:///path``; query
            arguments are the client library's (ssl_ca_certs ...).
        prefix: of every key. Stored keys differ between namespaces by themselves; the prefix is for whoever looks
            after the server.
        ttl_s: pages expire so long after they were put; None: never.
        connections: sockets that move pages; a batch is spread over them unless others wait for them.
        timeout_s: for each answer of the server, and for connecting.
        job_pages: most pages of a batch that go over one socket in one go.

    ``stats`` tells the server's memory and limit, and all keys of its database, as they were when it was called
    before or, called often, about a second ago. Raises ConfigError on a bad url.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "redis",
        prefix: str = "kvtransfer",
        ttl_s: float | None = None,
        connections: int = 2,
        timeout_s: float = 2.0,
        job_pages: int = 128,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        if ttl_s is not None and not ttl_s > 0:
            raise ConfigError(f"{name}: ttl_s: expected more than 0 seconds or None, got {ttl_s}")
        try:
            self._pool = redis.ConnectionPool.from_url(
                url,
                protocol=2,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),  # `health` decides what happens after a failure
            )
        except ValueError as error:
            raise ConfigError(
                f"{name}: url: expected redis://host:port/db, rediss:// or unix://, got: {error}"
            ) from error
        self._client = redis.Redis(connection_pool=self._pool)
        self._prefix = prefix.encode() + b":"
        self._options = [b"NX"] if ttl_s is None else [b"NX", b"PX", b"%d" % max(1, round(ttl_s * 1000))]
        self._ttl_ms = None if ttl_s is None else max(1, round(ttl_s * 1000))
        self._links: dict[int, _Link] = {}  # by thread
        self._connecting: dict[int, Any] = {}  # likewise, while the server has not answered
        self._links_lock = threading.Lock()
        self._usage = (0, 0, 0)
        self._usage_at = 0.0
        self._evicts = ""  # the policy, where the server may evict
        super().__init__(
            name,
            shared=True,
            workers=connections,
            job_pages=job_pages,
            timeout_s=2 * timeout_s,  # the sockets' own limit comes first
            observer=observer,
        )
        self._answer_s = timeout_s
        native_wire()  # built now, not in a worker's first call, whose time is limited
        self.start()

    # --- jobs

    def do_lookup(self, job: Job) -> Outcomes:
        with self._mapped_errors(), self._client.pipeline(transaction=False) as pipe:
            for name in self._names_of(job.keys):
                pipe.exists(name)
            answers = pipe.execute(raise_on_error=False)
        return [_outcome(at, answer) for at, answer in enumerate(answers)]

    def do_get(self, job: Job) -> Outcomes:
        names = self._names_of(job.keys)
        sizes = job.parts.sizes.sum(axis=1).tolist()
        alike = sizes.count(sizes[0]) == len(sizes)
        done = 0

        def ask(link: RespSocket, at: int) -> Iterator[list[Any]]:
            return link.fetch(
                names[at:], job.buffers[at:], lambda: job.stopping, stored_keys=job.keys[at:], parts=job.parts.from_(at)
            )

        for first, answers in self._moved(ask, job):
            done = first + len(answers)
            if answers.count(Got.WHOLE) == len(answers) and alike:  # what most are
                yield Same(first, len(answers), PageStatus.OK, sizes[first], checked=True)
            else:
                yield [self._got(at, answer, sizes[at]) for at, answer in enumerate(answers, first)]
        yield [Outcome(at, PageStatus.CANCELLED) for at in range(done, len(job.keys))]

    def _got(self, at: int, answer: Answer, record_bytes: int) -> Outcome:
        """What the answer to a GET of a record of so many bytes says."""
        if answer is Got.WHOLE or answer is Got.FILLED:
            return Outcome(at, PageStatus.OK, None, record_bytes, answer is Got.WHOLE)
        if answer is Got.NONE:
            return Outcome(at, PageStatus.MISS)
        if isinstance(answer, RespError):
            return Outcome(at, PageStatus.ERROR, self._error_of(answer))
        error = TierError(f"{self.name}: expected a record of {record_bytes} bytes, got {answer}")
        return Outcome(at, PageStatus.CORRUPT, error)

    def do_put(self, job: Job) -> Outcomes:
        names = self._names_of(job.keys)
        sizes = job.parts.sizes.sum(axis=1).tolist()
        alike = sizes.count(sizes[0]) == len(sizes)

        def ask(link: RespSocket, at: int) -> Iterator[list[Any]]:
            return link.store(names[at:], job.buffers[at:], self._options, parts=job.parts.from_(at))

        for first, answers in self._moved(ask, job):
            if answers.count(True) == len(answers) and alike:  # what most are
                yield Same(first, len(answers), PageStatus.OK, sizes[first])
            else:
                yield [self._stored(at, answer, sizes[at]) for at, answer in enumerate(answers, first)]

    def _stored(self, at: int, answer: bool | RespError, record_bytes: int) -> Outcome:
        """What the answer to a SET says."""
        if isinstance(answer, RespError):
            status = PageStatus.NO_ROOM if answer.code == "OOM" else PageStatus.ERROR
            return Outcome(at, status, self._error_of(answer))
        return Outcome(at, PageStatus.OK, None, record_bytes if answer else 0)

    def do_remove(self, job: Job) -> Outcomes:
        with self._mapped_errors(), self._client.pipeline(transaction=False) as pipe:
            for name in self._names_of(job.keys):
                pipe.unlink(name)
            answers = pipe.execute(raise_on_error=False)
        return [_outcome(at, answer) for at, answer in enumerate(answers)]

    def do_pin(self, job: Job) -> Outcomes:
        if self._evicts and job.ttl_s != 0:
            error = TierError(f"{self.name}: the server may evict any page (policy {self._evicts}): it can't pin one")
            return [Outcome(at, PageStatus.ERROR, error) for at in range(len(job.keys))]
        with self._mapped_errors(), self._client.pipeline(transaction=False) as pipe:
            for name in self._names_of(job.keys):
                if self._ttl_ms is None:
                    pass  # nothing ends it
                elif job.ttl_s is None:
                    pipe.persist(name)
                elif job.ttl_s == 0:
                    pipe.pexpire(name, self._ttl_ms)
                else:
                    pipe.pexpire(name, max(self._ttl_ms, round(job.ttl_s * 1000)))
                pipe.exists(name)
            answers = pipe.execute(raise_on_error=False)
        step = len(answers) // len(job.keys)
        return [_outcome(at, answer) for at, answer in enumerate(answers[step - 1 :: step])]

    def do_usage(self) -> tuple[int, int, int]:
        if time.monotonic() - self._usage_at >= _USAGE_AGE_S:
            self._usage_at = time.monotonic()
            self.soon(self._read_usage)
        return self._usage

    def do_probe(self) -> None:
        self._read_usage()

    def do_interrupt(self, threads: Collection[int]) -> None:
        with self._links_lock:
            links = [link for thread, link in self._links.items() if thread in threads]
            connecting = [connection for thread, connection in self._connecting.items() if thread in threads]
        for link in links:
            link.socket.shut()
        # Of the pool's no public name tells which thread uses one, nor which are in use.
        for connection in [*connecting, *getattr(self._pool, "_in_use_connections", ())]:
            shut(getattr(connection, "_sock", None))

    def do_abort(self) -> None:
        with self._links_lock:
            links, connecting = list(self._links.values()), list(self._connecting.values())
        for link in links:
            link.socket.shut()
        for connection in connecting:
            connection.disconnect()
        self._pool.disconnect()

    def do_close(self) -> None:
        with self._links_lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.connection.disconnect()
        self._pool.disconnect()

    # --- inside

    def _names_of(self, keys: Sequence[bytes]) -> list[bytes]:
        digits, step = b"".join(keys).hex().encode(), 2 * KEY_BYTES
        return [self._prefix + digits[at : at + step] for at in range(0, len(digits), step)]

    def _moved(
        self, ask: Callable[[RespSocket, int], Iterator[list[Any]]], job: Job
    ) -> Iterator[tuple[int, list[Any]]]:
        """(position, answers from there on) until every page of the job has one. A connection that broke while it lay
        idle is replaced, once."""
        answered = 0
        while True:
            link, fresh = self._link()
            try:
                for answers in ask(link.socket, answered):
                    away = next(
                        (i for i, a in enumerate(answers) if isinstance(a, RespError) and a.code in _AWAY), None
                    )
                    if told := answers[:away]:
                        yield answered, told
                        answered += len(told)
                    if away is not None:
                        raise UnavailableError(f"the server can't serve now: {answers[away]}")
                return
            except UnavailableError as error:
                idle_end = (
                    not fresh and answered == 0 and not isinstance(error.__cause__, BlockingIOError | TimeoutError)
                )
                if not idle_end or self._aborted or link.socket.was_shut:
                    raise
            finally:
                if not link.socket.in_step:
                    self._drop_link()

    def _link(self) -> tuple[_Link, bool]:
        """The calling thread's connection, and whether it was made just now."""
        me = threading.get_ident()
        link = self._links.get(me)
        if link is not None and link.socket.in_step:
            return link, False
        self._drop_link()  # never one with an answer to an earlier question under way
        connection: Any = self._pool.make_connection()
        with self._links_lock:
            self._connecting[me] = connection
        try:
            with self._mapped_errors():
                connection.connect()
        finally:
            with self._links_lock:
                del self._connecting[me]
        link = _Link(connection, RespSocket(_socket_of(connection), self._answer_s, native=native_wire()))
        with self._links_lock:
            self._links[me] = link
        return link, True

    def _drop_link(self) -> None:
        with self._links_lock:
            link = self._links.pop(threading.get_ident(), None)
        if link is not None:
            link.connection.disconnect()

    def _read_usage(self) -> None:
        with self._mapped_errors():
            memory: dict[str, Any] = self._client.info("memory")
            pages = int(self._client.dbsize())
        limit, policy = int(memory.get("maxmemory", 0)), str(memory.get("maxmemory_policy", "noeviction"))
        self._evicts = policy if limit and policy != "noeviction" else ""
        self._usage = (limit, int(memory["used_memory"]), pages)
        self._usage_at = time.monotonic()

    def _error_of(self, answer: RespError) -> TierError:
        error = TierError(f"{self.name}: the server refused: {answer}")
        error.__cause__ = answer
        return error

    @contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        """The client library's errors as ours."""
        try:
            yield
        except (redis.ConnectionError, redis.TimeoutError, redis.exceptions.ReadOnlyError) as error:
            raise UnavailableError(f"{self.name}: {error}") from error
        except redis.RedisError as error:
            raise TierError(f"{self.name}: {error}") from error


class _Link:
    """One connection of the client library, and its socket as ours."""

    def __init__(self, connection: Any, link: RespSocket) -> None:
        self.connection = connection
        self.socket = link


def _socket_of(connection: Any) -> Any:
    """The socket behind a connection of the client library, which has no public name."""
    sock = getattr(connection, "_sock", None)
    if sock is None:
        raise TierError(f"redis {redis.__version__}: expected a connection with a socket, got {connection!r}")
    return sock


def _outcome(at: int, answer: Any) -> Outcome:
    """Of a command that counts keys."""
    if isinstance(answer, Exception):
        return Outcome(at, PageStatus.ERROR, answer)
    return Outcome(at, PageStatus.OK if answer else PageStatus.MISS)
