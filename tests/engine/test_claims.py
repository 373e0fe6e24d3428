"""A Spark driver's claims without Spark: manifests, lease, settling, release, against real servers and lost replies."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

import chasqui.batch_jobs
import chasqui.claims
from chasqui import Backoff, Consumer, Producer, RetryOverride
from chasqui.batch_jobs import BatchJobs
from chasqui.claims import Claims, Planned, SettleTerms, settle, tell_ended
from chasqui.errors import CheckpointInUse, ConfigError, ConnectionLost
from chasqui.options import ConnectionOptions
from chasqui.outcomes import FAIL, OK, RETRY, Outcome, Outcomes, Settled
from chasqui.protocol.columns import JobSpans
from chasqui.protocol.keys import Keys
from chasqui.protocol.manifests import Place
from chasqui.protocol.scripts import script
from chasqui.redis_io import Link
from tests.proxy import CUT, DROP_REPLY, Act, Proxy
from tests.support import eventually

Open = Callable[..., Claims]


@pytest.fixture
def sid() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def link(url: str) -> Iterator[Link]:
    made = Link(ConnectionOptions(url=url))
    yield made
    made.close()


@pytest.fixture
def drive(url: str, sid: str) -> Iterator[Open]:
    """Starts drivers of the test's checkpoint."""
    made: list[Claims] = []

    def start(**given: Any) -> Claims:
        about = {"url": url, "sid": sid, "lease_ttl_ms": 1000, "max_batch_runs": 5} | given
        terms = SettleTerms(**{"claim_min_idle_ms": 30_000, **about.pop("terms", {})})
        connection = ConnectionOptions(url=about.pop("url"), reconnect_initial_ms=5, reconnect_max_ms=20)
        made.append(Claims(connection, terms=terms, **about))
        return made[-1]

    yield start
    for claims in made:
        claims.close()


def add(url: str, queue: str, count: int, **options: Any) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(list(range(count)), **options)


def pending(client: redis.Redis, queue: str, group: str = "default") -> dict[bytes, tuple[str, int, int]]:
    """Owner, idle time and deliveries, by entry id."""
    found = client.xpending_range(f"{{chasqui:{queue}}}:stream", group, "-", "+", 10_000)
    return {p["message_id"]: (p["consumer"].decode(), p["time_since_delivered"], p["times_delivered"]) for p in found}


def waiting(client: redis.Redis, queue: str) -> int:
    return int(client.xlen(f"{{chasqui:{queue}}}:stream"))


def read(link: Link, queue: str, sid: str, seq: int, plan: Planned, run: str = "run") -> list[bytes]:
    """What a task of that run does: entry ids of the jobs that are in the batch."""
    jobs = BatchJobs(link, queue=queue, group="default", sid=sid, seq=seq, token=plan.token)
    pieces = [(block, 0, size) for block, size in enumerate(plan.sizes, 1)]
    with jobs.task(run) as begun:
        return [entry_id for page in jobs.pages(pieces) for entry_id, _, _ in page] if begun else []


def test_a_batch_is_claimed_read_and_gone_once_settled(
    drive: Open, link: Link, client: redis.Redis, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 2500)
    driver = drive()

    assert driver.claim(queue, 1, limit=2200) == 2200
    ids = read(link, queue, sid, 1, driver.plan(queue, 1))
    assert list(pending(client, queue)) == ids
    driver.settle(queue, 1)

    assert len(ids) == len(set(ids)) == 2200
    assert waiting(client, queue) == 300
    assert pending(client, queue) == {}
    assert not [key for key in client.scan_iter(match=f"{{chasqui:{queue}}}*") if b":batch:" in key]


def test_settling_twice_or_in_two_places_at_once_acks_only_its_own(
    drive: Open, client: redis.Redis, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 3000)
    driver = drive()
    driver.claim(queue, 1, limit=3000)
    stream = f"{{chasqui:{queue}}}:stream"
    stolen = list(pending(client, queue))[:7]
    client.xclaim(stream, "default", "other", 0, stolen)
    links = [Link(ConnectionOptions(url=url)) for _ in range(4)]

    places = [threading.Thread(target=settle, args=[one, queue, sid, 1]) for one in links]
    for place in places:
        place.start()
    for place in places:
        place.join()

    assert {entry: owner for entry, (owner, _, _) in pending(client, queue).items()} == dict.fromkeys(stolen, "other")
    assert waiting(client, queue) == 7
    for one in links:
        one.close()


def test_a_driver_that_died_after_claiming_leaves_its_batch_to_the_next(
    drive: Open, link: Link, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 5)
    first = drive()
    first.claim(queue, 1, limit=3)
    first.close()

    second = drive()

    assert second.claim(queue, 1, limit=100) == 3
    assert len(read(link, queue, sid, 1, second.plan(queue, 1))) == 3
    second.settle(queue, 1)
    assert second.claim(queue, 2, limit=100) == 2


def test_a_driver_that_died_between_taking_jobs_and_closing_their_batch_leaves_it_to_the_next(
    drive: Open, link: Link, server: Any, client: redis.Redis, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 5)
    with Proxy(server.port) as proxy:
        dying = drive(url=proxy.url)
        proxy.on("EVALSHA", having=script("seal_batch").sha, act=Act(before=proxy.refuse, forward=False))
        with pytest.raises(ConnectionLost):
            dying.claim(queue, 1, limit=3)
        proxy.drop_all()
        assert len(pending(client, queue)) == 3

        second = drive()

        assert second.claim(queue, 1, limit=100) == 3
        assert len(read(link, queue, sid, 1, second.plan(queue, 1))) == 3
        second.settle(queue, 1)
        assert second.claim(queue, 2, limit=100) == 2
        dying.close()


@pytest.mark.parametrize("act", [CUT, DROP_REPLY], ids=["cut", "reply lost"])
def test_a_connection_that_breaks_while_claiming_takes_no_job_twice(
    drive: Open, link: Link, server: Any, url: str, queue: str, sid: str, act: Any
) -> None:
    add(url, queue, 3000)
    with Proxy(server.port) as proxy:
        driver = drive(url=proxy.url)
        driver.hold(queue)
        for nth in (2, 3, 4):
            proxy.on("EVALSHA", nth=nth, act=act)

        assert driver.claim(queue, 1, limit=2000) == 2000
        ids = read(link, queue, sid, 1, driver.plan(queue, 1))
        assert len(ids) == len(set(ids)) == 2000
        driver.settle(queue, 1)
        driver.close()


def test_a_second_driver_of_a_checkpoint_in_use_is_refused(drive: Open, url: str, queue: str) -> None:
    add(url, queue, 1)
    drive().hold(queue)

    with pytest.raises(CheckpointInUse, match="another driver takes jobs"):
        drive().hold(queue)


def test_a_driver_that_was_killed_is_replaced_when_its_lease_lapses(drive: Open, url: str, queue: str) -> None:
    killed = drive(lease_ttl_ms=1000)
    killed.hold(queue)
    killed._stop.set()  # its heart stops, and nothing is given back
    start = time.monotonic()

    drive().hold(queue)

    assert 0.3 < time.monotonic() - start < 3


def test_a_driver_that_was_replaced_takes_and_releases_nothing(
    drive: Open, client: redis.Redis, url: str, queue: str
) -> None:
    add(url, queue, 10)
    old = drive()
    old.claim(queue, 1, limit=5)
    token = old._tokens[queue]
    old.close()
    new = drive()
    new.plan(queue, 1)
    old._tokens[queue] = token

    with pytest.raises(CheckpointInUse):
        old.claim(queue, 2, limit=5)
    old._tokens[queue] = token
    assert old.leave(0.2) == 0

    assert len(pending(client, queue)) == 5
    assert max(idle for _, idle, _ in pending(client, queue).values()) < 20_000


def test_claims_are_renewed_while_a_batch_runs(drive: Open, client: redis.Redis, url: str, queue: str) -> None:
    add(url, queue, 1200)
    driver = drive(terms={"claim_min_idle_ms": 1000})
    driver.claim(queue, 1, limit=1200)

    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        assert max(idle for _, idle, _ in pending(client, queue).values()) < 1000
        time.sleep(0.05)

    assert {count for _, _, count in pending(client, queue).values()} == {1}
    driver.settle(queue, 1)


def test_a_greedy_worker_takes_over_a_dead_workers_job_and_none_of_a_batch_that_runs_long(
    drive: Open, client: redis.Redis, url: str, queue: str
) -> None:
    stream = f"{{chasqui:{queue}}}:stream"
    add(url, queue, 1200)
    driver = drive(terms={"claim_min_idle_ms": 1000})
    driver.claim(queue, 1, limit=1200)
    add(url, queue, 1)
    ((_, ((control, _),)),) = client.xreadgroup("default", "dead", {stream: ">"})
    greedy = Consumer(url, queue=queue, block_ms=20, claim_min_idle_ms=1000, delayed_enabled=False, run_scheduler=False)
    ran: list[str] = []

    async def handler(job: Any) -> None:
        ran.append(job.entry_id)
        await asyncio.sleep(2)  # twice as long as the threshold, with the batch in hand
        greedy.stop()

    asyncio.run(greedy.run(handler))

    assert ran == [control.decode()]
    assert len(pending(client, queue)) == 1200
    driver.settle(queue, 1)
    assert waiting(client, queue) == 0


def test_what_is_no_job_in_a_manifest_is_passed_over(
    drive: Open, link: Link, client: redis.Redis, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 2)
    first = drive()
    first.claim(queue, 1, limit=2)
    first.close()
    ids = list(pending(client, queue))
    client.hset(f"{{chasqui:{queue}}}:spark:{sid}:batch:1", "b1", b"junk \xff:7 %s %s:x" % tuple(ids))
    client.hset(f"{{chasqui:{queue}}}:spark:{sid}:session", "terms", "junk")
    second = drive()

    assert read(link, queue, sid, 1, second.plan(queue, 1))[:1] == ids[:1]
    second.settle(queue, 1)

    assert not client.exists(f"{{chasqui:{queue}}}:spark:{sid}:batch:1")


def test_jobs_of_silent_workers_are_taken_with_their_count(
    drive: Open, link: Link, client: redis.Redis, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 3)
    driver = drive()
    driver.hold(queue)
    stream = f"{{chasqui:{queue}}}:stream"
    client.xreadgroup("default", "dead", {stream: ">"}, count=1)
    (stale,) = pending(client, queue)
    client.xclaim(stream, "default", "dead", 0, [stale], idle=31_000, retrycount=2, justid=True)

    assert driver.claim(queue, 1, limit=10) == 3

    jobs = BatchJobs(link, queue=queue, group="default", sid=sid, seq=1, token=1)
    found = [e for page in jobs.pages([(b, 0, n) for b, n in enumerate(driver.plan(queue, 1).sizes, 1)]) for e in page]
    assert {entry_id: before for entry_id, _, before in found}[stale] == 2
    assert pending(client, queue)[stale][2] == 3
    driver.settle(queue, 1)
    assert pending(client, queue) == {}


def test_a_batch_that_is_run_again_drops_what_others_have_and_takes_back_what_is_stale(
    drive: Open, link: Link, client: redis.Redis, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 6)
    first = drive()
    first.claim(queue, 1, limit=6)
    first.close()
    stream = f"{{chasqui:{queue}}}:stream"
    ids = list(pending(client, queue))
    client.xack(stream, "default", ids[0])
    client.xclaim(stream, "default", "alive", 0, [ids[1]])
    client.xclaim(stream, "default", "dead", 0, [ids[2]], idle=40_000, justid=True)

    planned = drive().plan(queue, 1)

    assert planned.dropped == 2
    assert read(link, queue, sid, 1, planned) == ids[2:]
    assert pending(client, queue)[ids[1]][0] == "alive"


def test_nothing_is_claimed_beyond_the_entry_that_was_newest_at_the_start(
    drive: Open, client: redis.Redis, url: str, queue: str
) -> None:
    add(url, queue, 1500)
    driver = drive()
    upto = client.xinfo_stream(f"{{chasqui:{queue}}}:stream")["last-generated-id"].decode()
    add(url, queue, 50)

    assert driver.claim(queue, 1, limit=100_000, upto=upto) == 1500
    driver.settle(queue, 1)
    assert driver.claim(queue, 2, limit=100_000, upto=upto) == 0
    assert driver.claim(queue, 2, limit=100_000) == 50


def test_a_run_that_has_an_end_does_not_take_again_what_it_has_given_back(
    drive: Open, client: redis.Redis, url: str, queue: str
) -> None:
    add(url, queue, 3)
    driver = drive(terms={"ack": "settle", "leftover": "release", "claim_min_idle_ms": 60})
    upto = client.xinfo_stream(f"{{chasqui:{queue}}}:stream")["last-generated-id"].decode()
    assert driver.claim(queue, 1, limit=10, upto=upto) == 3

    driver.settle(queue, 1)
    time.sleep(0.05)  # three times as often as this stale jobs are looked for

    assert driver.claim(queue, 2, limit=10, upto=upto) == 0


def test_a_limit_in_bytes_holds_for_stale_jobs_too_and_what_was_taken_is_told(
    drive: Open, client: redis.Redis, url: str, queue: str
) -> None:
    with Producer(url, queue=queue) as producer:
        for _ in range(12):
            producer.add(b"x" * 400_000)
    driver = drive()

    assert driver.claim(queue, 1, limit=100, max_bytes=2_000_000) == 10
    assert driver.claimed_bytes > 4_000_000
    client.xclaim(f"{{chasqui:{queue}}}:stream", "default", "dead", 0, list(pending(client, queue)), idle=40_000)
    driver._next_stale.clear()  # as if the time for the next look had come
    assert driver.claim(queue, 2, limit=100, max_bytes=1_000_000) == 3
    assert driver.claimed_bytes > 1_200_000
    driver.claim(queue, 3, limit=100)
    assert driver.claim(queue, 4, limit=100) == 0
    assert driver.claimed_bytes == 0


def test_a_query_goes_on_when_the_server_is_emptied_under_it(
    drive: Open, link: Link, client: redis.Redis, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 3)
    driver = drive()
    driver.claim(queue, 1, limit=10)
    plan = driver.plan(queue, 1)
    client.delete(*client.scan_iter(match=f"{{chasqui:{queue}}}*"))

    assert read(link, queue, sid, 1, plan) == []
    driver.settle(queue, 1)
    add(url, queue, 2)

    assert driver.claim(queue, 2, limit=10) + driver.claim(queue, 2, limit=10) == 2
    assert len(read(link, queue, sid, 2, driver.plan(queue, 2))) == 2


def test_a_paused_queue_gives_nothing(drive: Open, client: redis.Redis, url: str, queue: str) -> None:
    add(url, queue, 3)
    client.set(f"{{chasqui:{queue}}}:paused", 1)

    assert drive().claim(queue, 1, limit=10) == 0


def test_a_stream_that_was_deleted_is_made_again(drive: Open, client: redis.Redis, url: str, queue: str) -> None:
    driver = drive()
    driver.claim(queue, 1, limit=10)
    client.delete(f"{{chasqui:{queue}}}:stream")

    assert driver.claim(queue, 1, limit=10) == 0
    add(url, queue, 2)
    assert driver.claim(queue, 1, limit=10) == 2


def test_a_query_goes_on_when_its_stream_is_deleted_under_a_batch(
    drive: Open, link: Link, client: redis.Redis, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 3)
    driver = drive()
    driver.claim(queue, 1, limit=10)
    plan = driver.plan(queue, 1)
    ids = list(pending(client, queue))
    client.delete(f"{{chasqui:{queue}}}:stream")

    assert read(link, queue, sid, 1, plan) == []
    assert Outcomes(link, queue, SettleTerms()).settle([Outcome(ids[0], OK), Outcome(ids[1], FAIL)]) == Settled(gone=2)
    driver.settle(queue, 1)

    add(url, queue, 2)
    assert driver.claim(queue, 2, limit=10) == 2


@pytest.mark.parametrize("ack", ["commit", "settle"])
@pytest.mark.parametrize("leftover", ["retry", "release"])
def test_a_driver_that_starts_again_settles_a_batch_whose_stream_is_gone(
    drive: Open, client: redis.Redis, url: str, queue: str, ack: str, leftover: str
) -> None:
    add(url, queue, 3)
    first = drive(terms={"ack": ack, "leftover": leftover})
    first.claim(queue, 1, limit=10)
    first.close()
    client.delete(f"{{chasqui:{queue}}}:stream")
    second = drive(terms={"ack": ack, "leftover": leftover})

    second.settle(queue, 1)

    add(url, queue, 2)
    assert second.claim(queue, 2, limit=10) == 2


def test_a_batch_in_hand_is_planned_and_released_also_when_its_stream_is_gone(
    drive: Open, client: redis.Redis, url: str, queue: str
) -> None:
    other = f"{queue}-b"
    add(url, queue, 3)
    add(url, other, 2)
    first = drive()
    first.claim(queue, 1, limit=10)
    first.close()
    second = drive()
    second.hold(queue)
    client.delete(f"{{chasqui:{queue}}}:stream")
    assert second.plan(queue, 1).dropped == 3
    second.claim(other, 1, limit=10)
    client.delete(f"{{chasqui:{queue}}}:stream")

    assert second.leave(1) == 2


def test_another_group_under_the_same_checkpoint_is_refused(drive: Open, url: str, queue: str) -> None:
    add(url, queue, 1)
    first = drive(terms={"group": "a"})
    first.claim(queue, 1, limit=1)
    first.close()

    with pytest.raises(ConfigError, match=r"group expects 'a'.*got 'b'.*another checkpointLocation"):
        drive(terms={"group": "b"}).claim(queue, 1, limit=1)


@pytest.mark.parametrize("odd", ["", "deleted", "override", "another's"])
def test_jobs_that_are_read_in_bytes_are_those_that_are_read_one_by_one(
    drive: Open, link: Link, client: redis.Redis, url: str, queue: str, sid: str, odd: str
) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(list(range(150)), name="n")
        if odd == "override":
            producer.add(1, name="n", retry=RetryOverride(7))
        producer.add_bulk(list(range(150)), name="n")
    driver = drive()
    claimed = driver.claim(queue, 1, limit=1000)
    plan = driver.plan(queue, 1)
    assert list(plan.sizes) == [claimed]
    pieces = [(1, 0, 150), (1, 151, claimed)] if odd == "another's" else [(1, 0, claimed)]
    if odd == "deleted":
        stream = f"{{chasqui:{queue}}}:stream"
        client.xdel(stream, client.xrange(stream)[150][0])

    def batch() -> BatchJobs:
        return BatchJobs(link, queue=queue, group="default", sid=sid, seq=1, token=plan.token)

    pages = list(batch().job_pages(pieces))

    found = [(i, flat) for page in pages for i, flat, *_ in (page.entries() if isinstance(page, JobSpans) else page)]
    assert found == [(i, flat) for page in batch().pages(pieces) for i, flat, _ in page]
    assert len(found) == claimed - (odd in ("deleted", "another's"))
    assert isinstance(pages[0], JobSpans)
    assert all(isinstance(page, JobSpans) for page in pages) is (not odd)


def test_large_jobs_are_claimed_and_read_in_small_pages(
    drive: Open, link: Link, url: str, queue: str, sid: str
) -> None:
    with Producer(url, queue=queue) as producer:
        for _ in range(30):
            producer.add(b"x" * 900_000)
    driver = drive()

    assert driver.claim(queue, 1, limit=100) == 30
    sizes = driver.plan(queue, 1).sizes
    assert max(sizes) <= 10
    pages = BatchJobs(link, queue=queue, group="default", sid=sid, seq=1, token=1).pages(
        [(block, 0, size) for block, size in enumerate(sizes, 1)]
    )
    assert sum(len(page) for page in pages) == 30
    driver.settle(queue, 1)


def test_a_batch_that_never_ends_is_cut_into_tenths_until_the_poison_stands_alone(
    drive: Open, link: Link, client: redis.Redis, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 20)
    poison = client.xrange(f"{{chasqui:{queue}}}:stream", count=1)[0][0]
    done = seq = 0
    while waiting(client, queue):
        seq += 1
        for _ in range(10):
            driver = drive(max_batch_runs=1)
            jobs = driver.claim(queue, seq, limit=100)
            plan = driver.plan(queue, seq)
            if poison in read(link, queue, sid, seq, plan):
                driver.close()  # the poison ends this run, and the batch is run again
                continue
            driver.settle(queue, seq)
            done += jobs if plan.sizes else 0
            driver.close()
            break

    assert done == 19
    assert seq < 30
    (letter,) = client.xrange(f"{{chasqui:{queue}}}:dlq")
    assert letter[1][b"reason"] == b"retries_exhausted"
    assert letter[1][b"source_id"] == poison


def test_a_batch_that_was_planned_and_never_begun_burns_no_run(
    drive: Open, link: Link, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 3)
    for _ in range(4):
        driver = drive(max_batch_runs=1)
        driver.claim(queue, 1, limit=10)
        assert driver.plan(queue, 1).sizes == (3,)
        driver.close()

    driver = drive(max_batch_runs=1)
    assert len(read(link, queue, sid, 1, driver.plan(queue, 1))) == 3
    driver.close()
    assert drive(max_batch_runs=1).plan(queue, 1).sizes == ()


def test_a_batch_that_has_no_jobs_left_is_passed_over_however_often_it_was_run(
    drive: Open, link: Link, client: redis.Redis, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 1)
    driver = drive(max_batch_runs=1)
    driver.claim(queue, 1, limit=1)
    ids = read(link, queue, sid, 1, driver.plan(queue, 1))
    client.xack(f"{{chasqui:{queue}}}:stream", "default", *ids)
    driver.close()

    assert drive(max_batch_runs=1).plan(queue, 1).sizes == ()

    assert not client.exists(f"{{chasqui:{queue}}}:dlq")


def test_a_task_of_a_driver_that_was_replaced_reads_nothing(
    drive: Open, link: Link, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 1)
    old = drive()
    old.claim(queue, 1, limit=1)
    plan = old.plan(queue, 1)
    old.close()
    drive().plan(queue, 1)

    with pytest.raises(CheckpointInUse, match="batch 1"):
        read(link, queue, sid, 1, plan)


def test_a_driver_that_starts_at_once_waits_for_tasks_of_the_one_before(
    drive: Open, link: Link, client: redis.Redis, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 4)
    old = drive(terms={"ack": "settle"})
    old.claim(queue, 1, limit=4)
    plan = old.plan(queue, 1)
    jobs = BatchJobs(link, queue=queue, group="default", sid=sid, seq=1, token=plan.token)
    new = drive(terms={"ack": "settle"})
    planned: list[Planned] = []
    starting = threading.Thread(target=lambda: planned.append(new.plan(queue, 1)))
    with jobs.task("run"):
        old.close()
        starting.start()
        starting.join(0.5)
        assert starting.is_alive()
        ids = list(pending(client, queue))
        Outcomes(link, queue, SettleTerms(), jobs.consumer).settle([Outcome(entry, OK) for entry in ids[:3]])
    starting.join()

    assert read(link, queue, sid, 1, planned[0]) == ids[3:]


def test_a_driver_that_starts_at_once_waits_for_jobs_that_may_be_at_work_behind_their_tasks(
    drive: Open, link: Link, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 4)
    old = drive()
    old.claim(queue, 1, limit=4)
    read(link, queue, sid, 1, old.plan(queue, 1))
    old.leave(0, linger_s=1)
    start = time.monotonic()

    assert drive().plan(queue, 1).sizes == (4,)

    assert time.monotonic() - start > 0.5


# Stopping


def test_a_stopped_driver_waits_for_tasks_that_are_at_work(
    drive: Open, link: Link, client: redis.Redis, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 4)
    driver = drive()
    driver.claim(queue, 1, limit=4)
    jobs = BatchJobs(link, queue=queue, group="default", sid=sid, seq=1, token=driver.plan(queue, 1).token)
    run, released = uuid.uuid4().hex, list[int]()
    leaving = threading.Thread(target=lambda: released.append(driver.leave(20)))
    with jobs.task(run):
        tell_ended(link, run, failed=False)
        leaving.start()
        eventually(lambda: client.hget(f"{{chasqui:{queue}}}:spark:{sid}:session", "until") == b"0")
        leaving.join(0.3)
        assert leaving.is_alive()
        assert max(idle for _, idle, _ in pending(client, queue).values()) < 20_000

    leaving.join()

    assert released == [4]


def test_jobs_of_a_task_that_never_ends_stay_claimed(
    drive: Open, link: Link, client: redis.Redis, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 4)
    driver = drive()
    driver.claim(queue, 1, limit=4)
    jobs = BatchJobs(link, queue=queue, group="default", sid=sid, seq=1, token=driver.plan(queue, 1).token)
    run = uuid.uuid4().hex
    tell_ended(link, run, failed=False)

    with jobs.task(run):
        assert driver.leave(0.2, tasks_s=0.2) == 0

    assert max(idle for _, idle, _ in pending(client, queue).values()) < 20_000


def test_jobs_of_a_task_that_was_killed_are_given_back_when_it_has_been_silent(
    drive: Open, link: Link, url: str, queue: str, sid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chasqui.batch_jobs, "BEAT_S", 0.05)
    monkeypatch.setattr(chasqui.claims, "_SILENT_MS", 500)
    add(url, queue, 4)
    driver = drive()
    driver.claim(queue, 1, limit=4)
    token = driver.plan(queue, 1).token
    run, released = uuid.uuid4().hex, list[int]()
    tell_ended(link, run, failed=False)
    link.run(Place(Keys(queue), "default", sid).begin_task(1, token, run, "killed"))
    leaving = threading.Thread(target=lambda: released.append(driver.leave(5)))

    with BatchJobs(link, queue=queue, group="default", sid=sid, seq=1, token=token).task(run):
        leaving.start()
        leaving.join(1)
        assert leaving.is_alive()
    leaving.join()

    assert released == [4]


def test_jobs_that_may_be_at_work_behind_their_tasks_are_given_back_after_these_have_had_their_time(
    drive: Open, link: Link, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 4)
    driver = drive()
    driver.claim(queue, 1, limit=4)
    run = uuid.uuid4().hex
    read(link, queue, sid, 1, driver.plan(queue, 1), run)
    tell_ended(link, run, failed=False)
    start = time.monotonic()

    assert driver.leave(0.2, 0.5) == 4

    assert time.monotonic() - start >= 0.5


def test_a_planned_batch_that_no_task_has_begun_is_given_back_at_once_and_a_late_task_reads_nothing(
    drive: Open, link: Link, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 4)
    driver = drive()
    driver.claim(queue, 1, limit=4)
    plan = driver.plan(queue, 1)
    start = time.monotonic()

    assert driver.leave(5, 5) == 4

    assert time.monotonic() - start < 2
    assert read(link, queue, sid, 1, plan) == []


def test_a_queue_that_makes_trouble_does_not_keep_the_jobs_of_another(
    drive: Open, client: redis.Redis, url: str, queue: str, sid: str
) -> None:
    driver = drive()
    for name in (queue, f"{queue}-b"):
        add(url, name, 2)
        driver.claim(name, 1, limit=2)
    session = f"{{chasqui:{queue}}}:spark:{sid}:session"
    client.delete(session)
    client.set(session, "broken", ex=60)

    assert driver.leave(0.1) == 2


def test_names_of_drivers_that_hold_nothing_are_forgotten(
    drive: Open, client: redis.Redis, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 2)
    driver = drive()
    driver.claim(queue, 1, limit=2)
    driver.settle(queue, 1)

    driver.leave(0.1)

    assert client.xinfo_consumers(f"{{chasqui:{queue}}}:stream", "default") == []


@pytest.mark.parametrize("told", ["stopped", "failed", ""])
def test_a_stopped_driver_releases_a_running_batch_only_on_the_listeners_word(
    drive: Open, link: Link, client: redis.Redis, url: str, queue: str, sid: str, told: str
) -> None:
    add(url, queue, 4)
    driver = drive()
    driver.claim(queue, 1, limit=4)
    run = uuid.uuid4().hex
    read(link, queue, sid, 1, driver.plan(queue, 1), run)
    if told:
        tell_ended(link, run, failed=told == "failed")

    assert driver.leave(0.3) == (4 if told == "stopped" else 0)

    free = [idle >= 30_000 and count == 0 for _, idle, count in pending(client, queue).values()]
    assert free == [told == "stopped"] * 4
    again = drive()
    assert sum(again.plan(queue, 1).sizes) == (0 if told == "stopped" else 4)
    again.settle(queue, 1)
    assert again.claim(queue, 2, limit=10) == (4 if told == "stopped" else 0)


def test_a_stopped_driver_releases_at_once_what_was_never_planned(
    drive: Open, client: redis.Redis, url: str, queue: str
) -> None:
    add(url, queue, 4)
    driver = drive()
    driver.claim(queue, 1, limit=4)
    start = time.monotonic()

    assert driver.leave(5) == 4

    assert time.monotonic() - start < 2
    assert {count for _, _, count in pending(client, queue).values()} == {0}


def test_a_batch_that_was_committed_is_not_released(
    drive: Open, link: Link, client: redis.Redis, url: str, queue: str, sid: str
) -> None:
    add(url, queue, 4)
    driver = drive()
    driver.claim(queue, 1, limit=4)
    run = uuid.uuid4().hex
    read(link, queue, sid, 1, driver.plan(queue, 1), run)
    leaving = threading.Thread(target=driver.leave, args=[5])
    leaving.start()

    settle(link, queue, sid, 1)
    tell_ended(link, run, failed=False)
    leaving.join()

    assert waiting(client, queue) == 0


# Outcomes


@pytest.fixture
def outcomes(link: Link, queue: str) -> Outcomes:
    return Outcomes(link, queue, SettleTerms(store_results=True, retry_jitter_ms=0))


def test_outcomes_end_retry_and_bury_jobs_once(
    drive: Open, outcomes: Outcomes, client: redis.Redis, url: str, queue: str
) -> None:
    with Producer(url, queue=queue) as producer:
        for number in range(4):
            producer.add(number, id=f"j{number}", name="n", retry=RetryOverride(2, Backoff.fixed(25_000)))
    drive().claim(queue, 1, limit=10)
    ids = list(pending(client, queue))
    told = [
        Outcome(ids[0], OK, result=b"\x07"),
        Outcome(ids[1], RETRY, error="ValueError: no"),
        Outcome(ids[2], FAIL, error="bad"),
        Outcome(ids[3], RETRY, delay_ms=5),
    ]

    assert outcomes.settle(told) == Settled(done=1, retried=2, dead=1)
    assert outcomes.settle(told) == Settled(gone=4)

    assert client.get(f"{{chasqui:{queue}}}:result:j0") == b"\x07"
    (letter,) = client.xrange(f"{{chasqui:{queue}}}:dlq")
    assert (letter[1][b"reason"], letter[1][b"error"], letter[1][b"n"]) == (b"unrecoverable", b"bad", b"n")
    seconds, _ = client.time()
    waits = sorted(
        at / 1000 - seconds for _, at in client.zrange(f"{{chasqui:{queue}}}:delayed", 0, -1, withscores=True)
    )
    assert waits[0] < 2 < 20 < waits[1]
    events = [(e[b"id"], e[b"e"]) for _, e in client.xrange(f"{{chasqui:{queue}}}:events")]
    assert [e for i, e in events if i == b"j0"] == [b"active", b"completed"]
    assert [e for i, e in events if i == b"j1"] == [b"active", b"failed", b"retry-scheduled"]
    assert [e for i, e in events if i == b"j2"] == [b"active", b"failed", b"dlq"]


def test_a_job_without_runs_left_is_given_up(
    drive: Open, outcomes: Outcomes, client: redis.Redis, url: str, queue: str
) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add(1, retry=RetryOverride(1))
    drive().claim(queue, 1, limit=10)

    assert outcomes.settle([Outcome(entry, RETRY, error="x") for entry in pending(client, queue)]) == Settled(dead=1)

    (letter,) = client.xrange(f"{{chasqui:{queue}}}:dlq")
    assert letter[1][b"reason"] == b"retries_exhausted"


def test_outcomes_touch_nothing_that_an_ordinary_worker_holds(
    drive: Open, outcomes: Outcomes, client: redis.Redis, url: str, queue: str
) -> None:
    add(url, queue, 3)
    drive().claim(queue, 1, limit=10)
    ids = list(pending(client, queue))
    client.xclaim(f"{{chasqui:{queue}}}:stream", "default", "c-1", 0, ids)

    found = outcomes.settle([Outcome(ids[0], OK), Outcome(ids[1], RETRY), Outcome(ids[2], FAIL)])

    assert found == Settled(gone=3)
    assert len(pending(client, queue)) == waiting(client, queue) == 3


@pytest.mark.parametrize("leftover", ["retry", "ok", "release"])
def test_leftovers_of_a_committed_batch_go_the_way_that_was_chosen(
    drive: Open, outcomes: Outcomes, client: redis.Redis, url: str, queue: str, leftover: str
) -> None:
    add(url, queue, 3)
    driver = drive(terms={"ack": "settle", "leftover": leftover})
    driver.claim(queue, 1, limit=3)
    driver.plan(queue, 1)
    ids = list(pending(client, queue))
    outcomes.settle([Outcome(ids[0], OK)])

    driver.settle(queue, 1)

    delayed = client.zcard(f"{{chasqui:{queue}}}:delayed")
    assert (waiting(client, queue), delayed) == {"retry": (0, 2), "ok": (0, 0), "release": (2, 0)}[leftover]
    if leftover == "release":
        assert all(idle >= 30_000 and count == 0 for _, idle, count in pending(client, queue).values())


def test_the_heart_of_a_batch_goes_on_after_an_outage(
    drive: Open, server: Any, client: Any, url: str, queue: str
) -> None:
    add(url, queue, 2)
    with Proxy(server.port) as proxy:
        driver = drive(url=proxy.url, terms={"claim_min_idle_ms": 300})
        driver.claim(queue, 1, limit=2)
        for nth in range(1, 6):
            proxy.on("EVALSHA", nth=nth, act=CUT)

        eventually(lambda: proxy.counts["EVALSHA"] > 12)
        assert max(idle for _, idle, _ in pending(client, queue).values()) < 1000
        driver.settle(queue, 1)
        driver.close()
