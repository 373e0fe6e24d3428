"""chasquictl: what is in queues, jobs in and out, dead letters, delayed and repeatable jobs, events."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import redis

from chasqui import Backoff, NewJob, Producer, RepeatableSpec, RepeatPattern, RetryOverride
from tests.engine.cli_tools import Ctl
from tests.engine.seen import key
from tests.engine.worker_tools import nothing_left, working
from tests.support import eventually


@pytest.fixture
def ctl(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ctl:
    return Ctl(url, capsys, monkeypatch)


def fail(_: object) -> None:
    raise ValueError("no such address \x1b[31m")


def dead(url: str, client: redis.Redis, queue: str, jobs: list[NewJob]) -> None:
    """Have jobs fail for good."""
    with Producer(url, queue=queue) as producer:
        producer.add_bulk_jobs(jobs)
    with working(url, queue, fail, max_attempts=1):
        eventually(lambda: nothing_left(client, queue))


# --- Figures ---


def test_inspect_of_a_queue_that_is_not_there_shows_nothing_and_succeeds(ctl: Ctl, queue: str) -> None:
    seen = ctl.json("inspect", queue)

    assert (seen["length"], seen["group_exists"], seen["workers"], seen["promoter"]) == (0, False, [], None)
    assert "no group 'default' yet" in ctl("inspect", queue).out


def test_inspect_tells_waiting_jobs_from_those_being_worked_on(
    ctl: Ctl, url: str, client: redis.Redis, queue: str
) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(5))
        producer.add_in(60_000, 1)
    client.xgroup_create(key(queue, "stream"), "default", "0")
    client.xreadgroup("default", "w1", {key(queue, "stream"): ">"}, count=2)

    seen = ctl.json("inspect", queue)

    assert [seen[n] for n in ("length", "waiting", "pending", "delayed", "added")][:4] == [5, 3, 2, 1]
    assert [(w["name"], w["pending"]) for w in seen["workers"]] == [("w1", 2)]
    assert seen["next_due_ms"] > seen["now_ms"]


def test_plain_inspect_says_the_same_every_time(ctl: Ctl, url: str, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.pause()

    first, second = ctl("inspect", queue), ctl("inspect", queue)

    assert first == second
    assert "\x1b" not in first.out
    assert "paused" in first.out


def test_watch_counts_what_was_added_between_two_looks(ctl: Ctl, url: str, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(10))

    said = ctl("watch", queue, "--count", "2", "--interval-ms", "1", "--json")

    assert said.code == 0
    assert len(said.out.splitlines()) == 2
    assert '"waiting": 10' in said.out


def test_pause_and_resume(ctl: Ctl, queue: str) -> None:
    assert ctl.json("pause", queue) == {"queue": queue, "paused": True}
    assert ctl.json("inspect", queue)["paused"] is True
    assert ctl.json("resume", queue) == {"queue": queue, "paused": False}
    assert ctl.json("inspect", queue)["paused"] is False


# --- Jobs ---


def test_added_job_is_run_and_its_result_shown(ctl: Ctl, url: str, queue: str) -> None:
    assert ctl.json("add", queue, '{"a": [1, "ü"]}', "--name", "n", "--id", "i") == {"queue": queue, "ids": ["i"]}

    with working(url, queue, lambda job: {"got": job.payload, "name": job.name}, store_results=True):
        said = ctl.json("results", queue, "i", "--wait", "10s")

    assert said == {"queue": queue, "results": {"i": {"got": {"a": [1, "ü"]}, "name": "n"}}}


def test_a_long_result_is_cut_and_said_to_be(ctl: Ctl, url: str, queue: str) -> None:
    ctl("add", queue, "1", "--id", "i")
    with working(url, queue, lambda job: "x" * 100_000, store_results=True):
        whole = ctl.json("results", queue, "i", "--wait", "10s")
    said = ctl("results", queue, "i")

    assert len(said.out) < 1000
    assert said.err == "results are cut at 400 characters; --json has all of them\n"
    assert whole["results"]["i"] == "x" * 100_000


def test_result_that_is_not_there_ends_with_one(ctl: Ctl, queue: str) -> None:
    assert ctl("results", queue, "nowhere").code == 1


def test_same_id_is_added_once(ctl: Ctl, queue: str) -> None:
    ctl("add", queue, "1", "--id", "i")
    ctl("add", queue, "1", "--id", "i")

    assert ctl.json("inspect", queue)["waiting"] == 1


def test_lines_become_jobs_and_a_bad_one_is_named(ctl: Ctl, queue: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"n": 1}\n\n{"n": 2}\n')
    bad.write_text('{"n": 1}\n{"n": \n')

    assert ctl.json("add", queue, "--lines", str(good)) == {"queue": queue, "added": 2}
    good.write_text('{"n": 1}\n\n1234567890123456789012\n')
    assert "line 3: payload is a number of more than 64 bits" in ctl("add", queue, "--lines", str(good)).err
    said = ctl("add", queue, "--lines", str(bad))

    assert said.code == 2
    assert "line 2 is not JSON" in said.err
    assert ctl.json("inspect", queue)["waiting"] == 2


def test_retry_rules_travel_with_the_job(ctl: Ctl, url: str, queue: str) -> None:
    ctl("add", queue, "1", "--max-attempts", "7", "--backoff", "fixed", "--backoff-delay", "2s", "--delay", "1h")

    with Producer(url, queue=queue) as producer:
        [found] = producer.list_delayed()
    assert found.job is not None
    assert found.job.retry == RetryOverride(7, Backoff.fixed(2000))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["add", "q"], "one PAYLOAD, or --lines"),
        (["add", "q", "{a"], "PAYLOAD is not JSON"),
        (["add", "q", "1234567890123456789012"], "chasquictl: payload is a number of more than 64 bits"),
        (["add", "q", "NaN"], "JSON has no NaN"),
        (["inspect", "q", "--config", ""], "--config and CHASQUI_CONFIG expect"),
        (["add", "q", "1", "--delay", "soon"], "--delay expects milliseconds"),
        (["add", "q", "1", "--delay", "1s", "--at", "2030-01-01"], "exclude each other"),
        (["add", "q", "1", "--backoff", "fixed"], "go together"),
        (["add", "{q}", "1"], "queue expects a name without braces"),
        (["add", "q", "--lines", "/nowhere/at/all"], "No such file"),
        (["inspect", "q", "--pool-size", "0"], "--pool-size expects a whole number from 1"),
        (["inspect", "q", "--config", "/nowhere.toml"], "/nowhere.toml cannot be read"),
        (["repeatable", "upsert", "q", "n", "--cron", "61 * * * *"], "61 * * * *"),
        (["repeatable", "upsert", "q", "n", "--every", "1s", "--tz", "UTC"], "--tz"),
        (["dlq", "filter", "q", "--since", "yesterday"], "--since expects a time such as 15m"),
        (["events", "q", "--from", "x"], "--from expects"),
        (["repeatable", "upsert", "q", "n", "--every", "0s"], "--every expects a time of at least 1ms"),
    ],
)
def test_users_mistake_is_told_in_a_line_and_ends_with_two(ctl: Ctl, args: list[str], words: str) -> None:
    said = ctl(*args)

    assert said.code == 2
    assert words in said.err
    assert len(said.err.splitlines()) == 1


# --- Dead letters ---


def test_dead_letters_are_chosen_by_reason_name_and_time(ctl: Ctl, url: str, client: redis.Redis, queue: str) -> None:
    dead(url, client, queue, [NewJob(i, name="a" if i % 2 else "b") for i in range(6)])

    found = ctl.json("dlq", "filter", queue, "--reason", "retries_exhausted", "--name", "a", "--since", "1h")
    none = ctl.json("dlq", "filter", queue, "--name", "c", code=1)

    assert found["matching"] == 3
    assert found["groups"] == [{"reason": "retries_exhausted", "name": "a", "count": 3}]
    assert [entry["payload"] for entry in found["entries"]] == [1, 3, 5]
    assert none["matching"] == 0


def test_peek_makes_what_handlers_raised_harmless_for_a_terminal(
    ctl: Ctl, url: str, client: redis.Redis, queue: str
) -> None:
    dead(url, client, queue, [NewJob({"a": 1}, name="n")])

    said = ctl("dlq", "peek", queue)

    assert "no such address \\x1b[31m" in said.out
    assert "\x1b" not in said.out
    assert "1 of 1 shown: 1 retries_exhausted" in said.out


def test_replay_puts_back_only_what_was_chosen(ctl: Ctl, url: str, client: redis.Redis, queue: str) -> None:
    dead(url, client, queue, [NewJob(i, name="a" if i % 2 else "b") for i in range(6)])

    dry = ctl.json("dlq", "replay", queue, "--name", "a", "--dry-run")
    done = ctl.json("dlq", "replay", queue, "--name", "a", "--limit", "2", "--yes")

    assert dry == {"queue": queue, "matching": 3, "replayed": 0}
    assert done == {"queue": queue, "matching": 2, "replayed": 2}
    assert client.xlen(key(queue, "stream")) == 2
    assert client.xlen(key(queue, "dlq")) == 4


def test_replay_keeps_to_its_rate(ctl: Ctl, url: str, client: redis.Redis, queue: str) -> None:
    dead(url, client, queue, [NewJob(i) for i in range(6)])

    started = time.monotonic()
    done = ctl.json("dlq", "replay", queue, "--rate", "5", "--yes")

    assert done["replayed"] == 6
    assert time.monotonic() - started >= 1.0


def test_without_a_terminal_and_without_yes_nothing_is_done(
    ctl: Ctl, url: str, client: redis.Redis, queue: str
) -> None:
    dead(url, client, queue, [NewJob(1)])

    for command in ("replay", "purge"):
        said = ctl("dlq", command, queue)
        assert said.code == 1
        assert "give --yes" in said.err
    assert client.xlen(key(queue, "dlq")) == 1


def test_purge_deletes_what_was_chosen(ctl: Ctl, url: str, client: redis.Redis, queue: str) -> None:
    dead(url, client, queue, [NewJob(i, name="a" if i else "b") for i in range(250)])

    assert ctl.json("dlq", "purge", queue, "--name", "a", "--yes")["purged"] == 249
    assert ctl.json("dlq", "purge", queue, "--yes")["purged"] == 1
    assert ctl("dlq", "purge", queue, "--yes").code == 0


# --- Delayed ---


def test_delayed_jobs_are_promoted_and_cancelled_by_any_id(ctl: Ctl, url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        made, own = producer.add_in(60_000, "a", name="n"), producer.add_in(120_000, "b", id="own")
        other, third = producer.add_in(180_000, "c"), producer.add_in(240_000, "d", id="third")

    listed = ctl.json("delayed", "list", queue)
    promoted = ctl.json("delayed", "promote", queue, made, own, "nowhere", "--yes", code=1)
    cancelled = ctl.json("delayed", "cancel", queue, other, third, "--yes")

    assert [job["id"] for job in listed["jobs"]] == [made, own, other, third]
    assert promoted["promoted"] == {made: True, own: True, "nowhere": False}
    assert cancelled["cancelled"] == {other: True, third: True}
    assert client.xlen(key(queue, "stream")) == 2
    assert client.zcard(key(queue, "delayed")) == 0
    ctl("add", queue, "1", "--id", "third")
    assert client.xlen(key(queue, "stream")) == 3, "after a cancel the id is free again"


def test_member_that_is_no_job_is_listed_and_passed_over(ctl: Ctl, url: str, client: redis.Redis, queue: str) -> None:
    client.zadd(key(queue, "delayed"), {b"\x01": 5, b"\xff\xff\xff\xffxx": 6})

    assert [job["id"] for job in ctl.json("delayed", "list", queue)["jobs"]] == [None, None]
    assert ctl.json("delayed", "promote", queue, "x", "--yes", code=1)["promoted"] == {"x": False}


# --- Repeatable, events ---


def test_repeatable_jobs_are_stored_listed_and_removed(ctl: Ctl, queue: str) -> None:
    stored = ctl.json("repeatable", "upsert", queue, "digest", "--cron", "0 7 * * *", "--tz", "Europe/Madrid")
    listed = ctl.json("repeatable", "list", queue)["repeatable"]

    assert [(s["key"], s["pattern"], s["tz"]) for s in listed] == [(stored["key"], "0 7 * * *", "Europe/Madrid")]
    assert ctl.json("repeatable", "remove", queue, stored["key"])["removed"] is True
    assert ctl("repeatable", "remove", queue, stored["key"]).code == 1


def test_repeatable_every_is_shown_with_its_interval(ctl: Ctl, url: str, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.upsert_repeatable(RepeatableSpec("ping", RepeatPattern.every(30_000), None))

    assert "every 30000ms" in ctl("repeatable", "list", queue).out


def test_events_are_filtered_by_what_happened_and_to_whom(ctl: Ctl, url: str, client: redis.Redis, queue: str) -> None:
    dead(url, client, queue, [NewJob(1, name="a"), NewJob(2, name="b")])

    said = ctl("events", queue, "--from", "0", "--no-follow", "--event", "failed", "--event", "dlq", "--name", "a")

    assert [line.split()[2] for line in said.out.splitlines()] == ["failed", "dlq"]
    assert all("name=a" in line for line in said.out.splitlines())
    assert "\x1b" not in said.out


# --- What is not as it should be ---


def test_a_key_of_the_wrong_type_is_named(ctl: Ctl, client: redis.Redis, queue: str) -> None:
    client.set(key(queue, "delayed"), "x", ex=600)
    named = f"{{chasqui:{queue}}}:delayed holds a string"

    said, doctor = ctl("inspect", queue), ctl("doctor", queue)

    assert said.code == 4
    assert f"{named}, where a queue has a zset" in said.err
    assert doctor.code == 5
    assert f"danger  keys: {named}; a queue has a zset there" in doctor.out
    assert "persistence:" in doctor.out, "the other findings stand beside it"


def test_doctor_goes_on_where_its_user_may_not_look(
    url: str, client: redis.Redis, queue: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client.acl_setuser(queue, enabled=True, passwords=["+p"], keys=["*"], categories=["+@all"])
    client.execute_command("ACL", "SETUSER", queue, "-config", "-info", "-time", "-xinfo")
    try:
        said = Ctl(url.replace("redis://", f"redis://{queue}:p@"), capsys, monkeypatch)("doctor", queue)
    finally:
        client.acl_deluser(queue)

    assert said.code == 1
    for words in ("note  clock: the server does not tell", "warning  permissions: ", "warning  keys: the queue cannot"):
        assert words in said.out
