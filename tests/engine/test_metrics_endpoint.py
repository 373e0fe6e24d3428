"""The HTTP endpoint: /metrics, /healthz, nothing else."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from chasqui import ConfigError, Producer
from chasqui.metrics import JobOutcome
from chasqui.sinks import MetricsServer, PrometheusSink, serve


class Worker:
    """Stands for a consumer."""

    healthy: Any = True

    def answer(self) -> bool:
        if isinstance(self.healthy, Exception):
            raise self.healthy
        return bool(self.healthy)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def endpoint(registry: CollectorRegistry, worker: Worker) -> Iterator[MetricsServer]:
    with serve(0, registry=registry, healthy=worker.answer) as server:
        yield server


def ask(endpoint: MetricsServer, path: str, method: str = "GET", host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, endpoint.port, timeout=5)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def samples(endpoint: MetricsServer) -> dict[str, float]:
    status, text = ask(endpoint, "/metrics")
    assert status == 200
    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_come_in_prometheus_text_format(endpoint: MetricsServer, registry: CollectorRegistry) -> None:
    PrometheusSink("q", registry).job_outcome(JobOutcome("ok", 1, 1, 'odd "name"\n\\ñ'))

    assert samples(endpoint)["chasquimq_jobs_completed_total" + str(sorted(["q", 'odd "name"\n\\ñ']))] == 1


def test_figures_of_a_real_queue_are_served(
    endpoint: MetricsServer, registry: CollectorRegistry, url: str, queue: str
) -> None:
    sink = PrometheusSink(queue, registry)
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(3))
        producer.add_in(60_000, 1)

        sink.update_stats(producer.stats())

    found = samples(endpoint)
    assert found["chasqui_queue_depth" + str(sorted([queue, "waiting"]))] == 3
    assert found["chasqui_queue_depth" + str(sorted([queue, "delayed"]))] == 1
    assert found["chasqui_queue_depth" + str(sorted([queue, "dlq"]))] == 0


def test_health_flips_with_the_worker(endpoint: MetricsServer, worker: Worker) -> None:
    assert ask(endpoint, "/healthz") == (200, "ok\n")

    worker.healthy = False
    assert ask(endpoint, "/healthz") == (503, "not claiming\n")

    worker.healthy = True
    assert ask(endpoint, "/healthz") == (200, "ok\n")


def test_a_worker_that_cannot_tell_is_not_healthy(endpoint: MetricsServer, worker: Worker) -> None:
    worker.healthy = RuntimeError("no idea")

    assert ask(endpoint, "/healthz") == (503, "not claiming\n")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/favicon.ico", "/healthz/x", "/etc/passwd", "/%2e%2e/metrics"])
def test_any_other_path_is_not_found(endpoint: MetricsServer, path: str) -> None:
    assert ask(endpoint, path)[0] == 404


def test_other_methods_change_nothing(endpoint: MetricsServer) -> None:
    assert ask(endpoint, "/metrics", "POST")[0] == 405
    assert ask(endpoint, "/healthz", "HEAD") == (200, "")


def test_a_client_that_says_nothing_does_not_hold_up_the_others(endpoint: MetricsServer) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port)):
        assert ask(endpoint, "/healthz") == (200, "ok\n")


def test_many_scrapes_at_a_time_are_answered(endpoint: MetricsServer, registry: CollectorRegistry) -> None:
    PrometheusSink("q", registry)
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(endpoint, "/metrics")[0])) for _ in range(20)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answers == [200] * 20


def test_each_endpoint_gets_a_port_of_its_own(endpoint: MetricsServer) -> None:
    with serve(0, registry=CollectorRegistry(), healthy=lambda: False) as other:
        assert other.port != endpoint.port
        assert ask(other, "/healthz")[0] == 503


def test_a_taken_port_is_an_error_that_names_it(endpoint: MetricsServer) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1 port {endpoint.port}"):
        serve(endpoint.port, healthy=lambda: True)


@pytest.mark.parametrize(("address", "port"), [("127.0.0.1", -1), ("127.0.0.1", 70_000), ("not an address", 0)])
def test_an_address_that_cannot_be_is_an_error(address: str, port: int) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        serve(port, address=address, healthy=lambda: True)


def test_after_closing_the_port_is_free_again(registry: CollectorRegistry, worker: Worker) -> None:
    first = serve(0, registry=registry, healthy=worker.answer)
    port = first.port
    first.close()
    first.close()

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with serve(port, registry=registry, healthy=worker.answer) as second:
        assert ask(second, "/healthz") == (200, "ok\n")


def test_it_listens_on_ipv6_where_asked(registry: CollectorRegistry) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    with serve(0, address="::1", registry=registry, healthy=lambda: True) as endpoint:
        assert ask(endpoint, "/healthz", host="::1") == (200, "ok\n")
