"""Tiers by name, and the whole tier of docs/adding_a_tier.md: made through its entry point, under the contract."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tier_contract import Lab, ShortRecordContract, TierContract

from kvtransfer.kernels.errors import ConfigError, TierError
from kvtransfer.tiers.base import Tier
from kvtransfer.tiers.memory_tier import MemoryTier
from kvtransfer.tiers.registry import BUILT_IN, GROUP, make_tier, tier_factory, tier_kinds

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "adding_a_tier.md").read_text(encoding="utf-8")
TIER, LAB = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, entries: str, name: str = "thirdparty") -> None:
    """What pip leaves of a package with these entry points."""
    meta = folder / f"{name}-1.0.dist-info"
    meta.mkdir(parents=True)
    (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with the page's tier."""
    package = tmp_path / "site" / "my_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "folder_tier.py").write_text(TIER)
    entry = re.search(r'^(folder) = "(.*)"$', PAGE, re.M)
    assert entry is not None
    install(tmp_path / "site", monkeypatch, f"{entry[1]} = {entry[2]}")
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        del sys.modules[name]


class FolderLab(Lab):
    """The page's lab, whose tiers come through the registry."""

    persistent = True

    def __init__(self, folder: Path) -> None:
        module = ModuleType("page")
        exec(LAB, module.__dict__)
        self.inner: Any = module.__dict__["FolderLab"](folder)

    def make(self) -> Tier:
        return make_tier("folder", folder=str(self.inner.folder))

    def rot(self, tier: Tier, key: bytes, offset: int) -> None:
        self.inner.rot(tier, key, offset)

    def shorten(self, tier: Tier, key: bytes) -> None:
        self.inner.shorten(tier, key)


class TestFolder(TierContract, ShortRecordContract):
    @pytest.fixture
    def bench(self, third_party: Path) -> Iterator[Lab]:
        yield FolderLab(third_party / "pages")


def test_the_page_s_tier_is_short_and_its_lab_runs(third_party: Path) -> None:
    assert len(TIER.splitlines()) <= 75
    lab = FolderLab(third_party / "pages")
    with lab.inner.make() as tier:
        assert "folder" in tier_kinds() and isinstance(tier, tier_factory("folder"))  # type: ignore[arg-type]


def test_every_tier_of_ours_can_be_made_by_its_name() -> None:
    assert set(BUILT_IN) <= set(tier_kinds())
    for kind, (module, name, _) in BUILT_IN.items():
        assert tier_factory(kind) is getattr(sys.modules[module], name)
    tier = make_tier("memory", capacity_bytes=1 << 20, name="mine")
    assert isinstance(tier, MemoryTier) and tier.name == "mine"
    tier.close()


def test_wrong_names_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"expected one of disk, memory, .*, got 'dsik'"):
        make_tier("dsik")
    with pytest.raises(ConfigError, match=r"tier 'memory': settings \['size'\]"):
        make_tier("memory", size=1)
    install(tmp_path / "a", monkeypatch, "gone = not_there_at_all:Tier\nodd = builtins:dict\nredis = builtins:dict")
    install(tmp_path / "b", monkeypatch, "twice = builtins:dict\n", "another")
    install(tmp_path / "c", monkeypatch, "twice = builtins:list\n", "third")
    with pytest.raises(ConfigError, match="'gone': the entry point not_there_at_all:Tier can't be loaded"):
        make_tier("gone")
    with pytest.raises(TierError, match=r"got dict without \['close', 'get_into'"):
        make_tier("odd")
    with pytest.raises(ConfigError, match="got builtins:dict besides kvtransfer's own"):
        make_tier("redis", url="redis://127.0.0.1")
    with pytest.raises(ConfigError, match="got builtins:dict, builtins:list"):
        make_tier("twice")


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "kvtransfer.tiers.object_store", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'kvtransfer\[object\]'"):
        make_tier("object_store", url="file:///x")
