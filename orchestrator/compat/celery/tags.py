"""Tagged values with Celery's exceptions."""

from __future__ import annotations

from orchestrator.compat.celery.exceptions import EncodeError
from orchestrator.compat.values import Values


class _CeleryValues(Values):
    error = EncodeError


_values = _CeleryValues()
tagged, tagged_call, untagged = _values.tagged, _values.tagged_call, _values.untagged
