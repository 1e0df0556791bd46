"""Requests with a condition (RFC 9110, 13): not again what somebody has, no change of what somebody has not seen."""

from __future__ import annotations

import re

from orchestrator.api.problems import refused

_TAG = re.compile(r'(?:W/)?"([^"]*)"')


def is_known(tag: str, given: str | None) -> bool:
    """Say whether somebody who has all of these has this one."""
    if given is None:
        return False
    return given.strip() == "*" or tag.strip('"') in _TAG.findall(given)


def expected_tag(given: str | None) -> str | None:
    """Return the one tag that is expected to be there still; None where any is as good."""
    if given is None or given.strip() == "*":
        return None
    found = re.fullmatch(r'"([^"]+)"', given.strip())
    if found is None:
        raise refused(
            400, "If-Match cannot be understood", f'Expected one tag, such as "0a1b2c", found {given!r:.100}.'
        )
    return found[1]
