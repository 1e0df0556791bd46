"""What a task says that an existing Dask cluster runs."""

from __future__ import annotations

import re
from typing import ClassVar

from orchestrator.domain.executors.options import ExecutorOptions

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_ADDRESS = re.compile(r"(tcp|tls|ws|wss|ucx)://[^\s/@]+:\d+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Dask(ExecutorOptions, frozen=True, kw_only=True):
    """A function that runs on the workers of a Dask cluster; its key there is the name of the execution."""

    executor: ClassVar[str] = "dask"

    function: str
    """What the cluster calls, with the task's arguments: `package.module:function`, which its workers can import."""
    address: str = ""
    """The scheduler of the cluster, e.g. tcp://scheduler:8786."""
    address_variable: str = "DASK_SCHEDULER_ADDRESS"
    """The variable in the environment of our workers that holds the address, where `address` is not given."""
    resources: dict[str, float] = {}
    """What a worker of the cluster must have to run it, as Dask counts it, e.g. GPU: 1."""
    priority: int = 0
    """Higher goes first among what waits on the cluster."""

    @property
    def wants(self) -> str:
        """The variable, where it is said nowhere else: workers say which of them they were given."""
        return self.executor if self.address else f"{self.executor} {self.address_variable}"

    def problems(self) -> list[tuple[str, str]]:
        """Return what types cannot say."""
        found = []
        if not _FUNCTION.fullmatch(self.function):
            found.append(("function", f"expected package.module:function, found {self.function!r}."))
        if self.address and not _ADDRESS.fullmatch(self.address):
            found.append(("address", f"expected an address such as tcp://scheduler:8786, found {self.address!r}."))
        if not _VARIABLE.fullmatch(self.address_variable):
            found.append(("address_variable", f"expected the name of a variable, found {self.address_variable!r}."))
        for name, amount in self.resources.items():
            if not amount > 0:
                found.append(("resources", f"{name}: expected more than zero, found {amount:g}."))
        return found
