"""Entries as they arrive: every recorded form, good and bad, ends where the original puts it, for the same reason."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import redis

from chasqui import InMemorySink, Producer, RetryOverride
from tests.engine.seen import an_envelope, key
from tests.engine.worker_tools import dead_letters, events, nothing_left, pending, working
from tests.support import eventually
from tests.unit.test_codec import INLINE_PAYLOADS, retry_shown

Case = dict[str, Any]
RECORDED: list[Case] = json.loads((Path(__file__).parents[1] / "golden" / "decode.json").read_text())["cases"]

# The original's counter stops here, so a job that has used up even the largest budget gets one more run. Ours does not.
NO_MORE_RUNS = 2**32 - 1


def by_settings() -> dict[tuple[int, int | None], list[Case]]:
    """The recorded cases, by the settings of the consumer that read them."""
    found: dict[tuple[int, int | None], list[Case]] = defaultdict(list)
    for case in RECORDED:
        found[case["max_attempts"], case.get("max_payload_bytes")].append(case)
    return found


def put(client: redis.Redis, queue: str, case: Case) -> str:
    """The entry as it was recorded: its fields as they were, else ``d`` and, where there is one, ``n``."""
    pairs = [(name, bytes.fromhex(value)) for name, value in case.get("fields", [])]
    if not pairs:
        pairs = [("d", bytes.fromhex(case["d"]))] + ([("n", case["n"].encode())] if case["n"] is not None else [])
    flat = [part for pair in pairs for part in pair]
    return str(client.execute_command("XADD", key(queue, "stream"), "*", *flat).decode())


@pytest.mark.parametrize(("max_attempts", "max_payload_bytes"), by_settings())
def test_every_recorded_entry_is_run_or_put_aside_as_the_original_does(
    url: str, client: redis.Redis, queue: str, max_attempts: int, max_payload_bytes: int | None
) -> None:
    cases = {put(client, queue, c): c for c in by_settings()[max_attempts, max_payload_bytes]}
    ran: dict[str, Case] = {}

    def handler(job: Any) -> None:
        ran[job.entry_id] = {
            "id": job.id,
            "name": job.name,
            "payload_hex": job.payload.hex(),
            "created_at_ms": job.created_at_ms,
            "attempt": job.attempt,
            "retry": retry_shown(job.retry),
        }
        raise ValueError("boom")

    options = {"max_attempts": max_attempts, "raw": True, "delayed_enabled": False}
    if max_payload_bytes is not None:
        options["max_payload_bytes"] = max_payload_bytes
    with working(url, queue, handler, **options):
        eventually(lambda: client.xlen(key(queue, "stream")) == 0 and pending(client, queue) == [])

    accepted = {i: c for i, c in cases.items() if c["accepted"]}
    inline = {i for i, c in cases.items() if c["d"] in INLINE_PAYLOADS}
    assert {i: seen for i, seen in ran.items() if i not in inline} == {
        i: {name: c[name] for name in ran[i]} for i, c in accepted.items() if i in ran
    }
    assert set(ran) == {i for i, c in accepted.items() if c["attempt"] < NO_MORE_RUNS} | inline
    assert written(client, queue) == {i: expected(c) for i, c in cases.items() if i not in inline and dead(c)}
    members = {bytes.fromhex(c["after_failure"]["member"]) for c in accepted.values() if not dead(c)}
    assert members <= set(client.zrange(key(queue, "delayed"), 0, -1))
    assert client.zcard(key(queue, "delayed")) == len(members) + len({cases[i]["d"] for i in inline})


def dead(case: Case) -> bool:
    return not case["accepted"] or case["after_failure"]["to"] == "dlq"


def expected(case: Case) -> Case:
    """The dead letter that the original writes, by field."""
    if case["accepted"]:
        after = case["after_failure"]
        return {"d": after["d"], "n": case["n"] or None, "reason": after["reason"], "detail": None}
    return {
        "d": case["d"] or "",
        "n": case["dlq_n"],
        "reason": case["dlq_reason"],
        "detail": case["dlq_detail"],
    }


def written(client: redis.Redis, queue: str) -> dict[str, Case]:
    return {
        letter["source_id"].decode(): {
            "d": letter["d"].hex(),
            "n": letter["n"].decode() if "n" in letter else None,
            "reason": letter["reason"].decode(),
            "detail": letter["detail"].decode() if "detail" in letter else None,
        }
        for letter in dead_letters(client, queue)
    }


# Events and figures of what is put aside unrun


@pytest.mark.parametrize(
    ("fields", "event"),
    [
        ({"x": b"1", "n": b"a"}, {"id": "", "attempt": "0", "reason": "malformed"}),
        ({"d": b"\xc1", "n": b"a"}, {"id": "", "attempt": "0", "reason": "decode_failed"}),
        ({"d": b"\xc1" * 101, "n": b"a"}, {"id": "", "n": "a", "attempt": "0", "reason": "oversize_payload"}),
        (
            {"d": an_envelope("j", 1, attempt=5), "n": b"a"},
            {"id": "j", "n": "a", "attempt": "5", "reason": "retries_exhausted"},
        ),
    ],
    ids=["malformed", "decode_failed", "oversize_payload", "retries_exhausted"],
)
def test_what_is_put_aside_unrun_is_told_in_one_event_and_counted(
    url: str, client: redis.Redis, queue: str, fields: dict[str, bytes], event: dict[str, str]
) -> None:
    sink, ran = InMemorySink(), []
    client.xadd(key(queue, "stream"), fields)  # type: ignore[arg-type]

    with working(url, queue, ran.append, max_payload_bytes=100, metrics=sink):
        eventually(lambda: dead_letters(client, queue) and nothing_left(client, queue))

    told = [e for e in events(client, queue) if e["e"] != "drained"]
    assert [{k: v for k, v in e.items() if k not in ("e", "ts")} for e in told] == [event]
    assert told[0]["e"] == "dlq"
    assert (ran, sink.reasons) == ([], {event["reason"]: 1})
    assert sink.last["dlq_routed"].attempt == int(event["attempt"])


def test_a_payload_of_exactly_the_limit_is_run(url: str, client: redis.Redis, queue: str) -> None:
    data, ran = an_envelope("j", "x" * 80), []
    client.xadd(key(queue, "stream"), {"d": data})

    with working(url, queue, ran.append, max_payload_bytes=len(data)):
        eventually(lambda: nothing_left(client, queue))

    assert [job.id for job in ran] == ["j"]


def test_bad_entries_do_not_hold_up_the_good_ones_among_them(url: str, client: redis.Redis, queue: str) -> None:
    ran: list[str] = []
    for n in range(100):
        client.xadd(key(queue, "stream"), {"d": b"\xc1" if n % 2 else an_envelope(f"j-{n}", n)})

    with working(url, queue, lambda job: ran.append(job.id), batch=7, concurrency=1):
        eventually(lambda: nothing_left(client, queue))

    assert ran == [f"j-{n}" for n in range(0, 100, 2)]
    assert len(dead_letters(client, queue)) == 50


# Budget on arrival. A delivery that was not settled was a start: the worker died in it. The original forgives one.


@pytest.mark.parametrize(
    ("deliveries", "attempt", "dead_with"),
    [(0, 0, None), (1, 0, None), (2, 0, 2), (3, 0, 3), (5, 0, 5), (0, 1, None), (1, 1, None), (0, 2, 2), (1, 2, 2)],
)
def test_a_job_is_started_while_its_starts_so_far_are_below_its_attempts(
    url: str, client: redis.Redis, queue: str, deliveries: int, attempt: int, dead_with: int | None
) -> None:
    data = an_envelope("j", 1, attempt=attempt, retry=RetryOverride(2))
    entry_id = client.xadd(key(queue, "stream"), {"d": data, "n": b"name"})
    if deliveries:
        client.xgroup_create(key(queue, "stream"), "default", 0)
        client.xreadgroup("default", "dead", {key(queue, "stream"): ">"})
        client.xclaim(key(queue, "stream"), "default", "dead", 0, [entry_id], idle=60_000, retrycount=deliveries)
    runs: list[int] = []

    with working(url, queue, lambda job: runs.append(job.run)):
        eventually(lambda: nothing_left(client, queue))

    told = {e["e"]: e for e in events(client, queue)}
    if dead_with is None:
        assert runs == [attempt + 1]
        assert told["active"]["attempt"] == str(attempt + 1)
    else:
        (letter,) = dead_letters(client, queue)
        assert runs == []
        assert (letter["d"], letter["n"], letter["reason"]) == (data, b"name", b"retries_exhausted")
        assert (told["dlq"]["id"], told["dlq"]["attempt"]) == ("j", str(dead_with))


def test_a_job_added_with_no_attempts_is_a_dead_letter_unrun(url: str, client: redis.Redis, queue: str) -> None:
    ran: list[Any] = []
    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j", retry=RetryOverride(0))
        with working(url, queue, ran.append):
            eventually(lambda: dead_letters(client, queue))

    assert ran == []
    assert dead_letters(client, queue)[0]["reason"] == b"retries_exhausted"
