"""The files of conf/ that servers read: each starts a real server, and is enough for those it is written for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from chasqui import AuthFailed, NewJob, Producer, RepeatableSpec, RepeatPattern, UnrecoverableError
from chasqui.embedded import EmbeddedServer
from chasqui.options import ConnectionOptions
from chasqui.reader import Reader
from chasqui.transactions import Terms
from tests.conftest import skip_before_redis_7
from tests.engine.cli_tools import Ctl
from tests.engine.test_transactions import commit, jobs, stage
from tests.engine.worker_tools import nothing_left, working
from tests.support import eventually

CONF = Path(__file__).parents[2] / "conf"
OURS = ("bind", "port")  # what an embedded server sets by itself


def settings(path: Path) -> list[str]:
    lines = [line.strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_with_the_production_file_doctor_finds_no_danger(
    start_like: Callable[..., EmbeddedServer], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line for line in settings(CONF / "redis.conf") if line.split()[0] not in OURS]
    server = start_like(config=lines)

    told = Ctl(server.url, capsys, monkeypatch)("doctor", "--json").json

    severities = {finding["check"]: finding["severity"] for finding in told["findings"]}
    assert told["worst"] in ("note", "warning")
    assert severities["eviction"] == "ok"
    # A warning only where the server has no WAITAOF, with which commits wait for the disk.
    assert severities["persistence"] in ("note", "warning")


def test_an_embedded_server_as_it_is_would_lose_jobs_and_doctor_says_so(
    url: str, queue: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Ctl(url, capsys, monkeypatch)("doctor", queue)

    assert said.code == 5
    assert "danger  persistence: no append-only file" in said.out
    assert said.out.endswith("jobs can be lost\n")


@pytest.fixture
def users(start_like: Callable[..., EmbeddedServer], client: redis.Redis, tmp_path: Path) -> Callable[[str], str]:
    """A server with the users of the shipped file; gives the url of each. The default user stays, to look from outside:
    the embedded server asks as that whether it is up.
    """
    skip_before_redis_7(client, "rules for keys that may only be read")
    text = (CONF / "users.acl").read_text()
    assert text.startswith("user default off\n")
    acl = tmp_path / "users.acl"
    acl.write_text(text.replace("user default off", "user default on nopass ~* &* +@all", 1))
    server = start_like(config={"aclfile": str(acl)})

    def url_of(user: str) -> str:
        if user == "default":
            return server.url
        return server.url.replace("redis://", f"redis://chasqui-{user}:CHANGE-{user}@")

    return url_of


def test_producer_and_worker_users_may_do_all_that_jobs_need(users: Callable[[str], str]) -> None:
    queue, ran = "q", []

    def handler(job: object) -> int:
        ran.append(job.payload)  # type: ignore[attr-defined]
        if job.payload == "retry" and job.attempt == 0:  # type: ignore[attr-defined]
            raise ValueError("once")
        if job.payload == "dead":  # type: ignore[attr-defined]
            raise UnrecoverableError("never")
        return 1

    with Producer(users("producer"), queue=queue) as producer, redis.Redis.from_url(users("default")) as client:
        producer.add("one", id="i", name="n")
        producer.add_bulk(["retry", "dead", "x"])
        producer.add_in(1, "later", id="later")
        keep = producer.add_in(60_000, "cancelled", id="c")
        producer.upsert_repeatable(RepeatableSpec("r", RepeatPattern.every(500), "tick", limit=2))
        with working(
            users("worker"), queue, handler, run_scheduler=True, scheduler_tick_interval_ms=50, store_results=True
        ):
            eventually(lambda: ran.count("retry") == 2 and "later" in ran and "tick" in ran, within=20)
            eventually(lambda: producer.get_result("i") == 1)
            producer.pause()
            producer.resume()
            assert producer.cancel_delayed(keep)
            eventually(lambda: nothing_left(client, queue))
        assert producer.stats().dlq == 1
        assert producer.peek_dlq()[0].name == ""
        assert producer.replay_dlq() == 1
        assert producer.overview().dlq == 0


def test_the_producer_user_may_do_what_a_producer_does_and_nothing_else(users: Callable[[str], str]) -> None:
    [line] = [line for line in (CONF / "users.acl").read_text().splitlines() if " chasqui-producer " in line]
    allowed = {word[1:] for word in line.split() if word.startswith("+")}

    with redis.Redis.from_url(users("default"), protocol=2) as client:
        with Producer(users("producer"), queue="q") as producer:
            producer.add_bulk(["dead"] * 4)
            with working(users("worker"), "q", _never, max_attempts=1):
                eventually(lambda: producer.stats().dlq == 4, within=20)
            client.config_resetstat()
            _everything(producer)
        used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
        denied = [entry["object"] for entry in client.acl_log() if entry["username"] == "chasqui-producer"]

    # What a cluster and a connection need is not seen here, nor is what this server's admin did.
    expected = allowed - {"@connection", "cluster|slots"}
    assert denied == []
    assert {name for name in used if not name.startswith(("client", "config", "hello", "auth", "ping"))} == expected


def _never(_: object) -> None:
    raise UnrecoverableError("never")


def _everything(producer: Producer) -> None:
    """All that a producer can be asked for."""
    producer.add(1)
    producer.add(1, id="i")
    producer.add_bulk(range(3))
    producer.add_bulk_jobs([NewJob(1, id="b"), NewJob(2, id="late", delay_ms=60_000)])
    ids = [producer.add_in(60_000, n) for n in range(3)]
    producer.list_delayed()
    producer.cancel_delayed(ids[0])
    producer.cancel_delayed_bulk(ids[1:], search=True)
    producer.promote_delayed(["late"])
    key = producer.upsert_repeatable(RepeatableSpec("r", RepeatPattern.every(500), None))
    producer.list_repeatable()
    producer.remove_repeatable(key)
    letters = producer.peek_dlq()
    producer.replay_dlq(1)
    producer.replay_dlq(ids=[letters[-1].dlq_id])
    producer.purge_dlq(1)
    producer.purge_dlq()
    producer.get_result_bulk(["i"])
    producer.stats()
    producer.overview()
    producer.pause()
    producer.resume()


def test_spark_user_may_stage_and_commit_and_read(users: Callable[[str], str]) -> None:
    url = users("spark")

    assert commit(url, "app", 1, stage(url, {"q": jobs(1, 2, 3)}), terms=Terms(durability="auto"))
    with Producer(url, queue="q") as producer:
        assert producer.stats().waiting == 3
    with Reader(ConnectionOptions(url=url)) as reader:
        assert reader.discover("*") == ["q"]
        assert sum(map(len, reader.delayed("q"))) == 0


def test_producer_user_reaches_no_key_outside_of_queues(users: Callable[[str], str]) -> None:
    with redis.Redis.from_url(users("producer")) as client:
        for command in (
            ("SET", "other", "1"),
            ("FLUSHALL",),
            ("KEYS", "*"),
            ("CONFIG", "GET", "*"),
            ("XACK", "{chasqui:q}:stream", "g", "1-0"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)


def test_observer_sees_everything_and_changes_nothing(
    users: Callable[[str], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(users("producer"), queue="q") as producer:
        producer.add(1)
        producer.add_in(60_000, 2, id="later")
    observer = Ctl(users("observer"), capsys, monkeypatch)

    assert observer.json("inspect", "q")["waiting"] == 1
    assert observer.json("delayed", "list", "q")["total"] == 1
    assert observer.json("dlq", "peek", "q")["total"] == 0
    assert observer.json("txn", "list") == {"writers": []}
    assert observer("events", "q", "--from", "0", "--no-follow").code == 0
    assert "may not use XADD" in observer("doctor", "q").out
    for refused in (("add", "q", "1"), ("pause", "q"), ("delayed", "cancel", "q", "later", "--yes")):
        said = observer(*refused)
        assert said.code == 4, said
        assert "does not allow this user" in said.err
    with Producer(users("observer"), queue="q") as producer, pytest.raises(AuthFailed):
        producer.add(1)


def test_operator_may_repair(
    users: Callable[[str], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = Ctl(users("operator"), capsys, monkeypatch)

    operator("add", "q", "1", "--delay", "1h", "--id", "i")
    assert operator.json("delayed", "promote", "q", "i", "--yes")["promoted"] == {"i": True}
    assert operator.json("pause", "q")["paused"] is True
    assert operator.json("repeatable", "upsert", "q", "n", "--every", "1h")["key"] == "n::every:3600000"
    assert operator.json("dlq", "purge", "q", "--yes")["purged"] == 0
    with redis.Redis.from_url(users("operator")) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.flushall()


def test_passwords_of_the_shipped_file_are_marked_to_be_changed() -> None:
    text = (CONF / "users.acl").read_text()

    assert re.findall(r">(\S+)", text)
    assert all(word.startswith("CHANGE-") for word in re.findall(r">(\S+)", text))
    assert "nopass" not in text
