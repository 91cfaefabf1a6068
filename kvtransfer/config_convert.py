"""FlexKV's configuration file into ours: every key is mapped, not needed, or refused, with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from kvtransfer.config import resolve
from kvtransfer.config_check import FLAGS, did_you_mean, masked, shown
from kvtransfer.config_fields import DTYPE_ALIASES
from kvtransfer.config_flexkv import RULES, Rule, mooncake_options
from kvtransfer.config_sources import Given, Tree, from_file
from kvtransfer.kernels.errors import ConfigError

PREFIX = "flexkv_"
DEFAULT_CPU_CACHE_GB = 16
DEFAULT_SSD_CACHE_DIR = "./flexkv_ssd"


@dataclass(frozen=True)
class Outcome:
    """What became of one key: ``text`` says where its value went, or why it is not needed or refused."""

    key: str
    value: Any
    fate: Literal["mapped", "not needed", "refused"]
    text: str


@dataclass
class Converted:
    """Ours, as a mapping for a file; and what became of each key, in the order of the file."""

    config: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def refused(self) -> list[Outcome]:
        """The keys that ask for what kvtransfer does not do."""
        return [outcome for outcome in self.outcomes if outcome.fate == "refused"]

    def yaml(self) -> str:
        """Our file. What was refused is in it as a comment."""
        lines = [f"# refused: {o.key}: {shown(masked((o.key,), o.value))}: {o.text}" for o in self.refused]
        lines = ["".join(c if c.isprintable() else "?" for c in line) for line in lines]  # a comment is one line
        body = yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True)
        return "".join(f"{line}\n" for line in lines) + body


def convert_flexkv(file: Path, *, ranks: int = 1) -> Converted:
    """Read a file of FlexKV (YAML or JSON) and say it in our terms.

    ``ranks``: of one machine, which share ``cpu_cache_gb``. Raises ConfigError for a file that can't be read, a key
    that FlexKV does not have (with the nearest), a value that its key does not take.
    """
    if ranks < 1:
        raise ConfigError(f"ranks: expected at least 1, got {ranks}")
    given = _keys(from_file(file), file)
    return Converter(given, file, ranks).convert()


class Converter:
    """One conversion. ``given`` are FlexKV's keys in small letters without the prefix."""

    def __init__(self, given: Mapping[str, Any], file: Path, ranks: int) -> None:
        self._given = given
        self._file = file
        self._ranks = ranks
        self._done = Converted()

    def convert(self) -> Converted:
        """All keys, and a last check of what they make."""
        for key, value in self._given.items():
            rule = RULES[key]
            if value is None:
                self._note(key, "not needed", "it asks for nothing")
            elif rule.refuse and not _is_off(self._read(key, value, rule), rule):
                self._note(key, "refused", rule.why)
            elif rule.refuse or not rule.target:
                self._note(key, "not needed", "it asks for nothing" if rule.refuse else rule.why)
            else:
                self._map(key, self._read(key, value, rule), rule)
        self._fill_in()
        try:
            resolve(arguments=self._done.config, environment={})
        except ConfigError as error:
            raise ConfigError(f"{self._file}: what it says is no valid configuration: {error}") from error
        return self._done

    def _map(self, key: str, value: Any, rule: Rule) -> None:
        """A key that has a target: by its own rule where it has one, else as it is."""
        special = getattr(self, f"_of_{key}", None) or getattr(self, "_to_" + rule.target.replace(".", "_"), None)
        if special is None:
            self._put(key, rule.target, value, rule.why)
        else:
            special(key, value, rule)

    # --- keys that need more than a new name

    def _of_cpu_cache_gb(self, key: str, value: Any, rule: Rule) -> None:
        share = value / self._ranks
        self._put(key, rule.target, share, f"{value:g} for {self._ranks} rank(s); {rule.why}")

    def _of_num_cpu_blocks(self, key: str, value: Any, rule: Rule) -> None:
        if "cpu_cache_gb" in self._given:
            self._note(key, "not needed", "cpu_cache_gb goes before it")
        else:
            self._put(key, rule.target, _whole(value), rule.why)

    def _of_ssd_cache_gb(self, key: str, value: Any, rule: Rule) -> None:
        if value == 0:
            self._note(key, "not needed", rule.why)
        else:
            self._put(key, rule.target, value, rule.why)

    def _of_num_ssd_blocks(self, key: str, value: Any, rule: Rule) -> None:
        if "ssd_cache_gb" in self._given or not self._has_disk:
            self._note(key, "not needed", "ssd_cache_gb goes before it" if self._has_disk else "there is no disk tier")
        else:
            self._put(key, rule.target, _whole(value), rule.why)

    def _of_ssd_cache_dir(self, key: str, value: Any, rule: Rule) -> None:
        if self._has_disk:
            self._put(key, rule.target, value, rule.why)
        else:
            self._note(key, "not needed", "there is no disk tier")

    def _of_max_file_size_gb(self, key: str, value: Any, rule: Rule) -> None:
        if value <= 0 or not self._has_disk:
            self._note(key, "not needed", rule.why if self._has_disk else "there is no disk tier")
        else:
            self._put(key, rule.target, value, rule.why)

    def _to_tiers_disk_engine(self, key: str, value: Any, rule: Rule) -> None:
        if value == 0 and self._has_disk:
            self._put(key, rule.target, "threads", rule.why)
        else:
            self._note(key, "not needed", rule.why if self._has_disk else "there is no disk tier")

    def _of_kv_cache_dtype(self, key: str, value: Any, rule: Rule) -> None:
        dtype = "auto" if value in (None, "", "auto") else DTYPE_ALIASES.get(str(value).lower())
        if dtype is None:
            self._note(key, "refused", f"expected one of {', '.join(DTYPE_ALIASES)}: declare others in the KVSpec")
        else:
            self._put(key, rule.target, dtype, rule.why)

    def _of_eviction_policy(self, key: str, value: Any, rule: Rule) -> None:
        if str(value).lower() in ("mru", "filo"):
            self._note(key, "refused", rule.why)
        else:
            self._put(key, rule.target, str(value).lower())

    def _of_evict_ratio(self, key: str, value: Any, rule: Rule) -> None:
        high = self._read_other("evict_start_threshold", 1.0)
        if not 0 <= value < high:
            self._note(key, "refused", f"expected a share of at least 0 and below evict_start_threshold, {high:g}")
        else:
            self._put(key, rule.target, round(high - value, 6), rule.why)

    def _to_sm_budget(self, key: str, value: Any, rule: Rule) -> None:
        before = self._done.config.get("sm_budget", 0)
        self._put(key, rule.target, max(before, _whole(value)), rule.why)

    def _of_use_hugepage_cpu_buffer(self, key: str, value: Any, rule: Rule) -> None:
        if value:
            self._put(key, rule.target, "reserved", rule.why)
        else:
            self._note(key, "not needed", "transparent huge pages are asked for by themselves")

    def _of_cudahost_chunk_size_gb(self, key: str, value: Any, rule: Rule) -> None:
        if value <= 0:
            self._note(key, "not needed", rule.why)
        else:
            self._put(key, rule.target, value, rule.why)

    def _of_use_mooncake_store_backend(self, key: str, value: Any, rule: Rule) -> None:
        if not value:
            self._note(key, "not needed", "it asks for nothing")
        elif not self._given.get("mooncake_store_config_path"):
            self._note(key, "refused", "expected mooncake_store_config_path too: the master is named there")
        else:
            self._note(key, "mapped", f"{rule.target}: {rule.why}")

    def _of_mooncake_store_config_path(self, key: str, value: Any, rule: Rule) -> None:
        if not self._read_other("use_mooncake_store_backend", False):
            self._note(key, "not needed", "use_mooncake_store_backend is off")
            return
        try:
            found = json.loads(Path(str(value)).read_bytes())
            options = mooncake_options(found)
        except (OSError, ValueError) as error:  # a ConfigError is a ValueError
            self._note(key, "refused", f"{shown(value)}: expected a readable file of Mooncake Store: {error}")
            return
        self._put(key, rule.target, options, rule.why)

    # --- inside

    @property
    def _has_disk(self) -> bool:
        if "enable_ssd" in self._given and not self._read_other("enable_ssd", False):
            return False
        return self._read_other("ssd_cache_gb", 0) > 0 or (
            "ssd_cache_gb" not in self._given and self._read_other("num_ssd_blocks", 0) > 0
        )

    def _fill_in(self) -> None:
        """FlexKV's defaults, where ours differ: the host's size, and the disk's folder."""
        tiers = self._done.config.setdefault("tiers", {})
        if not {"cache_gb", "pages"} & set(tiers.setdefault("host", {})):
            tiers["host"]["cache_gb"] = DEFAULT_CPU_CACHE_GB / self._ranks
        if "disk" in tiers and "paths" not in tiers["disk"]:
            tiers["disk"]["paths"] = DEFAULT_SSD_CACHE_DIR

    def _read_other(self, key: str, default: Any) -> Any:
        value = self._given.get(key)
        return default if value is None else self._read(key, value, RULES[key])

    def _read(self, key: str, value: Any, rule: Rule) -> Any:
        """The value as FlexKV reads it: flags and numbers from text too. ConfigError where it is none."""
        if rule.reads == "flag":
            flag = value if isinstance(value, bool) else FLAGS.get(str(value).strip().lower())
            if flag is not None:
                return flag
            wanted = "true or false"
        elif rule.reads == "number":
            try:
                number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else None
            except (ValueError, OverflowError):
                number = None
            if number is not None and abs(number) < float("inf"):
                return number
            wanted = "a number"
        else:
            return value
        raise ConfigError(f"{self._file}: {key}: expected {wanted}, got {shown(value)}")

    def _put(self, key: str, target: str, value: Any, why: str = "") -> None:
        self._place(target, int(value) if isinstance(value, float) and value.is_integer() else value)
        self._note(key, "mapped", f"{target}{f' ({why})' if why else ''}")

    def _place(self, target: str, value: Any) -> None:
        *sections, name = target.split(".")
        table = self._done.config
        for section in sections:
            table = table.setdefault(section, {})
        if isinstance(value, dict):
            table.setdefault(name, {}).update(value)
        else:
            table[name] = value

    def _note(self, key: str, fate: Literal["mapped", "not needed", "refused"], text: str) -> None:
        self._done.outcomes.append(Outcome(key, self._given[key], fate, text))


def _keys(tree: Tree, file: Path) -> dict[str, Any]:
    """FlexKV's keys: small letters, no prefix, those of ``cache_config`` beside the others."""
    found: dict[str, Any] = {}
    for spelled, inner in tree.items():
        key = spelled.lower().removeprefix(PREFIX)
        if key == "cache_config" and isinstance(inner, dict):
            inside = _keys(inner, file)
        elif key in RULES:
            inside = {key: _plain(inner)}
        else:
            raise ConfigError(
                f"{file}: {spelled}: expected a key of FlexKV's configuration, got {shown(spelled)}"
                f"{did_you_mean(key, RULES)}"
            )
        if twice := found.keys() & inside.keys():
            raise ConfigError(f"{file}: {sorted(twice)[0]}: expected it once, got it twice")
        found |= inside
    return found


def _plain(inner: Tree | Given) -> Any:
    return inner.value if isinstance(inner, Given) else {key: _plain(value) for key, value in inner.items()}


def _is_off(value: Any, rule: Rule) -> bool:
    return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in rule.off)


def _whole(value: float) -> Any:
    return int(value) if value.is_integer() else value
