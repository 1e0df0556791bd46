"""What programs import of `dramatiq.results`; results are kept without a backend."""

from orchestrator.compat.dramatiq.errors import ResultError, ResultFailure, ResultMissing, ResultTimeout

__all__ = ["ResultError", "ResultFailure", "ResultMissing", "ResultTimeout"]
