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
    for name, *words in _commands(folder):
        if name in (b"MULTI", b"EXEC"):
            in_script = name == b"MULTI"
        elif name == b"RPUSH":
            lists[words[0]] += words[1:]
        elif name == b"LPUSH":
            lists[words[0]][:0] = reversed(words[1:])
            if not in_script:
                sent.update(one for message in words[1:] for one in _ids(message))
        elif name == b"LMOVE" and lists[words[0]]:
            lists[words[1]].insert(0, lists[words[0]].pop())
        elif name == b"LREM" and words[2] in lists[words[0]]:
            lists[words[0]].remove(words[2])
        elif name == b"RPOP" and lists[words[0]]:
            message = lists[words[0]].pop()
            if not in_script:
                lost |= _ids(message)
        elif name == b"HSET" and words[0] == b"unacked":
            lost -= _ids(words[2])
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
                words = []
                for _ in range(int(head[1:])):
                    words.append(file.read(int(file.readline()[1:])))
                    file.read(2)
                words[0] = words[0].upper()
                if words[0] == b"SELECT":
                    database = words[1]
                elif database == b"0":
                    yield words
