"""Settings: which source wins, and the errors for invalid values."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator import Orchestrator
from orchestrator.cli import main
from orchestrator.environment import SERVICES_FILE
from orchestrator.errors import ConfigurationError
from orchestrator.settings import Settings, load_settings, misspelt
from orchestrator.store.database import engine_for
from orchestrator.terminal_safe import without_password
from orchestrator.transport.connection import connect


def write_pyproject(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.orchestrator]\n{text}\n", encoding="utf-8")


def write_services(folder: Path, text: str) -> None:
    (folder / SERVICES_FILE).parent.mkdir(parents=True)
    (folder / SERVICES_FILE).write_text(text, encoding="utf-8")
    (folder / SERVICES_FILE).parent.chmod(0o700)
    (folder / SERVICES_FILE).chmod(0o600)


def test_without_any_source_each_setting_has_its_default(tmp_path: Path) -> None:
    assert load_settings(tmp_path, environ={}) == Settings()


def test_whitespace_around_keys_and_urls_is_stripped(tmp_path: Path) -> None:
    """For example the newline at the end of a secret written with an editor."""
    environ = {"ORCHESTRATOR_API_KEY": " orc_a.b\n", "ORCHESTRATOR_API_URL": "https://api.example\n"}
    settings = load_settings(tmp_path, environ=environ)
    assert (settings.api_key, settings.api_url) == ("orc_a.b", "https://api.example")
    assert load_settings(tmp_path, environ={}, api_key="orc_a.b\r\n").api_key == "orc_a.b"


def test_arguments_win_over_environment_over_pyproject_over_services_file(tmp_path: Path) -> None:
    write_services(tmp_path, json.dumps({"database_url": "postgresql://services", "redis_url": "redis://services"}))

    def found(environ: dict[str, str] | None = None, **given: Any) -> str:
        return load_settings(tmp_path, environ=environ or {}, **given).database_url

    assert found() == "postgresql://services"
    write_pyproject(tmp_path, 'database_url = "postgresql://pyproject"')
    assert found() == "postgresql://pyproject"
    environ = {"ORCHESTRATOR_DATABASE_URL": "postgresql://environment"}
    assert found(environ) == "postgresql://environment"
    assert found(environ, database_url="postgresql://argument") == "postgresql://argument"
    assert load_settings(tmp_path, environ=environ).redis_url == "redis://services"


def test_none_arguments_and_empty_variables_are_ignored(tmp_path: Path) -> None:
    write_pyproject(tmp_path, 'app = "shop:app"')
    assert load_settings(tmp_path, environ={"ORCHESTRATOR_APP": ""}, app=None).app == "shop:app"


def test_files_are_found_in_parent_folders(tmp_path: Path) -> None:
    write_services(tmp_path, json.dumps({"redis_url": "redis://above", "pid": 1}))
    write_pyproject(tmp_path, "batch = 7")
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    settings = load_settings(below, environ={})
    assert (settings.redis_url, settings.batch) == ("redis://above", 7)


def test_an_incomplete_services_file_is_ignored(tmp_path: Path) -> None:
    write_services(tmp_path, '{"database_url": "postgresql://ho')
    assert load_settings(tmp_path, environ={}) == Settings()


def test_a_pyproject_without_our_section_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.other]\nx = 1\n", encoding="utf-8")
    assert load_settings(tmp_path, environ={}) == Settings()


def test_a_misspelled_variable_is_named_and_other_variables_are_ignored() -> None:
    environ = dict.fromkeys(("ORCHESTRATOR_LAESE", "ORCHESTRATOR_LEASE", "ORCHESTRATOR_SERVERS", "OTHER_LAESE"), "3")
    said = "ORCHESTRATOR_LAESE in the environment is not a setting, and is ignored. Did you mean 'lease'?"
    assert list(misspelt(environ)) == [said]
    result = CliRunner().invoke(main, ["workflows", "schema"], env=environ)
    assert (result.exit_code, result.stderr) == (0, f"Warning: {said}\n")


def test_numbers_are_parsed_from_environment_variables(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, environ={"ORCHESTRATOR_LEASE": "2.5", "ORCHESTRATOR_BATCH": "10"})
    assert (settings.lease, settings.batch) == (2.5, 10)


@pytest.mark.parametrize(
    ("environ", "pyproject", "given", "message"),
    [
        ({"ORCHESTRATOR_BATCH": "many"}, "", {}, "Setting batch in environment: expected int, found 'many'"),
        ({}, "lease = true", {}, r"Setting lease in \[tool.orchestrator\]: expected float, found True"),
        ({}, "app = 3", {}, r"Setting app in \[tool.orchestrator\]: expected str, found 3"),
        ({}, 'databse_url = "x"', {}, "Unknown setting 'databse_url'.*Did you mean 'database_url'"),
        ({}, "", {"leese": 1}, "Unknown setting 'leese' in argument.*Did you mean 'lease'"),
        ({"ORCHESTRATOR_LEASE": "0"}, "", {}, "Setting lease: expected a positive number up to 1,000,000, found 0.0"),
        ({"ORCHESTRATOR_LEASE": "nan"}, "", {}, "Setting lease: expected a positive number up to 1,000,000, found nan"),
        ({"ORCHESTRATOR_LEASE": "inf"}, "", {}, "Setting lease: expected a positive number up to 1,000,000, found inf"),
        ({}, "retention_success = 59", {}, "Setting retention_success: expected 60 seconds or more.*found 59"),
        ({}, "retention_failed = -1", {}, "Setting retention_failed: expected 60 seconds or more.*found -1"),
        ({}, "retention_failed = inf", {}, "Setting retention_failed: .*up to a hundred years, or 0.*found inf"),
        ({}, "", {"namespace": "Shop"}, "Setting namespace: expected up to 40 small letters.*found 'Shop'"),
        ({}, "", {"namespace": "pg_shop"}, "Setting namespace: .*not the name of a Postgres schema.*found 'pg_shop'"),
        ({}, "", {"namespace": "n" * 41}, "Setting namespace: expected up to 40 small letters"),
        ({"ORCHESTRATOR_WORKER_TTL": "1.5"}, "", {}, "worker_ttl: expected at least twice the heartbeat.*found 1.5"),
        ({"ORCHESTRATOR_DATABASE_URL": "mysql://x"}, "", {}, "Setting database_url: .*postgresql://.*'mysql://x'"),
        ({"ORCHESTRATOR_REDIS_URL": "localhost:6379"}, "", {}, "Setting redis_url: .*redis://.*'localhost:6379'"),
        ({"ORCHESTRATOR_API_URL": "api:8000"}, "", {}, "Setting api_url: .*http:// or https://, found 'api:8000'"),
    ],
)
def test_an_invalid_value_is_named_with_its_source(
    tmp_path: Path, environ: dict[str, str], pyproject: str, given: dict[str, Any], message: str
) -> None:
    write_pyproject(tmp_path, pyproject)
    with pytest.raises(ConfigurationError, match=message):
        load_settings(tmp_path, environ=environ, **given)


def test_a_retention_of_zero_is_accepted(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, environ={"ORCHESTRATOR_RETENTION_SUCCESS": "0"}, retention_failed=0)
    assert (settings.retention_success, settings.retention_failed) == (0.0, 0.0)


def test_an_invalid_pyproject_is_named(tmp_path: Path) -> None:
    write_pyproject(tmp_path, "batch =")
    with pytest.raises(ConfigurationError, match=r"pyproject\.toml is not valid TOML"):
        load_settings(tmp_path, environ={})


@pytest.mark.parametrize("driver", ["postgresql", "postgres", "postgresql+psycopg2"])
def test_every_form_of_a_postgres_url_is_accepted(tmp_path: Path, driver: str) -> None:
    url = f"{driver}://user@host/database"
    assert load_settings(tmp_path, environ={}, database_url=url).require_database() == url


def test_a_missing_url_error_names_the_setting_and_the_dev_command(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, environ={})
    with pytest.raises(ConfigurationError, match=r"ORCHESTRATOR_DATABASE_URL.*pyproject\.toml.*orchestrator dev"):
        settings.require_database()
    with pytest.raises(ConfigurationError, match=r"ORCHESTRATOR_REDIS_URL.*pyproject\.toml.*orchestrator dev"):
        settings.require_redis()


def test_services_started_after_the_settings_were_read_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    settings = load_settings(tmp_path, environ={})
    file = tmp_path / SERVICES_FILE
    file.parent.mkdir(mode=0o755)
    file.write_text('{"database_url": "postgresql:///late", "redis_url": "unix:///late"}')
    assert (settings.require_database(), settings.require_redis()) == ("postgresql:///late", "unix:///late")


# -- trust in the file of `orchestrator dev`


@pytest.mark.parametrize(
    ("part", "mode", "believed"),
    [
        (SERVICES_FILE, 0o644, True),
        (SERVICES_FILE, 0o664, False),
        (SERVICES_FILE, 0o646, False),
        (SERVICES_FILE.parent, 0o755, True),
        (SERVICES_FILE.parent, 0o775, False),
        (SERVICES_FILE.parent, 0o1777, False),
        (Path(), 0o775, True),  # as on systems with a group for each user
        (Path(), 0o777, False),
        (Path(), 0o1777, True),  # like /tmp: others may add files, but replace none
    ],
)
def test_a_services_file_writable_by_others_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: Path, mode: int, believed: bool
) -> None:
    write_services(tmp_path, json.dumps({"database_url": "postgresql://services"}))
    (tmp_path / part).chmod(mode)
    monkeypatch.chdir(tmp_path)
    settings = load_settings(environ={})
    assert (settings.database_url != "") is believed
    if not believed:
        with pytest.raises(ConfigurationError, match=r"are ignored: .* can be written by others \(mode"):
            settings.require_database()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("part", [SERVICES_FILE, SERVICES_FILE.parent, Path()])
def test_a_services_file_of_another_user_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: Path
) -> None:
    write_services(tmp_path, json.dumps({"database_url": "postgresql://services"}))
    os.chown(tmp_path / part, 65_534, 65_534)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"are ignored: .* belongs to another user \(65534\)"):
        load_settings(environ={}).require_database()


# -- passwords


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ada:s3cr3t@host:5432/db", "postgresql://ada:***@host:5432/db"),
        ("redis://:s3cr3t@host/0", "redis://:***@host/0"),
        ("postgresql://ada:s3@cr/3t@host/db", "postgresql://ada:***@host/db"),
        ("ada:s3cr3t@host", "ada:***@host"),
        (
            "postgresql://host/db?user=ada&password=s3cr3t&sslmode=x",
            "postgresql://host/db?user=ada&password=***&sslmode=x",
        ),
        ("host=h password=s3cr3t dbname=d", "host=h password=*** dbname=d"),
        ("postgresql+asyncpg://ada@host/db", "postgresql+asyncpg://ada@host/db"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("localhost:6379", "localhost:6379"),
    ],
)
def test_passwords_in_urls_are_redacted(url: str, shown: str) -> None:
    assert without_password(url) == shown


WRONG = [
    "mysql://ada:s3cr3t@host/db",
    "ada:s3cr3t@host",
    "postgresql://ada:s3cr3t@host:port/db",
    "postgresql://ada:s3cr3t@host/db?sslmode=no&nonsense=1",
    "postgresql://ada@host/db?password=s3cr3t&nonsense=1",
    "postgresql+nothing://ada:s3cr3t@host/db",
    "redis://:s3cr3t@host:port/0",
    "redis://:s3cr3t/x@host:1/0",
    "redis://:s3cr3t@host/0?socket_timeout=no",
    "redis://host/0?password=s3cr3t&socket_timeout=no",
]


@pytest.mark.parametrize("url", WRONG)
@pytest.mark.parametrize("name", ["database_url", "redis_url"])
def test_no_error_about_a_url_contains_its_password(tmp_path: Path, url: str, name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings = load_settings(tmp_path, environ={f"ORCHESTRATOR_{name.upper()}": url})
        engine_for(settings.database_url) if settings.database_url else connect(settings.redis_url)
    assert "s3cr3t" not in "".join(traceback.format_exception(caught.value))
    assert f"Setting {name}: expected " in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(tmp_path, environ={}, **{name: [url]})
    assert "s3cr3t" not in "".join(traceback.format_exception(caught.value))


def test_printed_settings_contain_no_password() -> None:
    settings = Settings(database_url="postgresql://ada:s3cr3t@host/db", redis_url="redis://:s3cr3t@host/0")
    for shown in (repr(settings), str(settings), f"{settings}"):
        assert "s3cr3t" not in shown
        assert "database_url='postgresql://ada:***@host/db'" in shown
        assert "batch=1000" in shown


def test_an_application_rejects_invalid_settings_at_its_creation() -> None:
    with pytest.raises(ConfigurationError, match="Unknown setting 'database_ulr' in argument. Did you mean"):
        Orchestrator(database_ulr="postgresql://host/database")
    with pytest.raises(ConfigurationError, match="Setting max_payload in argument: expected int, found 'much'"):
        Orchestrator(max_payload="much")
    Orchestrator(database_url=None, max_payload=5)


def test_single_settings_override_a_settings_object() -> None:
    together = Settings(namespace="shop", redis_url="redis://one")
    assert Orchestrator(together, redis_url="redis://two").settings == Settings(
        namespace="shop", redis_url="redis://two"
    )
    assert Orchestrator(together).settings is together
    with pytest.raises(ConfigurationError, match="Setting namespace: expected"):
        Orchestrator(together, namespace="Two Words")
