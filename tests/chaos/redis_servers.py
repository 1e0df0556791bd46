"""A real Redis Cluster and a real Redis with Sentinels, for tests that move slots and kill nodes."""

from __future__ import annotations

import random
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisError
from redis.retry import Retry

from orchestrator.embedded.server import find_redis
from orchestrator.settings import DEFAULT_NAMESPACE
from orchestrator.transport.keys import Keys
from tests.waiting import eventually

SLOTS = 16384


def free_port() -> int:
    """Return a free port whose cluster bus port (10,000 higher) is free too."""
    while True:
        port = random.randint(20_000, 30_000)
        with socket.socket() as client_port, socket.socket() as bus_port:
            try:
                client_port.bind(("127.0.0.1", port))
                bus_port.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port


class RedisServer:
    """A process of Redis or Valkey, without persistence."""

    def __init__(self, folder: Path, *lines: str, is_sentinel: bool = False) -> None:
        found = find_redis()
        if found is None:
            pytest.skip("only a real Redis has clusters and Sentinels")
        self.port = free_port()
        folder = folder / str(self.port)
        folder.mkdir(parents=True)
        configuration = folder / "redis.conf"
        defaults = (f"port {self.port}", "bind 127.0.0.1", f"dir {folder}", f"logfile {folder}/log")
        configuration.write_text("\n".join((*defaults, *([] if is_sentinel else ['save ""']), *lines)) + "\n")
        command: list[str | Path] = [found.path, configuration, *(["--sentinel"] if is_sentinel else [])]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._client = Redis(port=self.port, retry=Retry(NoBackoff(), 0), socket_timeout=5, protocol=2)
        eventually(self.answers, f"the server answers, see {folder}/log")

    def answers(self) -> bool:
        try:
            return bool(self._client.ping())
        except (RedisError, OSError):
            return False

    def __call__(self, *arguments: Any) -> Any:
        return self._client.execute_command(*arguments)  # type: ignore[no-untyped-call]

    def info(self, section: str) -> dict[str, Any]:
        found: dict[str, Any] = self._client.info(section)
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._client.close()
        self.kill()


class Cluster:
    """Three masters, and a replica of the master that owns the slot of the first namespace or shard."""

    def __init__(self, folder: Path, closing: ExitStack, namespaces: Sequence[str]) -> None:
        def start() -> RedisServer:
            server = RedisServer(folder, "cluster-enabled yes", "cluster-node-timeout 1500")
            closing.callback(server.close)
            return server

        self.nodes = [start() for _ in range(3)]
        share = -(-SLOTS // 3)
        for number, node in enumerate(self.nodes):
            node("CLUSTER ADDSLOTS", *range(number * share, min(SLOTS, (number + 1) * share)))
            node("CLUSTER SET-CONFIG-EPOCH", number + 1)
        self.replica = start()
        for node in (*self.nodes[1:], self.replica):
            node("CLUSTER MEET", "127.0.0.1", self.nodes[0].port)
        all_nodes = (*self.nodes, self.replica)
        eventually(lambda: all(self._is_whole(node, 4) for node in all_nodes), "the cluster stands", 60)
        self.slots = [key_slot(Keys(namespace).generation.encode()) for namespace in namespaces]
        self.owners = [self.nodes[slot // share] for slot in self.slots]
        """The masters that own the slots, in the order of the namespaces."""
        self.replica("CLUSTER REPLICATE", self._id(self.owners[0]))
        eventually(lambda: self.replica.info("replication").get("master_link_status") == "up", "it follows", 60)

    @staticmethod
    def _is_whole(node: RedisServer, nodes: int) -> bool:
        state = node("CLUSTER INFO")
        return state["cluster_state"] == "ok" and int(state["cluster_known_nodes"]) == nodes

    @staticmethod
    def _id(node: RedisServer) -> str:
        return bytes(node("CLUSTER MYID")).decode()

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}"

    def move_slot(self, index: int = 0) -> None:
        """Move a slot to another master, key by key, as redis-cli does."""
        source, slot = self.owners[index], self.slots[index]
        target = next(node for node in self.nodes if node is not source)
        target("CLUSTER SETSLOT", slot, "IMPORTING", self._id(source))
        source("CLUSTER SETSLOT", slot, "MIGRATING", self._id(target))
        while keys := source("CLUSTER GETKEYSINSLOT", slot, 10):
            source("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
            time.sleep(0.01)  # clients meet a half-migrated slot
        for node in (target, source, *self.nodes):
            node("CLUSTER SETSLOT", slot, "NODE", self._id(target))
        eventually(lambda: self._is_known(slot, target), "the replica knows, which may be the next to own it", 60)
        self.owners[index] = target

    def _is_known(self, slot: int, owner: RedisServer) -> bool:
        found = (server for first, last, server, *_ in self.replica("CLUSTER SLOTS") if first <= slot <= last)
        return [server[1] for server in found] == [owner.port]


@contextmanager
def cluster(folder: Path, *namespaces: str) -> Iterator[Cluster]:
    with ExitStack() as closing:
        yield Cluster(folder, closing, namespaces or [DEFAULT_NAMESPACE])


class Sentinels:
    """A master, a replica, and three Sentinels that can promote the replica."""

    def __init__(self, folder: Path, closing: ExitStack) -> None:
        def start(*lines: str, is_sentinel: bool = False) -> RedisServer:
            server = RedisServer(folder, *lines, is_sentinel=is_sentinel)
            closing.callback(server.close)
            return server

        self.master = start()
        self.replica = start(f"replicaof 127.0.0.1 {self.master.port}")
        eventually(lambda: self.replica.info("replication")["master_link_status"] == "up", "it follows", 60)
        name = "mymaster"
        lines = (
            f"sentinel monitor {name} 127.0.0.1 {self.master.port} 2",
            f"sentinel down-after-milliseconds {name} 1000",
            f"sentinel failover-timeout {name} 6000",
        )
        self.sentinels = [start(*lines, is_sentinel=True) for _ in range(3)]
        eventually(lambda: all(map(self._knows_all, self.sentinels)), "Sentinels know all", 60)

    @staticmethod
    def _knows_all(sentinel: RedisServer) -> bool:
        found = sentinel.info("sentinel")["master0"]
        return (found["slaves"], found["sentinels"], found["status"]) == (1, 3, "ok")

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{sentinel.port}' for sentinel in self.sentinels)}/mymaster/0"


@contextmanager
def sentinels(folder: Path) -> Iterator[Sentinels]:
    with ExitStack() as closing:
        yield Sentinels(folder, closing)
