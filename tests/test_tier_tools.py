"""`kvtransfer tier inspect` and `tier fsck`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from disk_helpers import SPACE, TINY, TINY_RECORD, TINY_SLOT, flip_byte, slab_path, tiny_record
from tier_contract import done, statuses

from kvtransfer.cli import main
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.tier_tools import check_tier, find_tiers, inspect_tier
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.disk_folder import Place

OK, MISS = PageStatus.OK, PageStatus.MISS


def filled(paths: object, count: int = 20, **more: object) -> tuple[list[bytes], list[tuple[str, int]]]:
    """A closed tier of ``count`` pages: their keys, and where they lie."""
    rng = np.random.default_rng()
    keys = [rng.bytes(32) for _ in range(count)]
    with DiskTier(paths, TINY, namespace=SPACE, capacity_pages=50, **more) as tier:  # type: ignore[arg-type]
        done(tier.put_from(keys, [tiny_record(key, rng) for key in keys])).require()
        return keys, [slab_path(tier, key) for key in keys]


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(args)
    return int(end.value.code or 0)


def test_inspect_tells_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path)
    filled(tmp_path, place=Place(tp=1), count=5)
    folder = tmp_path / SPACE.hex() / "i0-dp0-pp0-cp0-tp1"
    (folder / "core.123").write_text("x")
    before = sorted(p.name for p in folder.iterdir())
    for path in (tmp_path, tmp_path / SPACE.hex()):
        assert run("tier", "inspect", str(path)) == 0
        out = capsys.readouterr().out
        assert out.count("owner      nobody") == 2 and SPACE.hex() in out
        assert f"pages      20, {20 * TINY_RECORD} bytes, 40% of the slabs" in out and "strange    core.123" in out
    assert run("tier", "inspect", str(folder)) == 0
    assert "pages      5," in capsys.readouterr().out
    assert sorted(p.name for p in folder.iterdir()) == before
    with DiskTier(tmp_path, TINY, namespace=SPACE, capacity_pages=50):
        report = inspect_tier(find_tiers(str(tmp_path))[0])
        assert report.owner.startswith(f"process {os.getpid()}") and report.pages == 20
        assert report.oldest_s is not None and 0 <= report.oldest_s < 60


def test_paths_that_hold_no_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for path, words in ((tmp_path, "got none"), (tmp_path / "file", "got a file"), (tmp_path / "no", "got nothing")):
        assert run("tier", "inspect", str(path)) == 2
        assert words in capsys.readouterr().err


def test_fsck_finds_and_repairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, places = filled(tmp_path)
    assert run("tier", "fsck", str(tmp_path)) == 0
    assert "20 records read, 0 wrong" in capsys.readouterr().out
    flip_byte(places[3][0], places[3][1] + 7)
    flip_byte(places[8][0], places[8][1] + TINY_SLOT + 300)
    assert run("tier", "fsck", str(tmp_path)) == 1
    out = capsys.readouterr().out
    assert "2 wrong" in out and keys[3].hex() in out and keys[8].hex() in out and "checksum" in out
    assert run("tier", "fsck", str(tmp_path), "--repair") == 0
    assert "repaired" in capsys.readouterr().out
    assert run("tier", "fsck", str(tmp_path)) == 0
    with DiskTier(tmp_path, TINY, namespace=SPACE, capacity_pages=50) as tier:
        assert statuses(tier.lookup(keys)) == tuple(MISS if i in (3, 8) else OK for i in range(20))


def test_fsck_of_a_damaged_journal_and_a_lost_slab(tmp_path: Path) -> None:
    filled(tmp_path, file_bytes=5 * TINY_RECORD)
    (folders,) = find_tiers(str(tmp_path))
    os.unlink(os.path.join(folders[0], "slab.000001"))
    report = check_tier(folders)
    assert (report.checked, report.lost_pages, report.damaged, report.clean) == (15, 5, 0, False)
    flip_byte(os.path.join(folders[0], "snapshot"), 200)
    report = check_tier(folders, repair=True)
    assert (report.checked, report.damaged, report.repaired) == (0, 1, True)
    assert check_tier(folders).clean


def test_repair_wants_the_tier_for_itself_and_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = f"{tmp_path}/a;{tmp_path}/b"
    keys, places = filled(paths)
    with DiskTier(paths, TINY, namespace=SPACE, capacity_pages=50):
        assert run("tier", "fsck", paths, "--repair") == 1
        assert "owned by process" in capsys.readouterr().err
        assert run("tier", "fsck", paths) == 0
    assert run("tier", "fsck", f"{tmp_path}/a", "--repair") == 2
    assert "all 2 paths" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="without its first"):
        find_tiers(f"{tmp_path}/b")
    flip_byte(places[1][0], places[1][1])
    assert run("tier", "fsck", paths, "--repair") == 0
    with DiskTier(paths, TINY, namespace=SPACE, capacity_pages=50) as tier:
        assert statuses(tier.lookup(keys)).count(OK) == 19
