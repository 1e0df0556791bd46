"""The names of `dramatiq.results` that programs import. Results need no backend."""

from orchestrator.compat.dramatiq.errors import ResultError, ResultFailure, ResultMissing, ResultTimeout

__all__ = ["ResultError", "ResultFailure", "ResultMissing", "ResultTimeout"]
