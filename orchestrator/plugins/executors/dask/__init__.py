"""The executor `dask`: options of a task that runs on an existing Dask cluster."""

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
    """A function that runs on the workers of a Dask cluster. Its key there is the name of the execution."""

    executor: ClassVar[str] = "dask"

    function: str
    """The function, called with the task's arguments: `package.module:function`, importable on the cluster."""
    address: str = ""
    """The address of the cluster's scheduler, e.g. tcp://scheduler:8786."""
    address_variable: str = "DASK_SCHEDULER_ADDRESS"
    """The environment variable of our workers that has the address, if `address` is not set."""
    resources: dict[str, float] = {}
    """Resources that a worker of the cluster must have, by Dask's accounting, e.g. GPU: 1."""
    priority: int = 0
    """The priority on the cluster. Higher values run first."""

    @property
    def wants(self) -> str:
        """The variable, if `address` is not set: workers announce which variables they have."""
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
