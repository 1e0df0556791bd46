"""The harness's connection to a client process."""

from __future__ import annotations

import json
import select
from typing import Any

from tests.benchmarks.bench.programs import Failed, Program, Programs
from tests.benchmarks.peers.contestants import Contestant


class RemoteClient:
    """Sends requests to a client process; their names are the methods of `client.Client`."""

    def __init__(self, programs: Programs, contestant: Contestant) -> None:
        command = ["-P", "-m", "tests.benchmarks.bench.client", contestant.module]
        self._programs = programs
        self._program: Program = programs.start("client", [contestant.python, *command], piped=True)

    def ask(self, name: str, *arguments: object) -> Any:
        """Send a request, and return the response."""
        self.send(name, *arguments)
        return self.receive()

    def send(self, name: str, *arguments: object) -> None:
        """Send a request without waiting for the response."""
        pipe = self._program.process.stdin
        assert pipe is not None
        pipe.write(json.dumps([name, arguments]).encode() + b"\n")
        pipe.flush()

    def receive(self) -> Any:
        """Return the response to the last request."""
        pipe = self._program.process.stdout
        assert pipe is not None
        while not select.select([pipe], [], [], 1.0)[0]:
            self._programs.expect_alive()
        line = pipe.readline()
        if not line:
            raise Failed("The client process ended.")
        response = json.loads(line)
        if "error" in response:
            raise Failed(response["error"])
        return response["value"]
