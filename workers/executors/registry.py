"""The executors of a worker process. Each is loaded when its first task arrives."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

from orchestrator.domain.executors.options import ExecutorPlugin
from orchestrator.domain.executors.record import announced
from orchestrator.domain.executors.registry import executor_names, plugin_of
from orchestrator.errors import ConfigurationError
from orchestrator.workers.executors.protocol import Executor, Setup


def announcements(setup: Setup) -> list[str]:
    """Return the executors of a worker, in the form of announcements."""
    return [announced(capability) for name in executor_names() for capability in equipment(name, setup)]


def equipment(name: str, setup: Setup, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the capabilities of a worker for an executor; none if the executor's packages are not installed."""
    if name == "process":
        return [f"process {command}" for command in setup.commands if _may_exist(command, environ)]
    try:
        plugin = plugin_of(name)
    except ConfigurationError:
        return [name]  # so that the task is sent to this worker, and fails with the reason
    if plugin is None or not _is_installed(plugin):
        return []
    return [name] if plugin.equipment is None else plugin.equipment(environ)


def create(name: str, setup: Setup) -> Executor | None:
    """Return an executor for this worker process, or None if the executor is not available."""
    plugin = plugin_of(name)
    if plugin is None or not _is_installed(plugin):
        return None
    executor_class: Any = resolve_name(plugin.driver) if isinstance(plugin.driver, str) else plugin.driver
    executor: Executor = executor_class(setup)
    return executor


def _is_installed(plugin: ExecutorPlugin) -> bool:
    return all(find_spec(package) for package in plugin.needs)


def _may_exist(command: str, environ: Mapping[str, str]) -> bool:
    """Return whether a program exists on this machine. A pattern always may."""
    return any(sign in command for sign in "*?[") or shutil.which(command, path=environ.get("PATH")) is not None
