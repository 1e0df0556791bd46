"""Makes foreign text safe to display: without terminal control characters and forged lines.

Errors, results, tags, log lines and heartbeats come from tasks, clients, and anyone with access to Redis. All of them
pass through here before the command line or the log displays them. Passwords in URLs are hidden.
"""

from __future__ import annotations

import re

_CONTROLS = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls except tab and newline; C1 controls start sequences, too
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the text direction
    "\u2028\u2029\ufeff\ufff9-\ufffb"  # invisible separators and marks
    "\ud800-\udfff"  # cannot be encoded
    "\U000e0000-\U000e007f"  # invisible tags
    "]"
)
_BEYOND_ASCII = re.compile("[^\x00-\x7f]")
_LINES = re.compile("[\n\t]")
_STYLES = re.compile("(\x1b\\[[0-9;:]{0,30}m)")
SEQUENCES = re.compile("\x1b(?:\\[([0-9;:]{0,60})m|\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b]*(?:\x07|\x1b\\\\)?)")
"""Escape sequences: styles (their codes are the group), cursor movements, titles and links."""
_INDENT = "\n    "


def terminal_safe(text: str) -> str:
    """Return text with each terminal control character replaced. The number of characters and lines stays the same."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def one_line(text: str) -> str:
    """Return text for a single line, with newlines and tabs replaced by spaces."""
    return _LINES.sub(" ", terminal_safe(text))


def sentence(text: str) -> str:
    """Return text with a full stop, unless it ends with other punctuation."""
    return text if text.endswith((".", "?", "!", "…")) else f"{text}."


def indented(text: str) -> str:
    """Return text for the log, with all but the first line indented, so that it cannot forge records."""
    return terminal_safe(text).replace("\n", _INDENT)


def with_styles(text: str) -> str:
    """Return a line of a program's output, with colors that end with the line."""
    *styled, rest = _STYLES.split(text)
    if not styled:
        return terminal_safe(rest)
    kept = "".join(part if index % 2 else terminal_safe(part) for index, part in enumerate(styled))
    return f"{kept}{terminal_safe(rest)}\x1b[0m"


def without_styles(text: str) -> str:
    """Return a line of a program's output without colors and other control sequences."""
    return terminal_safe(SEQUENCES.sub("", text))


def terminal_safe_json(document: str) -> str:
    """Return equivalent JSON with control characters escaped. They occur only within strings."""
    return _CONTROLS.sub(_escape, document)


def ascii_json(document: str) -> str:
    """Return equivalent JSON in ASCII."""
    return _BEYOND_ASCII.sub(_escape, document)


def _escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", errors="surrogatepass")
    return "".join(f"\\u{units[index : index + 2].hex()}" for index in range(0, len(units), 2))


# -- passwords

_USER = re.compile(r"^(?P<scheme>[\w+.-]*://)?(?P<user>[^:]*):(?!//)(?P<password>.*)@", re.DOTALL)
"""Matches up to the last @, so that passwords that wrongly contain @ or other special characters are hidden, too."""
_NAMED = re.compile(r"((?:password|passwd|passphrase|secret|token)=)[^&\s]+", re.IGNORECASE)
_QUOTED = re.compile(r"""(['"])(.*?)\1""", re.DOTALL)
HIDDEN = "***"


def without_password(url: str) -> str:
    """Return the address of a server without passwords and tokens."""
    return _NAMED.sub(rf"\1{HIDDEN}", _USER.sub(rf"\g<scheme>\g<user>:{HIDDEN}@", url))


def without_password_of(url: str, text: str) -> str:
    """Return a parser's error about an address without parts of its password, which it may quote as a port."""
    match = _USER.search(url)
    pieces = [piece for piece in re.split(r"[^\w]+", match["password"]) if piece] if match else []

    def hide(quoted: re.Match[str]) -> str:
        is_secret = any(piece in quoted[2] or quoted[2] in piece for piece in pieces) if quoted[2] else False
        return f"{quoted[1]}{HIDDEN}{quoted[1]}" if is_secret else quoted[0]

    return _QUOTED.sub(hide, _NAMED.sub(rf"\1{HIDDEN}", text))
