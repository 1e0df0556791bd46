"""Reduces the memory of a process: memory left by loading modules, and malloc arenas per thread."""

from __future__ import annotations

import ctypes
import gc
import os

_ARENA_MAX = -8
_ARENAS = 2


def limit_arenas() -> None:
    """Limit malloc to two arenas for all threads. Call it before starting threads.

    Python threads rarely allocate in parallel. `MALLOC_ARENA_MAX` in the environment takes precedence.
    """
    library = ctypes.CDLL(None)
    if "MALLOC_ARENA_MAX" not in os.environ and hasattr(library, "mallopt"):  # only in glibc
        library.mallopt(_ARENA_MAX, _ARENAS)


def freeze_before_fork() -> None:
    """Treat everything loaded so far as permanent. A parent calls this before it forks.

    The garbage collector then no longer touches these objects, which would copy pages that processes share. Memory used
    by the compiler for modules without bytecode is returned to the system: 14 MB for the Redis driver alone.
    """
    gc.collect()
    gc.freeze()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
