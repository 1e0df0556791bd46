"""What a task says that an existing Dask cluster runs."""

from __future__ import annotations

import re
from typing import ClassVar

from orchestrator.domain.executors.options import (
    ExecutorOptions,
    ExecutorPlugin,
    Problems,
    address_variables,
    function_problems,
    resource_problems,
    variable_problems,
)

_SCHEMES = ("tcp", "tls", "ucx", "ws", "wss")
_ADDRESS = re.compile(rf"({'|'.join(_SCHEMES)})://[^\s/@]+:\d+")


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

    def problems(self) -> Problems:
        found = function_problems(self.function) + variable_problems("address_variable", self.address_variable)
        if self.address and not _ADDRESS.fullmatch(self.address):
            found.append(("address", f"expected an address such as tcp://scheduler:8786, found {self.address!r}."))
        return found + resource_problems(self.resources)


PLUGIN = ExecutorPlugin(
    options=Dask,
    driver="orchestrator.plugins.executors.dask.driver:DaskExecutor",
    needs=("distributed",),
    equipment=address_variables("dask", *_SCHEMES, or_given=True),
)
