"""Reader: looks at many queues, in bounded pages, through lost connections, and changes nothing."""

from __future__ import annotations

import dataclasses
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import redis

from chasqui import AuthFailed, ConnectionLost, NewJob, Producer, RetryOverride, ServerError, WrongKeyType, embedded
from chasqui.bridge import ConnectionOptions, JobSpans, Reader, delayed_columns, job_columns, matches
from chasqui.protocol.columns import one_by_one
from chasqui.protocol.keys import Keys
from chasqui.protocol.reading import PAGE_BYTES, PAGE_ENTRIES, PageLength, some_size
from chasqui.protocol.replies import fields
from chasqui.reader import queue_of
from tests.conftest import is_redis_6, skip_before_redis_7
from tests.proxy import CUT, DROP_REPLY, HALF_REPLY, Act, Proxy


@pytest.fixture
def reader(url: str) -> Iterator[Reader]:
    with Reader(ConnectionOptions(url=url)) as found:
        yield found


def add(url: str, queue: str, count: int, size: int = 1) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(["x" * size] * count)


def test_positions_tell_where_streams_stand(reader: Reader, url: str, queue: str, client: redis.Redis) -> None:
    add(url, queue, 3)
    first, second, third = (entry_id.decode() for entry_id, _ in client.xrange(Keys(queue).stream))
    client.xdel(Keys(queue).stream, second)

    found = reader.positions("jobs", [queue, f"{queue}-none"])

    here, none = found[queue], found[f"{queue}-none"]
    assert not isinstance(here, WrongKeyType)
    assert (here.first_id, here.last_id, here.length) == (first, third, 2)
    # Redis 6.2 has neither counter.
    assert (here.added, here.max_deleted) in [(3, second), *([(None, None)] if is_redis_6(client) else [])]
    assert not isinstance(none, WrongKeyType)
    assert (none.exists, none.last_id, none.length) == (False, "0-0", 0)


def test_a_key_of_another_type_is_an_error_of_its_queue_alone(reader: Reader, queue: str, client: redis.Redis) -> None:
    client.set(Keys(queue).stream, "x", ex=60)

    found = reader.positions("jobs", [queue, f"{queue}-b"])

    assert isinstance(found[queue], WrongKeyType)
    assert isinstance(found[queue], ServerError)
    assert not isinstance(found[f"{queue}-b"], WrongKeyType)


VIEWS = {
    "jobs": ("stream", "stream"),
    "events": ("events", "stream"),
    "dlq": ("dlq", "stream"),
    "pending": ("stream", "stream"),
    "delayed": ("delayed", "zset"),
    "repeatable": ("repeat", "zset"),
    "stats": ("dlq", "stream"),
}


@pytest.mark.parametrize("view", [*VIEWS, "results"])
def test_a_check_finds_nothing_wrong_with_queues_that_are_there_or_not(
    reader: Reader, url: str, queue: str, view: str
) -> None:
    add(url, queue, 3)

    reader.check(view, [queue, f"{queue}-none"], "default")


@pytest.mark.parametrize("view", VIEWS)
def test_a_check_names_the_key_its_type_and_the_one_expected(
    reader: Reader, queue: str, client: redis.Redis, view: str
) -> None:
    suffix, wanted = VIEWS[view]
    key = f"{{chasqui:{queue}}}:{suffix}"
    client.rpush(key, "x")

    with pytest.raises(WrongKeyType) as caught:
        reader.check(view, [f"{queue}-none", queue], "default")

    assert f"{key} on {reader.shown} is a list, and no {wanted} of a queue" in str(caught.value)


def test_a_check_finds_out_that_entries_may_not_be_read(url: str, queue: str, client: redis.Redis) -> None:
    commands = ["+@all", "-xrange"]
    client.acl_setuser("blind", enabled=True, passwords=["+hush"], keys=["*"], commands=commands)
    try:
        with (
            Reader(ConnectionOptions(url=url.replace("redis://", "redis://blind:hush@"))) as reader,
            pytest.raises(AuthFailed, match="xrange") as caught,
        ):
            reader.check("jobs", [queue], "default")
    finally:
        client.acl_deluser("blind")

    assert "hush" not in str(caught.value)


def test_growth_is_seen_without_telling_entries_that_are_known(reader: Reader, queue: str, client: redis.Redis) -> None:
    key = Keys(queue).stream
    client.execute_command("XADD", key, "5-0", "d", "x")
    last = f"{2**64 - 1}-{2**64 - 1}"

    assert reader.grown("jobs", {queue: "4-0"})
    assert reader.grown("jobs", {f"{queue}-none": "0-0", queue: "0-0"})
    assert not reader.grown("jobs", {queue: "5-0", f"{queue}-none": "0-0"})
    assert not reader.grown("jobs", {queue: last})
    client.delete(key)
    client.set(key, "x", ex=60)
    assert not reader.grown("jobs", {queue: "0-0"})


def test_pages_give_each_entry_of_the_range_once(reader: Reader, url: str, queue: str, client: redis.Redis) -> None:
    add(url, queue, 2500)
    ids = [entry_id for entry_id, _ in client.xrange(Keys(queue).stream)]

    whole = [entry[0] for page in reader.pages("jobs", queue) for entry in page]
    part = [e[0] for page in reader.pages("jobs", queue, ids[9].decode(), ids[1999].decode()) for e in page]

    assert whole == ids
    assert part == ids[10:2000]


def test_pages_of_large_entries_are_short(reader: Reader, url: str, queue: str) -> None:
    add(url, queue, 300, size=200_000)

    lengths = [len(page) for page in reader.pages("jobs", queue)]

    assert sum(lengths) == 300
    assert max(lengths[1:]) * 200_000 <= PAGE_BYTES


def test_page_sizes_follow_what_entries_weigh() -> None:
    length = PageLength()
    first = length.count

    length.had(first, *some_size([(b"1-0", [b"d", b"x" * 10])] * first))
    assert length.count == 4 * first
    for _ in range(5):
        length.had(length.count, 100, 1000)
    assert length.count == PAGE_ENTRIES
    length.had(length.count, *some_size([(b"1-0", [b"d", b"x" * (1 << 20)])] * 100))
    assert length.count == PAGE_BYTES // ((1 << 20) + 1)


def test_after_a_page_that_was_too_long_pages_do_not_grow_for_a_while() -> None:
    length = PageLength()
    for _ in range(5):
        length.had(length.count, 100, 1000)

    lengths = list[int]()
    for asked in (250, *[250] * 15, 250):
        length.had(asked, 100, 1000)
        lengths.append(length.count)

    assert lengths == [250] * 16 + [1000]


@pytest.mark.parametrize("act", [CUT, DROP_REPLY], ids=["cut", "reply lost"])
def test_a_lost_connection_in_the_middle_of_a_range_is_not_noticed(
    server: embedded.EmbeddedServer, queue: str, act: object
) -> None:
    add(server.url, queue, 1500)
    assert server.port is not None
    with Proxy(server.port) as proxy, Reader(ConnectionOptions(url=proxy.url, reconnect_initial_ms=1)) as reader:
        proxy.on("XRANGE", nth=2, act=act)  # type: ignore[arg-type]

        ids = [entry[0] for page in reader.pages("jobs", queue) for entry in page]

    assert len(ids) == len(set(ids)) == 1500


# --- Pages of jobs ---


def plain(page: list[Any] | JobSpans) -> list[Any]:
    return page.entries() if isinstance(page, JobSpans) else page


def kinds(pages: list[list[Any] | JobSpans]) -> set[type]:
    return {type(page) for page in pages}


def add_jobs_of_both_kinds(url: str, queue: str, count: int, size: int = 1) -> None:
    """Every thousandth has overrides, so its page has no spans."""
    jobs = [NewJob("x" * size, retry=RetryOverride(max_attempts=2) if i % 1000 == 999 else None) for i in range(count)]
    with Producer(url, queue=queue) as producer:
        producer.add_bulk_jobs(jobs)


def test_pages_of_jobs_hold_the_entries_that_pages_do(reader: Reader, url: str, queue: str) -> None:
    add_jobs_of_both_kinds(url, queue, 15_000)
    add(url, queue, 10_000)
    entries = [entry for page in reader.pages("jobs", queue) for entry in page]
    after, upto = entries[99][0].decode(), entries[23_999][0].decode()

    pages = list(reader.job_pages(queue))
    part = [entry for page in reader.job_pages(queue, after, upto) for entry in plain(page)]

    assert kinds(pages) == {list, JobSpans}
    assert [entry for page in pages for entry in plain(page)] == entries
    assert part == entries[100:24_000]
    assert len(entries) == 25_000


def test_pages_of_jobs_are_short_where_entries_are_large(reader: Reader, url: str, queue: str) -> None:
    add(url, queue, 1500, size=60_000)

    pages = list(reader.job_pages(queue))

    assert kinds(pages) == {JobSpans}
    assert sum(map(len, pages)) == 1500
    assert max(len(page.data) for page in pages[1:] if isinstance(page, JobSpans)) < 1.1 * PAGE_BYTES


def test_a_queue_without_jobs_has_no_pages_of_jobs(reader: Reader, queue: str) -> None:
    assert list(reader.job_pages(queue)) == []


@pytest.mark.parametrize("act", [CUT, DROP_REPLY, HALF_REPLY], ids=["cut", "reply lost", "half a reply"])
@pytest.mark.parametrize("command", ["XRANGE", "PING"])
def test_a_lost_connection_in_the_middle_of_pages_of_jobs_is_not_noticed(
    server: embedded.EmbeddedServer, queue: str, act: Act, command: str
) -> None:
    """Each page is an XRANGE and the PING that ends it; the first PING of a connection belongs to the connection."""
    add(server.url, queue, 1500)
    assert server.port is not None
    with Proxy(server.port) as proxy, Reader(ConnectionOptions(url=proxy.url, reconnect_initial_ms=1)) as reader:
        proxy.on(command, nth=3, act=act)

        pages = list(reader.job_pages(queue))

        assert proxy.connections == 2
    ids = [entry[0] for page in pages for entry in plain(page)]
    assert len(ids) == len(set(ids)) == 1500
    assert kinds(pages) == {JobSpans}


def test_a_server_that_falls_silent_in_a_page_of_jobs_is_given_up_in_time(
    server: embedded.EmbeddedServer, queue: str
) -> None:
    add(server.url, queue, 300)
    assert server.port is not None
    silent = dataclasses.replace(HALF_REPLY, after=lambda: time.sleep(3))
    options = {"reconnect_initial_ms": 1, "reconnect_attempts": 1, "socket_timeout_ms": 300}
    with Proxy(server.port) as proxy, Reader(ConnectionOptions(url=proxy.url, **options)) as reader:
        proxy.on("XRANGE", nth=2, act=silent)
        proxy.on("XRANGE", nth=3, act=silent)
        begin = time.monotonic()

        with pytest.raises(ConnectionLost, match="timed out"):
            list(reader.job_pages(queue))

        assert time.monotonic() - begin < 2


def test_a_refusal_in_place_of_a_page_of_jobs_is_told_and_leaves_a_clean_connection(
    reader: Reader, url: str, queue: str, client: redis.Redis
) -> None:
    other = f"{queue}-jobs"
    add(url, other, 10)
    client.set(Keys(queue).stream, "x", ex=60)
    client.expire(Keys(other).stream, 60)

    for _ in range(3):
        with pytest.raises(ServerError, match="WRONGTYPE"):
            list(reader.job_pages(queue))
        assert [len(page) for page in reader.job_pages(other)] == [10]


def test_pages_of_jobs_for_a_user_who_may_not_ping(url: str, queue: str, client: redis.Redis) -> None:
    add(url, queue, 500)
    commands = ["+@all", "-ping"]
    client.acl_setuser("mute", enabled=True, passwords=["+x"], keys=["*"], commands=commands, channels=["*"])
    try:
        with Reader(ConnectionOptions(url=url.replace("redis://", "redis://mute:x@"))) as reader:
            pages = list(reader.job_pages(queue))
    finally:
        client.acl_deluser("mute")

    assert kinds(pages) == {list}
    assert sum(map(len, pages)) == 500


def test_a_user_whose_ping_is_taken_away_while_reading_gets_every_page(
    url: str, queue: str, client: redis.Redis
) -> None:
    """No echo ends the page: it is given up after the time-out, and read over a new connection without one."""
    add(url, queue, 500)
    client.acl_setuser("mute", enabled=True, passwords=["+x"], keys=["*"], commands=["+@all"], channels=["*"])
    options = {"reconnect_initial_ms": 1, "socket_timeout_ms": 300}
    try:
        with Reader(ConnectionOptions(url=url.replace("redis://", "redis://mute:x@"), **options)) as reader:
            pages = reader.job_pages(queue)
            first = next(pages)
            client.execute_command("ACL", "SETUSER", "mute", "-ping")
            rest = list(pages)
    finally:
        client.acl_deluser("mute")

    assert isinstance(first, JobSpans)
    assert kinds(rest) == {list}
    assert len(first) + sum(map(len, rest)) == 500


def test_pages_that_are_not_plain_are_parsed_without_looking_at_each(reader: Reader, url: str, queue: str) -> None:
    """A look in vain costs, so after one some pages are parsed whatever they hold."""
    with Producer(url, queue=queue) as producer:
        producer.add_bulk_jobs([NewJob("x", retry=RetryOverride(max_attempts=2))])
    add(url, queue, 40_000)

    pages = [type(page) for page in reader.job_pages(queue)]

    assert pages[:9] == [list] * 9
    assert set(pages[9:]) == {JobSpans}


@pytest.mark.parametrize("view", ["jobs", "events"])
def test_a_page_that_turns_out_far_too_long_is_not_read_to_its_end(
    reader: Reader, queue: str, client: redis.Redis, view: str
) -> None:
    """Many small entries make the next page one of thousands, and then come large ones."""
    key = Keys(queue).stream if view == "jobs" else Keys(queue).events
    with client.pipeline(transaction=False) as pipe:
        for i in range(1, 5000):
            pipe.execute_command("XADD", key, f"{i}-0", "d", "x")
        for i in range(5000, 5120):
            pipe.execute_command("XADD", key, f"{i}-0", "d", b"x" * (1 << 20))
        pipe.execute()
    client.expire(key, 60)

    found = list[bytes]()
    tracemalloc.start()
    try:
        for page in reader.job_pages(queue) if view == "jobs" else reader.pages(view, queue):
            found += [entry[0] for entry in plain(page)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert found == [b"%d-0" % i for i in range(1, 5120)]
    assert peak < 80 << 20


def test_the_highest_id_of_all_is_read_and_nothing_asked_behind_it(
    reader: Reader, queue: str, client: redis.Redis
) -> None:
    key, last = Keys(queue).stream, f"{2**64 - 1}-{2**64 - 1}"
    for place in ("1-0", f"{2**64 - 1}-0", last):
        client.execute_command("XADD", key, place, "d", "x")
    client.expire(key, 60)

    assert [e[0].decode() for page in reader.pages("jobs", queue, "1-0") for e in page][-1] == last
    assert list(reader.pages("jobs", queue, last)) == []
    assert reader.walk("jobs", queue, "1-0", last).entries == 2
    assert reader.walk("jobs", queue, last, "+").entries == 0
    assert len(reader.probe("jobs", queue, "0-0", last, [(0, 1), (2**64 - 1, 2**64 - 1)])) == 2


# --- Walks ---


def test_a_walk_tells_what_a_range_holds(reader: Reader, url: str, queue: str, client: redis.Redis) -> None:
    add(url, queue, 2500)
    ids = [entry_id.decode() for entry_id, _ in client.xrange(Keys(queue).stream)]

    whole = reader.walk("jobs", queue, "0-0", "+", step=1000)
    some = reader.walk("jobs", queue, ids[99], ids[-1], entries=1200, step=300)

    assert (whole.entries, whole.last_id, whole.marks) == (2500, ids[-1], (ids[999], ids[1999]))
    assert (some.entries, some.last_id) == (1200, ids[1299])
    assert some.marks == (ids[399], ids[699], ids[999], ids[1299])


def test_a_walk_in_bytes_takes_at_least_one_entry(reader: Reader, url: str, queue: str) -> None:
    add(url, queue, 5, size=1000)

    assert reader.walk("jobs", queue, "0-0", "+", size=1).entries == 1


def test_the_walk_works_where_read_only_scripts_are_not_allowed(url: str, queue: str, client: redis.Redis) -> None:
    """As on Redis 6.2, which does not have them."""
    skip_before_redis_7(client, "read-only scripts to forbid")
    add(url, queue, 5)
    client.acl_setuser("old", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-evalsha_ro", "-eval_ro"])
    try:
        with Reader(ConnectionOptions(url=url.replace("redis://", "redis://old:x@"))) as reader:
            assert reader.walk("jobs", queue, "0-0", "+").entries == 5
    finally:
        client.acl_deluser("old")


def test_queues_are_found_by_a_glob(reader: Reader, url: str, queue: str, client: redis.Redis) -> None:
    names = [f"{queue}-{tail}" for tail in ("a", "b", "c*")]
    for name in names:
        add(url, name, 1)
    client.set(f"{{chasqui:{queue}-locks}}:promoter:lock", "x", ex=60)
    try:
        assert reader.discover(f"{queue}-*") == sorted(names)
        assert reader.discover(f"{queue}-[ab]") == names[:2]
        assert reader.discover(f"{queue}-c\\*") == names[2:]
    finally:
        client.delete(*(Keys(name).stream for name in names))


@pytest.mark.parametrize(
    "key", [b"{chasqui:a}:result:x", b"other", b"{chasqui:\xff}:stream", b"{chasqui:}:stream", b"{chasqui:a:stream"]
)
def test_keys_that_are_no_queue_are_passed_over(key: bytes) -> None:
    assert queue_of(key, (":stream",)) is None


GLOBS = [
    *("*", "a*", "*c", "a?c", "?", "[ab]", "[^ab]", "[a-c]*", "[c-a]*", "a[*?]c", "a\\*c", "a\\\\c", "[\\]]", "a[b"),
    *("[", "[^", "[^]", "[]", "[]a]", "a[]c", "*b*", "a**c", "??", "[a-", "[-a]", "[a-]", "\\[", "**", "", "\\"),
]


@pytest.mark.parametrize("pattern", GLOBS)
def test_a_glob_matches_here_what_it_matches_in_the_server(pattern: str, queue: str, client: redis.Redis) -> None:
    texts = ["", "a", "b", "ab", "abc", "a*c", "a?c", "a[b]c", "a\\c", "a-c", "^", "]", "aXbXc", "ñ", "-"]
    client.mset({f"{{chasqui:{queue}}}:{text}": "" for text in texts})

    found = client.keys(f"{{chasqui:{queue}}}:{pattern}".encode())

    names = {key.decode().partition("}:")[2] for key in found}
    assert {text for text in texts if matches(pattern, text)} == names
    client.delete(*(f"{{chasqui:{queue}}}:{text}" for text in texts))


def test_a_glob_of_many_stars_is_matched_in_no_time() -> None:
    begin = time.monotonic()

    assert not matches("*a" * 128, "a" * 127)
    assert not matches("*a" * 100 + "b", "a" * 256)
    assert time.monotonic() - begin < 2


def test_delayed_members_come_once_each_also_where_many_share_a_time(
    reader: Reader, queue: str, client: redis.Redis
) -> None:
    members = {f"m{i}".encode(): 5 if i < 700 else i for i in range(1000)}
    client.zadd(Keys(queue).delayed, members)

    found = [member for page in reader.delayed(queue) for member, _ in page]

    assert len(found) == len(set(found)) == 1000


def test_large_delayed_members_after_small_ones_do_not_fill_the_memory(
    reader: Reader, queue: str, client: redis.Redis
) -> None:
    key = Keys(queue).delayed
    members = {b"%d" % i: i for i in range(5000)} | {b"%d" % i + b"x" * (1 << 20): 5000 + i // 10 for i in range(100)}
    client.zadd(key, members)
    client.expire(key, 60)

    found = list[float]()
    tracemalloc.start()
    try:
        for page in reader.delayed(queue):
            found += [score for _, score in page]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert found == sorted(members.values())
    assert peak < 80 << 20


def test_members_promoted_meanwhile_hide_no_others(reader: Reader, queue: str, client: redis.Redis) -> None:
    client.zadd(Keys(queue).delayed, {f"m{i}".encode(): i for i in range(1000)})
    found: list[bytes] = []

    for page in reader.delayed(queue):
        found += [member for member, _ in page]
        client.zrem(Keys(queue).delayed, *(member for member, _ in page[:100]))

    assert len(found) == 1000


def test_pending_jobs_are_listed_in_pages(reader: Reader, url: str, queue: str, client: redis.Redis) -> None:
    add(url, queue, 20)
    assert list(reader.pending(queue, "default")) == []
    client.xgroup_create(Keys(queue).stream, "default", id="0")
    client.xreadgroup("default", "me", {Keys(queue).stream: ">"}, count=15)

    (page,) = reader.pending(queue, "default")

    assert len(page) == 15
    assert {(one.consumer, one.deliveries) for one in page} == {("me", 1)}


def test_a_key_of_another_kind_hides_no_result(reader: Reader, queue: str, client: redis.Redis) -> None:
    client.set(Keys(queue).result("good"), b"\x01", ex=100)
    client.hset(Keys(queue).result("odd"), "field", "value")
    client.expire(Keys(queue).result("odd"), 100)

    assert [job_id for page in reader.results(queue) for job_id, _, _ in page] == ["good"]


def test_results_are_found_with_their_time_left(reader: Reader, queue: str, client: redis.Redis) -> None:
    for i in range(250):
        client.set(Keys(queue).result(f"j{i}"), msgpack.packb(i), ex=100)
    client.set(f"{{chasqui:{queue}x}}:result:other", "x", ex=1)

    found = [one for page in reader.results(queue) for one in page]

    assert sorted(one[0] for one in found) == sorted(f"j{i}" for i in range(250))
    assert all(0 < left <= 100_000 for _, _, left in found)


# --- Columns ---


def test_a_page_read_at_once_equals_the_page_read_job_by_job(url: str, queue: str, client: redis.Redis) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_bulk_named([("", 1), ("mail", {"a": 2}), ("ñ", None)])
    entries = [(i, [x for pair in found.items() for x in pair]) for i, found in client.xrange(Keys(queue).stream)]

    quick = job_columns(entries)
    careful = one_by_one([fields(flat) for _, flat in entries])

    assert quick.errors is None
    assert [n.decode() if isinstance(n, bytes) else n for n in quick.names] == list(careful.names)
    for column in ("ids", "payloads", "created_ms", "attempts"):
        assert tuple(getattr(quick, column)) == tuple(getattr(careful, column))


def test_one_bad_entry_does_not_spoil_the_others() -> None:
    good = msgpack.packb(["a", b"\x01", 5, 0])

    found = job_columns([(b"1-0", [b"d", good]), (b"2-0", [b"d", b"\xc1"]), (b"3-0", []), (b"4-0", None)])

    assert list(found.ids) == ["a", None, None, None]
    assert found.errors is not None
    assert [error is None for error in found.errors] == [True, False, False, False]


def test_delayed_members_that_are_no_jobs_say_why() -> None:
    good = b"\x01\x00\x00\x00n" + msgpack.packb(["a", b"\x01", 5, 2])

    found = delayed_columns([good, b"\x01", b"\xff\xff\xff\xff"])

    assert (found.ids[0], found.names[0], found.attempts[0]) == ("a", "n", 2)
    assert found.errors is not None
    assert found.errors[0] is None
    assert all("delayed member" in str(error) for error in found.errors[1:])
