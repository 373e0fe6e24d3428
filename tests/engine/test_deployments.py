"""Ways to reach a server: unix sockets and TLS."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from chasqui import ConnectionLost, EmbeddedServerError, Producer
from chasqui.bridge import ConnectionOptions, JobSpans, Reader
from chasqui.embedded import EmbeddedServer, start
from tests.conftest import server_binaries
from tests.engine.conftest import Connect
from tests.engine.seen import in_stream, payloads


def reader_of(url: str, **options: Any) -> Reader:
    return Reader(ConnectionOptions(url=url, **options))


# Unix sockets


@pytest.fixture(params=list(server_binaries()), scope="module")
def on_a_socket(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    with start(binary=server_binaries()[request.param], unix=True) as server:
        yield server


def test_a_unix_socket_takes_every_kind_of_add(connect: Connect, on_a_socket: EmbeddedServer, colour: str) -> None:
    producer = connect(on_a_socket.url, queue=f"q-{colour}")

    producer.add(0)
    producer.add(1, id="i")
    producer.add_bulk(range(2, 1500))

    with redis.Redis.from_url(on_a_socket.url) as client:
        assert payloads(in_stream(client, f"q-{colour}")) == list(range(1500))


def test_a_unix_socket_gives_pages_of_jobs(on_a_socket: EmbeddedServer) -> None:
    with Producer(on_a_socket.url, queue="pages") as producer, reader_of(on_a_socket.url) as reader:
        producer.add_bulk(range(1500))

        pages = list(reader.job_pages("pages"))

    assert [type(page) for page in pages] == [JobSpans] * len(pages)
    assert sum(map(len, pages)) == 1500


def test_a_missing_unix_socket_is_named(connect: Connect, tmp_path: Path) -> None:
    producer = connect(f"unix://{tmp_path}/none.sock", queue="q")

    with pytest.raises(ConnectionLost, match=r"unix://.*/none\.sock cannot be reached") as caught:
        producer.add(1)

    assert caught.value.sent is False


def test_another_database_is_another_queue(connect: Connect, on_a_socket: EmbeddedServer, colour: str) -> None:
    connect(on_a_socket.url.replace("db=0", "db=3"), queue=f"other-{colour}").add(1)

    assert connect(on_a_socket.url, queue=f"other-{colour}").stats().waiting == 0


# TLS


@dataclass(frozen=True)
class Certificates:
    """Files made for this run: a CA with a server's and a client's certificate, and a CA that nobody uses."""

    directory: Path

    def path(self, name: str) -> str:
        return str(self.directory / name)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    home = tmp_path_factory.mktemp("tls")

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=home, check=True, capture_output=True)

    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for authority in ("ca", "other-ca"):
        openssl("req", "-x509", *new_key, "-keyout", f"{authority}.key", "-out", f"{authority}.crt", "-days", "2",
                "-subj", f"/CN={authority}", "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip
    for name, subject in (("server", "subjectAltName=IP:127.0.0.1"), ("client", "subjectAltName=DNS:client")):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (home / f"{name}.ext").write_text(subject)
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
                "-out", f"{name}.crt", "-days", "2", "-extfile", f"{name}.ext")  # fmt: skip
    return Certificates(home)


def start_tls(certificates: Certificates, **config: str) -> tuple[EmbeddedServer, int]:
    """A server with a TLS port beside its plain one; skips the test where no server here can do that."""
    settings = {
        "tls-cert-file": certificates.path("server.crt"),
        "tls-key-file": certificates.path("server.key"),
        "tls-ca-cert-file": certificates.path("ca.crt"),
        **config,
    }
    for binary in server_binaries().values():
        port = free_port()
        try:
            return start(binary=binary, config={"tls-port": str(port), **settings}), port
        except EmbeddedServerError as error:
            reason = str(error)
    pytest.skip(f"no server here was built with TLS; the last one said: {reason[-200:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def tls(certificates: Certificates) -> Iterator[tuple[EmbeddedServer, str]]:
    """A server that asks for no client certificate, and its url."""
    server, port = start_tls(certificates, **{"tls-auth-clients": "no"})
    with server:
        yield server, f"rediss://127.0.0.1:{port}/0"


@pytest.fixture(scope="module")
def mutual_tls(certificates: Certificates) -> Iterator[str]:
    """The url of a server that asks for a client certificate."""
    server, port = start_tls(certificates, **{"tls-auth-clients": "yes"})
    with server:
        yield f"rediss://127.0.0.1:{port}/0"


def test_tls_takes_every_kind_of_add(
    connect: Connect, tls: tuple[EmbeddedServer, str], certificates: Certificates, colour: str
) -> None:
    server, url = tls
    producer = connect(url, queue=f"q-{colour}", tls_ca=certificates.path("ca.crt"))

    producer.add(0)
    producer.add(1, id="i")
    producer.add_bulk(range(2, 1500))

    with redis.Redis.from_url(server.url) as client:
        assert payloads(in_stream(client, f"q-{colour}")) == list(range(1500))


def test_tls_gives_pages_of_jobs(tls: tuple[EmbeddedServer, str], certificates: Certificates) -> None:
    server, url = tls
    with Producer(server.url, queue="pages") as producer:
        producer.add_bulk(["x" * 1000] * 3000)

    with reader_of(url, tls_ca=certificates.path("ca.crt")) as reader:
        pages = list(reader.job_pages("pages"))

    assert sum(map(len, pages)) == 3000


def test_a_server_that_the_ca_does_not_know_is_refused(
    connect: Connect, tls: tuple[EmbeddedServer, str], certificates: Certificates
) -> None:
    producer = connect(tls[1], queue="q", tls_ca=certificates.path("other-ca.crt"), reconnect_attempts=1)

    with pytest.raises(ConnectionLost, match=r"(?i)rediss://127\.0\.0\.1:\d+ cannot be reached.*certificate") as caught:
        producer.add(1)

    assert caught.value.sent is False


def test_a_server_is_not_trusted_without_a_ca(connect: Connect, tls: tuple[EmbeddedServer, str]) -> None:
    producer = connect(tls[1], queue="q", reconnect_attempts=1)

    with pytest.raises(ConnectionLost, match=r"(?i)certificate"):
        producer.add(1)


def test_a_client_certificate_lets_in(connect: Connect, mutual_tls: str, certificates: Certificates) -> None:
    producer = connect(
        mutual_tls,
        queue="q",
        tls_ca=certificates.path("ca.crt"),
        tls_cert=certificates.path("client.crt"),
        tls_key=certificates.path("client.key"),
    )

    assert producer.add(1, id="i") == "i"


def test_a_missing_client_certificate_is_a_lost_connection(
    connect: Connect, mutual_tls: str, certificates: Certificates
) -> None:
    producer = connect(mutual_tls, queue="q", tls_ca=certificates.path("ca.crt"), reconnect_attempts=1)

    with pytest.raises(ConnectionLost):
        producer.add(1)


def test_a_ca_file_that_does_not_exist_is_told(connect: Connect, tls: tuple[EmbeddedServer, str]) -> None:
    producer = connect(tls[1], queue="q", tls_ca="/does/not/exist.crt", reconnect_attempts=1)

    with pytest.raises(ConnectionLost):
        producer.add(1)


def test_plain_talk_to_a_tls_port_is_a_lost_connection(connect: Connect, tls: tuple[EmbeddedServer, str]) -> None:
    producer = connect(tls[1].replace("rediss:", "redis:"), queue="q", reconnect_attempts=1)

    with pytest.raises(ConnectionLost):
        producer.add(1, id="i")
