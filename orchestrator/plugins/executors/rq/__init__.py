"""The executor `rq`: options of a task that an existing RQ fleet runs."""

from __future__ import annotations

from typing import ClassVar, Literal
from urllib.parse import urlsplit

from orchestrator.domain.executors.options import (
    ExecutorOptions,
    ExecutorPlugin,
    Problems,
    address_variables,
    function_problems,
    variable_problems,
)

_SCHEMES = ("redis", "rediss", "unix")


class Rq(ExecutorOptions, frozen=True, kw_only=True):
    """A job of an RQ queue. Its id is the name of the execution."""

    executor: ClassVar[str] = "rq"

    function: str
    """The function, called with the task's arguments: `package.module:function`."""
    queue: str = "default"
    """The RQ queue."""
    url: str = ""
    """The Redis URL of the fleet, e.g. redis://host:6379/0, without a password: people can see options."""
    url_variable: str = "RQ_REDIS_URL"
    """The environment variable of our workers that has the URL, if `url` is not set."""
    serializer: Literal["pickle", "json"] = "pickle"
    """The fleet's serializer of jobs and results. `pickle` is RQ's default."""
    job_timeout: float | None = None
    """Seconds after which the fleet ends the job; by default a little more than the task's timeout."""
    result_ttl: float = 86_400.0
    """Seconds for which the fleet keeps the result. A worker must collect it within that time."""
    prints: bool = False
    """Add the function's printed output to the task's log at the end. This package must be installed in the fleet."""

    @property
    def wants(self) -> str:
        """The variable, if `url` is not set: workers announce which variables they have."""
        return self.executor if self.url else f"{self.executor} {self.url_variable}"

    def problems(self) -> Problems:
        found = function_problems(self.function) + variable_problems("url_variable", self.url_variable)
        if not self.queue:
            found.append(("queue", "expected the name of a queue of RQ, found ''."))
        if self.url:
            found += _problems_of_url(self.url)
        if self.job_timeout is not None and not self.job_timeout >= 1:
            found.append(("job_timeout", f"expected 1 second or more, found {self.job_timeout:g}."))
        if not self.result_ttl >= 60:
            found.append(("result_ttl", f"expected 60 seconds or more, found {self.result_ttl:g}."))
        return found


def _problems_of_url(url: str) -> Problems:
    """Return the problems of a URL without quoting it, because it may contain a secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return [("url", "it cannot be read as an address.")]
    if parts.scheme not in _SCHEMES:
        return [("url", f"expected an address that begins with {', '.join(f'{scheme}://' for scheme in _SCHEMES)}.")]
    if parts.password is not None or "password=" in parts.query:
        return [
            ("url", "it contains a password, and options are visible; put the address into an environment variable of "
             "the workers, and pass its name as url_variable.")
        ]  # fmt: skip
    return []


PLUGIN = ExecutorPlugin(
    options=Rq,
    driver="orchestrator.plugins.executors.rq.driver:RqExecutor",
    needs=("rq",),
    equipment=address_variables("rq", *_SCHEMES, or_given=True),
)
