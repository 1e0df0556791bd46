"""A Ray cluster of one node, for tests.

Most of Ray's servers listen on every interface and run any code sent to them. Therefore the cluster runs in a network
namespace that has only loopback. Tests reach its HTTP API through a Unix socket and a proxy that can be shut.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

_PORT = 8265
_SET_INTERFACE_UP = 0x8914, 0x1  # SIOCSIFFLAGS, IFF_UP
_START_TIMEOUT = 120.0


def why_not() -> str:
    """Return why a cluster cannot run on this machine, or an empty string."""
    if find_spec("ray") is None or find_spec("aiohttp_cors") is None:
        return "Ray is not installed: pip install 'ray[default]'"
    result = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if result.returncode == 0 else "Ray needs a network of its own here, and unshare --net is not allowed"


class RayCluster:
    """A Ray head node that runs jobs, and the address of its Jobs API."""

    def __init__(self, **variables: str) -> None:
        from tests.doors import Door

        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))
        self._variables = variables
        self._start()
        self.door = Door(str(self._socket))
        self.address = f"http://127.0.0.1:{self.door.port}"
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._socket = self._folder / "api"
        self._socket.unlink(missing_ok=True)
        binaries = Path(sys.executable).parent
        environ = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parent)}
        environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1", **self._variables}
        program = ["unshare", "--net", sys.executable, __file__, str(self._folder)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(program, env=environ, cwd=self._folder, stdout=log, stderr=log)

    def _wait(self) -> None:
        from tests.waiting import eventually

        eventually(self._is_isolated, "it has a network of its own")
        eventually(self._answers, "Ray takes jobs", _START_TIMEOUT, every=0.2)

    def _is_isolated(self) -> bool:
        self._network = _network(self._process.pid)
        return self._network not in (None, _network(os.getpid()))

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self._folder / "log").read_text()
        request = Request(f"{self.address}/api/jobs/", b'{"entrypoint": "true"}', {"Content-Type": "application/json"})
        with suppress(OSError, URLError), urlopen(request, timeout=30) as answer:
            return bool(answer.status == 200)
        return False

    def restart(self) -> None:
        """Start a new, empty cluster at the same address."""
        self.kill()
        self._start()
        self._wait()

    def kill(self) -> None:
        """Kill every process in the cluster's network namespace."""
        assert self._network != _network(os.getpid())
        while members := [pid for pid in _processes() if _network(pid) == self._network]:
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        self.kill()
        self.door.shut()
        shutil.rmtree(self._folder, ignore_errors=True)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _network(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/ns/net").readlink()  # a zombie process has no namespace
    except OSError:
        return None


def _main(folder: Path) -> None:
    """Bring up loopback, start Ray in this network namespace, and forward a Unix socket to its HTTP API."""
    import threading

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_INTERFACE_UP[0], struct.pack("16sh", b"lo", _SET_INTERFACE_UP[1]))
    arguments = [
        "start",
        "--head",
        "--block",
        "--node-ip-address=127.0.0.1",
        "--dashboard-host=127.0.0.1",
        "--num-cpus=4",
    ]
    arguments += [f"--dashboard-port={_PORT}", f"--temp-dir={folder / 'ray'}", "--object-store-memory=80000000"]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "api"))
    listener.listen()
    with subprocess.Popen(["ray", *arguments, "--include-dashboard=true", "--disable-usage-stats"]):
        while True:
            near, _ = listener.accept()
            try:
                far = socket.create_connection(("127.0.0.1", _PORT))
            except OSError:
                near.close()
                continue
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=_forward, args=(source, target), daemon=True).start()


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    source.close()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
