"""Quotas of keys as people write them: `rate=10`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from orchestrator.domain.quotas import Quotas
from orchestrator.errors import ConfigurationError, did_you_mean


def parse_quotas(words: Iterable[str]) -> Quotas:
    """Return quotas from words such as `rate=10`; what is not named is as usual."""
    given: dict[str, str] = {}
    for word in words:
        name, _, value = (part.strip() for part in word.partition("="))
        if name not in Quotas.__struct_fields__:
            near = did_you_mean(name, Quotas.__struct_fields__)
            known = ", ".join(Quotas.__struct_fields__)
            raise ConfigurationError(f"There is no quota {name!r:.60}.{near} Expected one of {known}, as in rate=10.")
        given[name] = value
    try:
        return msgspec.convert(given, Quotas, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"Quotas: {error}.") from None
