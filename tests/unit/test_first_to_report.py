"""Of processes that fail alike, one says why, and the others let it."""

from __future__ import annotations

import os
from multiprocessing.connection import wait

from orchestrator.workers.parent.messages import FirstToReport


def test_the_others_end_after_the_first_to_report() -> None:
    first = FirstToReport()
    ended, end = os.pipe()
    assert first.take()  # as the first process
    other = os.fork()
    if other == 0:
        os.close(ended)
        os.write(end, b"first" if first.take() else b"other")
        os._exit(0)
    os.close(end)
    assert not wait([ended], 0.2), "it ends before the first has said why"
    first.close()  # as when the first has ended
    assert os.read(ended, 10) == b"other"
    os.waitpid(other, 0)
    os.close(ended)
