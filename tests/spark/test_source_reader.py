"""The source driven by hand, as Spark drives it but without Spark: quick looks at what each call does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from chasqui import AuthFailed, ChasquiError, DataLoss, Producer, RepeatableSpec, RepeatPattern, embedded
from chasqui.bridge import Reader
from chasqui.protocol.keys import Keys
from chasqui_spark.listings import listed
from chasqui_spark.options import source_options
from chasqui_spark.rows import Rows
from chasqui_spark.source import check_server, close_all
from chasqui_spark.stream_reader import StreamReader
from chasqui_spark.views import schema_of
from tests.conftest import skip_before_redis_7
from tests.proxy import Proxy, call
from tests.spark.source_tools import xadd_at


class Query:
    """A stream reader and where it stands. ``again`` is the query after a restart."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        given = {"url": url, "view": "events", **{name: str(value) for name, value in options.items()}}
        self.url, self.options = url, options
        parsed = source_options(given, streaming=True)
        self.reader = StreamReader(parsed, schema_of(parsed))
        self.at = self.reader.initialOffset()

    def again(self, **options: Any) -> Query:
        other = Query(self.url, {**self.options, **options})
        other.at = self.at
        return other

    def look(self) -> dict[str, Any]:
        return self.reader.latestOffset(self.at, self.reader.getDefaultReadLimit())

    def read(self, start: dict[str, Any], end: dict[str, Any]) -> list[str]:
        rows: list[str] = []
        for partition in self.reader.partitions(start, end):
            for batch in self.reader.read(partition):
                rows += batch.column("entry_id").to_pylist()
        return rows

    def step(self) -> list[str]:
        """One micro-batch; as in Spark there is none where the offset is the same."""
        end = self.look()
        rows = self.read(self.at, end) if end != self.at else []
        self.at = end
        return rows


MakeQuery = Callable[..., Query]


@pytest.fixture
def query(url: str) -> Iterator[MakeQuery]:
    yield lambda **options: Query(url, options)
    close_all()


@pytest.fixture
def put(queue: str, client: redis.Redis) -> Callable[..., None]:
    def put(*places: int, name: str = queue) -> None:
        for place in places:
            xadd_at(client, Keys(name).events, f"{place}-0", e="active")

    return put


# --- Where to begin ---


def test_a_start_in_the_future_waits_for_it(query: MakeQuery, queue: str, put: Callable[..., None]) -> None:
    put(1)
    one = query(queue=queue, startingTimestamp="1970-01-01T00:00:00.005")

    assert one.step() == []
    put(2)
    assert one.again().step() == []
    put(5, 6)
    assert one.step() == ["5-0", "6-0"]
    assert one.step() == []


def test_a_queue_that_is_not_there_yet_keeps_its_start(query: MakeQuery, queue: str, put: Callable[..., None]) -> None:
    put(9)
    other = f"{queue}-b"
    one = query(queues=f"{queue},{other}", startingTimestamp="1970-01-01T00:00:00.005")

    assert one.step() == ["9-0"]
    assert one.step() == []
    put(3, 7, name=other)
    assert one.again().step() == ["7-0"]


def test_a_start_at_an_entry_behind_the_end_is_a_loss(query: MakeQuery, queue: str, put: Callable[..., None]) -> None:
    put(1, 2)
    options = {"queue": queue, "startingOffsets": f'{{"{queue}": "7-0"}}'}

    with pytest.raises(DataLoss, match=r"startingOffsets begins behind 6-.*the stream ends before, at 2-0"):
        query(**options).step()

    one = query(**options, failOnDataLoss=False)
    assert one.step() == []
    put(3)
    assert one.step() == ["3-0"]


def test_a_checkpoint_of_another_view_is_refused(query: MakeQuery, queue: str, put: Callable[..., None]) -> None:
    put(1)
    one = query(queue=queue)
    one.step()

    with pytest.raises(ChasquiError, match="it is of view 'events', and this query reads dlq"):
        one.again(view="dlq").step()


# --- Streams that are not what they were ---


def test_a_server_that_lost_its_tail_and_went_on_makes_nothing_come_twice(
    query: MakeQuery, queue: str, put: Callable[..., None], client: redis.Redis
) -> None:
    skip_before_redis_7(client, "counters of what was added and deleted")
    put(1, 2, 3)
    copy = client.dump(Keys(queue).events)
    put(4, 5, 6)
    one = query(queue=queue)
    assert len(one.step()) == 6
    assert copy is not None
    client.restore(Keys(queue).events, 0, copy, replace=True)
    put(10, 11)

    with pytest.raises(DataLoss, match="it was made anew, or lost entries"):
        one.step()
    other = one.again(failOnDataLoss=False)
    assert other.step() == ["10-0", "11-0"]
    put(12)
    assert other.step() == ["12-0"]


def test_a_stream_made_anew_with_more_entries_than_before_is_noticed(
    query: MakeQuery, queue: str, put: Callable[..., None], client: redis.Redis
) -> None:
    skip_before_redis_7(client, "counters of what was added and deleted")
    put(1, 2)
    one = query(queue=queue)
    assert len(one.step()) == 2
    client.delete(Keys(queue).events)
    put(3, 4, 5, 6)

    with pytest.raises(DataLoss, match="it was made anew"):
        one.step()
    assert one.again(failOnDataLoss=False).step() == ["3-0", "4-0", "5-0", "6-0"]


@pytest.mark.parametrize("by", ["queue", "queuePattern"])
def test_a_stream_that_was_seen_to_be_gone_is_a_new_one(
    query: MakeQuery, queue: str, put: Callable[..., None], client: redis.Redis, by: str
) -> None:
    """Also where its ids are lower than those that were read, as after a clock was set back."""
    put(7, 8)
    one = query(**{by: queue}, failOnDataLoss=False, discoveryInterval=0)
    assert one.step() == ["7-0", "8-0"]
    client.delete(Keys(queue).events)
    assert one.step() == []
    settled = one.at
    assert one.step() == []
    assert one.at == settled
    put(3, 4)

    assert one.again().step() == ["3-0", "4-0"]


def test_a_queue_of_a_pattern_that_is_gone_leaves_the_offset(
    query: MakeQuery, queue: str, put: Callable[..., None], client: redis.Redis
) -> None:
    put(1)
    put(1, name=f"{queue}-b")
    one = query(queuePattern=f"{queue}*", discoveryInterval=0)
    assert len(one.step()) == 2
    client.delete(Keys(queue).events)
    one.step()

    assert list(one.at["queues"]) == [f"{queue}-b"]


def test_a_narrower_pattern_leaves_other_queues_where_they_are(
    query: MakeQuery, queue: str, put: Callable[..., None]
) -> None:
    put(1, name=f"{queue}-a")
    put(1, name=f"{queue}-b")
    one = query(queuePattern=f"{queue}*", discoveryInterval=0)
    assert len(one.step()) == 2
    put(2, name=f"{queue}-a")
    put(3, name=f"{queue}-b")
    narrow = one.again(queuePattern=f"{queue}-b*")

    assert narrow.step() == ["3-0"]
    wide = narrow.again(queuePattern=f"{queue}*")
    assert wide.step() == ["2-0"]


# --- Batches that are run again ---


@pytest.mark.parametrize("first", [True, False], ids=["first batch", "later batch"])
def test_a_batch_run_again_tells_what_was_trimmed_meanwhile(
    query: MakeQuery, queue: str, put: Callable[..., None], client: redis.Redis, first: bool
) -> None:
    skip_before_redis_7(client, "counters of what was added and deleted")
    one = query(queue=queue)
    put(1, 2, 3)
    if not first:
        one.step()
        put(4, 5, 6)
    end = one.look()
    again = one.again()
    assert len(again.read(again.at, end)) == 3
    client.xtrim(Keys(queue).events, maxlen=1, approximate=False)

    with pytest.raises(DataLoss, match=r"2 entries .* were trimmed before they were read"):
        again.read(again.at, end)
    assert len(again.again(failOnDataLoss=False).read(again.at, end)) == 1


def test_a_batch_of_jobs_run_again_after_workers_settled_them_is_no_loss(
    query: MakeQuery, queue: str, client: redis.Redis
) -> None:
    key = Keys(queue).stream
    for place in (1, 2, 3):
        xadd_at(client, key, f"{place}-0")
    one = query(queue=queue, view="jobs")
    end = one.look()
    client.xdel(key, "1-0", "2-0")

    assert one.again().read(one.at, end) == ["3-0"]


def test_a_batch_run_again_on_a_stream_that_is_gone_is_a_loss(
    query: MakeQuery, queue: str, put: Callable[..., None], client: redis.Redis
) -> None:
    put(1)
    one = query(queue=queue)
    end = one.look()
    client.delete(Keys(queue).events)

    with pytest.raises(DataLoss, match="its stream is gone"):
        one.again().read(one.at, end)
    client.set(Keys(queue).events, "x", ex=60)
    with pytest.raises(DataLoss, match="its key holds another type"):
        one.again().read(one.at, end)
    assert one.again(failOnDataLoss=False).read(one.at, end) == []


def test_what_was_trimmed_between_two_runs_of_available_now_is_a_loss_also_where_more_came_during_the_first(
    query: MakeQuery, queue: str, put: Callable[..., None], client: redis.Redis
) -> None:
    skip_before_redis_7(client, "counters of what was added and deleted")
    put(1, 2, 3)
    one = query(queue=queue)
    one.reader.prepareForTriggerAvailableNow()
    put(4)
    assert one.step() == ["1-0", "2-0", "3-0"]
    assert one.step() == []
    put(5, 6)
    client.xtrim(Keys(queue).events, maxlen=1, approximate=False)

    with pytest.raises(DataLoss, match="2 entries after 3-0 were trimmed"):
        one.again().step()


# --- Trimming while a batch is read ---


def entry_ids(batches: Iterator[Any]) -> list[str]:
    return [entry_id for batch in batches for entry_id in batch.column("entry_id").to_pylist()]


@pytest.mark.parametrize("first", [True, False], ids=["first batch", "later batch"])
def test_entries_trimmed_between_planning_and_reading_are_a_loss(
    query: MakeQuery, queue: str, put: Callable[..., None], client: redis.Redis, first: bool
) -> None:
    skip_before_redis_7(client, "counters of what was added and deleted")
    one = query(queue=queue)
    if not first:
        put(1, 2, 3)
        one.step()
    put(*range(10, 20))
    (part,) = one.reader.partitions(one.at, one.look())
    client.xtrim(Keys(queue).events, maxlen=4, approximate=False)

    with pytest.raises(DataLoss, match=r"6 entries after \S+ were trimmed while the batch was read"):
        list(one.reader.read(part))
    assert entry_ids(one.again(failOnDataLoss=False).reader.read(part)) == ["16-0", "17-0", "18-0", "19-0"]


def test_trimming_what_a_task_has_read_is_no_loss_and_what_it_has_not_is_one(
    query: MakeQuery, queue: str, put: Callable[..., None], client: redis.Redis
) -> None:
    skip_before_redis_7(client, "counters of what was added and deleted")
    put(*range(1, 1001))
    one = query(queue=queue)
    (part,) = one.reader.partitions(one.at, one.look())
    pages = one.reader.read(part)
    read = next(pages).num_rows
    client.xtrim(Keys(queue).events, maxlen=1000 - read, approximate=False)
    read += next(pages).num_rows
    client.xtrim(Keys(queue).events, maxlen=1000 - read - 5, approximate=False)

    with pytest.raises(DataLoss, match=f"5 entries after {read}-0 were trimmed"):
        next(pages)


def test_a_task_of_the_middle_of_a_batch_sees_that_its_begin_is_trimmed(
    query: MakeQuery, queue: str, put: Callable[..., None], client: redis.Redis
) -> None:
    skip_before_redis_7(client, "counters of what was added and deleted")
    put(*range(1, 301))
    one = query(queue=queue, minPartitions=3)
    parts = one.reader.partitions(one.at, one.look())
    assert len(parts) == 3
    found = entry_ids(one.reader.read(parts[0]))
    client.xtrim(Keys(queue).events, maxlen=300 - len(found) + 1, approximate=False)
    found += entry_ids(one.reader.read(parts[1]))
    assert found == [f"{i}-0" for i in range(1, len(found) + 1)]
    client.xtrim(Keys(queue).events, maxlen=10, approximate=False)

    with pytest.raises(DataLoss, match="were trimmed while the batch was read"):
        list(one.reader.read(parts[2]))


def test_letters_purged_while_a_batch_is_read_are_no_loss(
    query: MakeQuery, queue: str, put: Callable[..., None], client: redis.Redis
) -> None:
    put(*range(1, 11))
    one = query(queue=queue)
    (part,) = one.reader.partitions(one.at, one.look())
    client.xdel(Keys(queue).events, *[f"{i}-0" for i in range(1, 8)])

    assert entry_ids(one.reader.read(part)) == ["8-0", "9-0", "10-0"]


# --- Limits ---


def test_a_queue_of_large_entries_does_not_take_all_the_bytes_for_ever(
    query: MakeQuery, queue: str, client: redis.Redis, put: Callable[..., None]
) -> None:
    large, small = f"{queue}-a", f"{queue}-b"
    put(*range(1, 50), name=small)
    one = query(queues=f"{large},{small}", maxBytesPerTrigger=1000)
    found: list[str] = []
    for i in range(100, 110):
        client.execute_command("XADD", Keys(large).events, f"{i}-0", "e", b"x" * 5000)
        found += one.step()

    assert {"1-0", "2-0", "3-0", "100-0", "101-0", "102-0"} <= set(found)


def test_letters_purged_while_a_limit_is_counted_off_are_no_loss(
    server: embedded.EmbeddedServer, query: MakeQuery, queue: str, put: Callable[..., None], client: redis.Redis
) -> None:
    skip_before_redis_7(client, "counters of what was added and deleted")
    put(*range(1, 9))
    assert server.port is not None
    with Proxy(server.port) as proxy:
        one = Query(proxy.url, {"queue": queue, "maxJobsPerTrigger": 2})
        proxy.on("EVALSHA_RO", act=call(lambda: client.xdel(Keys(queue).events, "1-0", "2-0")))
        proxy.on("EVAL_RO", act=call(lambda: client.xdel(Keys(queue).events, "1-0", "2-0")))

        assert one.step() == ["3-0", "4-0"]
        client.xdel(Keys(queue).events, "3-0", "4-0")
        assert one.step() == ["5-0", "6-0"]


# --- What polling costs, and what load() checks ---


def test_an_idle_query_asks_each_queue_one_thing_and_is_told_nothing(
    server: embedded.EmbeddedServer, query: MakeQuery, queue: str, client: redis.Redis
) -> None:
    """A look at where a stream stands tells its first and last entry whole."""
    client.execute_command("XADD", Keys(queue).events, "1-0", "e", b"x" * 1_000_000)
    assert server.port is not None
    with Proxy(server.port) as proxy:
        one = Query(proxy.url, {"queue": queue})
        assert one.step() == ["1-0"]
        begin = time.monotonic()
        looks = 0
        while time.monotonic() < begin + 0.5:
            assert one.step() == []
            looks += 1

        # After the batch, and again each second.
        assert proxy.counts["XINFO"] <= 5
        assert proxy.counts["XRANGE"] >= looks - 1
        xadd_at(client, Keys(queue).events, "2-0", e="active")
        assert one.step() == ["2-0"]


def test_figures_that_are_not_allowed_are_asked_for_seldom_and_over_the_same_connection(
    query: MakeQuery, url: str, queue: str, put: Callable[..., None], client: redis.Redis, caplog: Any
) -> None:
    put(1)
    client.acl_setuser("seer", enabled=True, passwords=["+hush"], keys=["*"], commands=["+@all", "-zcard"])
    try:
        one = Query(url.replace("redis://", "redis://seer:hush@"), {"queue": queue})
        assert one.step() == ["1-0"]
        ours = {c["id"] for c in client.client_list() if c["user"] == "seer"}
        for _ in range(5):
            assert one.reader.reportLatestOffset() is None
            one.step()

        assert {c["id"] for c in client.client_list() if c["user"] == "seer"} == ours
    finally:
        client.acl_deluser("seer")

    told = [record.message for record in caplog.records if "no figures" in record.message]
    assert len(told) == 1
    assert "zcard" in told[0]
    assert "hush" not in told[0]


def test_load_works_for_a_user_who_has_only_the_keys_of_the_pattern(
    url: str, queue: str, put: Callable[..., None], client: redis.Redis
) -> None:
    put(1)
    client.acl_setuser("one", enabled=True, passwords=["+x"], keys=[f"{{chasqui:{queue}*"], commands=["+@all"])
    given = {"url": url.replace("redis://", "redis://one:x@"), "view": "events"}
    try:
        check_server(source_options({**given, "queuePattern": f"{queue}*"}))
        with pytest.raises(AuthFailed):
            check_server(source_options({**given, "queue": "another"}))
    finally:
        client.acl_deluser("one")


# --- Lists ---


def test_figures_of_64_bits_in_a_repeat_spec_and_odd_members_spoil_no_list(
    url: str, queue: str, client: redis.Redis
) -> None:
    top = 2**64 - 1
    with Producer(url, queue=queue) as producer:
        every = RepeatPattern.every(top)
        producer.upsert_repeatable(RepeatableSpec(job_name="n", pattern=every, payload=1, limit=top))
    client.zadd(
        Keys(queue).delayed, {b"\xff": float("inf"), b"\x04\x00\x00\x00\xff\xff\xff\xff\x91": -1e300, b"": 1e18}
    )

    def rows(view: str) -> list[dict[str, Any]]:
        options = source_options({"url": url, "queue": queue, "view": view})
        with Reader(options) as reader:
            return [row for batch in listed(options, Rows(options), reader, queue) for row in batch.to_pylist()]

    (spec,) = rows("repeatable")
    assert spec["every_ms"] == spec["fire_limit"] == 2**63 - 1
    assert spec["next_fire_at"] is None
    assert [row["run_at"] for row in rows("delayed")] == [None] * 3
    assert all(row["error"] for row in rows("delayed"))
