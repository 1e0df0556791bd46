"""The state that an application shares with its tasks, handles and queues: settings, routes, connections, threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigurationError, InvalidTask, NotDeterministic
from orchestrator.sdk.checks import check_name, for_message
from orchestrator.sdk.inside import inside_workflow
from orchestrator.sdk.tasks.context import TaskRuntime, current_runtime
from orchestrator.sdk.tasks.options import DEFAULT_QUEUE
from orchestrator.sdk.waiting.per_process import ProcessLock, signal_safe
from orchestrator.sdk.waiting.threads import Threads
from orchestrator.settings import Settings, check_arguments, load_settings, with_arguments
from orchestrator.terminal_safe import without_password

if TYPE_CHECKING:
    from orchestrator.sdk.calls.interface import Calls
    from orchestrator.sdk.middleware import Chain
    from orchestrator.sdk.tasks.transaction import Transactions


class Client:
    """The connections of one application to Postgres and Redis, or to the HTTP API. They are opened on first use."""

    def __init__(
        self,
        settings: Settings | Callable[[], Settings] | None,
        overrides: Mapping[str, Any],
        routes: Mapping[str, str],
        *,
        is_cell: bool = False,
    ) -> None:
        if not isinstance(routes, Mapping):
            raise ConfigurationError(
                f"Orchestrator(routes=…): expected queues by names of tasks, such as {{'shop.mail.*': 'mail'}}, "
                f"found {routes!r:.200}."
            )
        self.routes = {pattern: check_name("queue", queue) for pattern, queue in routes.items()}
        check_arguments(overrides)
        self._is_cell = is_cell
        self.runtime: Callable[[], TaskRuntime | None] = (lambda: None) if is_cell else current_runtime
        """Returns the runtime of the running task; None outside of a task, and always None for a cell."""
        self._source = with_arguments(settings, overrides) if isinstance(settings, Settings) else settings
        self._overrides = overrides
        self._settings: Settings | None = None
        self._backend: Calls | None = None
        self._opening: asyncio.Task[Calls] | None = None
        self._transactions: Transactions | None = None
        self._lock = ProcessLock()
        self.threads = Threads()
        """The threads in which the async variants of blocking calls run."""
        self.shard: str | None = None
        """In a worker process, the shard whose tasks the process runs."""
        self.middleware: Chain | None = None
        """The hooks around calls, attempts and turns; None if the application has no middleware."""
        self.composer: Callable[..., Any]
        """Starts compositions; the application provides it."""
        self.run_handle: Callable[[bytes], Any]
        """Makes the handle of a run from its id; the application provides it."""

    @property
    def settings(self) -> Settings:
        """The settings, read on first use."""
        if self._settings is None:
            provided = with_arguments(self._source(), self._overrides) if callable(self._source) else self._source
            self._settings = provided or load_settings(**self._overrides)
        return self._settings

    def __str__(self) -> str:
        """Name the deployment, without a password. Settings may not be read yet, so look at the overrides, too."""
        settings = self._settings or self._source
        url, namespace = (
            next((found for name in names if (found := self._overrides.get(name) or getattr(settings, name, None))), "")
            for names in (("api_url", "database_url"), ("namespace",))
        )
        named = [without_password(str(url))] if url else []
        if namespace and namespace != Settings.namespace:
            named.append(f"namespace {namespace}")
        return f"the cell {', '.join(named)}".rstrip() if self._is_cell else "the application's own deployment"

    @property
    def via(self) -> str:
        """The suffix in the repr of a task or handle that belongs to a cell; empty otherwise."""
        return f" via {self}" if self._is_cell else ""

    def refuse_other(self, what: str, target: Any) -> None:
        """Refuse a task or workflow that was made for another deployment with `via`."""
        other = target._client
        if other is not self and (other._is_cell or getattr(target, "_is_via", False)):
            raise InvalidTask(
                f"{what} is for {self}, but {target.name!r} was made for {other}. Omit its via(…), or use "
                "that cell for both."
            )

    def refuse_cell(self, what: str) -> None:
        """Refuse a call from a workflow to another deployment: only its own scheduler executes its commands."""
        if self._is_cell:
            raise NotDeterministic(
                f"{what} was called via a cell inside a workflow, but only the workflow's own deployment "
                "executes its commands. Schedule a task that does this."
            )

    def route(self, name: str, otherwise: str = DEFAULT_QUEUE) -> str:
        """Return the queue that the routes give to a task of this name; without a match, `otherwise`."""
        return next((queue for pattern, queue in self.routes.items() if fnmatchcase(name, pattern)), otherwise)

    @property
    def backend(self) -> Calls:
        """The backend for all calls, opened on first use. The code of a workflow may not use it."""
        if inside_workflow():
            raise NotDeterministic(
                "A workflow cannot call the orchestrator directly, because every replay would repeat the call. "
                "Make it a task and schedule that, or record the result of a short call with ctx.run(name, "
                "function), for example an update. Commands to other runs are, on app.workflow_run(id): await "
                "handle.asignal(name, value), await handle.aquery(name), await handle.acancel(), await "
                "handle.aresult()."
            )
        if self._backend is None:
            with self._lock:
                if self._backend is None:
                    made = signal_safe(self._make_backend)
                    if self._backend is None:
                        self._backend = made
                    else:  # a signal handler opened one meanwhile
                        made.close()
        return self._backend

    async def opened(self) -> Calls:
        """Return the backend; import SQLAlchemy in a thread, not on the event loop. Waiting calls keep their order."""
        if self._backend is None:
            loop, opening = asyncio.get_running_loop(), self._opening
            if opening is None or opening.done() or opening.get_loop() is not loop:
                opening = self._opening = loop.create_task(self.threads.run(lambda: self.backend))
            await asyncio.shield(opening)
        return self.backend

    def _make_backend(self) -> Calls:
        if self.settings.api_url:
            from orchestrator.sdk.remote import RemoteBackend  # loads SQLAlchemy too, for the types of rows

            return RemoteBackend(self.settings)
        from orchestrator.sdk.backend import backend_of  # loads SQLAlchemy, which workers do without

        return backend_of(self.settings)

    @property
    def transactions(self) -> Transactions:
        """The connections of tasks that complete in the database, opened on first use."""
        if self._transactions is None:
            with self._lock:
                if self._transactions is None:
                    made = signal_safe(self._make_transactions)
                    if self._transactions is None:
                        self._transactions = made
                    else:
                        made.close()
        return self._transactions

    def _make_transactions(self) -> Transactions:
        from orchestrator.sdk.tasks.transaction import Transactions  # loads SQLAlchemy too

        return Transactions(self.settings if self.shard is None else self.settings.of_shard(self.shard))

    def close(self) -> None:
        """Close all connections. They are reopened when needed; a settings function is then called again."""
        with self._lock:
            self.threads.close()
            if self._transactions is not None:
                self._transactions.close()
                self._transactions = None
            if self._backend is not None:
                self._backend.close()
                self._backend = None
            if callable(self._source):
                self._settings = None


class Deployment:
    """An object with a client: an application or one of its cells."""

    _client: Client


def client_of(cell: object) -> Client:
    """Return the client of a cell or application that is passed to `via`."""
    if isinstance(cell, Deployment):
        return cell._client
    raise TypeError(
        f"via(…): expected a cell, as `app.at(…)` returns it, or the application, found {for_message(cell)}."
    )
