"""Keys: which bytes may stand for which tokens.

Three things make up a stored page's key. The *page key* is a chain over the tokens up to and including
the page: ``sha256(parent key || token ids as little-endian u32)``, the same chain as SGLang's page hash.
The *namespace* is a digest over everything that must be equal for two pages of the same tokens to hold
the same content. The *shard* says which layers, heads and share of the context this record holds.
``stored_key = HMAC-SHA256(tenant salt, namespace || page key || shard)`` can't be guessed across salts.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, Union

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtransfer.kernels.errors import ConfigError, LayoutError

if TYPE_CHECKING:  # whoever only decides (an index in a scheduler) does without torch
    import torch

    from kvtransfer.kernels.spec import KVSpec

FORMAT_VERSION = 1
"""Version of the record format (record.py) and of everything digested here."""

Algorithm = Literal["sha256", "xxh3_128"]
Tokens = Union[Sequence[int], NDArray[Any], "torch.Tensor"]
KEY_BYTES: dict[str, int] = {"sha256": 32, "xxh3_128": 16}
_U32_MAX = 0xFFFFFFFF


def token_bytes(tokens: Tokens | None) -> memoryview:
    """``tokens`` as little-endian u32, 4 bytes a token (a view where the input already has that form, or that of i32).

    Takes a list, tuple, range or `array.array` of ints, a one-dimensional numpy integer array, or a
    one-dimensional integer torch tensor on the CPU. None is no tokens. Raises LayoutError on anything else:
    not integers, more than one dimension, a tensor on a device (copying it would wait for the device), or
    an id that does not fit 32 bits.
    """
    if tokens is None:
        return memoryview(b"")
    if isinstance(tokens, (list, tuple)) and array.array("I").itemsize == 4:
        try:  # an order of magnitude faster than numpy over Python ints, and as strict
            ids: NDArray[Any] = (
                np.frombuffer(array.array("I", tokens), dtype=np.uint32) if tokens else np.empty(0, "<u4")
            )
        except (TypeError, OverflowError):
            ids = _as_ids(tokens)  # finds the position, and says what is wrong there
    elif _is_tensor(tokens):
        if tokens.device.type != "cpu":
            raise LayoutError(f"tokens: expected them on the CPU, got {tokens.device}; copy them first (that waits)")
        if tokens.numel() and (tokens.dtype.is_floating_point or tokens.dtype.is_complex):  # an empty one is a float's
            raise LayoutError(f"tokens: expected an integer tensor, got {tokens.dtype}")
        ids = _as_ids(tokens.detach().numpy())
    else:
        ids = _as_ids(tokens)
    if ids.dtype != "<i4":  # an id that is not negative has the same four bytes in both forms
        ids = ids.astype("<u4", copy=False)
    return np.ascontiguousarray(ids).view(np.uint8).data


def _is_tensor(tokens: Any) -> TypeGuard[torch.Tensor]:
    """Whether ``tokens`` is a torch tensor. Nothing is one while nobody has imported torch."""
    torch_module = sys.modules.get("torch")
    return torch_module is not None and isinstance(tokens, torch_module.Tensor)


def _as_ids(tokens: Any) -> NDArray[Any]:
    """``tokens`` as a one-dimensional integer array with every id in 0..2^32-1, or LayoutError."""
    try:
        ids = np.asarray(tokens)
    except (ValueError, OverflowError, TypeError) as error:
        raise LayoutError(f"tokens: expected a flat sequence of ints, got {type(tokens).__name__}: {error}") from error
    if ids.ndim != 1:
        raise LayoutError(f"tokens: expected one dimension, got {type(tokens).__name__} of shape {ids.shape}")
    if not ids.size:
        return np.empty(0, dtype="<u4")
    if ids.dtype.kind not in "iu":
        raise LayoutError(f"tokens: expected integers in 0..{_U32_MAX}, got dtype {ids.dtype}")
    if ids.dtype != np.uint32 and (int(ids.min()) < 0 or (ids.dtype.itemsize > 4 and int(ids.max()) > _U32_MAX)):
        at = int(np.flatnonzero((ids < 0) | (ids > _U32_MAX))[0])
        raise LayoutError(f"tokens: expected ids in 0..{_U32_MAX}, got {int(ids[at])} at position {at}")
    return ids


def page_keys(
    tokens: Tokens | None, page_size: int, parent: bytes | None = None, *, algorithm: Algorithm = "sha256"
) -> list[bytes]:
    """The key of each whole page of ``tokens``: ``H(key before it || its token ids as little-endian u32)``.

    A rest shorter than ``page_size`` tokens has no key; no tokens, no keys. ``parent`` is the key of the page
    before the first one (None or ``b""`` at the root). ``xxh3_128`` is two to three times faster (0.6 ms
    instead of 1.5 for 2,048 pages of 16 tokens) and not resistant to chosen collisions: take it only where every
    user of the cache is trusted.
    Raises ConfigError on a bad page size, algorithm or parent, LayoutError on bad tokens (see `token_bytes`).
    """
    if page_size < 1:
        raise ConfigError(f"page_size: expected at least 1 token, got {page_size}")
    width = KEY_BYTES.get(algorithm)
    if width is None:
        raise ConfigError(f"algorithm: expected one of {sorted(KEY_BYTES)}, got {algorithm!r}")
    key = b"" if parent is None else parent
    if not isinstance(key, bytes) or len(key) not in (0, width):
        got = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise ConfigError(f"parent: expected None or a key of {width} bytes ({algorithm}), got {got}")
    data, step = token_bytes(tokens), 4 * page_size
    starts = range(0, len(data) - step + 1, step)
    keys: list[bytes] = []
    if algorithm == "sha256":
        for start in starts:
            hasher = hashlib.sha256(key)
            hasher.update(data[start : start + step])
            key = hasher.digest()
            keys.append(key)
    else:
        for start in starts:
            xxh = xxhash.xxh3_128(key)
            xxh.update(data[start : start + step])
            key = xxh.digest()
            keys.append(key)
    return keys


@dataclass(frozen=True)
class Namespace:
    """What must be equal for two pages of the same tokens to hold the same content.

    model           fingerprint of the weights: two revisions under one served name must differ here
    kv_dtype        what the bytes mean ("bfloat16", "float8_e4m3" ...)
    spec            `KVSpec.canonical` of the whole, uncut model (which part of it a record holds is its `Shard`)
    page_size       tokens a page
    adapter         name or fingerprint of the LoRA adapter or the like; None for the bare model
    format_version  of the record format
    """

    model: str
    kv_dtype: str
    spec: str
    page_size: int
    adapter: str | None = None
    format_version: int = FORMAT_VERSION

    @classmethod
    def of(cls, spec: KVSpec, *, model: str, kv_dtype: str, adapter: str | None = None) -> Namespace:
        """The namespace of ``spec`` (of the whole model, before it is cut by layers or heads)."""
        return cls(model, kv_dtype, spec.canonical(), spec.page_size, adapter)

    def digest(self) -> bytes:
        """32 bytes: SHA-256 over tagged, length-prefixed fields. An absent adapter differs from an empty name."""
        hasher = hashlib.sha256(b"kvtransfer content namespace\0")
        fields: list[tuple[bytes, str | None]] = [
            (b"model", self.model),
            (b"kv_dtype", self.kv_dtype),
            (b"spec", self.spec),
            (b"page_size", str(self.page_size)),
            (b"adapter", self.adapter),
            (b"format_version", str(self.format_version)),
        ]
        for tag, text in fields:
            if text is not None:
                value = text.encode()
                hasher.update(struct.pack("<II", len(tag), len(value)) + tag + value)
        return hasher.digest()


@dataclass(frozen=True)
class Shard:
    """Which part of a page a record holds. Not part of the namespace: all shards of a page share one.

    layer_start, layer_stop     layers ``layer_start`` to ``layer_stop - 1`` (pipeline parallel)
    head_part, head_parts       the heads' share, part of parts (tensor parallel); 0 of 1 where replicated
    context_part, context_parts the tokens' share where ranks split a page between them (context parallel)
    """

    layer_start: int
    layer_stop: int
    head_part: int = 0
    head_parts: int = 1
    context_part: int = 0
    context_parts: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.layer_start < self.layer_stop <= _U32_MAX:
            raise ConfigError(f"shard: expected 0 <= layer_start < layer_stop, got {self!r}")
        for part, parts in ((self.head_part, self.head_parts), (self.context_part, self.context_parts)):
            if not 0 <= part < parts <= _U32_MAX:
                raise ConfigError(f"shard: expected 0 <= part < parts, got {self!r}")

    @classmethod
    def whole(cls, spec: KVSpec) -> Shard:
        """All layers and all heads of ``spec``."""
        return cls(0, spec.num_layers)

    def canonical(self) -> bytes:
        """24 bytes: the six numbers as little-endian u32."""
        return struct.pack(
            "<6I",
            self.layer_start,
            self.layer_stop,
            self.head_part,
            self.head_parts,
            self.context_part,
            self.context_parts,
        )


def stored_keys(salt: bytes, namespace_digest: bytes, keys: Sequence[bytes], shard: Shard) -> list[bytes]:
    """The key under which each page of ``keys`` is stored: 32 bytes each (see `stored_key`)."""
    if not isinstance(salt, bytes):
        raise ConfigError(f"salt: expected bytes (b'' for none), got {type(salt).__name__}")
    if len(namespace_digest) != 32:
        raise ConfigError(f"namespace: expected a digest of 32 bytes, got {len(namespace_digest)}")
    widths = set(KEY_BYTES.values())
    tail = shard.canonical()
    base = hmac.new(salt, namespace_digest, "sha256")  # copied for each key: half the time of a fresh one
    stored = []
    for key in keys:
        if len(key) not in widths:
            raise ConfigError(f"page key: expected {sorted(widths)} bytes, got {len(key)}")
        one = base.copy()
        one.update(key + tail)
        stored.append(one.digest())
    return stored


def stored_key(salt: bytes, namespace_digest: bytes, page_key: bytes, shard: Shard) -> bytes:
    """``HMAC-SHA256(salt, namespace || page_key || shard)``, 32 bytes.

    ``salt`` is the tenant's secret (``b""`` for none). Widths are fixed, so no two inputs run together.
    Raises ConfigError on a field of the wrong width.
    """
    return stored_keys(salt, namespace_digest, (page_key,), shard)[0]
