"""Where a disk tier's files lie: one folder for each process, of its own making, under every configured path.

<path>/<content namespace>/i<instance>-dp<..>-pp<..>-cp<..>-tp<..>/
    LOCK          who owns it (flock)
    meta.json     what the slabs hold; the same set id in every folder of the process
    slab.000000   records, one behind the other: payload, trailer, payload, trailer ...
    snapshot, journal.00000001   in the first path's folder only (journal.py)
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvtransfer.kernels.errors import ConfigError, TierError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.io import Storage, write_file
from kvtransfer.tiers.record import padded_bytes, trailer_bytes

LOCK, META = "LOCK", "meta.json"
FOLDER_FORMAT = 1


@dataclass(frozen=True)
class Place:
    """Which process of a deployment: instance of the engine, and its ranks. Names the sub-folder that it owns."""

    instance: int = 0
    dp: int = 0
    pp: int = 0
    cp: int = 0
    tp: int = 0

    def __post_init__(self) -> None:
        if min(self.instance, self.dp, self.pp, self.cp, self.tp) < 0:
            raise ConfigError(f"place: expected numbers of at least 0, got {self!r}")

    def folder(self) -> str:
        """Name of the sub-folder."""
        return f"i{self.instance}-dp{self.dp}-pp{self.pp}-cp{self.cp}-tp{self.tp}"


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """What `meta.json` holds.

    set_id, path_number, paths  which set of folders this is one of: hex, its number, how many
    payload_bytes, slot_bytes, trailer_bytes  of one record: without and with padding, and the trailer
    slots_per_file  slot ``s`` is record ``s % slots_per_file`` of slab ``s // slots_per_file``
    capacity_bytes, owners  as configured for all processes of the path, and how many share it
    """

    format: int
    namespace: str
    place: str
    set_id: str
    path_number: int
    paths: int
    payload_bytes: int
    slot_bytes: int
    trailer_bytes: int
    slots_per_file: int
    capacity_bytes: int
    owners: int

    @property
    def record_bytes(self) -> int:
        """Of a padded payload and its trailer."""
        return self.slot_bytes + self.trailer_bytes


def split_paths(paths: str | Path | Sequence[str | Path]) -> list[str]:
    """``paths`` as absolute ones: one path, several in a string with ``;`` between them, or a sequence.

    Raises ConfigError on none, or on one named twice.
    """
    parts = paths.split(";") if isinstance(paths, str) else [paths] if isinstance(paths, Path) else list(paths)
    found = [os.path.abspath(os.path.expanduser(str(part).strip())) for part in parts if str(part).strip()]
    if not found or len({os.path.realpath(path) for path in found}) != len(found):
        raise ConfigError(f"disk: expected one path or several different ones, got {paths!r}")
    return found


def read_meta(storage: Storage, folder: str) -> Meta | None:
    """The folder's meta.json, None if there is none. Raises TierError if it can't be understood."""
    if META not in storage.list_folder(folder):
        return None
    try:
        meta = msgspec.json.decode(storage.read_all(os.path.join(folder, META)), type=Meta)
    except msgspec.DecodeError as error:
        raise TierError(
            f"{folder}: expected a {META} of a disk tier, got {error}; remove the folder to start anew"
        ) from error
    if meta.format != FOLDER_FORMAT:
        raise ConfigError(
            f"{folder}: expected format {FOLDER_FORMAT}, got {meta.format}; remove it, or take another path"
        )
    return meta


def write_meta(storage: Storage, folder: str, meta: Meta) -> None:
    """Replace the folder's meta.json."""
    write_file(storage, folder, META, msgspec.json.format(msgspec.json.encode(meta)) + b"\n")


def claim_folders(
    storage: Storage, folders: Sequence[str], spec: KVSpec, namespace: bytes, place: Place, wanted: dict[str, Any]
) -> list[Meta]:
    """Make the folders if need be, lock them, and bring each meta.json up to date.

    ``wanted`` holds slots_per_file (what an earlier run chose stays), capacity_bytes and owners.
    Raises OwnershipError if another process owns one, ConfigError if one can't be made
    or belongs to something else.
    """
    for folder in folders:
        try:
            storage.make_folder(folder)
        except OSError as error:
            raise ConfigError(
                f"{folder}: expected a folder, there or to be made, got {error}; take another path, or give this user "
                "the right to write there"
            ) from error
        storage.lock(os.path.join(folder, LOCK), f"process {os.getpid()} on {os.uname().nodename}\n")
    found = [read_meta(storage, folder) for folder in folders]
    known = next((meta for meta in found if meta is not None), None)
    set_id = secrets.token_hex(16) if known is None else known.set_id
    metas = []
    for number, (folder, old) in enumerate(zip(folders, found, strict=True)):
        meta = Meta(
            format=FOLDER_FORMAT,
            namespace=namespace.hex(),
            place=place.folder(),
            set_id=set_id,
            path_number=number,
            paths=len(folders),
            payload_bytes=spec.page_bytes,
            slot_bytes=padded_bytes(spec.page_bytes),
            trailer_bytes=trailer_bytes(spec),
            slots_per_file=wanted["slots_per_file"] if known is None else known.slots_per_file,
            capacity_bytes=wanted["capacity_bytes"],
            owners=wanted["owners"],
        )
        if old is not None:
            _require_same(folder, old, meta)
        if old != meta:
            write_meta(storage, folder, meta)
        metas.append(meta)
    return metas


def _require_same(folder: str, old: Meta, new: Meta) -> None:
    fields = ("namespace", "payload_bytes", "slot_bytes", "trailer_bytes", "set_id", "path_number", "paths")
    for field in fields:
        expected, got = getattr(old, field), getattr(new, field)
        if expected != got:
            raise ConfigError(
                f"{folder}: holds records with {field} {expected}, asked for {got}; name the same paths in the same "
                "order with the same model cut the same way, take another instance number, or remove the folder"
            )
