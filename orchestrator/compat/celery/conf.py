"""Celery's settings: those with an effect here, those without, and those that are refused."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from orchestrator.compat.celery.exceptions import ImproperlyConfigured

_UNSET = """
broker_url result_backend result_expires task_annotations task_default_priority task_default_rate_limit task_queues
task_routes task_soft_time_limit task_time_limit timezone worker_concurrency worker_max_memory_per_child
worker_max_tasks_per_child
"""
_OFF = """
task_acks_late task_allow_error_cb_on_chord_header task_always_eager task_eager_propagates task_ignore_result
task_remote_tracebacks task_store_eager_result task_store_errors_even_if_ignored task_track_started
"""
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(_UNSET.split()),
    **dict.fromkeys(_OFF.split(), False),
    "accept_content": ["json"],
    "beat_schedule": {},
    "enable_utc": True,
    "imports": (),
    "include": (),
    "task_create_missing_queues": True,
    "task_default_queue": "celery",
    "task_publish_retry": True,
    "task_serializer": "json",
    "result_serializer": "json",
    "worker_pool": "prefork",
}
"""Settings with an effect here, or whose value programs read, with Celery's defaults."""

_NAMES = """
broker_connection_max_retries broker_connection_retry broker_connection_retry_on_startup
broker_connection_timeout broker_heartbeat broker_pool_limit broker_read_url broker_transport_options
broker_use_ssl broker_write_url broker_channel_error_retry broker_failover_strategy broker_heartbeat_checkrate
broker_login_method beat_max_loop_interval beat_schedule_filename beat_scheduler beat_sync_every
beat_cron_starting_deadline control_exchange control_queue_expires control_queue_ttl
database_short_lived_sessions database_engine_options database_table_names database_table_schemas event_exchange
event_queue_expires event_queue_prefix event_queue_ttl event_serializer redis_backend_health_check_interval
redis_backend_use_ssl redis_db redis_host redis_max_connections redis_password redis_port redis_retry_on_timeout
redis_socket_connect_timeout redis_socket_keepalive redis_socket_timeout redis_username
result_backend_always_retry result_backend_max_retries result_backend_transport_options result_cache_max
result_chord_join_timeout result_chord_retry_interval result_compression result_exchange result_exchange_type
result_extended result_persistent result_backend_thread_safe security_certificate security_digest security_key
task_acks_on_failure_or_timeout task_compression task_default_delivery_mode task_default_exchange
task_default_exchange_type task_default_routing_key task_default_queue_type task_inherit_parent_priority
task_protocol task_publish_retry_policy task_queue_ha_policy task_queue_max_priority task_reject_on_worker_lost
task_send_sent_event visibility_timeout worker_agent worker_autoscaler
worker_cancel_long_running_tasks_on_connection_loss worker_consumer worker_deduplicate_successful_tasks
worker_direct worker_disable_prefetch worker_disable_rate_limits worker_enable_prefetch_count_reduction
worker_enable_remote_control worker_eta_task_limit worker_hijack_root_logger worker_log_color worker_log_format
worker_logfile worker_lost_wait worker_prefetch_multiplier worker_proc_alive_timeout worker_redirect_stdouts
worker_redirect_stdouts_level worker_send_task_events worker_state_db worker_task_log_format worker_timer
worker_timer_precision worker_soft_shutdown_timeout worker_enable_soft_shutdown_on_idle
worker_detect_quorum_queues broker_native_delayed_delivery_queue_type deprecated_settings
"""
WITHOUT_EFFECT = frozenset(_NAMES.split())
"""Settings about brokers, result backends and processes that do not exist here. One warning names them."""

_PICKLE = "Pickle is never used: arguments and results are data."
REFUSED: dict[str, Callable[[Any], str | None]] = {
    "task_serializer": lambda value: _PICKLE if value == "pickle" else None,
    "result_serializer": lambda value: _PICKLE if value == "pickle" else None,
    "worker_pool": lambda value: (
        "There is no gevent or eventlet pool. Use `threads`, or write the task as `async def` with the native API."
        if value in ("gevent", "eventlet")
        else None
    ),
    "beat_scheduler": lambda value: (
        "Schedules are stored in Postgres: app.schedules.set(…) changes them while the program runs."
        if "DatabaseScheduler" in str(value)
        else None
    ),
}
"""Settings that would change the program's behavior, with a function that returns why a value is refused."""


def _zone(value: Any) -> str | None:
    try:
        if isinstance(value, str):
            ZoneInfo(value)
    except (ValueError, OSError, ZoneInfoNotFoundError):
        return "the name of a time zone, such as Europe/Paris"
    return None


def _count(value: Any) -> str | None:
    return None if value is None or str(value).isdecimal() else "a number of processes, or 0 for one per CPU"


CHECKED: dict[str, Callable[[Any], str | None]] = {"timezone": _zone, "worker_concurrency": _count}
"""Settings that would fail only later, with a function that returns what is expected instead of a wrong value."""

_RENAMED = """
broker_url=broker_url celery_broker_url=broker_url celery_always_eager=task_always_eager
celery_eager_propagates_exceptions=task_eager_propagates celery_imports=imports celery_include=include
celery_timezone=timezone celery_enable_utc=enable_utc celery_accept_content=accept_content
celery_ignore_result=task_ignore_result celery_routes=task_routes celery_queues=task_queues
celery_annotations=task_annotations celery_acks_late=task_acks_late celery_default_queue=task_default_queue
celery_default_rate_limit=task_default_rate_limit celery_track_started=task_track_started
celery_task_result_expires=result_expires celery_result_backend=result_backend
celery_result_serializer=result_serializer celery_store_errors_even_if_ignored=task_store_errors_even_if_ignored
celerybeat_schedule=beat_schedule celerybeat_scheduler=beat_scheduler
celerybeat_max_loop_interval=beat_max_loop_interval celeryd_concurrency=worker_concurrency celeryd_pool=worker_pool
celeryd_max_tasks_per_child=worker_max_tasks_per_child celeryd_max_memory_per_child=worker_max_memory_per_child
celeryd_prefetch_multiplier=worker_prefetch_multiplier celeryd_task_time_limit=task_time_limit
celeryd_task_soft_time_limit=task_soft_time_limit celeryd_hijack_root_logger=worker_hijack_root_logger
celeryd_log_format=worker_log_format
"""
OLD_NAMES = dict(pair.split("=") for pair in _RENAMED.split())
"""Setting names from before Celery 4, in lower case."""


class Conf(dict[str, Any]):
    """`app.conf`: settings by name and as attributes, with Celery's defaults."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: list[tuple[Any, str | None]] = []
        self._warned: set[str] = set()
        self._is_loading = False
        self._version = 0
        """Incremented with each change."""

    def add_source(self, source: Any, namespace: str | None) -> None:
        """Register an object, a module or its name; its settings are read when one is needed."""
        self._sources.append((source, namespace))

    def load(self) -> None:
        if self._is_loading:
            return
        self._is_loading = True
        try:
            while self._sources:
                source, namespace = self._sources.pop(0)
                values = {
                    name: value
                    for name, value in _read(source, namespace).items()
                    if name not in self or namespace is None
                }
                self.apply(values, is_own=namespace is not None)
        finally:
            self._is_loading = False

    def apply(self, values: Mapping[str, Any], *, is_own: bool = True) -> None:
        """Set several settings. `is_own` means that all of them are meant for Celery."""
        unused = []
        self._version += 1
        for name, value in values.items():
            key = _name(name)
            if key in REFUSED and (reason := REFUSED[key](value)) is not None:
                raise ImproperlyConfigured(f"Celery setting {name} = {value!r}: {reason}")
            if key in CHECKED and (problem := CHECKED[key](value)) is not None:
                raise ImproperlyConfigured(f"Celery setting {name}: expected {problem}, found {value!r}.")
            if (
                key not in DEFAULTS
                and (key in WITHOUT_EFFECT or (is_own and not _is_foreign(name)))
                and key not in self._warned
            ):
                unused.append(key)
            dict.__setitem__(self, key, value)
        if unused:
            self._warned.update(unused)
            warnings.warn(
                f"These settings of Celery have no effect here: {', '.join(sorted(unused))}. "
                f"See docs/from-celery.md for what takes their place.",
                UserWarning,
                stacklevel=3,
            )

    def update(self, *args: Any, **kwargs: Any) -> None:
        self.apply(dict(*args, **kwargs))

    def __setitem__(self, name: str, value: Any) -> None:
        self.apply({name: value})

    def __getitem__(self, name: str) -> Any:
        self.load()
        key = _name(name)
        if key in self:
            return super().__getitem__(key)
        if key in DEFAULTS:
            return DEFAULTS[key]
        if key in WITHOUT_EFFECT:
            return None
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"Celery has no setting {name!r}, or it is not set.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self[name] = value

    def is_given(self, name: str) -> bool:
        self.load()
        return name in self

    def find_value_for_key(self, name: str, namespace: str = "") -> Any:
        """Return a setting; `namespace` is the optional first part of its name."""
        return self[f"{namespace}_{name}".lower() if namespace else name.lower()]


def _is_foreign(name: str) -> bool:
    """Return whether this is a setting of another library, such as ONCE, and not a misspelt one of Celery."""
    return name.isupper() and not get_close_matches(name.lower(), [*DEFAULTS, *WITHOUT_EFFECT, *OLD_NAMES], n=1)


def _name(name: str) -> str:
    key = name.lower()
    if key in OLD_NAMES:
        return OLD_NAMES[key]
    short = key.removeprefix("celery_")
    return short if short in DEFAULTS or short in WITHOUT_EFFECT else key


def _read(source: Any, namespace: str | None) -> dict[str, Any]:
    """Return the settings of a module, an object or a mapping that are meant for Celery."""
    if isinstance(source, str):
        try:
            source = _imported(source)
        except (ImportError, AttributeError) as error:
            raise ImproperlyConfigured(f"config_from_object({source!r}): {error}.") from error
    names: Iterable[str] = source.keys() if isinstance(source, Mapping) else dir(source)
    values: dict[str, Any] = {}
    prefix = f"{namespace}_" if namespace else ""
    for name in names:
        if name.startswith("__") or not name.startswith(prefix):
            continue
        key = _name(name[len(prefix) :])
        if prefix or key in DEFAULTS or key in WITHOUT_EFFECT:
            values[key] = source[name] if isinstance(source, Mapping) else getattr(source, name)
    return values


def _imported(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute) if colon else importlib.import_module(module)
    except ModuleNotFoundError:
        parent, _, last = name.rpartition(".")
        if colon or not parent:
            raise
        return getattr(importlib.import_module(parent), last)


def stores(conf: Conf) -> dict[str, str]:
    """Return the URLs of Redis and Postgres from `broker_url` and `result_backend`, as native settings."""
    urls = {}
    broker = os.environ.get("CELERY_BROKER_URL") or conf.broker_url or ""
    if str(broker).startswith(("redis://", "rediss://", "unix://", "redis+socket://")):
        urls["redis_url"] = str(broker).replace("redis+socket://", "unix://")
    backend = str(conf.result_backend or "")
    if backend.startswith("db+postgres"):
        urls["database_url"] = "postgresql://" + backend.partition("://")[2]
    return urls
