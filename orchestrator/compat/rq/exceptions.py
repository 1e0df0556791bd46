"""RQ's exceptions, as far as something here raises them."""


class NoSuchJobError(Exception):
    """No job has that id, or it is no longer kept."""


class InvalidJobOperation(Exception):
    """The job is in a state that does not allow this."""


InvalidJobOperationError = InvalidJobOperation
"""RQ's other name for the same."""


class InvalidJobDependency(Exception):
    """A job that this one depends on has not succeeded."""


class DuplicateJobError(Exception):
    """Another job has that id."""


class TimeoutFormatError(Exception):
    """A timeout is neither a number of seconds nor a text such as `1h`."""
