"""A driver library in C that stands in for libcuda.so.1 (fake_driver.c)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest


class FakeDriver:
    """The library's path, and its switches and records as attributes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))

    def set(self, name: str, value: int | bytes) -> None:
        if isinstance(value, bytes):
            ctypes.memmove(
                ctypes.addressof((ctypes.c_char * 64).in_dll(self.library, name)), value + b"\0", len(value) + 1
            )
        else:
            kind = ctypes.c_longlong if name == "fake_fail_index" else ctypes.c_int
            kind.in_dll(self.library, name).value = value

    def seen(self, name: str) -> int:
        kind = ctypes.c_int if name in ("abi", "order", "flags", "hints", "calls") else ctypes.c_uint64
        return int(kind.in_dll(self.library, f"seen_{name}").value)

    def asked(self) -> list[str]:
        return (ctypes.c_char * 8192).in_dll(self.library, "fake_asked").value.decode().split()


def build_driver(folder: Path) -> FakeDriver:
    """Compiled in ``folder``; skips the test without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    path, source = folder / "libcuda.so.1", Path(__file__).with_name("fake_driver.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-o", path, source], check=True)
    return FakeDriver(path)
