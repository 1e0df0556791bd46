"""A scheduler that does not lead, and would if the leader ended."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta


class Standby(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduler that stands by."""

    address: Annotated[str, Meta(max_length=300)]
    """Its host and process id."""
    since: datetime
    """When it began to, by its own clock."""
