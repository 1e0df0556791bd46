"""Finds lost and resent messages in the append-only file of Celery's Redis.

Celery's workers pop messages with BRPOP, and record them as reserved in a second command. If a worker or Redis is
killed in between, Celery loses the message. In the file, this is an RPOP outside of a script without a later HSET.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

_ID = re.compile(rb'\\?"id\\?": \\?"([0-9a-f-]+)')


def read_log(folder: Path) -> tuple[set[str], Counter[str]]:
    """Return the ids of messages that Celery popped without reserving, and how often Celery sent each id."""
    sent: Counter[str] = Counter()
    lists: defaultdict[bytes, list[bytes]] = defaultdict(list)
    lost: set[str] = set()
    in_script = False
    for name, *arguments in _commands(folder):
        if name in (b"MULTI", b"EXEC"):
            in_script = name == b"MULTI"
        elif name == b"RPUSH":
            lists[arguments[0]] += arguments[1:]
        elif name == b"LPUSH":
            lists[arguments[0]][:0] = reversed(arguments[1:])
            if not in_script:
                sent.update(message_id for message in arguments[1:] for message_id in _ids(message))
        elif name == b"LMOVE" and lists[arguments[0]]:
            lists[arguments[1]].insert(0, lists[arguments[0]].pop())
        elif name == b"LREM" and arguments[2] in lists[arguments[0]]:
            lists[arguments[0]].remove(arguments[2])
        elif name == b"RPOP" and lists[arguments[0]]:
            message = lists[arguments[0]].pop()
            if not in_script:
                lost |= _ids(message)
        elif name == b"HSET" and arguments[0] == b"unacked":
            lost -= _ids(arguments[2])
    return lost, sent


def _ids(message: bytes) -> set[str]:
    found = _ID.search(message)
    return {found[1].decode()} if found else set()


def _commands(folder: Path) -> Iterator[list[bytes]]:
    """Yield the commands on database 0, which contains the messages."""
    database = b"0"
    for path in sorted(folder.glob("appendonlydir/*.incr.aof")):
        with path.open("rb") as file:
            while head := file.readline():
                if not head.startswith(b"*"):
                    continue  # a timestamp
                arguments = []
                for _ in range(int(head[1:])):
                    arguments.append(file.read(int(file.readline()[1:])))
                    file.read(2)
                arguments[0] = arguments[0].upper()
                if arguments[0] == b"SELECT":
                    database = arguments[1]
                elif database == b"0":
                    yield arguments
