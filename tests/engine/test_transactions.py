"""Exactly-once adds without Spark: staged, committed, aborted, resumed; every step broken in every way."""

from __future__ import annotations

import itertools
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread
from typing import Any

import msgpack
import pytest
import redis

from chasqui import ConfigError, OptionError, QueueFull
from chasqui.embedded import EmbeddedServer, start
from chasqui.errors import ChasquiError, ConnectionLost, DecodeError, LedgerAhead, LedgerBroken, StageExpired
from chasqui.ids import new_ids
from chasqui.options import ConnectionOptions
from chasqui.protocol.blocks import Dead, Jobs
from chasqui.protocol.keys import AppKeys, Keys
from chasqui.staging import Staged, Stager
from chasqui.transactions import Terms, Transactions
from tests.conftest import server_binaries
from tests.engine.seen import in_delayed, in_stream, keys_of
from tests.proxy import CUT, DROP_REPLY, Act, Proxy, call
from tests.support import eventually

NOW = 1_794_978_620_538
TERMS = Terms(block_timeout_ms=0)


def jobs(*numbers: int, name: bytes = b"work", **columns: object) -> Jobs:
    payloads = [msgpack.packb({"n": n}) for n in numbers]
    return Jobs(NOW, new_ids(len(numbers), NOW), payloads, name, **columns)  # type: ignore[arg-type]


def options(url: str, attempts: int = 0) -> ConnectionOptions:
    return ConnectionOptions(url=url, reconnect_attempts=attempts, reconnect_initial_ms=1)


def numbers(client: redis.Redis, queue: str) -> Counter[int]:
    return Counter(job.payload["n"] for job in [*in_stream(client, queue), *in_delayed(client, queue)])


def stage(url: str, queues: dict[str, Jobs], *, ttl_ms: int = 100_000, attempts: int = 3) -> Staged:
    with Stager(options(url, attempts), stage_ttl_ms=ttl_ms) as stager:
        for queue, some in queues.items():
            stager.add(queue, some)
        return stager.finish()


def commit(url: str, app: str, version: int, *staged: Staged, terms: Terms = TERMS, **more: Any) -> bool:
    with Transactions(options(url), terms) as transactions:
        return transactions.commit(app, version, staged, **more)


@pytest.fixture
def app(client: redis.Redis) -> Iterator[str]:
    """A writer of the test's own; afterwards nothing of it may be left that would stay for ever."""
    name = f"app-{uuid.uuid4().hex[:12]}/main"
    yield name
    keys = list(client.scan_iter(match=f"{{chasqui-txn:{name}}}*", count=1000))
    leaked = [key for key in keys if client.ttl(key) == -1]
    if keys:
        client.delete(*keys)
    assert not leaked, f"keys without expiry: {leaked}"


@pytest.fixture
def other(queue: str, client: redis.Redis) -> Iterator[str]:
    yield f"{queue}-b"
    for key in client.scan_iter(match=f"{{chasqui:{queue}-b}}*", count=1000):
        client.delete(key)


# --- The ordinary way ----------------------------------------------------------------------------------------------


def test_nothing_is_visible_before_the_commit_and_all_after_it(
    url: str, client: redis.Redis, queue: str, app: str
) -> None:
    staged = stage(url, {queue: jobs(*range(2500))})
    assert not client.exists(Keys(queue).stream)

    assert commit(url, app, 0, staged) is True

    assert [job.payload["n"] for job in in_stream(client, queue)] == list(range(2500))
    assert keys_of(client, queue) == sorted([Keys(queue).stream, Keys(queue).ledger(app)])


def test_a_version_that_another_query_has_written_is_refused_and_its_rows_are_not_dropped_silently(
    url: str, client: redis.Redis, queue: str, app: str
) -> None:
    assert commit(url, app, 0, stage(url, {queue: jobs(1)}), by="a") is True
    assert commit(url, app, 0, stage(url, {queue: jobs(2)}), by="a") is False

    for complete in (True, False):
        with pytest.raises(LedgerAhead, match=r"written by another query, a,.*txnAppId"):
            commit(url, app, 0, stage(url, {queue: jobs(3)}), by="b", complete=complete)

    assert commit(url, app, 0, stage(url, {queue: jobs(4)})) is False  # who does not tell is not compared
    assert numbers(client, queue) == Counter([1])
    assert keys_of(client, queue) == sorted([Keys(queue).stream, Keys(queue).ledger(app)])


def test_stages_expire_until_they_are_adopted_and_ledgers_after_they_are_closed(
    url: str, client: redis.Redis, queue: str, app: str
) -> None:
    staged = stage(url, {queue: jobs(1)}, ttl_ms=60_000)
    assert 50 < client.ttl(Keys(queue).stage(staged.stage_id)) <= 60

    commit(url, app, 0, staged, terms=Terms(ledger_ttl_ms=70_000))

    assert 60 < client.ttl(Keys(queue).ledger(app)) <= 70
    assert 60 < client.ttl(AppKeys(app).home) <= 70


def test_jobs_go_where_they_belong(url: str, client: redis.Redis, queue: str, app: str) -> None:
    """Named and unnamed, now and later, with an override, with an id, and rows that are no jobs."""
    with Stager(options(url), stage_ttl_ms=60_000) as stager:
        stager.add(queue, jobs(1, 2, name=b""))
        stager.add(queue, jobs(3, 4, names=[b"a", b""], retries=[b"", b"\x92\x07\xc0"]))
        stager.add(queue, jobs(5, 6, run_at_ms=[NOW + 5, None]))
        given = Jobs(NOW, ["x", "y", "x"], [b"\x81\xa1n\x07"] * 3, run_at_ms=[None, NOW, None], marker_ttls_s=[90] * 3)
        stager.add(queue, given)
        stager.add_dead(queue, Dead(b"bytes", b"name", "malformed", "why"))
        staged = stager.finish()

    commit(url, app, 0, staged)

    seen = {job.payload["n"]: job for job in in_stream(client, queue)}
    assert {n: job.name for n, job in seen.items()} == {1: "", 2: "", 3: "a", 4: "", 6: "work", 7: ""}
    assert seen[4].retry is not None
    assert seen[4].retry.max_attempts == 7
    assert [(job.payload["n"], job.at) for job in in_delayed(client, queue)] == [(7, NOW), (5, NOW + 5)]
    assert len(in_stream(client, queue)) == 6  # the second x is taken
    assert 80 < client.ttl(Keys(queue).dedup("x")) <= 90
    assert client.get(Keys(queue).delayed_index("y")) is not None
    [(_, letter)] = client.xrange(Keys(queue).dlq)
    assert letter == {b"d": b"bytes", b"n": b"name", b"source_id": b"", b"reason": b"malformed", b"detail": b"why"}


def test_a_batch_without_rows_is_a_version_too(url: str, app: str) -> None:
    assert commit(url, app, 4, stage(url, {})) is True
    assert commit(url, app, 4, stage(url, {})) is False
    with pytest.raises(LedgerAhead):
        commit(url, app, 3, stage(url, {}))


def test_jobs_of_more_than_a_block_stay_in_order_and_blocks_stay_small(
    url: str, client: redis.Redis, queue: str, app: str
) -> None:
    big = Jobs(NOW, new_ids(7, NOW), [msgpack.packb(bytes([n]) * 400_000) for n in range(7)])
    staged = stage(url, {queue: big})
    sizes = [len(block) for block in client.hvals(Keys(queue).stage(staged.stage_id))]

    commit(url, app, 0, staged)

    assert max(sizes) < 1 << 20
    assert [job.payload[:1] for job in in_stream(client, queue)] == [bytes([n]) for n in range(7)]


# --- Versions ------------------------------------------------------------------------------------------------------


def test_the_same_version_again_publishes_nothing_and_leaves_no_stage(
    url: str, client: redis.Redis, queue: str, app: str
) -> None:
    commit(url, app, 7, stage(url, {queue: jobs(1)}))

    assert commit(url, app, 7, stage(url, {queue: jobs(1)})) is False

    assert numbers(client, queue) == {1: 1}
    assert not [key for key in keys_of(client, queue) if ":stage:" in key]
    assert not list(client.scan_iter(match=f"{AppKeys(app).prefix}:manifest:*"))


def test_a_lower_version_fails_and_names_the_way_out(url: str, client: redis.Redis, queue: str, app: str) -> None:
    commit(url, app, 7, stage(url, {queue: jobs(1)}))

    with pytest.raises(LedgerAhead, match=r"version 6 .* version 7.*txnAppId.*txn reset"):
        commit(url, app, 6, stage(url, {queue: jobs(2)}))

    assert numbers(client, queue) == {1: 1}
    assert not [key for key in keys_of(client, queue) if ":stage:" in key]


def test_a_lower_version_is_skipped_where_that_was_asked_for(
    url: str, client: redis.Redis, queue: str, app: str, caplog: pytest.LogCaptureFixture
) -> None:
    commit(url, app, 7, stage(url, {queue: jobs(1)}))

    assert commit(url, app, 6, stage(url, {queue: jobs(2, 3)}), terms=Terms(older="skip")) is False

    assert numbers(client, queue) == {1: 1}
    assert "version 6 is skipped, 2 rows" in caplog.text


def test_a_reset_writer_may_begin_anew(url: str, client: redis.Redis, queue: str, app: str) -> None:
    commit(url, app, 7, stage(url, {queue: jobs(1)}))
    with Transactions(options(url)) as transactions:
        assert transactions.reset(app) is True
        assert transactions.reset(app) is False

    assert commit(url, app, 0, stage(url, {queue: jobs(2)})) is True
    assert numbers(client, queue) == {1: 1, 2: 1}


# --- Broken at every step ------------------------------------------------------------------------------------------


def whole_batch(queue: str, other: str) -> dict[str, Jobs]:
    """Two queues, several blocks, jobs for now and later, and ids: every kind of step there is."""
    return {
        queue: jobs(*range(1200), run_at_ms=[NOW if n % 100 == 0 else None for n in range(1200)]),
        other: jobs(*range(2000, 2300), marker_ttls_s=[0 if n % 2 else 60 for n in range(300)]),
    }


def steps_of_a_commit(url: str, port: int, queue: str, other: str, app: str) -> int:
    """How many commands a commit sends."""
    staged = stage(url, whole_batch(f"{queue}-count", f"{other}-count"))
    with Proxy(port) as proxy:
        commit(proxy.url, f"{app}-count", 0, staged)
        return proxy.counts["*"]


@pytest.mark.parametrize("act", [CUT, DROP_REPLY], ids=["cut", "reply-lost"])
def test_a_commit_that_stops_at_any_command_is_completed_by_the_next_run(
    server: EmbeddedServer, url: str, client: redis.Redis, queue: str, other: str, app: str, act: Act
) -> None:
    """As a driver that is killed there, or loses the server there; with and without the abort that Spark sends."""
    assert server.port is not None
    for n in range(1, 200):
        batch = whole_batch(queue, other)
        for some in batch.values():  # ids of the jobs that have one are this round's own
            some.ids = [f"{n}-{i}" if some.marker_ttls_s else i for i in some.ids]
        staged = stage(url, batch)
        with Proxy(server.port) as proxy:
            proxy.on("*", nth=n, act=act)
            try:
                commit(proxy.url, app, n, staged)
            except ConnectionLost:
                pass
            else:
                assert n > 15, "a commit has more commands than that"
                assert proxy.counts["*"] < n
                return
        if n % 2:
            with Transactions(options(url)) as transactions:
                transactions.abort(app, n, [staged])

        commit(url, app, n, stage(url, whole_batch(queue, other) | batch if n % 3 else batch))

        assert numbers(client, queue) == Counter(range(1200)), f"queue a, command {n}"
        assert numbers(client, other) == Counter(range(2000, 2300)), f"queue b, command {n}"
        left = [key for key in [*keys_of(client, queue), *keys_of(client, other)] if ":stage:" in key]
        assert not [key for key in left if client.ttl(key) == -1], f"stages without expiry after command {n}"
        client.delete(*(k for q in (queue, other) for k in (Keys(q).stream, Keys(q).delayed)))
    raise AssertionError("a commit has fewer commands than that")


@pytest.mark.parametrize("act", [CUT, DROP_REPLY], ids=["cut", "reply-lost"])
def test_a_lost_connection_at_any_command_is_survived_by_itself(
    server: EmbeddedServer, url: str, client: redis.Redis, queue: str, other: str, app: str, act: Act
) -> None:
    assert server.port is not None
    steps = steps_of_a_commit(url, server.port, queue, other, app)
    for n in range(1, steps + 1):
        staged = stage(url, whole_batch(queue, other))
        with Proxy(server.port) as proxy:
            proxy.on("*", nth=n, act=act)
            with Transactions(options(proxy.url, attempts=3), TERMS) as transactions:
                transactions.commit(app, n, [staged])

        assert numbers(client, queue) == Counter(range(1200)), f"command {n}"
        assert numbers(client, other) == Counter(range(2000, 2300)), f"command {n}"
        client.delete(*(k for q in (queue, other) for k in (Keys(q).stream, Keys(q).delayed)))


@pytest.mark.parametrize("act", [CUT, DROP_REPLY], ids=["cut", "reply-lost"])
def test_a_lost_connection_while_staging_stages_no_block_twice(
    server: EmbeddedServer, url: str, client: redis.Redis, queue: str, other: str, app: str, act: Act
) -> None:
    assert server.port is not None
    with Proxy(server.port) as proxy:
        stage(proxy.url, whole_batch(queue, other))
        steps = proxy.counts["*"]
    for n in range(1, steps + 1):
        with Proxy(server.port) as proxy:
            proxy.on("*", nth=n, act=act)
            staged = stage(proxy.url, whole_batch(queue, other))

        commit(url, app, n, staged)

        assert numbers(client, queue) == Counter(range(1200)), f"command {n}"
        assert numbers(client, other) == Counter(range(2000, 2300)), f"command {n}"
        client.delete(*(k for q in (queue, other) for k in (Keys(q).stream, Keys(q).delayed)))


def test_a_task_that_fails_takes_its_stages_with_it(url: str, client: redis.Redis, queue: str) -> None:
    def task() -> None:
        with Stager(options(url), stage_ttl_ms=60_000) as stager:
            stager.add(queue, jobs(*range(1500)))
            assert len(keys_of(client, queue)) == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        task()

    assert keys_of(client, queue) == []


def test_a_higher_version_finishes_the_open_one_first(
    server: EmbeddedServer, url: str, client: redis.Redis, queue: str, app: str
) -> None:
    staged = stage(url, {queue: jobs(*range(2500))})
    assert server.port is not None
    with Proxy(server.port) as proxy:
        proxy.on("EVALSHA", nth=5, act=CUT)  # begin, adopt, decide, one slice, and here
        with pytest.raises(ConnectionLost):
            commit(proxy.url, app, 1, staged)
    assert 0 < client.xlen(Keys(queue).stream) < 2500

    commit(url, app, 2, stage(url, {queue: jobs(9999)}))

    assert [job.payload["n"] for job in in_stream(client, queue)] == [*range(2500), 9999]


def test_rows_that_a_re_run_routes_elsewhere_are_published_once(
    server: EmbeddedServer, url: str, client: redis.Redis, queue: str, other: str, app: str
) -> None:
    staged = stage(url, {queue: jobs(*range(1500)), other: jobs(*range(5000, 5010))})
    assert server.port is not None
    with Proxy(server.port) as proxy:
        proxy.on("EVALSHA", nth=6, act=DROP_REPLY)
        with pytest.raises(ConnectionLost):
            commit(proxy.url, app, 1, staged)

    assert commit(url, app, 1, stage(url, {other: jobs(*range(1500)), queue: jobs(*range(5000, 5010))})) is False

    assert numbers(client, queue) == Counter(range(1500))
    assert numbers(client, other) == Counter(range(5000, 5010))


# --- Stages that are gone ------------------------------------------------------------------------------------------


def test_an_expired_stage_fails_the_batch_publishes_nothing_and_the_next_run_is_whole(
    url: str, client: redis.Redis, queue: str, other: str, app: str
) -> None:
    commit(url, app, 0, stage(url, {queue: jobs(0)}))
    staged = stage(url, {queue: jobs(1, 2), other: jobs(3)})
    client.delete(Keys(other).stage(staged.stage_id))

    with pytest.raises(StageExpired, match="run it again"):
        commit(url, app, 1, staged)

    assert numbers(client, queue) == {0: 1}
    assert not client.exists(Keys(other).stream)
    assert not [key for key in keys_of(client, queue) if ":stage:" in key]
    assert commit(url, app, 1, stage(url, {queue: jobs(1, 2), other: jobs(3)})) is True
    assert numbers(client, queue) == {0: 1, 1: 1, 2: 1}
    assert numbers(client, other) == {3: 1}


@pytest.mark.parametrize("act", [CUT, DROP_REPLY], ids=["cut", "reply-lost"])
def test_a_withdrawal_that_stops_at_any_command_is_completed_by_the_next_run(
    server: EmbeddedServer, url: str, client: redis.Redis, queue: str, other: str, app: str, act: Act
) -> None:
    assert server.port is not None
    for n in range(1, 40):
        staged = stage(url, {queue: jobs(1, 2), other: jobs(3)})
        client.delete(Keys(other).stage(staged.stage_id))
        with Proxy(server.port) as proxy:
            proxy.on("*", nth=n, act=act)
            with pytest.raises(ChasquiError) as failed:
                commit(proxy.url, app, n, staged)

        commit(url, app, n, stage(url, {queue: jobs(1, 2), other: jobs(3)}))

        assert numbers(client, queue) == {1: 1, 2: 1}
        assert numbers(client, other) == {3: 1}
        client.delete(Keys(queue).stream, Keys(other).stream)
        if isinstance(failed.value, StageExpired):
            return
    raise AssertionError("a withdrawal has fewer commands than that")


def test_a_block_that_is_missing_is_an_expired_stage(url: str, client: redis.Redis, queue: str, app: str) -> None:
    staged = stage(url, {queue: jobs(*range(2500))})
    client.hdel(Keys(queue).stage(staged.stage_id), "1")

    with pytest.raises(StageExpired):
        commit(url, app, 1, staged)

    assert not client.exists(Keys(queue).stream)


def test_an_adopted_stage_that_vanishes_is_an_error_and_never_the_end(
    server: EmbeddedServer, url: str, client: redis.Redis, queue: str, app: str
) -> None:
    staged = stage(url, {queue: jobs(*range(2500))})
    assert server.port is not None
    with Proxy(server.port) as proxy:
        proxy.on("EVALSHA", nth=5, act=call(lambda: client.delete(Keys(queue).stage(staged.stage_id))))
        with pytest.raises(LedgerBroken, match="noeviction"):
            commit(proxy.url, app, 1, staged)

    with pytest.raises(LedgerBroken):
        commit(url, app, 1, stage(url, {queue: jobs(*range(2500))}))
    with Transactions(options(url)) as transactions:
        with pytest.raises(ConfigError, match="discard"):
            transactions.reset(app)
        assert transactions.reset(app, discard=True) is True


def test_tasks_that_staged_nothing_need_the_version_that_they_saw(url: str, queue: str, app: str) -> None:
    commit(url, app, 1, stage(url, {queue: jobs(1)}))
    nothing = stage(url, {})
    assert commit(url, app, 1, nothing, complete=False) is False
    with Transactions(options(url)) as transactions:
        transactions.reset(app)

    with pytest.raises(StageExpired, match="reset or lost"):
        commit(url, app, 1, nothing, complete=False)


# --- Abort ---------------------------------------------------------------------------------------------------------


def test_abort_deletes_what_no_manifest_has_and_nothing_else(
    server: EmbeddedServer, url: str, client: redis.Redis, queue: str, app: str
) -> None:
    unused = stage(url, {queue: jobs(1)})
    adopted = stage(url, {queue: jobs(*range(2500))})
    assert server.port is not None
    with Proxy(server.port) as proxy:
        proxy.on("EVALSHA", nth=5, act=CUT)
        with pytest.raises(ConnectionLost):
            commit(proxy.url, app, 1, adopted)

    with Transactions(options(url)) as transactions:
        transactions.abort(app, 1, [unused])
        transactions.abort(app, 1, [adopted])

    assert not client.exists(Keys(queue).stage(unused.stage_id))
    assert client.exists(Keys(queue).stage(adopted.stage_id))
    assert commit(url, app, 1, stage(url, {queue: jobs(7)})) is False
    assert numbers(client, queue) == Counter(range(2500))


# --- Two at a time -------------------------------------------------------------------------------------------------


def test_two_drivers_of_one_version_publish_it_once(url: str, client: redis.Redis, queue: str, app: str) -> None:
    for version in range(5):
        stages = [stage(url, {queue: jobs(*range(5000))}) for _ in range(3)]
        failures: list[ChasquiError] = []

        def work(staged: Staged, failures: list[ChasquiError] = failures, version: int = version) -> None:
            try:
                commit(url, app, version, staged)
            except ChasquiError as error:
                failures.append(error)

        threads = [Thread(target=work, args=[staged]) for staged in stages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

        assert failures == []
        assert numbers(client, queue) == Counter(range(5000))
        client.delete(Keys(queue).stream)
    left = [key for key in keys_of(client, queue) if ":stage:" in key]
    assert left == []


def test_an_old_driver_that_wakes_up_publishes_nothing(
    server: EmbeddedServer, url: str, client: redis.Redis, queue: str, app: str
) -> None:
    """At each command of the old one: meanwhile a new one finishes its version and the next."""
    assert server.port is not None
    for n in itertools.count(1):
        version = n * 10
        old, new = (stage(url, {queue: jobs(*range(1200))}) for _ in range(2))
        woken: list[bool] = []

        def take_over(new: Staged = new, version: int = version, woken: list[bool] = woken) -> None:
            woken.append(True)
            commit(url, app, version, new)
            commit(url, app, version + 1, stage(url, {queue: jobs(7777)}))

        with Proxy(server.port) as proxy:
            proxy.on("*", nth=n, act=call(take_over))
            with suppress(LedgerAhead, StageExpired):
                commit(proxy.url, app, version, old)
        if not woken:
            break  # it has no more commands than that

        assert numbers(client, queue) == Counter([*range(1200), 7777]), f"command {n}"
        client.delete(Keys(queue).stream)

    assert n > 10


# --- At the cap ----------------------------------------------------------------------------------------------------


def test_a_full_queue_stops_the_batch_and_the_next_run_goes_on_where_it_stopped(
    url: str, client: redis.Redis, queue: str, other: str, app: str
) -> None:
    staged = stage(url, {queue: jobs(*range(1500)), other: jobs(1, 2)})
    tight = Terms(overflow="reject", max_stream_len=1000)

    with pytest.raises(QueueFull, match=r"902 of 1502 rows are published.*maxStreamLen"):
        commit(url, app, 1, staged, terms=tight)

    assert client.xlen(Keys(queue).stream) == 900
    assert numbers(client, other) == {1: 1, 2: 1}
    first = in_stream(client, queue)
    client.xtrim(Keys(queue).stream, maxlen=0, approximate=False)
    commit(url, app, 1, stage(url, {queue: jobs(*range(1500)), other: jobs(1, 2)}), terms=tight)
    assert Counter(job.payload["n"] for job in [*first, *in_stream(client, queue)]) == Counter(range(1500))


def test_block_waits_for_workers_and_publishes_all(url: str, client: redis.Redis, queue: str, app: str) -> None:
    staged = stage(url, {queue: jobs(*range(3000))})
    taken: Counter[int] = Counter()
    most = 0

    def drain() -> None:
        nonlocal most
        deadline = time.monotonic() + 20
        while sum(taken.values()) < 3000 and time.monotonic() < deadline:
            entries = client.xrange(Keys(queue).stream, count=200)
            most = max(most, client.xlen(Keys(queue).stream))
            for entry_id, fields in entries:
                taken[msgpack.unpackb(msgpack.unpackb(fields[b"d"])[1])["n"]] += 1
                client.xdel(Keys(queue).stream, entry_id)

    worker = Thread(target=drain)
    worker.start()
    commit(url, app, 1, staged, terms=Terms(max_stream_len=500, block_timeout_ms=10_000))
    worker.join(30)

    assert taken == Counter(range(3000))
    assert most <= 450


def test_block_gives_up_after_its_time_without_progress(url: str, queue: str, app: str) -> None:
    staged = stage(url, {queue: jobs(*range(1500))})

    with pytest.raises(QueueFull, match="after 200 ms of waiting"):
        commit(url, app, 1, staged, terms=Terms(max_stream_len=1000, block_timeout_ms=200))

    with Transactions(options(url)) as transactions:
        assert transactions.reset(app, discard=True)


def test_trim_drops_the_oldest(url: str, client: redis.Redis, queue: str, app: str) -> None:
    commit(url, app, 1, stage(url, {queue: jobs(*range(5000))}), terms=Terms(overflow="trim", max_stream_len=1000))

    assert client.xlen(Keys(queue).stream) < 2000
    assert in_stream(client, queue)[-1].payload == {"n": 4999}


def test_ids_at_the_cap_are_published_as_far_as_there_is_room(
    url: str, client: redis.Redis, queue: str, app: str
) -> None:
    batch = jobs(*range(200), marker_ttls_s=[60] * 200)
    with pytest.raises(QueueFull):
        commit(url, app, 1, stage(url, {queue: batch}), terms=Terms(overflow="reject", max_stream_len=100))
    assert client.xlen(Keys(queue).stream) == 90

    commit(url, app, 1, stage(url, {queue: batch}))

    assert numbers(client, queue) == Counter(range(200))


# --- The server ----------------------------------------------------------------------------------------------------


def test_a_queue_of_the_wrong_type_stops_the_batch_and_can_be_repaired(
    url: str, client: redis.Redis, queue: str, app: str
) -> None:
    client.set(Keys(queue).stream, "something else")

    with pytest.raises(ChasquiError, match="WRONGTYPE"):
        commit(url, app, 1, stage(url, {queue: jobs(1, 2)}))

    client.delete(Keys(queue).stream)
    commit(url, app, 1, stage(url, {queue: jobs(1, 2)}))
    assert numbers(client, queue) == {1: 1, 2: 1}


@pytest.mark.parametrize("name", server_binaries())
@pytest.mark.parametrize("at", ["staging", "publishing"])
def test_a_server_that_is_killed_and_comes_back_has_everything_once(name: str, at: str) -> None:
    with start(binary=server_binaries()[name], config={"appendonly": "yes", "appendfsync": "always"}) as own:
        assert own.port is not None
        client = redis.Redis.from_url(own.url)

        def fall() -> None:
            own.kill()
            own.restart()

        with Proxy(own.port) as proxy:
            patient = ConnectionOptions(url=proxy.url, reconnect_attempts=8)
            if at == "staging":
                proxy.on("EXEC", nth=2, act=call(fall))
            with Stager(patient, stage_ttl_ms=60_000) as stager:
                stager.add("q", jobs(*range(5000)))
                staged = stager.finish()
            if at == "publishing":
                proxy.on("EVALSHA", nth=6, act=call(fall))
            with Transactions(patient, TERMS) as transactions:
                transactions.commit("app", 1, [staged])

        assert numbers(client, "q") == Counter(range(5000))


@pytest.mark.parametrize("name", server_binaries())
def test_a_commit_waits_for_the_disk_where_the_server_can_tell(name: str) -> None:
    with start(binary=server_binaries()[name], config={"appendonly": "yes", "appendfsync": "everysec"}) as own:
        client = redis.Redis.from_url(own.url)
        staged = stage(own.url, {"q": jobs(*range(1000))})
        try:
            client.execute_command("WAITAOF", 0, 0, 1)
        except redis.ResponseError:
            with pytest.raises(OptionError, match=r"WAITAOF.*published"):
                commit(own.url, "app", 1, staged, terms=Terms(durability="fsync"))
            assert commit(own.url, "app", 1, staged) is False
            return

        commit(own.url, "app", 1, staged)
        own.kill()
        own.restart()

        assert numbers(client, "q") == Counter(range(1000))
        assert commit(own.url, "app", 1, stage(own.url, {"q": jobs(*range(1000))})) is False


def test_fsync_is_refused_where_nothing_is_written_to_disk(url: str, queue: str, app: str) -> None:
    with pytest.raises(OptionError, match="appendonly"):
        commit(url, app, 1, stage(url, {queue: jobs(1)}), terms=Terms(durability="fsync"))


# --- Time on the server --------------------------------------------------------------------------------------------


def test_nobody_waits_long_while_a_batch_is_published(url: str, client: redis.Redis, queue: str, app: str) -> None:
    big = [Jobs(NOW, new_ids(1000, NOW), [msgpack.packb(b"x" * 900)] * 1000) for _ in range(20)]
    with Stager(options(url), stage_ttl_ms=60_000) as stager:
        for some in big:
            stager.add(queue, some)
        staged = stager.finish()
    client.config_resetstat()

    commit(url, app, 1, staged)

    # The mean, because on a busy machine a single call may be interrupted for as long as the system likes.
    calls = client.info("commandstats")["cmdstat_evalsha"]
    assert client.xlen(Keys(queue).stream) == 20_000
    assert calls["usec_per_call"] < 10_000


def test_ledgers_are_shown_with_how_far_they_are(
    server: EmbeddedServer, url: str, client: redis.Redis, queue: str, app: str
) -> None:
    staged = stage(url, {queue: jobs(*range(1500))})
    with pytest.raises(QueueFull):
        commit(url, app, 3, staged, terms=Terms(overflow="reject", max_stream_len=1000))

    with Transactions(options(url)) as transactions:
        [ledger] = transactions.ledgers([app, "nobody"])
        transactions.reset(app, discard=True)

    assert (ledger.app_id, ledger.version, ledger.state) == (app, 3, "open")
    assert [(row.queue, row.published, row.rows, row.state) for row in ledger.queues] == [(queue, 900, 1500, "open")]
    assert eventually(lambda: not client.exists(AppKeys(app).home))


def test_a_ledger_that_cannot_be_read_hides_no_other(url: str, client: redis.Redis, app: str) -> None:
    broken = f"{app}-broken"
    commit(url, app, 1)
    client.hset(AppKeys(broken).home, mapping={"version": "one", "state": "done"})
    client.expire(AppKeys(broken).home, 60)

    with Transactions(options(url)) as transactions:
        found = [(one.app_id, one.state) for one in transactions.ledgers([broken, app])]
        with pytest.raises(DecodeError, match="expected a whole number, found 'one'"):
            transactions.standing(broken)

    assert found == [(broken, "unreadable"), (app, "done")]


@pytest.mark.parametrize("number", [-1, 2**53 + 1, 1.0, True, "1"], ids=repr)
def test_numbers_that_a_script_cannot_hold_are_refused(url: str, app: str, number: Any) -> None:
    with pytest.raises(ConfigError, match="version expects a whole number"):
        commit(url, app, number)
    with pytest.raises(ConfigError, match="stage_ttl_ms expects a whole number"):
        Terms(stage_ttl_ms=number)
