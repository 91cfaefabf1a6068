"""The object store tier against a server that speaks S3, and in a local folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tier_contract import Lab, RemoteContract, ShortRecordContract, TierContract, done, opened, statuses
from tier_servers import Moto

from kvtransfer.kernels.errors import ConfigError
from kvtransfer.tiers.base import PageStatus, Tier

obstore = pytest.importorskip("obstore")
ObjectStoreTier = pytest.importorskip("kvtransfer.tiers.object_store").ObjectStoreTier
OK, MISS, ERROR = PageStatus.OK, PageStatus.MISS, PageStatus.ERROR


class FolderLab(Lab):
    persistent = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, **more: Any) -> Any:
        return ObjectStoreTier(self.folder.as_uri(), **{"workers": 2, **more})

    def path(self, key: bytes) -> Path:
        return self.folder / "kvtransfer" / key.hex()[:2] / key.hex()

    def rot(self, tier: Tier, key: bytes, offset: int) -> None:
        data = bytearray(self.path(key).read_bytes())
        data[offset] ^= 8
        self.path(key).write_bytes(data)

    def shorten(self, tier: Tier, key: bytes) -> None:
        self.path(key).write_bytes(self.path(key).read_bytes()[:-4096])


class TestFolder(TierContract, ShortRecordContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Lab]:
        yield FolderLab(tmp_path / "with a blank, and a %25")


class S3Lab(Lab):
    persistent = True
    many = 24

    def __init__(self, server: Moto) -> None:
        self.server = server

    def make(self, **more: Any) -> Any:
        settings = {"options": self.server.options, "client_options": {"allow_http": True}}
        return ObjectStoreTier("s3://bucket/some/path", **{"workers": 4, "timeout_s": 2.0, **settings, **more})

    def store(self) -> Any:
        return obstore.store.from_url(
            "s3://bucket/some/path", **self.server.options, client_options={"allow_http": True}
        )

    def rot(self, tier: Tier, key: bytes, offset: int) -> None:
        path = f"kvtransfer/{key.hex()[:2]}/{key.hex()}"
        data = bytearray(obstore.get(self.store(), path).bytes().to_bytes())
        data[offset] ^= 8
        obstore.put(self.store(), path, bytes(data))

    def shorten(self, tier: Tier, key: bytes) -> None:
        path = f"kvtransfer/{key.hex()[:2]}/{key.hex()}"
        data = obstore.get(self.store(), path).bytes().to_bytes()
        obstore.put(self.store(), path, data[:-4096])

    def stop(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server.start()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Lab]:
    server = Moto(tmp_path_factory.mktemp("moto"))
    yield S3Lab(server)
    server.kill()


class TestS3(TierContract, ShortRecordContract):
    """Plain only: the server takes milliseconds a page, and `FaultyTier` is seen over the folder."""

    @pytest.fixture
    def bench(self, s3: S3Lab) -> Iterator[Lab]:
        yield s3

    @pytest.fixture
    def lab(self, s3: S3Lab) -> Iterator[Lab]:
        yield s3


class TestS3Outage(RemoteContract):
    @pytest.fixture
    def lab(self, s3: S3Lab) -> Iterator[Lab]:
        yield s3


def test_writers_at_once_keep_the_first(s3: S3Lab) -> None:
    """Conditional puts: of many writers of one key just one has written."""
    tiers = [s3.make() for _ in range(4)]
    with opened(s3, tiers[0]) as (tier, arena):
        source, target = arena(3).fill(), arena(3)
        gate = threading.Barrier(4)

        def put(one: Any) -> None:
            gate.wait(10)
            done(one.put_from(source.keys, source.buffers)).require()

        threads = [threading.Thread(target=put, args=(one,)) for one in tiers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        written = sum(one.stats().counters["bytes_written"] for one in tiers)
        assert written == 3 * source.record_bytes
        done(tier.get_into(source.keys, target.buffers)).require()
        assert target.images() == source.images()
    for one in tiers[1:]:
        one.close()


def test_a_bucket_that_is_not_there(s3: S3Lab) -> None:
    settings = {"options": s3.server.options, "client_options": {"allow_http": True}}
    tier = ObjectStoreTier("s3://nothing-here/x", timeout_s=2.0, **settings)
    with opened(s3, tier) as (tier, arena):
        source = arena(2).fill()
        assert statuses(tier.lookup(source.keys)) == (MISS, MISS)
        result = done(tier.put_from(source.keys, source.buffers))
        assert result.statuses == (ERROR, ERROR) and "nothing-here" in str(result.errors[0])


@pytest.mark.parametrize(
    ("url", "more", "message"),
    [
        ("memory:///", {}, "scheme"),
        ("nonsense", {}, "scheme"),
        ("s3://bucket", {"options": {"no_such_option": "1"}}, "url"),
        ("s3://bucket", {"retries": -1}, "retries"),
        ("s3://bucket", {"timeout_s": 0.0}, "time-out"),
    ],
)
def test_bad_settings(url: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"object_store: .*{message}"):
        ObjectStoreTier(url, **more)
