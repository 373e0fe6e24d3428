"""What becomes of a job: done, again later, or a dead letter; and that no handler can take its worker along."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis

from chasqui import Backoff, Producer, RetryLater, RetryOverride, Router, UnrecoverableError
from chasqui.protocol.codec import decode_envelope
from tests.engine.seen import in_delayed, in_stream, key
from tests.engine.worker_tools import dead_letters, events, nothing_left, working
from tests.support import eventually

HOUR_MS = 3_600_000


def failing(error: Exception) -> Callable[[Any], None]:
    def handler(_: Any) -> None:
        raise error

    return handler


def fail(_: Any) -> None:
    raise ValueError("boom")


# Runs and their number


@pytest.mark.parametrize("own", [True, False], ids=["the job's own", "the queue's"])
@pytest.mark.parametrize(("attempts", "left"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_a_job_that_always_fails_has_as_many_runs_as_attempts_say(
    url: str, client: redis.Redis, queue: str, attempts: int, left: int, own: bool
) -> None:
    seen: list[tuple[int, int]] = []

    def handler(job: Any) -> None:
        seen.append((job.attempt, job.run))
        fail(job)

    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j", name="f", retry=RetryOverride(attempts) if own else None)
        with working(url, queue, handler, max_attempts=25 if own else attempts):
            eventually(lambda: dead_letters(client, queue) and nothing_left(client, queue))

    (letter,) = dead_letters(client, queue)
    assert seen == [(n, n + 1) for n in range(attempts)]
    assert (letter["reason"], letter["n"]) == (b"retries_exhausted", b"f")
    assert decode_envelope(letter["d"]).attempt == left
    assert [e["attempt"] for e in events(client, queue) if e["e"] == "dlq"] == [str(attempts)]


def test_a_job_that_fails_once_is_done_the_second_time(url: str, client: redis.Redis, queue: str) -> None:
    seen: list[tuple[str, str, Any, int]] = []

    def handler(job: Any) -> str:
        seen.append((job.id, job.name, job.payload, job.attempt))
        if job.attempt == 0:
            fail(job)
        return "done"

    with Producer(url, queue=queue) as producer:
        producer.add({"k": 1}, id="j", name="mail")
        with working(url, queue, handler, store_results=True):
            assert producer.wait_for_result("j", 10) == "done"

    assert seen == [("j", "mail", {"k": 1}, 0), ("j", "mail", {"k": 1}, 1)]
    assert nothing_left(client, queue)
    assert dead_letters(client, queue) == []


def test_a_retry_keeps_everything_of_the_job_but_its_attempt(url: str, client: redis.Redis, queue: str) -> None:
    rules = RetryOverride(9, Backoff.exponential(HOUR_MS, multiplier=2.0))
    with Producer(url, queue=queue) as producer:
        producer.add({"k": 1}, id="j", name="é", retry=rules)
        (before,) = in_stream(client, queue)

        with working(url, queue, fail):
            eventually(lambda: in_delayed(client, queue))

    (after,) = in_delayed(client, queue)
    assert (after.id, after.name, after.payload, after.retry) == (before.id, before.name, before.payload, before.retry)
    assert (after.created_at_ms, before.attempt, after.attempt) == (before.created_at_ms, 0, 1)
    assert client.xlen(key(queue, "stream")) == 0


# How long to wait


def waits(client: redis.Redis, queue: str, retry: RetryOverride | None, url: str, **options: Any) -> list[str]:
    """What the events say about the wait before each retry of a job that always fails."""
    with Producer(url, queue=queue) as producer:
        producer.add(1, retry=retry)
        with working(url, queue, fail, **options):
            eventually(lambda: dead_letters(client, queue))
    return [e["backoff_ms"] for e in events(client, queue) if e["e"] == "retry-scheduled"]


@pytest.mark.parametrize(
    ("backoff", "expected"),
    [
        (Backoff.exponential(10, multiplier=2.5, max_delay_ms=60, jitter_ms=0), ["10", "25", "60", "60"]),
        (Backoff.exponential(3, multiplier=1.5, jitter_ms=0), ["3", "4", "6", "10"]),
        (Backoff.exponential(10, multiplier=-2.0, jitter_ms=0), ["10", "0", "40", "0"]),
        (Backoff.fixed(50, max_delay_ms=0, jitter_ms=0), ["0"] * 4),
        (None, ["2", "6", "7", "7"]),
    ],
    ids=["exponential", "truncated", "negative", "cap of zero", "the queue's"],
)
def test_waits_between_runs_are_the_originals(
    url: str, client: redis.Redis, queue: str, backoff: Backoff | None, expected: list[str]
) -> None:
    options = {"retry_initial_backoff_ms": 2, "retry_multiplier": 3.0, "retry_max_backoff_ms": 7}
    if backoff is not None:
        options["retry_max_backoff_ms"] = 1000

    assert waits(client, queue, RetryOverride(5, backoff), url, **options) == expected


def test_jitter_is_added_after_the_cap(url: str, client: redis.Redis, queue: str) -> None:
    rules = RetryOverride(8, Backoff.fixed(10, max_delay_ms=5, jitter_ms=4))

    assert {int(wait) for wait in waits(client, queue, rules, url)} <= {5, 6, 7, 8}


def test_a_retry_is_dated_by_the_servers_clock(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add(1, retry=RetryOverride(9, Backoff.fixed(20_000, jitter_ms=0)))
        seconds, micros = client.time()

        with working(url, queue, fail):
            eventually(lambda: in_delayed(client, queue))

    at = in_delayed(client, queue)[0].at
    assert at is not None
    assert 20_000 <= at - (seconds * 1000 + micros // 1000) < 25_000


def test_retry_later_chooses_its_own_wait_whatever_the_rules_say(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j", retry=RetryOverride(9, Backoff.fixed(5)))

        with working(url, queue, failing(RetryLater(HOUR_MS))):
            eventually(lambda: in_delayed(client, queue))

    (job,) = in_delayed(client, queue)
    assert job.at is not None
    assert abs(job.at - time.time() * 1000 - HOUR_MS) < 30_000
    assert job.attempt == 1
    assert [e["backoff_ms"] for e in events(client, queue) if e["e"] == "retry-scheduled"] == [str(HOUR_MS)]


def test_retry_later_counts_as_a_run(url: str, client: redis.Redis, queue: str) -> None:
    runs: list[int] = []

    def handler(job: Any) -> None:
        runs.append(job.run)
        raise RetryLater(1)

    with Producer(url, queue=queue) as producer:
        producer.add(1)
        with working(url, queue, handler, max_attempts=3):
            eventually(lambda: dead_letters(client, queue))

    assert runs == [1, 2, 3]
    assert dead_letters(client, queue)[0]["reason"] == b"retries_exhausted"


# Giving up


def test_unrecoverable_beats_any_override(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add({"k": "unrec"}, id="j-un", name="u", retry=RetryOverride(99))
        (entry_id, before), *_ = client.xrange(key(queue, "stream"))

        with working(url, queue, failing(UnrecoverableError("no such user"))):
            eventually(lambda: dead_letters(client, queue))

    (letter,) = dead_letters(client, queue)
    assert list(letter) == ["d", "n", "source_id", "reason", "error"]
    assert (letter["d"], letter["n"], letter["source_id"]) == (before[b"d"], b"u", entry_id)
    assert letter["reason"] == b"unrecoverable"


def test_a_subclass_of_unrecoverable_is_unrecoverable(url: str, client: redis.Redis, queue: str) -> None:
    class NoSuchUser(UnrecoverableError):
        pass

    with Producer(url, queue=queue) as producer:
        producer.add(1)
        with working(url, queue, failing(NoSuchUser("x"))):
            eventually(lambda: dead_letters(client, queue))

    assert dead_letters(client, queue)[0]["reason"] == b"unrecoverable"


def test_the_handlers_error_travels_in_the_dead_letter_and_shows_in_peek(
    url: str, client: redis.Redis, queue: str
) -> None:
    def deep(job: Any) -> None:
        fail(job)

    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j", name="f")
        with working(url, queue, deep, max_attempts=1):
            eventually(lambda: dead_letters(client, queue))
        (entry,) = producer.peek_dlq()

    assert list(dead_letters(client, queue)[0]) == ["d", "n", "source_id", "reason", "error"]
    assert entry.error is not None
    head, *frames = entry.error.splitlines()
    assert head == "ValueError: boom"
    assert [frame.rpartition(" in ")[2] for frame in frames[:2]] == ["fail", "deep"]
    assert all(__file__ in frame for frame in frames[:2])


def test_a_long_error_is_cut_to_two_kilobytes_at_a_whole_character(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add(1)
        with working(url, queue, failing(ValueError("日" * 5000)), max_attempts=1):
            eventually(lambda: dead_letters(client, queue))
        (entry,) = producer.peek_dlq()

    stored = dead_letters(client, queue)[0]["error"]
    assert 1000 < len(stored) <= 2048
    assert stored.decode() == entry.error
    assert stored.startswith("ValueError: 日日".encode())


def test_a_dead_letter_replayed_runs_again_from_attempt_zero(url: str, client: redis.Redis, queue: str) -> None:
    broken = True

    def handler(job: Any) -> int:
        if broken:
            fail(job)
        return int(job.attempt)

    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j")
        with working(url, queue, handler, max_attempts=2, store_results=True):
            eventually(lambda: dead_letters(client, queue))
            broken = False
            assert producer.replay_dlq() == 1

            assert producer.wait_for_result("j", 10) == 0


# Odd handlers: the job fails, the worker goes on


class Unspeakable(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


async def cancelled(_: Any) -> None:
    """As when something that the handler waits for was cancelled by somebody else."""
    waiting = asyncio.ensure_future(asyncio.sleep(60))
    waiting.cancel()
    await waiting


async def unspeakable(_: Any) -> None:
    raise Unspeakable


def exhausted(_: Any) -> None:
    next(iter([]))


class Named(Exception):
    """Its text is another's business."""

    @property
    def message(self) -> str:
        raise RuntimeError("no message")


def awaited(error: BaseException) -> Any:
    """A coroutine that raises it."""

    async def handler(_: Any) -> None:
        raise error

    return handler


ODD: dict[str, Any] = {
    "SystemExit": awaited(SystemExit(3)),
    "SystemExit in a thread": failing(SystemExit(3)),
    "KeyboardInterrupt": awaited(KeyboardInterrupt()),
    "KeyboardInterrupt in a thread": failing(KeyboardInterrupt()),
    "GeneratorExit": awaited(GeneratorExit()),
    "GeneratorExit in a thread": failing(GeneratorExit()),
    "CancelledError": awaited(asyncio.CancelledError()),
    "CancelledError in a thread": failing(asyncio.CancelledError()),
    "a wait that was never set": failing(RetryLater.__new__(RetryLater)),
    "a cancelled await": cancelled,
    "an error without text": unspeakable,
    "an error whose message raises": failing(Named()),
    "StopIteration in a thread": exhausted,
    "lone surrogates": failing(ValueError("\udcff")),
    "a wait of None": failing(RetryLater(None)),  # type: ignore[arg-type]
    "a wait of text": failing(RetryLater("soon")),  # type: ignore[arg-type]
    "a wait of a timedelta": failing(RetryLater(timedelta(seconds=1))),  # type: ignore[arg-type]
    "a wait for ever": failing(RetryLater(float("inf"))),  # type: ignore[arg-type]
    "a wait that is no number": failing(RetryLater(float("nan"))),  # type: ignore[arg-type]
    "a recursion without end": lambda job: (lambda f: f(f))(lambda f: f(f)),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=list(ODD))
def test_a_handler_fails_its_own_job_only_and_not_its_worker_with(
    url: str, client: redis.Redis, queue: str, odd: Any
) -> None:
    others: list[str] = []
    router = Router(default=lambda job: others.append(job.id)).on("odd", odd)
    options = {"concurrency": 1, "max_attempts": 2, "shutdown_deadline_secs": 1}
    with Producer(url, queue=queue) as producer, working(url, queue, router, **options) as worker:
        producer.add(1, id="odd", name="odd")
        eventually(lambda: worker.ended or dead_letters(client, queue), within=3)
        producer.add(1, id="other")

        eventually(lambda: worker.ended or nothing_left(client, queue), within=3)

    assert others == ["other"]
    assert [letter["n"] for letter in dead_letters(client, queue)] == [b"odd"]


def test_a_wait_below_zero_means_at_once(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add(1)
        with working(url, queue, failing(RetryLater(-5)), max_attempts=2):
            eventually(lambda: dead_letters(client, queue))

    assert [e["backoff_ms"] for e in events(client, queue) if e["e"] == "retry-scheduled"] == ["0"]


def test_a_plain_function_that_returns_a_coroutine_has_it_awaited(url: str, client: redis.Redis, queue: str) -> None:
    seen: list[str] = []

    async def work(job: Any) -> str:
        seen.append(job.id)
        return "done"

    def decorated(function: Any) -> Any:
        @functools.wraps(function)
        def inner(job: Any) -> Any:
            return function(job)

        return inner

    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j")
        with working(url, queue, decorated(work)):
            eventually(lambda: nothing_left(client, queue))

    assert seen == ["j"]


def test_a_payload_that_is_not_messagepack_is_a_failed_run(url: str, client: redis.Redis, queue: str) -> None:
    client.xadd(key(queue, "stream"), {"d": bytes.fromhex("94a170c401c1cf000001a1ed1399a200")})

    with working(url, queue, print, max_attempts=1):
        eventually(lambda: dead_letters(client, queue))

    assert dead_letters(client, queue)[0]["reason"] == b"retries_exhausted"
    assert b"the payload is not MessagePack" in dead_letters(client, queue)[0]["error"]
