"""Settings, from keyword arguments, the environment, pyproject.toml or the file of `orchestrator dev`, in this order.

Each field below can be given as an argument of `Orchestrator(...)`, as `ORCHESTRATOR_<NAME>` in the environment, or
under `[tool.orchestrator]` in the nearest pyproject.toml. The two URLs are also read from
`.orchestrator/services.json`, which a running `orchestrator dev` writes into its folder.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.environment import SERVICES_FILE, distrust, nearest_file, read_services_file
from orchestrator.errors import ConfigurationError, did_you_mean
from orchestrator.terminal_safe import without_password

_MAX_PAYLOAD = 50_000_000
"""The maximum of payload sizes, in bytes. Redis does not accept messages much larger than a few of these."""
_MAX_NUMBER = 1_000_000.0
"""The maximum of all other numbers: seconds (eleven days), rows of a batch."""

DEFAULT_NAMESPACE = "orchestrator"
MIN_RETENTION = 60.0
"""Seconds that an ended task is kept at least, because a report of it may still arrive."""
MAX_RETENTION = 100 * 365 * 86_400.0

_PREFIX = "ORCHESTRATOR_"
_NAMESPACE = re.compile(r"(?!pg_|public$|information_schema$)[a-z][a-z0-9_]{0,39}")
CHOICES = {
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("text", "json"),
    "webhooks": ("public", "allowed", "off"),
    "signing": ("sign", "require"),
    "capture_logs": ("all", "said", "off"),
}
_SECRETS = ("signing_keys", "data_keys", "service_keys", "api_key")
_NO_SETTINGS = ("servers",)
"""Environment variables of ours that are not settings. This one names the servers that `orchestrator dev` starts."""
_LISTS = ("redact", "webhook_allow", "api_proxies", "api_quotas")
"""Text settings that may also be given as lists of texts."""
_MAX_BY_NAME = {**dict.fromkeys(("max_payload", "inline_payload", "inline_result"), _MAX_PAYLOAD), "shards": 64}
_MAX_STORED = 10_000_000_000
"""Bytes. Larger values do not fit into the memory of a program."""
_UNLIMITED_IF_ZERO = ("retention_success", "retention_failed", "retention_audit", "retention_logs")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings, with their defaults."""

    database_url: str = ""
    """Postgres, e.g. postgresql://user:password@host/database."""
    redis_url: str = ""
    """Redis or Valkey, e.g. redis://host:6379/0, unix:///path/to/socket, redis+sentinel://host1,host2/mymaster/0 or
    redis+cluster://host1,host2."""
    api_url: str = ""
    """An HTTP API, e.g. https://orchestrator.example.com. Clients and commands use it instead of the two URLs above."""
    api_key: str = ""
    """The key for `api_url`."""
    api_ca_file: str = ""
    """CA certificates (PEM) for an https `api_url`; default: those of the system."""
    api_timeout: float = 60.0
    """Seconds before a request to `api_url` times out."""
    app: str = ""
    """The application that commands load, e.g. `package.module:app`."""
    release: str = ""
    """The release of your code, e.g. a version or a Git commit. Workers announce it, and it is kept with attempts."""
    namespace: str = DEFAULT_NAMESPACE
    """Postgres schema and prefix of all Redis keys. Give each application on shared servers its own."""
    shards: int = 1
    """Number of leaders that share the work (experimental). All processes need the same number."""

    max_payload: int = 1_000_000
    """Largest arguments or result of a task, in bytes, that are stored in Postgres and sent in messages."""
    payload_store: str = ""
    """Where larger payloads go: a shared folder, s3://bucket/path, gs://bucket/path, …"""
    inline_payload: int = 64_000
    """With a payload store, arguments and results of at least this many bytes are stored there."""
    payload_grace: float = 86_400.0
    """Seconds that a stored payload is kept although no row references it."""
    inline_result: int = 4_096
    """Results up to this many bytes reach waiting clients through Redis; they read larger ones from Postgres."""

    read_database_url: str = ""
    """A standby of `database_url`, from which the HTTP API and the dashboard read lists and charts."""
    database_timeout: float = 30.0
    """Seconds before a Postgres statement of a client or scheduler times out."""
    idempotency_period: float = 86_400.0
    """Seconds that an idempotency key is remembered."""
    retention_success: float = 7 * 86_400.0
    """Seconds that successful tasks and runs are kept; 0 keeps them forever."""
    retention_failed: float = 90 * 86_400.0
    """Seconds that failed, cancelled and skipped tasks and runs are kept; 0 keeps them forever."""

    retention_audit: float = 365 * 86_400.0
    """Seconds that lines of the audit log are kept; 0 keeps them forever."""
    retention_logs: float = 7 * 86_400.0
    """Seconds that log lines of tasks are kept, at most as long as the task; 0 keeps them as long as the task."""
    redact: str = ""
    """Fields of arguments and results to hide from people, separated by commas, e.g. password, card.*"""
    audit_as: str = ""
    """The actor in the audit log where there is no API key; default: user and host of the process."""

    lease: float = 3.0
    """Seconds after which a standby may replace a silent leader."""
    safety_scan: float = 1.0
    """Seconds between scans for writes whose wake-up message was lost."""
    batch: int = 1_000
    """Maximum number of events, requests or due tasks that one tick handles."""
    unknown_task_timeout: float = 300.0
    """Seconds that a task waits for a worker that has registered it. Then it fails."""
    loss_limit: int = 3
    """Crashes of processes of its own after which a task fails. Its first crash, in a shared process, is free."""

    max_depth: int = 100
    """Deepest nesting of runs that start runs."""
    max_descendants: int = 100_000
    """Maximum number of runs below one run, through child workflows and `on`."""

    long_transaction: float = 60.0
    """`status` reports transactions open for more than this many seconds: they hold back vacuum."""

    heartbeat: float = 1.0
    """Seconds between two heartbeats of a worker."""
    worker_ttl: float = 5.0
    """Seconds of silence after which a worker counts as dead."""
    drain_timeout: float = 30.0
    """Seconds that a stopping worker gives its running tasks before it returns them to the queue."""
    stop_grace: float = 5.0
    """Seconds that interrupted code has to end. After that, its attempt ends anyway, and its process is replaced."""
    run_timeout_grace: float = 300.0
    """Seconds that the code of a timed-out run has to end. After that, the run ends anyway."""
    turn_timeout: float = 2.0
    """Seconds that the code of a workflow may run without waiting for anything. After that, the run is stuck."""
    scale_down_after: float = 30.0
    """Seconds of low load after which a worker with --autoscale ends a process."""

    log_level: str = "info"
    """Lowest level that schedulers and workers log: debug, info, warning or error."""
    log_format: str = "text"
    """Log format: text, or json with one object per line."""

    capture_logs: str = "all"
    """Output of tasks to keep: `all`, only `said` lines (ctx.log), or `off`."""
    log_limit: int = 1_000_000
    """Bytes of log lines kept per attempt (UTF-8); beyond that, the first and the last lines are kept."""

    metrics: str = ""
    """Address of /metrics, /healthz and /readyz: host:port, or a port on this machine only."""

    api_connections: int = 1_000
    """Maximum number of open connections to the HTTP API per address; this machine and api_proxies may have more."""
    api_connection_rate: float = 500.0
    """Maximum new connections per second and address, averaged over ten seconds; this machine and api_proxies are
    exempt."""
    api_quotas: str = ""
    """Quotas of all callers of the HTTP API together, e.g. rate=200, open_tasks=100000."""
    api_proxies: str = ""
    """Addresses and networks of proxies whose headers the HTTP API trusts."""
    api_user_header: str = ""
    """Header in which these proxies name the user, e.g. X-Forwarded-User."""
    api_user_scope: str = "read"
    """Scope of such users: read, enqueue, operate, admin or none."""
    api_group_header: str = ""
    """Header in which these proxies name the user's groups, separated by commas."""
    api_group_scopes: str = ""
    """Scopes of groups, e.g. ops=operate, platform=admin. The highest counts; users without any get api_user_scope."""

    session_lifetime: float = 43_200.0
    """Seconds after which the dashboard asks for the key again."""

    webhooks: str = "public"
    """Where webhooks may go: `public` addresses and webhook_allow, only `allowed` ones, or `off`."""
    webhook_allow: str = ""
    """Internal hosts and networks that webhooks may reach, e.g. hooks.corp, *.corp, 10.1.0.0/16."""

    registry_ttl: float = 15.0
    """Seconds of silence after which a registered service gets no more requests."""
    registry_refresh: float = 5.0
    """Seconds between two reads of the service registry by a worker."""

    executor_timeout: float = 30.0
    """Seconds before a request to an executor's cluster or cloud times out."""
    executor_pause: float = 30.0
    """Longest pause, in seconds, between two attempts to reach an unavailable executor."""

    signing: str = "require"
    """With signing keys: `require` signatures on messages in Redis, or `sign` and accept unsigned ones too."""
    signing_keys: str = ""
    """Secrets that sign messages in Redis, in base64, separated by commas. The first signs, all verify."""
    signing_keys_file: str = ""
    """A file that holds the signing keys."""
    data_keys: str = ""
    """Keys that encrypt stored values, as id:secret, separated by commas. The first encrypts, all decrypt."""
    data_keys_file: str = ""
    """A file that holds the data keys."""
    service_keys: str = ""
    """Keys that `orchestrator serve` accepts, separated by commas; workers send the first to registered services."""
    service_keys_file: str = ""
    """A file that holds the service keys."""

    def __repr__(self) -> str:
        """Return all settings, without passwords and secrets."""
        displayed = (f"{name}={_displayed(name, getattr(self, name))}" for name in _FIELDS)
        return f"{type(self).__name__}({', '.join(displayed)})"

    @property
    def largest_value(self) -> int:
        """The maximum size of arguments or a result in bytes, wherever they are stored."""
        return _MAX_STORED if self.payload_store else self.max_payload

    @property
    def root(self) -> str:
        """The namespace, without the shard."""
        return self.namespace.partition("/")[0]

    @property
    def shard(self) -> int:
        """The number of this process's shard."""
        return int(self.namespace.partition("/")[2] or 0)

    def of_shard(self, shard: int | str) -> Settings:
        """Return the settings of one shard, or of `all` shards for readers."""
        return dataclasses.replace(self, namespace=f"{self.root}/{shard}" if shard else self.root)

    def require_database(self) -> str:
        """Return the database URL, or raise ConfigurationError if it is not set."""
        return self.database_url or self._missing("database_url", "postgresql://user:password@host/database")

    def require_redis(self) -> str:
        """Return the Redis URL, or raise ConfigurationError. The URL of a cluster ends with the shard's hash slot."""
        if "+cluster:" in self.redis_url:
            return f"{self.redis_url}#{self.namespace}"
        return self.redis_url or self._missing("redis_url", "redis://localhost:6379/0")

    def _missing(self, name: str, example: str) -> str:
        """Return the URL of an `orchestrator dev` that was started after the settings were read, or raise."""
        path = nearest_file(Path.cwd(), str(SERVICES_FILE))
        late: str | None = read_services_file(path).get(name) if path is not None else None
        if late:
            return late
        if self.api_url:
            raise ConfigurationError(
                f"This needs direct access to Postgres and Redis, but setting {name} is not set, only api_url. Run it "
                f"where both can be reached, with ORCHESTRATOR_DATABASE_URL and ORCHESTRATOR_REDIS_URL."
            )
        reason = distrust(path) if path is not None else None
        raise ConfigurationError(
            f"Setting {name} is not set. Set ORCHESTRATOR_{name.upper()} (e.g. {example}), or {name} under "
            f"[tool.orchestrator] in pyproject.toml. For development, run `orchestrator dev` in this folder: it brings "
            f"its own Postgres and Redis, and other commands run here find them."
            f"{f' The settings in {path} are ignored: {reason}.' if reason else ''}"
        )


_FIELDS: Mapping[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(Settings)}


def load_settings(folder: Path | None = None, environ: Mapping[str, str] | None = None, **given: Any) -> Settings:
    """Load the settings for `folder`. Arguments override the environment, which overrides files."""
    folder = (folder or Path.cwd()).resolve()
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for source, source_values in (
        (str(SERVICES_FILE), _from_services_file(folder)),
        ("[tool.orchestrator]", _from_pyproject(folder)),
        ("environment", _from_environment(environ)),
    ):
        for name, value in source_values.items():
            values[name] = _parse(name, value, source)
        _drop_overridden_api(values, source_values)
    arguments = check_arguments(given)
    values |= arguments
    _drop_overridden_api(values, arguments)
    return _validated(Settings(**values))


def _drop_overridden_api(values: dict[str, Any], source_values: Mapping[str, Any]) -> None:
    """Remove an API URL if a source of higher precedence sets a database URL."""
    if source_values.get("database_url") and not source_values.get("api_url"):
        values.pop("api_url", None)


def misspelt(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each environment variable that looks like a misspelled setting."""
    for variable in sorted(environ):
        name = variable.removeprefix(_PREFIX).lower()
        is_ours = name in _FIELDS or name in _NO_SETTINGS
        if variable.startswith(_PREFIX) and not is_ours and (nearest := did_you_mean(name, _FIELDS)):
            yield f"{variable} in the environment is not a setting, and is ignored.{nearest}"


def check_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings given as arguments, or raise ConfigurationError for unknown names and wrong types."""
    return {name: _parse(name, value, "argument") for name, value in given.items() if value is not None}


def with_arguments(settings: Settings, given: Mapping[str, Any]) -> Settings:
    """Return settings with those given as arguments changed."""
    changes = check_arguments(given)
    if changes.get("database_url") and not changes.get("api_url"):
        changes["api_url"] = ""
    return _validated(dataclasses.replace(settings, **changes)) if changes else settings


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    return {name: environ[_PREFIX + name.upper()] for name in _FIELDS if environ.get(_PREFIX + name.upper())}


def _from_pyproject(folder: Path) -> dict[str, Any]:
    path = nearest_file(folder, "pyproject.toml")
    if path is None:
        return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}.") from error
    table: dict[str, Any] = document.get("tool", {}).get("orchestrator", {})
    return table


def _from_services_file(folder: Path) -> dict[str, Any]:
    path = nearest_file(folder, str(SERVICES_FILE))
    return {} if path is None else read_services_file(path)


def _parse(name: str, value: Any, source: str) -> Any:
    if name not in _FIELDS:
        raise ConfigurationError(f"Unknown setting {name!r} in {source}.{did_you_mean(name, _FIELDS)}")
    expected_type: type[Any] = type(_FIELDS[name].default)
    try:
        if name in _LISTS and isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            value = ", ".join(value)
        if isinstance(value, bool) or (expected_type is str and not isinstance(value, str)):
            raise ValueError
        if name in _SECRETS or name.endswith("_url"):  # a value read from a file usually ends with a newline
            value = value.strip()
        return value.lower() if name in CHOICES else expected_type(value)
    except (TypeError, ValueError):
        raise _unfit(f"{name} in {source}", expected_type.__name__, _displayed(name, value)) from None


def _unfit(name: str, expected: str, found: str) -> ConfigurationError:
    return ConfigurationError(f"Setting {name}: expected {expected}, found {found}.")


def _validated(settings: Settings) -> Settings:
    for name, field in _FIELDS.items():
        value = getattr(settings, name)
        if name in _UNLIMITED_IF_ZERO:
            if value != 0 and not MIN_RETENTION <= value <= MAX_RETENTION:
                expected = f"{MIN_RETENTION:g} seconds or more, up to a hundred years, or 0 to keep forever"
                raise _unfit(name, expected, repr(value))
        elif isinstance(field.default, (int, float)):
            limit = _MAX_BY_NAME.get(name, _MAX_NUMBER)
            if not 0 < value <= limit:
                raise _unfit(name, f"a positive number up to {limit:,.0f}", repr(value))
    if not _NAMESPACE.fullmatch(settings.namespace):
        expected = (
            "up to 40 small letters, digits and _ that begin with a letter and are not the name of a Postgres schema ("
            "pg_…, public, information_schema)"
        )
        raise _unfit("namespace", expected, repr(settings.namespace))
    if len(settings.release) > 100 or not settings.release.isprintable():  # sent with each heartbeat
        raise _unfit("release", "up to 100 printable characters", repr(settings.release))
    if settings.worker_ttl < 2 * settings.heartbeat:
        raise _unfit("worker_ttl", f"at least twice the heartbeat ({settings.heartbeat})", str(settings.worker_ttl))
    for name, schemes in (
        *((name, ("postgresql", "postgres")) for name in ("database_url", "read_database_url")),
        ("redis_url", ("redis", "rediss", "unix")),
        ("api_url", ("http", "https")),
    ):
        value = getattr(settings, name)
        if value and value.split(":")[0].split("+")[0] not in schemes:
            prefixes = " or ".join(f"{scheme}://" for scheme in schemes)
            raise _unfit(name, f"a URL that starts with {prefixes}", _displayed(name, value))
    for name, choices in CHOICES.items():
        if getattr(settings, name) not in choices:
            raise _unfit(name, f"{', '.join(choices[:-1])} or {choices[-1]}", repr(getattr(settings, name)))
    return settings


def _displayed(name: str, value: object) -> str:
    """Return a value for a message, without the password in a URL, and without secrets."""
    if name in _SECRETS:
        return "'…'" if value else "''"
    if not name.endswith("_url") and name != "payload_store":
        return repr(value)
    return repr(without_password(value)) if isinstance(value, str) else f"a value of type {type(value).__name__}"
