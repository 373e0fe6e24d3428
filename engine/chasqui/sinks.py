"""Where the figures of a worker go: the seam, three sinks, a guard around any of them, and an HTTP endpoint.

A sink is anything with the six hooks of ``MetricsSink``. Hooks are called on the worker's event loop, between jobs:
they count and return, and never wait. Workers put every sink into ``Guarded``, so that a broken one costs figures and
never a job.
"""

from __future__ import annotations

import copy
import inspect
import logging
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from chasqui.errors import ConfigError
from chasqui.job import Stats
from chasqui.metrics import DlqRouted, JobOutcome, LockOutcome, PromoterTick, ReaderBatch, RetryScheduled

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics import MetricWrapperBase

log = logging.getLogger("chasqui.metrics")

HOOKS = ("promoter_tick", "promoter_lock_outcome", "reader_batch", "job_outcome", "retry_scheduled", "dlq_routed")
MAX_NAMES = 200
OTHER = "other"

_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
_DURATION_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_BACKOFF_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 21_600, 86_400)
_FAILED_KINDS = {"err": "error", "panic": "panic"}


@runtime_checkable
class MetricsSink(Protocol):
    """Receives what happens inside a worker, a promoter or a scheduler."""

    def promoter_tick(self, event: PromoterTick) -> None:
        """Each pass of the leading promoter."""

    def promoter_lock_outcome(self, event: LockOutcome) -> None:
        """Each change of leadership, also of the scheduler's."""

    def reader_batch(self, event: ReaderBatch) -> None:
        """Each read that brought jobs."""

    def job_outcome(self, event: JobOutcome) -> None:
        """Each run of a handler."""

    def retry_scheduled(self, event: RetryScheduled) -> None:
        """Each failed job that was put back."""

    def dlq_routed(self, event: DlqRouted) -> None:
        """Each job that became a dead letter."""


class NoopSink:
    """Lets everything pass: a base for sinks that want some of the hooks only."""

    def promoter_tick(self, event: PromoterTick) -> None: ...

    def promoter_lock_outcome(self, event: LockOutcome) -> None: ...

    def reader_batch(self, event: ReaderBatch) -> None: ...

    def job_outcome(self, event: JobOutcome) -> None: ...

    def retry_scheduled(self, event: RetryScheduled) -> None: ...

    def dlq_routed(self, event: DlqRouted) -> None: ...


class InMemorySink:
    """Counts, for tests and small programs. Threads may share it; ``snapshot()`` is one moment of all of it.

    ``calls``        how often each hook was called, by its name
    ``last``         what each hook was given last, by its name
    ``promoted``     jobs promoted from the delayed set
    ``depth``        jobs in the delayed set, as of the last pass
    ``acquired``, ``held``  changes of leadership, by role
    ``read``, ``reclaimed``  jobs read, and how many of them were taken over from another delivery
    ``completed``, ``failed``, ``retried``, ``dead``  handler runs that went well or did not, jobs put back, and dead
                     letters; each by the job's name, of which 200 are told apart
    ``panicked``     those among ``failed`` whose kind is panic
    ``reasons``      dead letters by reason
    ``handler_us``   time spent in handlers, in microseconds
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names = _Bounded(MAX_NAMES)
        self.calls: Counter[str] = Counter()
        self.last: dict[str, Any] = {}
        self.promoted = 0
        self.depth = 0
        self.acquired: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.read = 0
        self.reclaimed = 0
        self.completed: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.panicked: Counter[str] = Counter()
        self.retried: Counter[str] = Counter()
        self.dead: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.handler_us = 0

    def snapshot(self) -> dict[str, Any]:
        """All attributes by name, copied while nothing changes them."""
        with self._lock:
            return {name: copy.copy(value) for name, value in vars(self).items() if not name.startswith("_")}

    def promoter_tick(self, event: PromoterTick) -> None:
        with self._lock:
            self._called("promoter_tick", event)
            self.promoted += event.promoted
            self.depth = event.depth

    def promoter_lock_outcome(self, event: LockOutcome) -> None:
        with self._lock:
            self._called("promoter_lock_outcome", event)
            (self.acquired if event.outcome == "acquired" else self.held)[event.role] += 1

    def reader_batch(self, event: ReaderBatch) -> None:
        with self._lock:
            self._called("reader_batch", event)
            self.read += event.size
            self.reclaimed += event.reclaimed

    def job_outcome(self, event: JobOutcome) -> None:
        with self._lock:
            self._called("job_outcome", event)
            name = self._names(event.name)
            self.handler_us += event.handler_duration_us
            (self.completed if event.kind == "ok" else self.failed)[name] += 1
            if event.kind == "panic":
                self.panicked[name] += 1

    def retry_scheduled(self, event: RetryScheduled) -> None:
        with self._lock:
            self._called("retry_scheduled", event)
            self.retried[self._names(event.name)] += 1

    def dlq_routed(self, event: DlqRouted) -> None:
        with self._lock:
            self._called("dlq_routed", event)
            self.dead[self._names(event.name)] += 1
            self.reasons[event.reason] += 1

    def _called(self, hook: str, event: Any) -> None:
        self.calls[hook] += 1
        self.last[hook] = event


class PrometheusSink:
    """Figures of one queue for Prometheus, under ChasquiMQ's names with a ``queue`` label.

    Sinks of several queues may share a registry. A label ``name`` holds at most 200 names of jobs per sink; what comes
    later counts as ``other``, because each name is a series that Prometheus keeps for ever. Beyond the hooks:
    ``update_stats`` sets the gauges ``chasqui_queue_depth`` and ``chasqui_queue_oldest_age_seconds``, ``update_health``
    and ``watch_health`` set ``chasqui_worker_healthy``. They do not show before they are known.
    """

    def __init__(self, queue: str, registry: CollectorRegistry | None = None) -> None:
        self._queue = queue
        self._families = _families(registry)
        self._names = _Bounded(MAX_NAMES)
        # Looking a series up by its labels costs more than counting on it.
        self._series: dict[tuple[str, ...], Any] = {}
        self._promoted = self._of("promoted")
        self._delayed = self._of("delayed")
        self._lag = self._of("lag")
        self._acquired = self._of("acquired")
        self._lost = self._of("lost")
        self._batch = self._of("batch")
        self._reclaimed = self._of("reclaimed")
        self._backoff = self._of("backoff")

    def promoter_tick(self, event: PromoterTick) -> None:
        self._promoted.inc(event.promoted)
        self._delayed.set(event.depth)
        self._lag.set(event.oldest_pending_lag_ms)

    def promoter_lock_outcome(self, event: LockOutcome) -> None:
        (self._acquired if event.outcome == "acquired" else self._lost).inc()

    def reader_batch(self, event: ReaderBatch) -> None:
        self._batch.observe(event.size)
        self._reclaimed.inc(event.reclaimed)

    def job_outcome(self, event: JobOutcome) -> None:
        name = self._names(event.name)
        self._of("duration", name).observe(event.handler_duration_us / 1_000_000)
        if event.kind == "ok":
            self._of("completed", name).inc()
        else:
            self._of("failed", _FAILED_KINDS[event.kind], name).inc()

    def retry_scheduled(self, event: RetryScheduled) -> None:
        self._of("retries", self._names(event.name)).inc()
        self._backoff.observe(event.backoff_ms / 1000)

    def dlq_routed(self, event: DlqRouted) -> None:
        self._of("dlq", event.reason, self._names(event.name)).inc()

    def update_stats(self, stats: Stats) -> None:
        """Show these figures of the queue."""
        for state in ("waiting", "pending", "delayed", "dlq"):
            self._of("depth", state).set(getattr(stats, state))
        self._of("age").set(stats.oldest_age_ms / 1000)

    def update_health(self, healthy: bool) -> None:
        """Show whether the worker can claim jobs."""
        self._of("healthy").set(1 if healthy else 0)

    def watch_health(self, healthy: Callable[[], bool]) -> None:
        """Ask at each scrape whether the worker can claim jobs, such as ``lambda: consumer.healthy``."""
        self._of("healthy").set_function(lambda: 1 if _asked(healthy) else 0)

    def _of(self, family: str, *labels: str) -> Any:
        key = (family, *labels)
        try:
            return self._series[key]
        except KeyError:
            series = self._series[key] = self._families[family].labels(self._queue, *labels)
            return series


class Guarded:
    """Any sink, made harmless: what a hook raises is logged and counted in ``failures``, and goes no further.

    The first failure is logged as an error with its traceback. Later ones are warnings that tell how many there were,
    at most one a minute: a sink that fails fails at every job.
    """

    def __init__(self, sink: MetricsSink, *, clock: Callable[[], float] = time.monotonic) -> None:
        for hook in HOOKS:
            found = getattr(sink, hook, None)
            if not callable(found) or inspect.iscoroutinefunction(found):
                what = "has no" if not callable(found) else "awaits in its"
                raise ConfigError(
                    f"a metrics sink expects six plain methods, {', '.join(HOOKS)}; {type(sink).__name__} {what} {hook}"
                )
        self.sink = sink
        self.failures = 0
        self._hooks: dict[str, Callable[[Any], None]] = {hook: getattr(sink, hook) for hook in HOOKS}
        self._clock = clock
        self._logged_at = 0.0
        self._lock = threading.Lock()

    def promoter_tick(self, event: PromoterTick) -> None:
        self._call("promoter_tick", event)

    def promoter_lock_outcome(self, event: LockOutcome) -> None:
        self._call("promoter_lock_outcome", event)

    def reader_batch(self, event: ReaderBatch) -> None:
        self._call("reader_batch", event)

    def job_outcome(self, event: JobOutcome) -> None:
        self._call("job_outcome", event)

    def retry_scheduled(self, event: RetryScheduled) -> None:
        self._call("retry_scheduled", event)

    def dlq_routed(self, event: DlqRouted) -> None:
        self._call("dlq_routed", event)

    def _call(self, hook: str, event: Any) -> None:
        try:
            self._hooks[hook](event)
        except Exception as error:  # noqa: BLE001
            self._failed(hook, error)

    def _failed(self, hook: str, error: Exception) -> None:
        with self._lock:
            self.failures += 1
            failures, now = self.failures, self._clock()
            if failures > 1 and now - self._logged_at < 60:
                return
            self._logged_at = now
        sink = type(self.sink).__name__
        if failures == 1:
            log.error("%s raised in %s; jobs are not affected", sink, hook, exc_info=error)
        else:
            log.warning("%s raised in %s again, %d times so far: %r", sink, hook, failures, error)


class MetricsServer:
    """The endpoint, made by ``serve()``: ``port`` is where it listens. Ends with ``close()`` or a ``with`` block."""

    def __init__(self, server: WSGIServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=[0.1], name="chasqui-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop listening. Can be called again."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    port: int,
    *,
    address: str = "127.0.0.1",
    registry: CollectorRegistry | None = None,
    healthy: Callable[[], bool],
) -> MetricsServer:
    """Serve ``/metrics`` (Prometheus' text format) and ``/healthz`` (200 ``ok``, 503 ``not claiming``) from a thread.

    ``port`` 0 picks a free one. ``registry``: by default prometheus-client's own. ``healthy`` is called at each
    ``/healthz``, in the thread of that request, such as ``lambda: consumer.healthy``.
    """
    client = _prometheus("the metrics endpoint")
    metrics: WSGIApplication = client.make_wsgi_app(client.REGISTRY if registry is None else registry)
    try:
        server = _Server(address, port)
    except (OSError, OverflowError, TypeError) as error:
        raise ConfigError(f"the metrics endpoint cannot listen on {address} port {port}: {error}") from error
    server.set_app(_application(metrics, healthy))
    return MetricsServer(server)


def _application(metrics: WSGIApplication, healthy: Callable[[], bool]) -> WSGIApplication:
    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path == "/metrics":
            return metrics(environ, start_response)
        if path != "/healthz":
            status, text = "404 Not Found", b"there are /metrics and /healthz\n"
        elif _asked(healthy):
            status, text = "200 OK", b"ok\n"
        else:
            status, text = "503 Service Unavailable", b"not claiming\n"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))])
        return [] if environ.get("REQUEST_METHOD") == "HEAD" else [text]

    return application


def _asked(healthy: Callable[[], bool]) -> bool:
    try:
        return bool(healthy())
    except Exception:
        log.exception("asking whether the worker is healthy failed: then it is not")
        return False


class _Handler(WSGIRequestHandler):
    # A client that connects and says nothing must not keep its thread for ever.
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    # Waiting for slow clients would hold up a worker that shuts down.
    block_on_close = False

    def __init__(self, address: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the name service who we are; without one that takes many seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away half way."""
        log.debug("a request to the metrics endpoint failed", exc_info=True)


class _Bounded:
    """Lets the first names through and calls the others ``other``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, name: str) -> str:
        if name in self._known:
            return name
        with self._lock:
            if len(self._known) >= self._limit:
                return OTHER
            self._known.add(name)
            return name


def _prometheus(what: str) -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        install = 'pip install "chasqui-spark[metrics]"'
        raise ConfigError(f"{what} needs prometheus-client, the extra metrics: {install} ({error})") from error
    return prometheus_client


# A registry takes each name once, so all sinks on it share the same families.
_by_registry: weakref.WeakKeyDictionary[Any, dict[str, MetricWrapperBase]] = weakref.WeakKeyDictionary()
_by_registry_lock = threading.Lock()


def _families(registry: CollectorRegistry | None) -> dict[str, MetricWrapperBase]:
    client = _prometheus("PrometheusSink")
    target = client.REGISTRY if registry is None else registry
    with _by_registry_lock:
        families = _by_registry.get(target)
        if families is None:
            families = _by_registry[target] = _new_families(client, target)
        return families


def _new_families(client: Any, registry: CollectorRegistry) -> dict[str, MetricWrapperBase]:
    def counter(name: str, help: str, *labels: str) -> Any:
        return client.Counter(name, help, ("queue", *labels), registry=registry)

    def gauge(name: str, help: str, *labels: str) -> Any:
        return client.Gauge(name, help, ("queue", *labels), registry=registry)

    def histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Any:
        return client.Histogram(name, help, ("queue", *labels), buckets=buckets, registry=registry)

    mq = "chasquimq"
    return {
        "promoted": counter(f"{mq}_promoter_promoted_total", "Jobs promoted from the delayed set."),
        "delayed": gauge(f"{mq}_delayed_zset_depth", "Jobs in the delayed set, as of the promoter's last pass."),
        "lag": gauge(f"{mq}_promoter_oldest_pending_lag_ms", "How overdue the oldest delayed job is."),
        "acquired": counter(f"{mq}_promoter_lock_acquired_total", "Times this process became the leader."),
        "lost": counter(f"{mq}_promoter_lock_lost_total", "Times another process was found to lead."),
        "batch": histogram(f"{mq}_consumer_batch_size", "Jobs per read that brought any.", _BATCH_BUCKETS),
        "reclaimed": counter(f"{mq}_consumer_reclaimed_total", "Jobs taken over from another delivery."),
        "duration": histogram(f"{mq}_handler_duration_seconds", "Time in the handler.", _DURATION_BUCKETS, "name"),
        "completed": counter(f"{mq}_jobs_completed_total", "Runs that went well.", "name"),
        "failed": counter(f"{mq}_jobs_failed_total", "Runs that failed.", "kind", "name"),
        "retries": counter(f"{mq}_retries_scheduled_total", "Failed jobs put back to run again.", "name"),
        "backoff": histogram(f"{mq}_retry_backoff_seconds", "Wait before the next run.", _BACKOFF_BUCKETS),
        "dlq": counter(f"{mq}_dlq_routed_total", "Jobs that became dead letters.", "reason", "name"),
        "depth": gauge("chasqui_queue_depth", "Jobs of the queue.", "state"),
        "age": gauge("chasqui_queue_oldest_age_seconds", "Age of the oldest job in the stream."),
        "healthy": gauge("chasqui_worker_healthy", "1 while the worker can claim jobs, else 0."),
    }
