"""Postgres and Redis over TLS with a private certificate authority; Redis also requires client certificates."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import project
import psycopg2
import pytest

from orchestrator.embedded.postgres import SYSTEM_USER, EmbeddedPostgres
from orchestrator.errors import ConfigurationError
from orchestrator.store import database
from orchestrator.store.tasks import completions
from orchestrator.transport.connection import UNAVAILABLE, connect
from tests.acceptance.conftest import fresh_stack
from tests.waiting import eventually


class Certificates(NamedTuple):
    """The folder of certificates and keys."""

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)


class Secured(NamedTuple):
    """Redis and Postgres, which accept TLS only."""

    certificates: Certificates
    redis_port: int
    postgres_port: int

    def redis_url(self, host: str = "localhost", **options: str) -> str:
        given = {
            "ssl_ca_certs": self.certificates.path("ca.pem"),
            "ssl_certfile": self.certificates.path("client.pem"),
            "ssl_keyfile": self.certificates.path("client.key"),
        }
        query = "&".join(f"{name}={value}" for name, value in (given | options).items() if value)
        return f"rediss://{host}:{self.redis_port}/0?{query}"

    def database_url(self, ca: str = "ca.pem", host: str = "localhost") -> str:
        query = f"sslmode=verify-full&sslrootcert={self.certificates.path(ca)}"
        return f"postgresql://postgres@{host}:{self.postgres_port}/postgres?{query}"


def openssl(*arguments: str, folder: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def make_authority(folder: Path, name: str) -> None:
    subject = ("-subj", f"/CN={name} authority")
    openssl(
        *f"req -x509 -newkey rsa:2048 -nodes -days 2 -keyout {name}.key -out {name}.pem".split(),
        *subject,
        folder=folder,
    )


def make_certificate(folder: Path, name: str) -> None:
    """Create a certificate for `localhost` only."""
    openssl(*f"req -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr -subj /CN={name}".split(), folder=folder)
    (folder / "names").write_text("subjectAltName=DNS:localhost\n")
    signing = (
        f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out {name}.pem"
    )
    openssl(*signing.split(), folder=folder)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if shutil.which("openssl") is None or server is None:
        pytest.skip("openssl and a Redis of the machine's are needed")
    folder = tmp_path_factory.mktemp("tls")
    folder.chmod(0o755)
    make_authority(folder, "ca")
    make_authority(folder, "other")
    make_certificate(folder, "server")
    make_certificate(folder, "client")
    found = Secured(Certificates(folder), free_port(), free_port())
    redis = start_redis(server, found)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ORCHESTRATOR_SERVERS", "system")  # Debian's Postgres has TLS
            postgres = start_postgres(tmp_path_factory.mktemp("postgres"), found)
        yield found
        postgres.stop()
    finally:
        redis.terminate()
        redis.wait()


def start_redis(server: str, found: Secured) -> subprocess.Popen[bytes]:
    path = found.certificates.path
    options = (
        f"--port 0 --tls-port {found.redis_port} --bind 127.0.0.1 --dir {found.certificates.folder} "
        f"--tls-cert-file {path('server.pem')} --tls-key-file {path('server.key')} --tls-ca-cert-file {path('ca.pem')} "
        f"--tls-auth-clients yes --daemonize no --appendonly no"
    )
    process = subprocess.Popen([server, "--save", "", *options.split()], stdout=subprocess.DEVNULL)

    def answers() -> bool:
        if process.poll() is not None:
            pytest.skip("this Redis was built without TLS")
        try:
            return bool(connect(found.redis_url()).ping())
        except UNAVAILABLE:
            return False

    eventually(answers, "Redis answers over TLS")
    return process


def start_postgres(folder: Path, found: Secured) -> EmbeddedPostgres:
    folder.chmod(0o755)
    path = found.certificates.path
    key = folder / "server.key"
    shutil.copy(path("server.key"), key)
    key.chmod(0o600)
    settings: dict[str, str | int] = {
        "listen_addresses": "127.0.0.1",
        "port": found.postgres_port,
        "ssl": "on",
        "ssl_cert_file": path("server.pem"),
        "ssl_key_file": str(key),
    }
    try:
        server = EmbeddedPostgres(folder, settings)
        if os.geteuid() == 0:
            shutil.chown(key, pwd.getpwnam(SYSTEM_USER).pw_uid)
        server.start()
    except (ConfigurationError, KeyError) as error:
        pytest.skip(f"no Postgres of the machine's with TLS: {error}")
    rules = server.data / "pg_hba.conf"
    rules.write_text("local all all trust\nhostssl all all 127.0.0.1/32 trust\nhostssl all all ::1/128 trust\n")
    with database.engine_for(found.database_url(), autocommit=True).connect() as connection:
        connection.exec_driver_sql("SELECT pg_reload_conf()")
    eventually(lambda: rejects_plaintext(found), "the rules are read")
    return server


def rejects_plaintext(found: Secured) -> bool:
    """Return whether Postgres rejects connections without TLS."""
    try:
        psycopg2.connect(host="127.0.0.1", port=found.postgres_port, user="postgres", sslmode="disable").close()
    except psycopg2.OperationalError as error:
        return "no pg_hba.conf entry" in str(error)
    return False


def test_tasks_and_workflows_run_over_tls(secured: Secured, tmp_path: Path) -> None:
    database.upgrade(secured.database_url())
    with fresh_stack(secured.database_url(), secured.redis_url(), tmp_path) as stack:
        stack.scheduler()
        stack.worker(processes=2)
        handles = [project.add.enqueue(number, 1) for number in range(100)]
        assert [handle.result(60) for handle in handles] == list(range(1, 101))
        assert project.both.start(1, 2).result(60) == [2, 3]
        said = project.says.enqueue("hello")
        said.result(60)
        assert (
            stack.scalar(
                "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE NOT ssl "
                "AND backend_type = 'client backend' AND client_addr IS NOT NULL"
            )
            == 0
        )
    check_unread_connections_time_out(secured.database_url())


def check_unread_connections_time_out(url: str) -> None:
    """During a task's transaction, the kernel closes the connection of a frozen worker that reads no rows; TCP only."""
    engine = database.engine_for(url)
    with engine.connect() as connection:
        assert not completions.begin(connection, bytes(16), 1)
        assert connection.exec_driver_sql("SHOW tcp_user_timeout").scalar_one() == "60000"
        connection.rollback()
        assert connection.exec_driver_sql("SHOW tcp_user_timeout").scalar_one() == "0"
    engine.dispose()


def test_a_server_certificate_of_another_authority_is_rejected(secured: Secured) -> None:
    other = connect(secured.redis_url(ssl_ca_certs=secured.certificates.path("other.pem")))
    with pytest.raises(UNAVAILABLE, match="CERTIFICATE_VERIFY_FAILED"):
        other.ping()
    with pytest.raises(Exception, match="certificate verify failed"):
        database.engine_for(secured.database_url("other.pem")).connect()


def test_a_server_certificate_for_another_host_is_rejected(secured: Secured) -> None:
    with pytest.raises(UNAVAILABLE, match=r"(?i)certificate"):
        connect(secured.redis_url(host="127.0.0.1")).ping()
    with pytest.raises(Exception, match=r"does not match|verify"):
        database.engine_for(secured.database_url(host="127.0.0.1")).connect()


def test_redis_rejects_a_client_without_a_certificate(secured: Secured) -> None:
    with pytest.raises(UNAVAILABLE):
        connect(secured.redis_url(ssl_certfile="", ssl_keyfile="")).ping()


def test_connections_without_tls_are_rejected(secured: Secured) -> None:
    with pytest.raises(UNAVAILABLE):
        connect(f"redis://localhost:{secured.redis_port}/0").ping()
    with pytest.raises(Exception, match="no pg_hba.conf entry"):
        database.engine_for(
            f"postgresql://postgres@localhost:{secured.postgres_port}/postgres?sslmode=disable"
        ).connect()


def test_a_process_exits_with_the_reason_if_a_server_is_untrusted(secured: Secured, tmp_path: Path) -> None:
    with fresh_stack(secured.database_url(), secured.redis_url(), tmp_path) as stack:
        stack.environment["ORCHESTRATOR_REDIS_URL"] = secured.redis_url(
            ssl_ca_certs=secured.certificates.path("other.pem")
        )
        worker = stack.worker(wait=False)
        assert worker.wait() != 0
        assert "CERTIFICATE_VERIFY_FAILED" in worker.log.read_text()
        stack.environment["ORCHESTRATOR_DATABASE_URL"] = secured.database_url("other.pem")
        scheduler = stack.scheduler(wait=False)
        assert scheduler.wait() != 0
        assert "certificate verify failed" in scheduler.log.read_text()
