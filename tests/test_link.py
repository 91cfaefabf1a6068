"""Link profiles: interpolation as a table and against a model, files that are whole, foreign, damaged or missing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import Log
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvtransfer import link
from kvtransfer.device_info import DeviceInfo
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.link import (
    FORMAT,
    Curve,
    Grid,
    LinkProfile,
    ProfileKey,
    along,
    bracket,
    decode_profile,
    encode_profile,
    load_profile,
    profile_key,
    save_profile,
    shipped_profile,
)

GRID = Grid((1024, 4096, 65536), (16, 256, 4096), ((1.0, 2.0, 4.0), (2.0, 8.0, 8.0), (32.0, 48.0)))


@pytest.mark.parametrize(
    ("piece", "count", "gbps"),
    [
        (1024, 16, 1.0),
        (4096, 256, 8.0),
        (65536, 256, 48.0),
        (2048, 16, math.sqrt(2)),  # half-way between 1 and 2, in logs
        (1024, 64, math.sqrt(2)),
        (2048, 64, 2.0 ** ((0 + 1 + 1 + 3) / 4)),
        (512, 16, 1.0),  # clamped on all four sides
        (1024, 1, 1.0),
        (1 << 30, 16, 32.0),
        (1024, 1 << 20, 4.0),
        (65536, 4096, 48.0),  # not measured: the row's last rate holds
        (65536, 1024, 48.0),
        (16384, 4096, 8.0 * math.sqrt(6)),
    ],
)
def test_rates_are_read_by_log_log_interpolation(piece: int, count: int, gbps: float) -> None:
    assert GRID.rate(piece, count) == pytest.approx(gbps)
    assert GRID.seconds(piece, count) == pytest.approx(piece * count / gbps / 1e9)


def test_no_pieces_take_no_time() -> None:
    assert GRID.seconds(1024, 0) == 0


@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=8, unique=True), st.floats(1, 1e13))
@settings(deadline=None)
def test_brackets(axis: list[int], x: float) -> None:
    axis.sort()
    low, high, share = bracket(axis, x)
    assert 0 <= low <= high < len(axis) and 0 <= share <= 1
    if axis[0] <= x <= axis[-1]:
        assert axis[low] + (axis[high] - axis[low]) * share == pytest.approx(x)
    values = [float(a) for a in axis]
    assert along(axis, values, x) == pytest.approx(min(max(x, axis[0]), axis[-1]))


@given(st.integers(512, 1 << 22), st.integers(1, 1 << 17))
@settings(deadline=None)
def test_rates_lie_between_their_neighbours(piece: int, count: int) -> None:
    assert 0.999 < GRID.rate(piece, count) < 48.001


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grid((), (1,), ()), "ascending"),
        (lambda: Grid((2, 1), (1,), ((1.0,), (1.0,))), "ascending"),
        (lambda: Grid((0, 1), (1,), ((1.0,), (1.0,))), "ascending"),
        (lambda: Grid((1,), (1,), ()), "expected 1 rows, got 0"),
        (lambda: Grid((1,), (1,), ((1.0, 2.0),)), "expected 1 to 1 values a row, got 2"),
        (lambda: Grid((1,), (1,), ((),)), "expected 1 to 1 values a row, got 0"),
        (lambda: Grid((1,), (1,), ((0.0,),)), "above 0"),
        (lambda: Grid((1,), (1,), ((math.nan,),)), "finite"),
        (lambda: Curve((1, 2), (1.0,)), "expected 2 values, got 1"),
        (lambda: replace(shipped_profile(), peak_gbps={"h2d": 1.0}), "expected 'd2h'"),
        (lambda: replace(shipped_profile(), gemm_kept={"tape/h2d": 1.0}), "got 'tape/h2d'"),
    ],
)
def test_tables_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# -- shipped figures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_the_shipped_profiles_say_what_they_are(kind: str) -> None:
    profile = shipped_profile(kind)
    assert profile.source == "shipped" and profile.format == FORMAT
    assert profile.describe().startswith("shipped figures of ")
    assert decode_profile(encode_profile(profile), "here") == profile


def test_the_shipped_figures_are_those_of_the_documents() -> None:
    """docs/performance.md: what the table of the copy engine and of the kernel there says comes back within 3 %."""
    grids = shipped_profile().grids
    for key, piece, count, gbps in (
        ("staged/h2d", 16 << 10, 4096, 48.7),
        ("staged/h2d", 32 << 10, 4096, 55.1),
        ("staged/h2d", 128 << 10, 2048, 55.3),
        ("staged/d2h", 16 << 10, 4096, 47.4),
        ("staged/d2h", 128 << 10, 2048, 54.8),
        ("strided/h2d", 128 << 10, 1, 23.6),
        ("strided/h2d", 128 << 10, 16, 51.0),
        ("mapped/h2d", 32 << 10, 8192, 49.3),
        ("mapped/d2h", 32 << 10, 8192, 52.1),
    ):
        assert grids[key].rate(piece, count) == pytest.approx(gbps, rel=0.03), (key, piece, count)


def test_a_gemm_keeps_at_most_everything() -> None:
    profile = shipped_profile()
    assert profile.kept("staged", "h2d", 4) == 0.9515
    assert profile.kept("mapped", "d2h", 4) == pytest.approx(0.658)
    assert profile.kept("mapped", "h2d", 1) > profile.kept("mapped", "h2d", 16)
    assert profile.kept("device", "h2d", 4) == 1.0
    assert replace(profile, gemm_kept={"staged/h2d": 1.07}).kept("staged", "h2d", 4) == 1.0
    assert profile.mapped_factor("h2d", profile.mapped_ctas) == 1.0 > profile.mapped_factor("h2d", 1)
    assert replace(profile, mapped_scale={}).mapped_factor("h2d", 1) == 1.0


# -- files -------------------------------------------------------------------------------------------


def mine(**more: Any) -> LinkProfile:
    """A measured profile of this machine's CPU."""
    fresh = {"source": "measured", "made": "today", "key": profile_key("cpu")}
    return replace(shipped_profile("cpu"), **{**fresh, **more})


def load(folder: Path) -> tuple[LinkProfile, Log]:
    log = Log()
    return load_profile("cpu", folder=folder, observer=log), log


def test_what_was_saved_is_used_without_a_word(tmp_path: Path) -> None:
    path = save_profile(mine(), tmp_path / "new")
    assert [p.name for p in (tmp_path / "new").iterdir()] == [path.name], "nothing half-written is left behind"
    profile, log = load(tmp_path / "new")
    assert profile == mine() and not profile.note
    assert profile.describe() == f"measured on {profile_key('cpu')} (today)"
    assert not log.fallbacks and not log.notes
    save_profile(mine(made="tomorrow"), tmp_path / "new")
    assert load(tmp_path / "new")[0].made == "tomorrow"


def test_nothing_measured_is_noted(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "not there"):
        profile, log = load(folder)
        assert profile.source == "shipped"
        assert profile.note == "nothing was measured on this machine; run `kvtransfer tune --cpu`"
        assert [what for what, _ in log.notes] == ["link profile"] and not log.fallbacks


OTHER = ProfileKey("NVIDIA H100", "driver 570.1", 5, 16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a link profile, got something else"),
        (b"\xff\x00{", "expected a link profile, got something else"),
        (b"[1, 2]", f"expected a link profile of format {FORMAT}, got None"),
        (b'{"format": 99}', f"expected a link profile of format {FORMAT}, got 99"),
        (b'{"format": 1}', "missing required field"),
        (encode_profile(mine())[:-500], "expected a link profile, got something else"),
        (encode_profile(mine()).replace(b'"h2d": ', b'"h2d": -'), "above 0"),
        (encode_profile(mine(key=OTHER)), "is of NVIDIA H100, driver 570.1, PCIe 5.0 x16, this is CPU"),
    ],
    ids=["empty", "no text", "a list", "a later format", "no tables", "cut off", "negative", "another card's"],
)
def test_a_file_that_is_not_ours_is_not_used_and_that_is_said(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / profile_key("cpu").file_name
    path.write_bytes(content)
    profile, log = load(tmp_path)
    ((what, why),) = log.fallbacks
    assert what == "link profile" and message in why and str(path) in why and "it is not used" in why
    assert why.endswith("run `kvtransfer tune --cpu`")
    assert profile.source == "shipped" and message in profile.note
    assert message in profile.describe(), "explain says it too"
    assert path.read_bytes() == content, "it is left where it is"


def test_a_profile_of_an_earlier_driver_is_named(tmp_path: Path) -> None:
    old = save_profile(mine(key=replace(profile_key("cpu"), driver="torch 1.0")), tmp_path)
    save_profile(mine(key=OTHER), tmp_path)  # another card: no reason to speak of it
    profile, log = load(tmp_path)
    ((_, why),) = log.fallbacks
    assert f"{old} is of another driver or link" in why and profile.source == "shipped"


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"can't write the link profile .* set XDG_CACHE_HOME"):
        save_profile(mine(), tmp_path / "file" / "folder")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_profile(mine(), tmp_path)

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(ConfigError, match="disk full"):
        save_profile(mine(made="tomorrow"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name] and load(tmp_path)[0].made == "today"


def test_the_file_is_json_that_people_can_read(tmp_path: Path) -> None:
    text = save_profile(mine(), tmp_path).read_text()
    assert json.loads(text)["key"]["device"].startswith("CPU ") and text.count("\n") > 50


def test_keys_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The width is the one trained now: a card in a narrower slot is another link."""
    info = DeviceInfo("NVIDIA H200", "GPU-1", "580.1", 5, 16, 63.0, 0, "0000:01:00.0", 1, 8, 5)
    monkeypatch.setattr(link, "device_info", lambda device: info)
    key = profile_key("cuda:0")
    assert key == ProfileKey("NVIDIA H200", "driver 580.1", 5, 8)
    assert key.file_name == "link-nvidia-h200--driver-580.1-gen5-x8.json"
    assert str(key) == "NVIDIA H200, driver 580.1, PCIe 5.0 x8"

    def hidden(device: torch.device) -> DeviceInfo:
        raise ConfigError("NVML did not start")

    monkeypatch.setattr(link, "device_info", hidden)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="NVML did not start"):
            profile_key(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert profile_key(0) == ProfileKey("NVIDIA H200", "driver unknown")
