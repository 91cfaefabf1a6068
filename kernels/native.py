"""native: C files of ours, compiled at first use with the compiler that Triton needs anyway, then kept in a cache."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvtransfer.kernels.errors import ConfigError

T = TypeVar("T")


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/kvtransfer``, or ``~/.cache/kvtransfer``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvtransfer"


def once(make: Callable[[], T]) -> Callable[[], T]:
    """``make``, carried out at the first call alone. Who calls meanwhile waits: `functools.cache` would do it twice."""
    lock = threading.Lock()
    made: list[T] = []

    def get() -> T:
        if not made:
            with lock:
                if not made:
                    made.append(make())
        return made[0]

    return functools.wraps(make)(get)


def build(source: Path, folder: Path | None = None) -> Path:
    """The shared library of one C file, in ``folder`` (`cache_folder`), made at first use; its name holds the hash of
    source and compiler flags.

    Safe for several processes (written aside, then renamed). Raises ConfigError without a compiler, or with its message
    when it fails.
    """
    text = source.read_bytes()
    flags = ["-O2", "-shared", "-fPIC", "-pthread"]
    digest = hashlib.sha256(text + " ".join(flags).encode()).hexdigest()[:16]
    target = (folder or cache_folder()) / f"{source.stem}-{sysconfig.get_platform()}-{digest}.so"
    if target.exists():
        return target
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None:
        raise ConfigError("no C compiler: expected gcc, clang or CC")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        path = Path(work) / source.name
        path.write_bytes(text)
        made = subprocess.run(
            [compiler, *flags, "-o", f"{work}/out.so", str(path)], capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise ConfigError(f"{compiler} failed: {made.stderr.strip()[-500:]}")
        os.replace(f"{work}/out.so", target)
    return target
