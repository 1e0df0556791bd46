"""RQ's exceptions, as far as this package raises them."""


class NoSuchJobError(Exception):
    """No job has this id, or the job is no longer stored."""


class InvalidJobOperation(Exception):
    """The state of the job does not allow this operation."""


InvalidJobOperationError = InvalidJobOperation
"""RQ's alias."""


class InvalidJobDependency(Exception):
    """A job that this job depends on has not succeeded."""


class DuplicateJobError(Exception):
    """Another job has this id."""


class JobTimeoutException(Exception):
    """Raised in a job that runs longer than its timeout."""

    def __str__(self) -> str:
        return super().__str__() or "ran longer than its timeout"  # raised in a thread, it has no message


class TimeoutFormatError(Exception):
    """The timeout is neither a number of seconds nor a text such as `1h`."""
