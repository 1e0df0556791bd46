"""Memory that a process can do without: what loading its modules took, and an allocator's arena for each thread."""

from __future__ import annotations

import ctypes
import gc
import os

_ARENA_MAX = -8
_ARENAS = 2


def limit_arenas() -> None:
    """Have all threads allocate from two arenas, and not each from one of its own; called before there are any.

    Threads of Python allocate by turns anyway. What `MALLOC_ARENA_MAX` in the environment says goes before this.
    """
    library = ctypes.CDLL(None)
    if "MALLOC_ARENA_MAX" not in os.environ and hasattr(library, "mallopt"):  # glibc has it, others do not
        library.mallopt(_ARENA_MAX, _ARENAS)


def settle() -> None:
    """Take what is loaded as what stays, called once it all is: in a parent, before it forks.

    No collection looks at it again, which would write to it and so copy what processes share. What the compiler used,
    where modules have no bytecode on disk, goes back to the system: 14 MB for the driver of Redis alone.
    """
    gc.collect()
    gc.freeze()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
