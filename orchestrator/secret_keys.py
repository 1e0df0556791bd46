"""Secrets in settings, or in files that settings name."""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path

from orchestrator.errors import ConfigurationError

MIN_LENGTH = 32
"""The minimum length of a secret, in bytes."""


def read_secrets(name: str, text: str, path: str, advice: str) -> list[str]:
    """Return the secrets of a setting as written, separated by commas or lines, the one in use first."""
    if text and path:
        raise ConfigurationError(f"Settings {name} and {name}_file are both set. Set one of them.")
    if path:
        try:
            text = Path(path).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"Setting {name}_file: {path!r} cannot be read: {error}.") from error
        if not text.strip():
            raise ConfigurationError(f"Setting {name}_file: {path!r} is empty. {advice}")
    return text.replace(",", " ").split()


def decode_secret(name: str, text: str, advice: str) -> bytes:
    """Decode a secret. Error messages never contain the text."""
    try:
        secret = base64.b64decode(text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if len(secret) < MIN_LENGTH:
        raise ConfigurationError(
            f"Setting {name}: expected secrets of at least {MIN_LENGTH} bytes in base64, separated by commas, the "
            f"active one first; found one that is invalid, or has {len(secret)} bytes. {advice}"
        )
    return secret


_SERVICE_KEY = re.compile(r"[A-Za-z0-9+/=_.~-]{32,200}")


def service_keys(text: str, path: str) -> list[str]:
    """Return the keys of services, the one in use first. Error messages never contain them."""
    advice = "Make one: openssl rand -hex 32"
    keys = read_secrets("service_keys", text, path, advice)
    if not all(_SERVICE_KEY.fullmatch(key) for key in keys):
        raise ConfigurationError(
            f"Setting service_keys: expected keys of 32 to 200 letters, digits and + / = _ . ~ -, separated by commas, "
            f"the active one first; found one that is invalid. {advice}"
        )
    return keys
