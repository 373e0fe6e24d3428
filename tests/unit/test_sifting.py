"""What of claimed entries becomes rows, and what goes to the dead letters on arrival."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from chasqui import DecodeError, RetryOverride
from chasqui.bridge import DeadLetter, JobSpans, Limits
from chasqui.protocol.codec import Envelope, encode_envelope
from chasqui.protocol.spans import job_spans
from chasqui_spark.options import SourceOptions
from chasqui_spark.rows import Rows
from chasqui_spark.sifting import sift

LIMITS = Limits(3, 1000)


def entry(
    number: int, payload: Any = 1, *, attempt: int = 0, deliveries: int = 0, retry: Any = None, raw: bytes | None = None
) -> tuple[bytes, list[bytes], int]:
    data = (
        encode_envelope(Envelope(f"j{number}", msgpack.packb(payload), 1_794_978_620_538, attempt, retry))
        if raw is None
        else raw
    )
    return b"1795000000000-%d" % number, [b"d", data, b"n", b"name"], deliveries


def sifted(page: list[Any], *, keep_bad: bool = False, **options: Any) -> tuple[list[str], dict[str, DeadLetter]]:
    rows = Rows(SourceOptions(queue="q", mode="consume", **options))
    batch, letters = sift(rows, "q", page, LIMITS, keep_bad=keep_bad)
    return batch.column("entry_id").to_pylist(), {letter.entry_id.decode()[-1]: letter for letter in letters}


def test_good_jobs_are_rows_in_order() -> None:
    ids, letters = sifted([entry(1), entry(2, attempt=2), entry(3, retry=RetryOverride(9), attempt=8)])

    assert [one[-1] for one in ids] == ["1", "2", "3"]
    assert letters == {}


def test_each_way_of_being_no_job_has_its_reason() -> None:
    page: list[Any] = [
        entry(1),
        entry(2, raw=b"\xc1"),
        (b"1795000000000-3", [b"x", b"1"], 0),
        entry(4, raw=b"x" * 1001),
        entry(5, attempt=3),
        entry(6, retry=RetryOverride(0)),
        entry(7, deliveries=3),
        entry(8, deliveries=2),
        (b"1795000000000-9", [], 0),
    ]

    ids, letters = sifted(page)

    assert [one[-1] for one in ids] == ["1", "8"]
    assert {number: letter.reason for number, letter in letters.items()} == {
        "2": "decode_failed",
        "3": "malformed",
        "4": "oversize_payload",
        "5": "retries_exhausted",
        "6": "retries_exhausted",
        "7": "retries_exhausted",
        "9": "malformed",
    }
    assert (letters["5"].attempt, letters["5"].job_id, letters["7"].attempt) == (3, "j5", 3)


def test_a_payload_that_does_not_fit_its_schema_is_a_dead_letter_that_says_why() -> None:
    ids, letters = sifted([entry(1, {"n": 1}), entry(2, {"n": "x"})], payload_schema="n INT")

    assert len(ids) == 1
    assert letters["2"].reason == "decode_failed"
    assert "n" in letters["2"].detail


def test_bad_jobs_are_rows_where_they_are_to_be_null_but_not_what_has_no_run_left() -> None:
    ids, letters = sifted([entry(1), entry(2, raw=b"\xc1"), entry(3, attempt=3)], keep_bad=True, bad_jobs="null")

    assert [one[-1] for one in ids] == ["1", "2"]
    assert list(letters) == ["3"]


def as_spans(page: list[Any]) -> JobSpans:
    """The same page, in the bytes that it would come in."""
    parts = [b"*%d\r\n" % len(page)]
    for entry_id, flat, _ in page:
        parts += [b"*2\r\n$%d\r\n%b\r\n*%d\r\n" % (len(entry_id), entry_id, len(flat))]
        parts += [b"$%d\r\n%b\r\n" % (len(part), part) for part in flat]
    found = job_spans(b"".join(parts))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "page",
    [
        [entry(1), entry(2, attempt=2)],
        [entry(1), entry(2, "x" * 1000)],
        [entry(1), entry(2, "x" * (1000 - 25)), entry(3)],
        [entry(1, attempt=3), entry(2)],
        [entry(1, {"n": 1}), entry(2, {"n": "x"})],
    ],
    ids=["all fit", "too large", "just not too large", "no run left", "another schema"],
)
@pytest.mark.parametrize("keep_bad", [False, True])
def test_a_page_in_bytes_is_sifted_as_its_entries_are(page: list[Any], keep_bad: bool) -> None:
    rows = Rows(
        SourceOptions(queue="q", mode="consume", payload_schema="n INT", bad_jobs="null" if keep_bad else "dlq")
    )

    batch, letters = sift(rows, "q", as_spans(page), LIMITS, keep_bad=keep_bad)

    expected, wanted = sift(rows, "q", page, LIMITS, keep_bad=keep_bad)
    assert batch.equals(expected)
    assert letters == wanted


def test_bad_jobs_fail_the_query_where_they_are_to() -> None:
    with pytest.raises(DecodeError):
        sifted([entry(1), entry(2, raw=b"\xc1")], keep_bad=True, bad_jobs="fail")
