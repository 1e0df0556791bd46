"""Foreign text as people see it, without what would command the terminal or forge the text around it.

Errors, results, tags, log lines and heartbeats come from tasks, from clients, and from anyone with access to Redis. All
that the command line and the log show of them passes through here. Of addresses, all but the passwords is shown.
"""

from __future__ import annotations

import re

_COMMANDS = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, but for tab and newline; those beyond ASCII begin sequences, too
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # turn the direction of what follows
    "\u2028\u2029\ufeff\ufff9-\ufffb"  # lines and marks that one does not see
    "\ud800-\udfff"  # cannot be written at all
    "\U000e0000-\U000e007f"  # tags, which nobody sees
    "]"
)
_BEYOND_ASCII = re.compile("[^\x00-\x7f]")
_LINES = re.compile("[\n\t]")
_STYLES = re.compile("(\x1b\\[[0-9;:]{0,30}m)")
SEQUENCES = re.compile("\x1b(?:\\[([0-9;:]{0,60})m|\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b]*(?:\x07|\x1b\\\\)?)")
"""Styles, whose codes are the group; movements of the cursor; and titles and links."""
_INDENT = "\n    "


def terminal_safe(text: str) -> str:
    """Return text in which each character that would command a terminal is replaced, one for one; lines stay."""
    return _COMMANDS.sub("\N{REPLACEMENT CHARACTER}", text)


def one_line(text: str) -> str:
    """Return text for a place that has one line: newlines and tabs are spaces, one for one."""
    return _LINES.sub(" ", terminal_safe(text))


def sentence(text: str) -> str:
    """Return text with a full stop behind it, unless it ends with what stands for one."""
    return text if text.endswith((".", "?", "!", "…")) else f"{text}."


def indented(text: str) -> str:
    """Return text of a log: no line but the first begins where records begin, so nobody can forge one."""
    return terminal_safe(text).replace("\n", _INDENT)


def with_styles(text: str) -> str:
    """Return a line of a program's output: colours stay, and end with it."""
    *styled, rest = _STYLES.split(text)
    if not styled:
        return terminal_safe(rest)
    kept = "".join(part if place % 2 else terminal_safe(part) for place, part in enumerate(styled))
    return f"{kept}{terminal_safe(rest)}\x1b[0m"


def without_styles(text: str) -> str:
    """Return a line of a program's output without its colours and all else that is meant for a terminal."""
    return terminal_safe(SEQUENCES.sub("", text))


def terminal_safe_json(document: str) -> str:
    """Return JSON that says the same, with escapes for what would command a terminal: it stands only within strings."""
    return _COMMANDS.sub(_escape, document)


def ascii_json(document: str) -> str:
    """Return JSON that says the same in ASCII."""
    return _BEYOND_ASCII.sub(_escape, document)


def _escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", errors="surrogatepass")
    return "".join(f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2))


# -- passwords

_USER = re.compile(r"^(?P<scheme>[\w+.-]*://)?(?P<user>[^:]*):(?!//)(?P<password>.*)@", re.DOTALL)
"""Up to the last @: a password that holds one, or any other sign that it should not, must not be shown either."""
_NAMED = re.compile(r"((?:password|passwd|passphrase|secret|token)=)[^&\s]+", re.IGNORECASE)
_QUOTED = re.compile(r"""(['"])(.*?)\1""", re.DOTALL)
HIDDEN = "***"


def without_password(url: str) -> str:
    """Return the address of a server without what lets one in."""
    return _NAMED.sub(rf"\1{HIDDEN}", _USER.sub(rf"\g<scheme>\g<user>:{HIDDEN}@", url))


def without_password_of(url: str, text: str) -> str:
    """Return what a parser says of an address, without pieces of its password, which it may have taken for a port."""
    found = _USER.search(url)
    pieces = [piece for piece in re.split(r"[^\w]+", found["password"]) if piece] if found else []

    def hide(quoted: re.Match[str]) -> str:
        told = any(piece in quoted[2] or quoted[2] in piece for piece in pieces) if quoted[2] else False
        return f"{quoted[1]}{HIDDEN}{quoted[1]}" if told else quoted[0]

    return _QUOTED.sub(hide, _NAMED.sub(rf"\1{HIDDEN}", text))
