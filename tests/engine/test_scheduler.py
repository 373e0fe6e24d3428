"""Repeatable jobs on a real server: stored, listed, fired once, caught up, handed over and set aside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import redis

from chasqui import Backoff, ConfigError, ConnectionLost, NoFutureFire, PayloadError, Producer, RetryOverride
from chasqui.ids import new_ids
from chasqui.metrics import LockOutcome
from chasqui.options import SchedulerOptions
from chasqui.protocol import schedule
from chasqui.protocol.keys import Keys
from chasqui.protocol.lease import Lease
from chasqui.protocol.produce import Room
from chasqui.protocol.schedule import pass_once
from chasqui.protocol.scripts import script
from chasqui.protocol.specs import StoredSpec, payload_element
from chasqui.redis_io import Link
from chasqui.repeat import MissedFires, RepeatableMeta, RepeatableSpec, RepeatPattern
from chasqui.scheduler import Scheduler
from tests.engine.conftest import Connect
from tests.engine.seen import in_stream, keys_of, payloads
from tests.proxy import CUT, DROP_REPLY, Act, Proxy, call
from tests.support import eventually

MINUTE = 60_000
SCRIPTS = ("take_lease", "due_repeats", "fire_repeat", "set_aside_repeat")
QUICK = {"reconnect_initial_ms": 5, "reconnect_max_ms": 20}
NATIVE = os.environ.get("CHASQUI_NATIVE_PYTHON", "")


def server_ms(client: redis.Redis) -> int:
    seconds, micros = client.time()
    return int(seconds) * 1000 + int(micros) // 1000


def every(interval_ms: int = MINUTE, payload: Any = None, *, name: str = "job", **options: Any) -> RepeatableSpec:
    return RepeatableSpec(name, RepeatPattern.every(interval_ms), payload, **options)


class Stage:
    """A queue with a plain producer, and passes of a scheduler that are run one by one."""

    def __init__(self, url: str, client: redis.Redis, queue: str) -> None:
        self.url, self.client, self.queue, self.keys = url, client, queue, Keys(queue)
        self.producer = Producer(url, queue=queue)
        self.links = [Link(SchedulerOptions(url=url, **QUICK))]

    def close(self) -> None:
        self.producer.close()
        for link in self.links:
            link.close()

    def tick(
        self,
        holder: str = "me",
        *,
        url: str | None = None,
        batch: int = 256,
        max_stream_len: int = 1_000_000,
        overflow: str = "reject",
        ttl_ms: int = MINUTE,
    ) -> bool | None:
        """One pass, by a scheduler of that name."""
        if url is not None:
            self.links.append(Link(SchedulerOptions(url=url, **QUICK)))
        lease = Lease(self.keys.scheduler_lock, holder, ttl_ms)
        room = Room.of(max_stream_len, overflow, 0)
        return self.links[-1].run(pass_once(self.keys, lease, room, batch, 100_000, new_ids))

    def add(self, spec: RepeatableSpec, *, late_ms: int | None = 1) -> str:
        """Store a spec, and make it overdue by so much; None leaves it to its time."""
        made = self.producer.upsert_repeatable(spec)
        if late_ms is not None:
            self.client.zadd(self.keys.repeat, {made: server_ms(self.client) - late_ms})
        return made

    def store(self, spec: RepeatableSpec, at_ms: int) -> None:
        """Store a spec that was due first at that time, as if it had been upserted long ago."""
        stored = StoredSpec(
            spec.resolved_key,
            spec.job_name,
            spec.pattern,
            payload_element(msgpack.packb(spec.payload)),
            spec.limit,
            spec.start_after_ms,
            spec.end_before_ms,
            spec.missed_fires,
            spec.retry,
        )
        self.links[0].run(schedule.upsert(self.keys, stored, at_ms, at_ms))

    def score(self, spec_key: str) -> int | None:
        found = self.client.zscore(self.keys.repeat, spec_key)
        return None if found is None else int(found)

    def fields(self, spec_key: str) -> dict[bytes, bytes]:
        return self.client.hgetall(self.keys.repeat_spec(spec_key))

    def gone(self, spec_key: str) -> bool:
        return self.score(spec_key) is None and not self.fields(spec_key)

    @property
    def jobs(self) -> list[Any]:
        return in_stream(self.client, self.queue)

    @property
    def holder(self) -> bytes | None:
        return self.client.get(self.keys.scheduler_lock)


@pytest.fixture
def stage(url: str, client: redis.Redis, queue: str) -> Iterator[Stage]:
    made = Stage(url, client, queue)
    yield made
    made.close()


@contextlib.contextmanager
def running(*schedulers: Scheduler) -> Iterator[None]:
    """Schedulers at work in threads, stopped and joined afterwards."""
    threads = [threading.Thread(target=scheduler.run_sync) for scheduler in schedulers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for scheduler in schedulers:
            scheduler.stop()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)


@contextlib.contextmanager
def process_of(url: str, queue: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A scheduler in a process of its own, killed if it still runs at the end."""
    code = f"from chasqui.scheduler import Scheduler; Scheduler({url!r}, queue={queue!r}, **{options!r}).run_sync()"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()


# --- Store, list, remove -------------------------------------------------------------------------------------------


def test_an_upserted_spec_is_listed_as_it_was_given(producer: Any, client: redis.Redis) -> None:
    retry = RetryOverride(5, Backoff.exponential(10, multiplier=3.0))
    before = time.time_ns() // 1_000_000
    spec = RepeatableSpec(
        "mail",
        RepeatPattern.cron("0 9 * * *", "Europe/London"),
        {"to": "ana"},
        key="mine",
        limit=7,
        start_after_ms=before + MINUTE,
        end_before_ms=before + 10**12,
        missed_fires=MissedFires.fire_all(3),
        retry=retry,
    )

    assert producer.upsert_repeatable(spec) == "mine"

    [meta] = producer.list_repeatable()
    first = spec.pattern.next_fire_ms(before + MINUTE)
    assert meta == RepeatableMeta(
        "mine", "mail", spec.pattern, first, 7, before + MINUTE, before + 10**12, MissedFires.fire_all(3), retry
    )


def test_the_first_fire_comes_one_interval_after_the_upsert(producer: Any) -> None:
    before = time.time_ns() // 1_000_000

    made = producer.upsert_repeatable(every(MINUTE))

    [meta] = producer.list_repeatable()
    assert made == meta.key == "job::every:60000"
    assert before + MINUTE <= meta.next_fire_ms <= time.time_ns() // 1_000_000 + MINUTE


def test_a_list_is_in_the_order_of_firing_and_ends_at_its_limit(producer: Any) -> None:
    for minutes in (30, 10, 20):
        producer.upsert_repeatable(every(minutes * MINUTE, key=f"k{minutes}"))

    assert [meta.key for meta in producer.list_repeatable()] == ["k10", "k20", "k30"]
    assert [meta.key for meta in producer.list_repeatable(2)] == ["k10", "k20"]
    assert producer.list_repeatable(0) == []


def test_a_long_list_is_read_in_pages(stage: Stage) -> None:
    for n in range(600):
        stage.client.hset(stage.keys.repeat_spec(str(n)), "spec", b"\xc1")
    stage.client.zadd(stage.keys.repeat, {str(n): n for n in range(600)})
    stage.add(every(), late_ms=None)

    assert [meta.key for meta in stage.producer.list_repeatable(1000)] == ["job::every:60000"]


def test_a_removed_spec_is_gone_and_the_second_removal_says_so(producer: Any, client: redis.Redis, queue: str) -> None:
    made = producer.upsert_repeatable(every())

    assert producer.remove_repeatable(made) is True
    assert producer.remove_repeatable(made) is False
    assert producer.list_repeatable() == []
    assert keys_of(client, queue) == []


def test_an_upsert_of_the_same_key_takes_the_place_of_the_old_one(producer: Any) -> None:
    producer.upsert_repeatable(every(MINUTE, key="k"))
    producer.upsert_repeatable(every(5 * MINUTE, key="k", name="other"))

    [meta] = producer.list_repeatable()
    assert (meta.job_name, meta.pattern.interval_ms) == ("other", 5 * MINUTE)


def test_an_upsert_keeps_the_count_of_fires(stage: Stage) -> None:
    for fired in (b"1", b"2"):
        made = stage.add(every(limit=3))
        stage.tick()
        assert stage.fields(made)[b"fired"] == fired

    made = stage.add(every(limit=3))
    stage.tick()

    assert stage.gone(made)
    assert len(stage.jobs) == 3


@pytest.mark.parametrize(
    ("gap", "overlap"), [("shift", "first"), ("skip", "first"), ("shift", "both"), ("skip", "both")]
)
def test_policies_for_clock_changes_are_stored_and_come_back(producer: Any, gap: str, overlap: str) -> None:
    pattern = RepeatPattern.cron("30 2 * * *", "America/New_York", gap=gap, overlap=overlap)
    other = RepeatPattern.cron("30 2 * * *", "America/New_York", gap="skip", overlap="both")
    producer.upsert_repeatable(RepeatableSpec("j", other, None))

    producer.upsert_repeatable(RepeatableSpec("j", pattern, None))

    assert [meta.pattern for meta in producer.list_repeatable()] == [pattern]


def test_the_scheduler_obeys_the_stored_policy_for_clock_changes(stage: Stage) -> None:
    """02:30 of 2010-03-14 does not exist in New York: shifted it fires at 03:00, skipped on the next day only."""
    the_day_before, the_day_after = 1_268_465_400_000, 1_268_634_600_000
    for gap in ("shift", "skip"):
        pattern = RepeatPattern.cron("30 2 * * *", "America/New_York", gap=gap)
        spec = RepeatableSpec(
            gap, pattern, None, key=gap, end_before_ms=the_day_after - 1, missed_fires=MissedFires.fire_all(9)
        )
        stage.store(spec, the_day_before)

    stage.tick()

    assert Counter(job.name for job in stage.jobs) == {"shift": 2, "skip": 1}


@pytest.mark.parametrize(
    ("spec", "error", "why"),
    [
        (RepeatableSpec("j", RepeatPattern.cron("0 0 30 2 *"), None), NoFutureFire, "'0 0 30 2 .' never fires after"),
        (RepeatableSpec("j", RepeatPattern.cron("0 0 0 1 1 * 2020"), None), NoFutureFire, "never fires after"),
        (RepeatableSpec("j", RepeatPattern.cron("nonsense"), None), ConfigError, "expected 5 to 7 fields"),
        (RepeatableSpec("j", RepeatPattern.cron("* * * * *", "Mars/Olympus"), None), ConfigError, "time zone"),
        (every(end_before_ms=5), ConfigError, r"end_before_ms \(5\) is before the first fire"),
        (every(start_after_ms=10**13, end_before_ms=10**13 + MINUTE - 1), ConfigError, "before the first fire"),
        (every(name="n" * 257), ConfigError, "name takes at most 256 bytes"),
        (every(key="k" * 2049), ConfigError, "key takes at most 2048 bytes"),
        (every(key=" "), ConfigError, "key expects text that is not blank"),
        (every(payload=object()), PayloadError, "payload is a object"),
        (every(payload=bytes(1_048_576)), PayloadError, "max_payload_bytes"),
        ("0 9 * * *", ConfigError, "spec expects a RepeatableSpec, got str"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_spec_that_cannot_fire_is_refused_and_nothing_is_stored(
    producer: Any, client: redis.Redis, queue: str, spec: Any, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        producer.upsert_repeatable(spec)

    assert keys_of(client, queue) == []


@pytest.mark.parametrize("wrong", [None, 5, b"k", "\ud800"])
def test_a_key_that_is_no_text_is_refused(producer: Any, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="key"):
        producer.remove_repeatable(wrong)


@pytest.mark.parametrize("wrong", [-1, None, "5", 1.5, True])
def test_a_limit_that_is_no_number_is_refused(producer: Any, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="limit expects a whole number"):
        producer.list_repeatable(wrong)


def test_a_producer_of_raw_payloads_stores_them_as_they_are(connect: Connect, url: str, stage: Stage) -> None:
    producer = connect(url, queue=stage.queue, raw=True)
    made = producer.upsert_repeatable(every(payload=msgpack.packb({"k": 1})))
    stage.client.zadd(stage.keys.repeat, {made: server_ms(stage.client)})

    stage.tick()

    assert payloads(stage.jobs) == [{"k": 1}]


@pytest.mark.parametrize("act", [CUT, DROP_REPLY], ids=["cut", "reply lost"])
def test_an_upsert_survives_a_broken_connection_while_its_first_fire_is_far(
    connect: Connect, proxy: Proxy, queue: str, act: Act
) -> None:
    producer = connect(proxy.url, queue=queue)
    producer.upsert_repeatable(every(5 * MINUTE, key="warm"))
    proxy.on("EVALSHA", act=act)

    producer.upsert_repeatable(every(5 * MINUTE, key="k"))

    assert {meta.key for meta in producer.list_repeatable()} == {"warm", "k"}


def test_an_upsert_that_may_have_fired_already_is_not_sent_again(connect: Connect, proxy: Proxy, queue: str) -> None:
    producer = connect(proxy.url, queue=queue)
    producer.upsert_repeatable(every(50, key="warm"))
    proxy.on("EVALSHA", act=DROP_REPLY)

    with pytest.raises(ConnectionLost) as caught:
        producer.upsert_repeatable(every(50, key="k"))

    assert caught.value.sent is True
    assert len(producer.list_repeatable()) == 2


# --- Firing --------------------------------------------------------------------------------------------------------


def test_a_due_spec_fires_a_job_with_its_name_payload_and_retry_override(stage: Stage) -> None:
    retry = RetryOverride(5, Backoff.fixed(10))
    made = stage.add(every(payload={"k": [1, None]}, name="mail", retry=retry))
    was = stage.score(made)
    before = server_ms(stage.client)

    assert stage.tick() is False

    [job] = stage.jobs
    assert (job.name, job.payload, job.attempt, job.retry) == ("mail", {"k": [1, None]}, 0, retry)
    assert len(job.id) == 26
    assert before <= job.created_at_ms <= server_ms(stage.client)
    assert stage.score(made) == (was or 0) + MINUTE
    assert stage.fields(made)[b"fired"] == b"1"


def test_a_spec_that_is_not_due_does_not_fire(stage: Stage) -> None:
    stage.add(every(), late_ms=None)

    assert stage.tick() is False
    assert stage.jobs == []


def test_jobs_of_one_spec_have_ids_of_their_own(stage: Stage) -> None:
    stage.add(every(missed_fires=MissedFires.fire_all(100)), late_ms=30 * MINUTE + 30_000)

    stage.tick()

    assert len({job.id for job in stage.jobs}) == 31


@pytest.mark.parametrize(
    ("missed", "fires"),
    [
        (MissedFires.skip(), 0),
        (MissedFires.fire_once(), 1),
        (MissedFires.fire_all(100), 6),
        (MissedFires.fire_all(2), 2),
    ],
    ids=["skip", "fire once", "fire all", "fire two"],
)
def test_after_an_outage_missed_windows_fire_as_the_policy_says(stage: Stage, missed: MissedFires, fires: int) -> None:
    made = stage.add(every(100_000, missed_fires=missed), late_ms=550_000)
    was = stage.score(made) or 0

    stage.tick()

    assert len(stage.jobs) == fires
    assert stage.score(made) == was + 600_000


def test_a_window_that_is_late_but_alone_fires_although_the_policy_is_to_skip(stage: Stage) -> None:
    made = stage.add(every(1_000_000), late_ms=550_000)
    was = stage.score(made) or 0

    stage.tick()

    assert len(stage.jobs) == 1
    assert stage.score(made) == was + 1_000_000


def test_a_limit_of_three_fires_three_times_and_removes_the_spec(stage: Stage) -> None:
    made = stage.add(every(limit=3))

    for _ in range(3):
        assert not stage.gone(made)
        stage.client.zadd(stage.keys.repeat, {made: server_ms(stage.client)})
        stage.tick()

    assert len(stage.jobs) == 3
    assert stage.gone(made)
    stage.tick()
    assert len(stage.jobs) == 3


def test_a_catch_up_stops_at_the_limit(stage: Stage) -> None:
    made = stage.add(every(limit=4, missed_fires=MissedFires.fire_all(100)), late_ms=30 * MINUTE)

    stage.tick()

    assert len(stage.jobs) == 4
    assert stage.gone(made)


def test_a_limit_of_zero_is_no_limit(stage: Stage) -> None:
    made = stage.add(every(limit=0))

    stage.tick()

    assert len(stage.jobs) == 1
    assert stage.score(made)


@pytest.mark.parametrize(("end_after_ms", "stays"), [(500_000, True), (499_999, False)], ids=["just in time", "beyond"])
def test_a_spec_whose_next_fire_is_beyond_its_end_fires_and_is_removed(
    stage: Stage, end_after_ms: int, stays: bool
) -> None:
    at = server_ms(stage.client) - 100_000
    stage.store(every(500_000, end_before_ms=at + end_after_ms), at)

    stage.tick()

    assert len(stage.jobs) == 1
    assert stage.gone("job::every:500000") is not stays


def test_of_a_spec_that_ends_within_its_third_interval_two_fires_are_seen(stage: Stage) -> None:
    now = time.time_ns() // 1_000_000
    made = stage.add(every(250, end_before_ms=now + 600, missed_fires=MissedFires.fire_all(9)), late_ms=None)

    with running(Scheduler(stage.url, queue=stage.queue, tick_interval_ms=5)):
        eventually(lambda: stage.gone(made))

    assert len(stage.jobs) == 2


def test_the_last_match_of_a_year_limited_cron_fires_once_and_removes_the_spec(stage: Stage) -> None:
    stage.store(RepeatableSpec("job", RepeatPattern.cron("0 0 0 1 1 * 2020"), 5, key="k"), 1_577_836_800_000)

    stage.tick()
    stage.tick()

    assert payloads(stage.jobs) == [5]
    assert stage.gone("k")


def test_a_long_catch_up_takes_several_passes_and_fires_no_more_than_allowed(stage: Stage) -> None:
    made = stage.add(every(1000, missed_fires=MissedFires.fire_all(2500)), late_ms=5_000_000)

    assert [stage.tick(), stage.tick("me"), stage.tick()] == [True, True, False]

    assert len(stage.jobs) == 2500
    assert (stage.score(made) or 0) > server_ms(stage.client) - 1000
    assert b"catchup" not in stage.fields(made)


def test_a_catch_up_goes_on_under_another_leader_with_what_was_left(stage: Stage) -> None:
    stage.add(every(1000, missed_fires=MissedFires.fire_all(1500)), late_ms=5_000_000)
    stage.tick("first")
    stage.client.delete(stage.keys.scheduler_lock)

    stage.tick("second")
    stage.tick("second")

    assert len(stage.jobs) == 1500


def test_more_due_specs_than_a_batch_are_fired_by_passes_that_follow_at_once(stage: Stage) -> None:
    for n in range(7):
        stage.add(every(key=f"k{n}", payload=n))

    assert [stage.tick(batch=3) for _ in range(3)] == [True, True, False]

    assert sorted(payloads(stage.jobs)) == list(range(7))


def test_a_full_stream_holds_fires_until_there_is_room(stage: Stage) -> None:
    made = stage.add(every())
    was = stage.score(made)
    entries = [stage.client.xadd(stage.keys.stream, {"d": b"x"}) for _ in range(9)]

    assert stage.tick(max_stream_len=10, batch=1) is False
    assert stage.score(made) == was
    assert b"fired" not in stage.fields(made)
    assert stage.client.xlen(stage.keys.stream) == 9

    stage.client.xdel(stage.keys.stream, *entries)
    stage.tick(max_stream_len=10)
    assert len(stage.jobs) == 1


def test_told_to_trim_the_scheduler_fires_into_a_full_stream(stage: Stage) -> None:
    stage.add(every())
    for _ in range(9):
        stage.client.xadd(stage.keys.stream, {"d": b"x"})

    stage.tick(max_stream_len=5, overflow="trim")

    assert stage.client.xrevrange(stage.keys.stream, count=1)[0][1][b"n"] == b"job"


# --- Broken specs --------------------------------------------------------------------------------------------------


def blob_of(pattern: RepeatPattern) -> bytes:
    spec = StoredSpec("k", "job", pattern, b"\xc0", None, None, None, MissedFires.skip(), None)
    return schedule.encode_spec(spec)


@pytest.mark.parametrize(
    ("blob", "why"),
    [
        (None, "its bytes are missing"),
        (b"\xc1", "expected an array or a map"),
        (blob_of(RepeatPattern.cron("99 * * * *")), "minute '99'"),
        (blob_of(RepeatPattern.cron("* * * * *", "Mars/Olympus")), "time zone 'Mars/Olympus'"),
    ],
    ids=["no hash", "no spec", "no cron", "no zone"],
)
def test_a_broken_spec_becomes_a_dead_letter_and_the_others_fire(stage: Stage, blob: bytes | None, why: str) -> None:
    stage.add(every(payload="good"))
    stage.client.zadd(stage.keys.repeat, {"bad": 5})
    if blob is not None:
        stage.client.hset(stage.keys.repeat_spec("bad"), "spec", blob)

    stage.tick()

    assert payloads(stage.jobs) == ["good"]
    [letter] = stage.producer.peek_dlq()
    assert (letter.reason, letter.source_id, letter.payload, letter.job) == ("malformed", "", blob or b"", None)
    assert (letter.detail or "").startswith("repeat spec bad: ")
    assert why in (letter.detail or "")
    assert stage.gone("bad")
    assert stage.producer.replay_dlq() == 0


def test_a_spec_under_a_key_of_another_type_is_set_aside_and_the_key_stays(stage: Stage) -> None:
    stage.add(every(payload="good"))
    stage.client.zadd(stage.keys.repeat, {"bad": 5, b"\xff\xfe": 6})
    stage.client.set(stage.keys.repeat_spec("bad"), "precious", ex=60)

    stage.tick()
    stage.tick()

    assert payloads(stage.jobs) == ["good"]
    assert len(stage.producer.peek_dlq()) == 2
    assert stage.client.get(stage.keys.repeat_spec("bad")) == b"precious"
    assert stage.client.zcard(stage.keys.repeat) == 1


def test_a_batch_full_of_broken_specs_does_not_hold_up_what_is_behind_them(stage: Stage) -> None:
    stage.client.zadd(stage.keys.repeat, {f"bad{n}": n for n in range(10)})
    stage.add(every(payload="good"))

    while stage.tick(batch=4):
        pass

    assert payloads(stage.jobs) == ["good"]
    assert stage.producer.stats().dlq == 10


# --- Once ----------------------------------------------------------------------------------------------------------


def test_a_spare_fires_nothing_while_another_leads(stage: Stage) -> None:
    stage.add(every())
    stage.client.set(stage.keys.scheduler_lock, "other", px=MINUTE)

    assert stage.tick() is None
    assert stage.jobs == []


def test_a_call_made_a_second_time_with_the_same_arguments_fires_nothing(stage: Stage) -> None:
    made = stage.add(every())
    score = str(stage.score(made)).encode()
    stored = stage.fields(made)[b"spec"]
    spec = schedule.decode_spec(stored)
    lease = Lease(stage.keys.scheduler_lock, "me", MINUTE)
    stage.links[0].run(lease.take())
    now = server_ms(stage.client)
    work = schedule._Pass(stage.keys, lease, Room.of(1000, "reject", 0), now, 100, new_ids)
    planned = work.plan(made.encode(), score, [stored, None, None])

    first, second = stage.links[0].run(schedule.call_scripts([planned.call, planned.call], safe=True))

    assert (first, second) == ([1, 0], 0)
    assert len(stage.jobs) == 1
    assert stage.score(made) == int(score) + (spec.pattern.interval_ms or 0)


@pytest.mark.parametrize("act", [CUT, DROP_REPLY], ids=["cut", "reply lost"])
@pytest.mark.parametrize("at", [1, 2, 3], ids=["taking the lease", "looking", "firing"])
def test_a_pass_whose_connection_breaks_fires_each_spec_once(stage: Stage, proxy: Proxy, act: Act, at: int) -> None:
    for name in SCRIPTS:
        stage.client.script_load(script(name).source)
    for n in range(5):
        stage.add(every(key=f"k{n}", payload=n))
    proxy.on("EVALSHA", nth=at, act=act)

    stage.tick(url=proxy.url)

    assert sorted(payloads(stage.jobs)) == [0, 1, 2, 3, 4]


def test_scripts_that_the_server_forgot_are_sent_again(stage: Stage) -> None:
    stage.client.script_flush()
    stage.add(every())
    stage.client.zadd(stage.keys.repeat, {"bad": 5})
    stage.client.script_flush()

    stage.tick()

    assert len(stage.jobs) == 1
    assert stage.producer.stats().dlq == 1


def test_each_spec_fires_once_while_schedulers_wrest_the_lead_from_each_other(stage: Stage) -> None:
    for n in range(300):
        stage.add(every(10 * MINUTE, key=f"k{n}", payload=n))
    options: dict[str, Any] = {"queue": stage.queue, "tick_interval_ms": 1, "batch": 10, "lock_ttl_secs": 1}

    with running(*(Scheduler(stage.url, holder_id=f"s{n}", **options) for n in range(3))):
        while stage.client.xlen(stage.keys.stream) < 300:
            stage.client.delete(stage.keys.scheduler_lock)
        time.sleep(0.1)

    assert sorted(payloads(stage.jobs)) == list(range(300))


def test_a_spare_takes_over_within_the_lease_of_a_killed_leader(stage: Stage) -> None:
    options: dict[str, Any] = {"tick_interval_ms": 20, "lock_ttl_secs": 2}
    with process_of(stage.url, stage.queue, holder_id="leader", **options) as leader:
        eventually(lambda: stage.holder == b"leader")
        with running(Scheduler(stage.url, queue=stage.queue, holder_id="spare", **options)):
            leader.kill()
            leader.wait()
            killed = time.monotonic()
            stage.add(every(payload="late"))

            eventually(lambda: stage.jobs)

            assert time.monotonic() - killed < 2 + 1.5
            assert stage.holder == b"spare"
    assert payloads(stage.jobs) == ["late"]


def test_a_leader_stopped_between_plan_and_fire_past_its_lease_fires_nothing_twice(stage: Stage, proxy: Proxy) -> None:
    for name in SCRIPTS:
        stage.client.script_load(script(name).source)
    made = stage.add(every(payload=1))
    overtaken = threading.Event()
    stopped: list[int] = []

    def stop_and_overtake() -> None:
        os.kill(stopped[0], signal.SIGSTOP)
        eventually(lambda: stage.holder is None)
        assert stage.tick("spare") is False
        os.kill(stopped[0], signal.SIGCONT)
        overtaken.set()

    ready = threading.Event()
    proxy.on("EVALSHA", nth=3, act=call(lambda: (ready.wait(20), stop_and_overtake())))
    with process_of(proxy.url, stage.queue, holder_id="leader", tick_interval_ms=20, lock_ttl_secs=1) as leader:
        stopped.append(leader.pid)
        ready.set()
        assert overtaken.wait(30)
        seen = proxy.counts["EVALSHA"]
        eventually(lambda: proxy.counts["EVALSHA"] > seen + 2)

        assert payloads(stage.jobs) == [1]
        assert stage.fields(made)[b"fired"] == b"1"
        assert stage.holder == b"spare"


# --- The role ------------------------------------------------------------------------------------------------------


def test_a_running_scheduler_fires_in_the_rhythm_of_the_spec(stage: Stage) -> None:
    made = stage.add(every(20, limit=3, missed_fires=MissedFires.fire_all(9)), late_ms=None)

    with running(Scheduler(stage.url, queue=stage.queue, tick_interval_ms=5)):
        eventually(lambda: stage.gone(made))

    assert len(stage.jobs) == 3


def test_a_stopped_scheduler_gives_the_lead_back(stage: Stage) -> None:
    scheduler = Scheduler(stage.url, queue=stage.queue, tick_interval_ms=5)
    with running(scheduler):
        assert (eventually(lambda: stage.holder) or b"").startswith(b"s-")
        assert len(stage.holder or b"") == 38

    assert stage.holder is None


def test_stop_before_run_ends_it_at_once(stage: Stage) -> None:
    scheduler = Scheduler(stage.url, queue=stage.queue)
    scheduler.stop()

    scheduler.run_sync()

    assert stage.holder is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_the_process_in_good_order(stage: Stage, number: signal.Signals) -> None:
    with process_of(stage.url, stage.queue, tick_interval_ms=20) as process:
        eventually(lambda: stage.holder)

        process.send_signal(number)

        assert process.wait(10) == 0
        assert stage.holder is None


class Sink:
    """Hears of changes of leadership, and breaks on each when told to."""

    def __init__(self, *, breaks: bool) -> None:
        self.heard: list[LockOutcome] = []
        self.breaks = breaks

    def promoter_lock_outcome(self, event: LockOutcome) -> None:
        self.heard.append(event)
        if self.breaks:
            raise RuntimeError("broken sink")


@pytest.mark.parametrize("breaks", [False, True], ids=["", "broken sink"])
def test_changes_of_leadership_are_told_and_a_broken_sink_disturbs_nothing(stage: Stage, breaks: bool) -> None:
    stage.client.set(stage.keys.scheduler_lock, "other", px=MINUTE)
    sink = Sink(breaks=breaks)
    stage.add(every())

    with running(Scheduler(stage.url, queue=stage.queue, metrics=sink, tick_interval_ms=5)):
        eventually(lambda: sink.heard)
        stage.client.delete(stage.keys.scheduler_lock)
        eventually(lambda: stage.jobs)

    assert sink.heard == [LockOutcome("held", "scheduler"), LockOutcome("acquired", "scheduler")]


def test_a_scheduler_outlives_a_restart_of_its_server(start_like: Callable[..., Any], queue: str) -> None:
    own = start_like(config={"appendonly": "yes"})
    with redis.Redis.from_url(own.url) as client:
        there = Stage(own.url, client, queue)
        with running(Scheduler(own.url, queue=queue, tick_interval_ms=5, lock_ttl_secs=1)):
            eventually(lambda: there.holder)
            own.restart()
            there.add(every())
            eventually(lambda: there.jobs)
        there.close()


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="did you mean tick_interval_ms"):
        Scheduler(tick_intervall_ms=5)


# --- Beside the original -------------------------------------------------------------------------------------------

PRELUDE = """
import asyncio, os, sys
from chasquimq import Queue, MissedFiresPolicy, RepeatPattern, Worker
from chasquimq import _native
url, name = sys.argv[1:]
"""


@pytest.fixture
def native(stage: Stage) -> Callable[[str], subprocess.Popen[bytes]]:
    """Starts a program on the interpreter that has ChasquiMQ; it knows ``url`` and ``name``, the queue's."""
    if not NATIVE:
        pytest.skip("CHASQUI_NATIVE_PYTHON is not set")
    info = stage.client.info("server")
    if info.get("server_name") == "valkey" or int(info["redis_version"].split(".")[0]) < 8:
        pytest.skip("ChasquiMQ runs on Redis 8 only")
    return lambda code: subprocess.Popen([NATIVE, "-c", PRELUDE + code, stage.url, stage.queue])


def finish(process: subprocess.Popen[bytes]) -> None:
    with process:
        assert process.wait(30) == 0


@contextlib.contextmanager
def working(process: subprocess.Popen[bytes]) -> Iterator[None]:
    with process:
        try:
            yield
        finally:
            process.kill()


NATIVE_UPSERT = """
async def main():
    queue = Queue(name, redis_url=url)
    await queue.upsert_repeatable_job("plain", {"k": 1}, repeat=RepeatPattern.every(100_000))
    await queue.upsert_repeatable_job("all", [1, 2], repeat=RepeatPattern.every(100_000), limit=3,
                                      missed_fires=MissedFiresPolicy.fire_all(5))
    await queue.upsert_repeatable_job("cron", None, repeat=RepeatPattern.cron("0 8 * * *", tz="America/New_York"),
                                      missed_fires=MissedFiresPolicy.fire_once())
    await queue.close()
    os._exit(0)  # an ordinary end of the interpreter crashes at times: the extension's threads outlive it
asyncio.run(main())
"""


def test_specs_of_the_original_are_listed_and_fired_by_ours(
    stage: Stage, native: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    finish(native(NATIVE_UPSERT))

    metas = {meta.job_name: meta for meta in stage.producer.list_repeatable()}
    assert metas["plain"].missed_fires == MissedFires.skip()
    assert metas["all"].missed_fires == MissedFires.fire_all(5)
    assert metas["all"].limit == 3
    assert metas["cron"].pattern == RepeatPattern.cron("0 8 * * *", "America/New_York")

    now = server_ms(stage.client)
    stage.client.zadd(stage.keys.repeat, {metas["plain"].key: now, metas["all"].key: now - 550_000})
    stage.client.zadd(stage.keys.repeat, {metas["cron"].key: metas["cron"].next_fire_ms - 86_400_000 * 3})
    stage.tick()

    assert Counter((job.name, str(job.payload)) for job in stage.jobs) == {
        ("plain", "{'k': 1}"): 1,
        ("all", "[1, 2]"): 3,
        ("cron", "None"): 1,
    }
    assert stage.gone(metas["all"].key)
    assert (stage.score(metas["cron"].key) or 0) == metas["cron"].next_fire_ms


def test_specs_of_ours_are_fired_by_the_originals_scheduler(
    stage: Stage, native: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    mine = stage.add(
        every(100_000, payload={"k": 1}, name="mine", missed_fires=MissedFires.fire_all(4)), late_ms=550_000
    )
    knobs = RepeatPattern.cron("* * * * *", gap="skip", overlap="both")
    made = stage.producer.upsert_repeatable(RepeatableSpec("knobs", knobs, [1], missed_fires=MissedFires.fire_once()))
    stage.client.zadd(stage.keys.repeat, {made: server_ms(stage.client) - 600_000})

    run = "async def main():\n    await _native.Scheduler(url, name, tick_interval_ms=20).run()\nasyncio.run(main())"
    with working(native(run)):
        eventually(lambda: len(stage.jobs) == 5, within=20)

    assert Counter((job.name, str(job.payload)) for job in stage.jobs) == {("mine", "{'k': 1}"): 4, ("knobs", "[1]"): 1}
    assert stage.fields(mine)[b"fired"] == b"4"
    assert stage.fields(made)[b"dst"] == b"skip,both"


def test_a_worker_of_the_original_runs_what_our_scheduler_fires(
    stage: Stage, native: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    stage.add(every(payload={"n": 5}, name="mail", retry=RetryOverride(2, Backoff.fixed(1, jitter_ms=0))))
    stage.tick()
    run = """
async def handle(job):
    assert (job.name, job.data) == ("mail", {"n": 5})
    if job.attempt == 0:
        raise ValueError("first")
    return "ran"
async def main():
    await Worker(name, handle, redis_url=url, store_results=True, run_scheduler=False).run()
asyncio.run(main())
"""
    [job] = stage.jobs
    with working(native(run)):
        assert stage.producer.wait_for_result(job.id, 20) == "ran"


def test_ours_stands_back_while_the_originals_scheduler_leads_and_takes_over_after_it(
    stage: Stage, native: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    run = (
        "async def main():\n    await _native.Scheduler(url, name, tick_interval_ms=20, lock_ttl_secs=1).run()\n"
        "asyncio.run(main())"
    )
    with working(native(run)):
        eventually(lambda: stage.holder)
        assert stage.tick() is None
    stage.add(every(payload="late"))

    assert eventually(lambda: stage.tick() is not None, within=5)
    assert payloads(stage.jobs) == ["late"]
