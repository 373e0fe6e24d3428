"""Sinks: what they count, what they refuse, and that none of them can disturb a job."""

from __future__ import annotations

import builtins
import gc
import logging
import threading
import weakref
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from chasqui import ConfigError, Stats
from chasqui.metrics import DlqRouted, JobOutcome, LockOutcome, PromoterTick, ReaderBatch, RetryScheduled
from chasqui.sinks import (
    HOOKS,
    MAX_NAMES,
    OTHER,
    Guarded,
    InMemorySink,
    MetricsSink,
    NoopSink,
    PrometheusSink,
    serve,
)

HAPPENED: list[tuple[str, Any]] = [
    ("promoter_tick", PromoterTick(promoted=3, depth=7, oldest_pending_lag_ms=40)),
    ("promoter_tick", PromoterTick(promoted=2, depth=5, oldest_pending_lag_ms=0)),
    ("promoter_lock_outcome", LockOutcome("acquired", "promoter")),
    ("promoter_lock_outcome", LockOutcome("acquired", "scheduler")),
    ("promoter_lock_outcome", LockOutcome("held", "promoter")),
    ("reader_batch", ReaderBatch(size=10, reclaimed=2)),
    ("reader_batch", ReaderBatch(size=1, reclaimed=0)),
    ("job_outcome", JobOutcome("ok", 1, 1_500, "mail")),
    ("job_outcome", JobOutcome("ok", 2, 500, "mail")),
    ("job_outcome", JobOutcome("err", 1, 2_000_000, "mail")),
    ("job_outcome", JobOutcome("panic", 1, 10, "")),
    ("retry_scheduled", RetryScheduled(attempt=2, backoff_ms=150, name="mail")),
    ("dlq_routed", DlqRouted("unrecoverable", 1, "mail")),
    ("dlq_routed", DlqRouted("decode_failed", 0, "")),
]


def tell(sink: MetricsSink, happened: list[tuple[str, Any]] = HAPPENED) -> None:
    for hook, event in happened:
        getattr(sink, hook)(event)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


# The seam


@pytest.mark.parametrize(
    "sink",
    [NoopSink(), InMemorySink(), PrometheusSink("q", CollectorRegistry()), Guarded(NoopSink())],
    ids=lambda sink: type(sink).__name__,
)
def test_every_sink_has_the_six_hooks(sink: Any) -> None:
    assert isinstance(sink, MetricsSink)
    tell(sink)


def test_something_without_all_hooks_is_no_sink() -> None:
    class Half:
        def job_outcome(self, event: JobOutcome) -> None: ...

    assert not isinstance(Half(), MetricsSink)


# In memory


def test_what_happened_is_counted() -> None:
    sink = InMemorySink()

    tell(sink)

    assert (sink.promoted, sink.depth) == (5, 5)
    assert sink.acquired == {"promoter": 1, "scheduler": 1}
    assert sink.held == {"promoter": 1}
    assert (sink.read, sink.reclaimed) == (11, 2)
    assert sink.completed == {"mail": 2}
    assert sink.failed == {"mail": 1, "": 1}
    assert sink.panicked == {"": 1}
    assert sink.retried == {"mail": 1}
    assert sink.dead == {"mail": 1, "": 1}
    assert sink.reasons == {"unrecoverable": 1, "decode_failed": 1}
    assert sink.handler_us == 2_002_010
    assert sink.calls == {hook: sum(name == hook for name, _ in HAPPENED) for hook in HOOKS}
    assert sink.last == dict(HAPPENED)


def test_a_snapshot_does_not_change_any_more() -> None:
    sink = InMemorySink()
    tell(sink)

    before = sink.snapshot()
    tell(sink)

    assert before["completed"] == {"mail": 2}
    assert sink.snapshot()["completed"] == {"mail": 4}
    assert set(before) == {name for name in vars(sink) if not name.startswith("_")}


def test_counting_from_many_threads_loses_nothing() -> None:
    sink = InMemorySink()

    def work() -> None:
        for n in range(2000):
            sink.job_outcome(JobOutcome("ok", 1, 1, f"job-{n % 7}"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sink.completed.total() == sink.handler_us == 16_000


# Prometheus


def test_what_happened_stands_under_chasquimqs_names(registry: CollectorRegistry) -> None:
    tell(PrometheusSink("q", registry))

    samples = {
        ("chasquimq_promoter_promoted_total",): 5,
        ("chasquimq_delayed_zset_depth",): 5,
        ("chasquimq_promoter_oldest_pending_lag_ms",): 0,
        ("chasquimq_promoter_lock_acquired_total",): 2,
        ("chasquimq_promoter_lock_lost_total",): 1,
        ("chasquimq_consumer_batch_size_count",): 2,
        ("chasquimq_consumer_batch_size_sum",): 11,
        ("chasquimq_consumer_reclaimed_total",): 2,
        ("chasquimq_handler_duration_seconds_count", "name", "mail"): 3,
        ("chasquimq_handler_duration_seconds_sum", "name", "mail"): 2.002,
        ("chasquimq_handler_duration_seconds_count", "name", ""): 1,
        ("chasquimq_jobs_completed_total", "name", "mail"): 2,
        ("chasquimq_jobs_failed_total", "kind", "error", "name", "mail"): 1,
        ("chasquimq_jobs_failed_total", "kind", "panic", "name", ""): 1,
        ("chasquimq_retries_scheduled_total", "name", "mail"): 1,
        ("chasquimq_retry_backoff_seconds_sum",): 0.15,
        ("chasquimq_dlq_routed_total", "reason", "unrecoverable", "name", "mail"): 1,
        ("chasquimq_dlq_routed_total", "reason", "decode_failed", "name", ""): 1,
    }
    found = {
        (name, *rest): registry.get_sample_value(name, {"queue": "q", **dict(zip(rest[::2], rest[1::2], strict=True))})
        for name, *rest in samples
    }
    assert found == pytest.approx(samples)


def test_figures_of_the_queue_and_the_workers_health_are_gauges(registry: CollectorRegistry) -> None:
    sink = PrometheusSink("q", registry)

    sink.update_stats(Stats(waiting=4, pending=3, delayed=2, dlq=1, oldest_age_ms=1500, paused=False))
    sink.update_health(True)

    depth = {
        state: registry.get_sample_value("chasqui_queue_depth", {"queue": "q", "state": state})
        for state in ("waiting", "pending", "delayed", "dlq")
    }
    assert depth == {"waiting": 4, "pending": 3, "delayed": 2, "dlq": 1}
    assert registry.get_sample_value("chasqui_queue_oldest_age_seconds", {"queue": "q"}) == 1.5
    assert registry.get_sample_value("chasqui_worker_healthy", {"queue": "q"}) == 1
    sink.update_health(False)
    assert registry.get_sample_value("chasqui_worker_healthy", {"queue": "q"}) == 0


def test_health_that_is_watched_is_asked_for_at_each_scrape(registry: CollectorRegistry) -> None:
    answers = iter([True, False, RuntimeError("no idea")])

    def healthy() -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    PrometheusSink("q", registry).watch_health(healthy)

    assert [registry.get_sample_value("chasqui_worker_healthy", {"queue": "q"}) for _ in range(3)] == [1, 0, 0]


def test_what_is_not_known_yet_does_not_show_as_zero(registry: CollectorRegistry) -> None:
    PrometheusSink("q", registry)

    assert registry.get_sample_value("chasqui_worker_healthy", {"queue": "q"}) is None
    assert registry.get_sample_value("chasqui_queue_oldest_age_seconds", {"queue": "q"}) is None
    assert registry.get_sample_value("chasquimq_promoter_promoted_total", {"queue": "q"}) == 0


def test_two_queues_on_one_registry_are_told_apart(registry: CollectorRegistry) -> None:
    one, other, again = PrometheusSink("a", registry), PrometheusSink("b", registry), PrometheusSink("a", registry)

    for sink in (one, other, again):
        sink.job_outcome(JobOutcome("ok", 1, 1, "x"))

    assert registry.get_sample_value("chasquimq_jobs_completed_total", {"queue": "a", "name": "x"}) == 2
    assert registry.get_sample_value("chasquimq_jobs_completed_total", {"queue": "b", "name": "x"}) == 1


def test_only_so_many_names_of_jobs_become_series(registry: CollectorRegistry) -> None:
    sink = PrometheusSink("q", registry)

    for n in range(MAX_NAMES + 50):
        sink.job_outcome(JobOutcome("ok", 1, 1, f"job-{n}"))
        sink.retry_scheduled(RetryScheduled(2, 1, f"job-{n}"))
        sink.dlq_routed(DlqRouted("panic", 1, f"job-{n}"))
    sink.job_outcome(JobOutcome("ok", 1, 1, "job-0"))

    def value(name: str) -> float | None:
        return registry.get_sample_value("chasquimq_jobs_completed_total", {"queue": "q", "name": name})

    assert value("job-0") == 2
    assert value(f"job-{MAX_NAMES - 1}") == 1
    assert value(f"job-{MAX_NAMES}") is None
    assert value(OTHER) == 50
    assert generate_latest(registry).count(b"\nchasquimq_jobs_completed_total{") == MAX_NAMES + 1
    assert generate_latest(registry).count(b"\nchasquimq_dlq_routed_total{") == MAX_NAMES + 1


def test_a_registry_is_not_kept_alive_by_its_sinks_families() -> None:
    registry = CollectorRegistry()
    PrometheusSink("q", registry)
    alive = weakref.ref(registry)

    del registry
    gc.collect()

    assert alive() is None


@pytest.mark.parametrize(
    "use", [lambda: PrometheusSink("q"), lambda: serve(0, healthy=lambda: True)], ids=["sink", "endpoint"]
)
def test_without_prometheus_client_the_error_names_the_extra(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return imported(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)

    with pytest.raises(ConfigError, match=r'pip install "chasqui-spark\[metrics\]"'):
        use()


# The guard


class Broken(NoopSink):
    """Raises in every hook."""

    def __getattribute__(self, name: str) -> Any:
        if name not in HOOKS:
            return super().__getattribute__(name)

        def hook(event: Any) -> None:
            raise RuntimeError("the sink is broken")

        return hook


@pytest.mark.parametrize(("hook", "event"), [(hook, dict(HAPPENED)[hook]) for hook in HOOKS])
def test_a_raising_sink_does_not_raise(hook: str, event: Any, caplog: pytest.LogCaptureFixture) -> None:
    guarded = Guarded(Broken())

    getattr(guarded, hook)(event)

    assert guarded.failures == 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert f"Broken raised in {hook}" in record.getMessage()


def test_later_failures_are_warnings_that_count_at_most_one_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    guarded = Guarded(Broken(), clock=iter(range(1000, 1181, 10)).__next__)

    for _ in range(19):
        guarded.job_outcome(JobOutcome("ok", 1, 1, "x"))

    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in told] == ["ERROR", "WARNING", "WARNING", "WARNING"]
    assert [word for _, message in told[1:] for word in message.split() if word.isdigit()] == ["7", "13", "19"]
    assert guarded.failures == 19


def test_what_passes_the_guard_reaches_the_sink() -> None:
    sink = InMemorySink()

    tell(Guarded(sink))

    assert sink.last == dict(HAPPENED)


def test_the_guard_lets_an_interrupt_through() -> None:
    class Interrupted(NoopSink):
        def job_outcome(self, event: JobOutcome) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guarded(Interrupted()).job_outcome(JobOutcome("ok", 1, 1, "x"))


def test_something_that_is_no_sink_is_refused_at_once() -> None:
    class Asynchronous(NoopSink):
        async def job_outcome(self, event: JobOutcome) -> None: ...  # type: ignore[override]

    with pytest.raises(ConfigError, match="object has no promoter_tick"):
        Guarded(object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Asynchronous awaits in its job_outcome"):
        Guarded(Asynchronous())
