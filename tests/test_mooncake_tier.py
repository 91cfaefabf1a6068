"""The Mooncake tier against a real master and a real owner of memory: the contract, and what is Mooncake's own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tier_contract import Lab, RemoteContract, ShortRecordContract, TierContract, done, eventually, opened, statuses
from tier_pages import Arena
from tier_servers import Mooncake

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.base import PageStatus, Tier

store = pytest.importorskip("mooncake.store", reason="needs mooncake-transfer-engine or its -non-cuda build")
MooncakeTier = pytest.importorskip("kvtransfer.tiers.mooncake").MooncakeTier
OK, MISS, ERROR, NO_ROOM = PageStatus.OK, PageStatus.MISS, PageStatus.ERROR, PageStatus.NO_ROOM


class MooncakeLab(Lab):
    """Tiers share one client unless ``alone``: to set one up and close it takes a second."""

    persistent = True
    outage_s = 8.0  # the client gives up on a dead master after 4.5 s

    def __init__(self, servers: Mooncake, *, alone: bool = False) -> None:
        self.servers = servers
        self.client = store.MooncakeDistributedStore()
        code = self.client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 4 << 20, "tcp", "", servers.address)
        assert code == 0
        self.store = None if alone else self.client

    def make(self, **more: Any) -> Any:
        settings = {"hostname": "127.0.0.1", "prefix": "test", "timeout_s": 1.0, "lease_s": 0.6, "store": self.store}
        return MooncakeTier(self.servers.address, **{**settings, **more})

    def rot(self, tier: Tier, key: bytes, offset: int) -> None:
        data = bytearray(self.client.get("test:" + key.hex()))
        data[offset] ^= 32
        self._replace(key, bytes(data))

    def shorten(self, tier: Tier, key: bytes) -> None:
        self._replace(key, self.client.get("test:" + key.hex())[:-4096])

    def _replace(self, key: bytes, data: bytes) -> None:
        assert self.client.remove("test:" + key.hex(), True) == 0
        assert self.client.put("test:" + key.hex(), data) == 0

    def stop(self) -> None:
        self.servers.master.kill()

    def start(self) -> None:
        self.servers.master.start()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    made = Mooncake(tmp_path_factory.mktemp("mooncake"))
    yield made
    made.kill()


@pytest.fixture(scope="module")
def shared(servers: Mooncake) -> Iterator[MooncakeLab]:
    lab = MooncakeLab(servers)
    yield lab
    lab.client.close()


class TestMooncake(TierContract, ShortRecordContract):
    @pytest.fixture
    def bench(self, shared: MooncakeLab) -> Iterator[Lab]:
        yield shared


class TestOutage(RemoteContract):
    """Plain only: each takes several seconds of the client's own time-outs, and `FaultyTier` has no part in it."""

    @pytest.fixture
    def lab(self, tmp_path: Path) -> Iterator[Lab]:
        servers = Mooncake(tmp_path)
        lab = MooncakeLab(servers, alone=True)
        yield lab
        lab.client.close()
        servers.kill()


# --- what is Mooncake's own


def test_a_tier_with_a_client_of_its_own(shared: MooncakeLab) -> None:
    with opened(shared, shared.make(store=None)) as (tier, arena):
        source, target = arena(9).fill(), arena(9)
        done(tier.put_from(source.keys, source.buffers)).require()
        done(tier.get_into(source.keys, target.buffers)).require()
        assert target.images() == source.images()


@pytest.mark.parametrize("put, get", [(0, 1 << 20), (1 << 20, 0), (0, 0), (1 << 20, 1 << 20)])
def test_records_over_memory_of_the_tier_or_straight(shared: MooncakeLab, put: int, get: int) -> None:
    """Either way the same objects: more than a job, some twice, some not there, one rotten, nothing beside a buffer."""
    with shared.make(bounce_bytes=put, job_pages=7) as one, shared.make(bounce_bytes=get, job_pages=7) as two:
        source = Arena(30, tier=one).fill()
        target = Arena(30, tier=two)
        done(one.put_from(source.keys, source.buffers)).require()
        shared.rot(two, source.keys[4], 700)
        done(one.remove(source.keys[10:12])).require()
        order = [0, 0, *range(30)][:30]
        asked = [source.keys[at] for at in order]
        got = statuses(two.get_into(asked, target.buffers))
        bad = {4: PageStatus.CORRUPT, 10: MISS, 11: MISS}
        assert got == tuple(bad.get(at, OK) for at in order)
        images, wanted = target.images(), source.images()
        assert all(images[place] == wanted[at] for place, at in enumerate(order) if at not in bad)
        target.check_guards()
        counted = two.stats().counters["bytes_read"]
        assert counted == (got.count(OK) + 1) * source.record_bytes, "the rotten one was read"
    source.close()
    target.close()


class SmallRegions:
    """A client that takes no large memory, as under a limit on locked memory; everything else is the store's."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def register_buffer(self, start: int, nbytes: int) -> int:
        return int(self._store.register_buffer(start, nbytes)) if nbytes < 1 << 20 else -600

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_client_that_takes_no_more_memory_gets_two_pieces(shared: MooncakeLab) -> None:
    with shared.make(store=SmallRegions(shared.client)) as tier:
        source, target = Arena(9).fill(), Arena(18, tier=tier)
        for at, buffer in enumerate(source.buffers):
            target.buffers[at].payload[:], target.buffers[at].trailer[:] = buffer.payload, buffer.trailer
        done(tier.put_from(source.keys, target.buffers[:9])).require()
        done(tier.get_into(source.keys, target.buffers[9:])).require()
        assert target.images()[9:] == target.images()[:9] == source.images()
        assert tier.stats().counters["times_down"] == 0
    source.close()
    target.close()


def test_records_of_several_lengths_in_a_batch(shared: MooncakeLab) -> None:
    """Those go straight: they do not lie in rows."""
    with shared.make() as tier:
        short, long = Arena(3, tier=tier).fill(), Arena(3, KVSpec.attention(3, 5, 3, 150, 2), tier=tier).fill()
        keys, buffers = [*short.keys, *long.keys], [*short.buffers, *long.buffers]
        before = short.images() + long.images()
        done(tier.put_from(keys, buffers)).require()
        for buffer in buffers:
            buffer.payload[:], buffer.trailer[:] = 0, 0
        done(tier.get_into(keys, buffers)).require()
        assert short.images() + long.images() == before
    short.close()
    long.close()


def test_a_lease_that_ends_while_the_page_is_read_is_a_miss(shared: MooncakeLab) -> None:
    """The owner sends the page late, when the master is free to have given its place away."""
    with opened(shared, shared.make(timeout_s=20.0)) as (tier, arena):
        source, target = arena(3).fill(), arena(3)
        done(tier.put_from(source.keys, source.buffers)).require()
        shared.servers.provider.freeze()
        try:
            handle = tier.get_into(source.keys, target.buffers)
            time.sleep(1.5)  # a lease is 1 s
            assert not handle.done()
        finally:
            shared.servers.provider.thaw()
        assert statuses(handle) == (MISS,) * 3
        assert tier.stats().counters["times_down"] == 0


def test_an_owner_that_stalls_costs_one_time_out(shared: MooncakeLab) -> None:
    """The page that is stuck keeps its buffer; everything else is answered at once, and it comes back."""
    with opened(shared, shared.make(timeout_s=0.4)) as (tier, arena):
        source, target = arena(3).fill(), arena(3)
        done(tier.put_from(source.keys, source.buffers)).require()
        shared.servers.provider.freeze()
        try:
            stuck = tier.get_into(source.keys, target.buffers)
            eventually(lambda: tier.stats().counters["times_down"] == 1)
            assert not stuck.done()
        finally:
            shared.servers.provider.thaw()
        assert set(statuses(stuck)) <= {OK, MISS}
        eventually(lambda: statuses(tier.get_into(source.keys, target.buffers)) == (OK,) * 3)
        assert target.images() == source.images()


def test_an_owner_that_dies_takes_the_tier_down_until_its_pages_are_given_up(tmp_path: Path) -> None:
    servers = Mooncake(tmp_path)
    lab = MooncakeLab(servers)
    with opened(lab, lab.make(timeout_s=3.0)) as (tier, arena):
        source, target = arena(3).fill(), arena(3)
        done(tier.put_from(source.keys, source.buffers)).require()
        servers.provider.kill()
        result = done(tier.get_into(source.keys, target.buffers))
        assert result.statuses == (ERROR,) * 3 and "owner" in str(result.errors[0])
        started = time.monotonic()
        for _ in range(20):
            assert statuses(tier.lookup(source.keys)) in [(ERROR,) * 3, (MISS,) * 3]
        assert time.monotonic() - started < 1
        another = servers.make_provider()
        eventually(lambda: OK in statuses(tier.put_from(source.keys, source.buffers)))
        done(tier.put_from(source.keys, source.buffers)).require()
        done(tier.get_into(source.keys, target.buffers)).require()
        assert target.images() == source.images()
        another.kill()
    lab.client.close()
    servers.kill()


def test_what_the_master_evicts_is_a_miss_and_pins_hold(tmp_path: Path) -> None:
    servers = Mooncake(tmp_path, segment_mib=16)
    lab = MooncakeLab(servers)
    with opened(lab) as (tier, arena):
        pinned, target = arena(3).fill(), arena(400)
        done(tier.put_from(pinned.keys, pinned.buffers)).require()
        done(tier.pin(pinned.keys, None)).require()
        seen: set[PageStatus] = set()
        for _ in range(6):  # 40 MB
            source = arena(400).fill()
            put = statuses(tier.put_from(source.keys, source.buffers))
            assert set(put) <= {OK, NO_ROOM}
            time.sleep(0.7)
            result = done(tier.get_into(source.keys, target.buffers))
            assert set(result.statuses) <= {OK, MISS}
            assert all(target.image(i) == source.image(i) for i in result.positions(OK))
            seen |= set(put) | set(result.statuses)
        assert seen >= {OK, MISS}
        assert done(tier.get_into(pinned.keys, target.buffers[:3])).all_ok
        assert [target.image(i) for i in range(3)] == pinned.images()
        assert "pins_lost" not in tier.stats().counters
    lab.client.close()
    servers.kill()


def test_a_pin_that_is_lost_is_told(shared: MooncakeLab) -> None:
    with opened(shared) as (tier, arena):
        source = arena(2).fill()
        done(tier.put_from(source.keys, source.buffers)).require()
        done(tier.pin(source.keys, None)).require()
        assert shared.client.remove("test:" + source.keys[0].hex(), True) == 0
        eventually(lambda: tier.stats().counters.get("pins_lost") == 1)
        assert tier.stats().pinned_pages == 1


def test_a_full_pool_is_no_room(tmp_path: Path) -> None:
    servers = Mooncake(tmp_path)
    lab = MooncakeLab(servers)
    servers.provider.kill()
    eventually(lambda: lab.client.put("test:fill", b"x") == -200)
    with opened(lab) as (tier, arena):
        source = arena(2).fill()
        result = done(tier.put_from(source.keys, source.buffers))
        assert result.statuses == (NO_ROOM, NO_ROOM) and "room" in str(result.errors[0])
        assert tier.stats().counters["times_down"] == 0
    lab.client.close()
    servers.kill()


@pytest.mark.parametrize(
    ("master", "more"),
    [
        ("nowhere", {}),
        ("a:b", {}),
        ("127.0.0.1:1", {"hostname": ""}),
        ("127.0.0.1:1", {"protocol": "ip"}),
        ("127.0.0.1:1", {"replicas": 0}),
        ("127.0.0.1:1", {"lease_s": 0.0}),
    ],
)
def test_bad_settings(master: str, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="mooncake: "):
        MooncakeTier(master, **{"hostname": "127.0.0.1", **more})


ENDING = """
import sys, time
sys.path[:0] = sys.argv[1:3]
from kvtransfer.tiers.mooncake import MooncakeTier
from tier_pages import Arena

tier = MooncakeTier(sys.argv[3], hostname="127.0.0.1", prefix="ending")
arenas = [Arena(64, tier=tier).fill() for _ in range(4)]
handles = []
for _ in range(40):
    for arena in arenas:
        handles += [tier.put_from(arena.keys, arena.buffers), tier.get_into(arena.keys, arena.buffers)]
handles[0].result(20)
assert not handles[-1].done()
END
"""


@pytest.mark.parametrize(("end", "codes"), [("sys.exit(3)", (3,)), ("raise KeyboardInterrupt", (-2, 130))])
def test_a_process_may_end_with_batches_on_their_way(servers: Mooncake, end: str, codes: tuple[int, ...]) -> None:
    """The client takes Python's lock back in C++, where a thread that Python ends would abort the process."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", ENDING.replace("END", end), str(here.parent), str(here), servers.address],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode in codes and "terminate called" not in done.stderr, done.stderr[-2000:]
