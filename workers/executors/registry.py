"""Which executors a worker process has; each is loaded when the first task for it comes."""

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
    """Return which executors a worker has, as it announces them."""
    return [announced(want) for name in executor_names() for want in equipment(name, setup)]


def equipment(name: str, setup: Setup, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return what a worker has of an executor; nothing if the packages for it are not installed."""
    if name == "process":
        return [f"process {command}" for command in setup.commands if _may_be_there(command, environ)]
    try:
        plugin = plugin_of(name)
    except ConfigurationError:
        return [name]  # so that a task is given to this worker, and fails with the reason
    if plugin is None or not _is_installed(plugin):
        return []
    return [name] if plugin.equipment is None else plugin.equipment(environ)


def create(name: str, setup: Setup) -> Executor | None:
    """Return an executor for this worker process; None if it has none of that name."""
    plugin = plugin_of(name)
    if plugin is None or not _is_installed(plugin):
        return None
    kind: Any = resolve_name(plugin.driver) if isinstance(plugin.driver, str) else plugin.driver
    executor: Executor = kind(setup)
    return executor


def _is_installed(plugin: ExecutorPlugin) -> bool:
    return all(find_spec(package) for package in plugin.needs)


def _may_be_there(command: str, environ: Mapping[str, str]) -> bool:
    """Say whether a program is on this machine; a pattern must be tried."""
    return any(sign in command for sign in "*?[") or shutil.which(command, path=environ.get("PATH")) is not None
