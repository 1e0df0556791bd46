"""Requests with a condition (RFC 9110, 13): not again what somebody has, no change of what somebody has not seen."""

from __future__ import annotations

import re

from starlette.datastructures import Headers

from orchestrator.api.problems import refused
from orchestrator.domain.dag.conditions import ANY, Condition

_TAG = r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"'
_LIST = re.compile(rf"\s*{_TAG}\s*(?:,\s*{_TAG}\s*)*")


def is_known(tag: str, given: str | None) -> bool:
    """Say whether somebody who has all of these has this one."""
    if given is None:
        return False
    return given.strip() == ANY or tag.strip('"') in (found for _, found in re.findall(_TAG, given))


def condition_of(headers: Headers) -> Condition:
    """Return what must be true of what is to be replaced; a weak tag in If-Match is like no other (RFC 9110, 8.8.3)."""
    return Condition(one_of=_tags(headers, "If-Match", weak=False), none_of=_tags(headers, "If-None-Match", weak=True))


def _tags(headers: Headers, name: str, *, weak: bool) -> frozenset[str] | None:
    lines = headers.getlist(name)
    if not lines:
        return None
    given = ", ".join(lines)
    if given.strip() == ANY:
        return frozenset([ANY])
    if not _LIST.fullmatch(given):
        raise refused(
            400,
            "The condition cannot be understood",
            f'{name}: expected tags as an ETag has them, such as "0a1b2c", by comma, or *; found {given!r:.100}.',
        )
    return frozenset(tag for is_weak, tag in re.findall(_TAG, given) if weak or not is_weak)
