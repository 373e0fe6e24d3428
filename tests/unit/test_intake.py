"""Classification of an entry on arrival: a job to run, or a dead letter, and nothing raised on data."""

from __future__ import annotations

import random
from typing import Any

import pytest

from chasqui import Backoff, RetryOverride
from chasqui.intake import ActiveJob, Limits, budget, classify
from chasqui.protocol.codec import Envelope, encode_envelope
from chasqui.protocol.consume import DeadLetter, Member
from chasqui.protocol.flow import Command
from chasqui.protocol.keys import Keys
from tests.support import drive

LIMITS = Limits(max_attempts=3, max_payload_bytes=200)
ID = b"5-1"


def envelope(attempt: int = 0, retry: RetryOverride | None = None, payload: bytes = b"\x01") -> bytes:
    return encode_envelope(Envelope("j", payload, 1794978620538, attempt, retry))


def arrived(*flat: bytes, deliveries: int = 0) -> ActiveJob | DeadLetter:
    return classify((ID, list(flat), deliveries), LIMITS, None)


def job_of(*flat: bytes, deliveries: int = 0) -> ActiveJob:
    found = arrived(*flat, deliveries=deliveries)
    assert isinstance(found, ActiveJob)
    return found


# Jobs


def test_an_ordinary_entry_is_a_job_with_its_payload_still_packed() -> None:
    rules = RetryOverride(7, Backoff.fixed(5))

    job = job_of(b"d", envelope(1, rules), b"n", "é".encode(), deliveries=2)

    assert (job.id, job.name, job.payload, job.created_at_ms, job.attempt) == ("j", "é", None, 1794978620538, 1)
    assert (job.retry, job.entry_id, job.entry, job.deliveries, job.lost) == (rules, "5-1", ID, 2, False)
    assert job.envelope.payload == b"\x01"


@pytest.mark.parametrize(
    "flat",
    [
        (b"n", b"x", b"d", envelope()),
        (b"z", b"1", b"d", envelope(), b"n", b"x"),
        (b"d", envelope(), b"n", b"x", b"d", b"\xc1"),
        (b"d", envelope(), b"n", b"x", b"n", b"y"),
    ],
    ids=["other order", "a field more", "d twice", "n twice"],
)
def test_fields_are_found_by_name_and_the_first_counts(flat: tuple[bytes, ...]) -> None:
    assert (job_of(*flat).id, job_of(*flat).name) == ("j", "x")


@pytest.mark.parametrize("flat", [(), (b"n", b""), (b"n", b"\xff\xfe")], ids=["missing", "empty", "not UTF-8"])
def test_a_name_that_cannot_be_read_means_unnamed(flat: tuple[bytes, ...]) -> None:
    assert job_of(b"d", envelope(), *flat).name == ""


# Dead letters


@pytest.mark.parametrize("flat", [(), (b"n", b"x"), (b"payload", envelope()), (b"d",)], ids=repr)
def test_an_entry_without_payload_is_malformed_and_nameless(flat: tuple[bytes, ...]) -> None:
    assert arrived(*flat) == DeadLetter(ID, b"", b"", "malformed", 0, "", "missing or non-bytes payload field")


@pytest.mark.parametrize("flat", [None, b"text", 7], ids=repr)
def test_fields_that_are_no_list_are_malformed(flat: Any) -> None:
    assert classify((ID, flat, 0), LIMITS, None) == DeadLetter(
        ID, b"", b"", "malformed", 0, detail="fields not an array"
    )


def test_too_large_a_payload_keeps_bytes_and_name_and_is_not_decoded() -> None:
    assert arrived(b"d", b"\xc1" * 201, b"n", b"x") == DeadLetter(ID, b"\xc1" * 201, b"x", "oversize_payload", 0)


def test_a_payload_of_exactly_the_limit_is_accepted() -> None:
    room = LIMITS.max_payload_bytes - len(envelope(payload=b"p" * 50)) + 50

    data = envelope(payload=b"p" * room)

    assert len(data) == LIMITS.max_payload_bytes
    assert isinstance(arrived(b"d", data), ActiveJob)


def test_what_does_not_decode_keeps_its_bytes_and_loses_its_name() -> None:
    assert arrived(b"d", b"\xc1", b"n", b"x") == DeadLetter(ID, b"\xc1", b"", "decode_failed", 0)


def test_an_empty_payload_field_is_there_but_does_not_decode() -> None:
    assert arrived(b"d", b"") == DeadLetter(ID, b"", b"", "decode_failed", 0)


@pytest.mark.parametrize(
    ("attempt", "deliveries", "limit", "prior"),
    [
        (0, 0, 3, None),
        (2, 0, 3, None),
        (3, 0, 3, 3),
        (0, 2, 3, None),
        (0, 3, 3, 3),
        (1, 4, 3, 4),
        (4, 1, 3, 4),
        (0, 0, 0, 0),
        (0, 0, 1, None),
        (0, 1, 1, 1),
        (7, 7, 8, None),
    ],
)
def test_a_job_whose_starts_reach_its_budget_is_exhausted(
    attempt: int, deliveries: int, limit: int, prior: int | None
) -> None:
    data = envelope(attempt, RetryOverride(limit))

    found = arrived(b"d", data, b"n", b"x", deliveries=deliveries)

    if prior is None:
        assert isinstance(found, ActiveJob)
    else:
        assert found == DeadLetter(ID, data, b"x", "retries_exhausted", prior, "j")


@pytest.mark.parametrize(
    ("retry", "expected"),
    [
        (None, 3),
        (RetryOverride(), 3),
        (RetryOverride(0), 0),
        (RetryOverride(9), 9),
        (RetryOverride(2**32 - 1), 2**32 - 1),
    ],
    ids=repr,
)
def test_the_jobs_own_budget_goes_before_the_workers(retry: RetryOverride | None, expected: int) -> None:
    assert budget(retry, LIMITS) == expected


def test_no_bytes_whatsoever_raise() -> None:
    rng = random.Random(3)
    good = envelope(1, RetryOverride(7, Backoff.exponential(5, multiplier=2.0)))
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        flat = [b"d", bytes(data[: rng.randrange(len(data) + 1)]), b"n", rng.randbytes(3)]
        found = classify((ID, flat, rng.randrange(3)), LIMITS, None)
        assert isinstance(found, ActiveJob | DeadLetter)


# How much a worker asks of the server at once: a script stops it meanwhile.

ME = Member(Keys("q"), "g", "me")


def test_claims_of_more_than_a_thousand_entries_are_renewed_and_released_in_steps() -> None:
    ids = [f"{n}-0".encode() for n in range(2500)]

    _, renewals = drive(ME.renew(ids), [[], [], []])
    _, releases = drive(ME.release(1, [(i, 0) for i in ids]), [1000, 1000, 500])

    assert [len(step.args) - 6 for step in renewals if isinstance(step, Command)] == [1000, 1000, 500]
    assert len(releases) == 3
