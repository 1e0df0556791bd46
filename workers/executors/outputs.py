"""Answers of the remote side, as outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from orchestrator.domain.executors.options import Broken, Finished, Outcome
from orchestrator.domain.plain import unstorable


def finished(output: Any) -> Outcome:
    """Return that it has done its work; a result that is no plain data is a failure that no other try heals."""
    reason = unstorable(output)
    if reason is not None:
        return Broken("UnreadableOutput", f"The work is done, but its result is no plain data: {reason}.", False)
    return Finished(msgspec.to_builtins(output, str_keys=True))


def function_outcome(end: Mapping[str, Any], output: Any) -> Outcome:
    """Return how a function ended that a program of ours has called elsewhere; `output` is its result, if any."""
    if "unreadable" in end:
        why = f"The work is done, but its result is no plain data: {end['unreadable']}."
        return Broken("UnreadableOutput", why, False)
    if "kind" in end:
        return Broken(str(end["kind"]), str(end.get("message", "")), detail=str(end.get("detail", "")))
    return finished(output)


def raised(traceback: str, otherwise: str) -> tuple[str, str]:
    """Return the type and the text of the exception that a printed traceback ends with; `otherwise` names the type."""
    lines = traceback.strip().splitlines()
    frames = [place for place, line in enumerate(lines) if line.startswith("  File ")]
    if not frames:
        return otherwise, traceback.strip()
    said = next((place for place in range(frames[-1] + 1, len(lines)) if not lines[place].startswith(" ")), None)
    if said is None:
        return otherwise, traceback.strip()
    kind, _, message = lines[said].partition(": ")
    return kind.rpartition(".")[2], "\n".join([message, *lines[said + 1 :]]).strip()
