"""Of several processes that fail alike, one reports the reason, and the rest wait for it."""

from __future__ import annotations

import os
from multiprocessing.connection import wait

from orchestrator.workers.parent.messages import FirstToReport


def test_other_processes_end_after_the_first_has_reported() -> None:
    first = FirstToReport()
    ended, end = os.pipe()
    assert first.take()  # in the role of the first process
    other = os.fork()
    if other == 0:
        os.close(ended)
        os.write(end, b"first" if first.take() else b"other")
        os._exit(0)
    os.close(end)
    assert not wait([ended], 0.2), "it ends before the first has said why"
    first.close()  # as at the end of the first process
    assert os.read(ended, 10) == b"other"
    os.waitpid(other, 0)
    os.close(ended)
