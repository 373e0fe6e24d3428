"""dead_letter: a job that is given up is written once, with the native fields first, and only while it is ours."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tests.lua.worker_pending import GROUP, Pending


@pytest.fixture
def q(client: redis.Redis, queue: str) -> Pending:
    return Pending(client, queue)


def bury(q: Pending, *dead: tuple[bytes, str, str, str, str, str], max_len: int = 100) -> Any:
    """Entry id, envelope, name, reason, detail and error of each."""
    keys = [q.keys.stream, q.keys.dlq]
    return q.call("dead_letter", keys, GROUP, "me", max_len, *(part for one in dead for part in one))


def test_all_fields_stand_in_the_native_order_with_the_error_last(q: Pending) -> None:
    (entry,) = q.taken("me", "a")

    assert bury(q, (entry, "env", "name", "why", "detail", "error")) == [1]

    (letter,) = q.dead
    assert list(letter.items()) == [
        ("d", "env"),
        ("n", "name"),
        ("source_id", entry.decode()),
        ("reason", "why"),
        ("detail", "detail"),
        ("error", "error"),
    ]
    assert (q.stream, q.pending) == ([], [])


def test_what_is_empty_is_left_out_but_the_envelope_never(q: Pending) -> None:
    (entry,) = q.taken("me", "a")

    bury(q, (entry, "", "", "malformed", "", ""))

    assert q.dead == [{"d": "", "source_id": entry.decode(), "reason": "malformed"}]


def test_a_second_call_writes_nothing(q: Pending) -> None:
    (entry,) = q.taken("me", "a")
    letter = (entry, "env", "", "why", "", "")

    assert [bury(q, letter), bury(q, letter)] == [[1], [0]]

    assert len(q.dead) == 1


def test_a_job_that_another_worker_took_over_stays_with_it(q: Pending) -> None:
    first, second = q.taken("me", "a", "b")
    q.give("other", [first])

    assert bury(q, (first, "e1", "", "why", "", ""), (second, "e2", "", "why", "", "")) == [0, 1]

    assert [letter["d"] for letter in q.dead] == ["e2"]
    assert (q.stream, q.pending) == (["a"], [(first, "other", 1)])


def test_the_dead_letters_are_trimmed_about_at_their_cap(q: Pending) -> None:
    entries = q.taken("me", *(str(n) for n in range(500)))

    bury(q, *((entry, "e", "", "why", "", "") for entry in entries), max_len=100)

    assert 100 <= len(q.dead) <= 300


def test_a_dlq_key_of_another_type_is_an_error_and_the_job_stays(q: Pending) -> None:
    (entry,) = q.taken("me", "a")
    q.client.set(q.keys.dlq, "mine", ex=60)

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        bury(q, (entry, "env", "", "why", "", ""))

    assert (q.stream, q.pending) == (["a"], [(entry, "me", 1)])
