"""Patterns of texts that msgspec checks."""

from __future__ import annotations


def whole(pattern: str) -> str:
    """Return a pattern that only a whole text fits. msgspec searches, and `$` alone fits before a last line break."""
    return rf"^(?:{pattern})(?!\n)$"
