"""Jobs found in the bytes of a reply: the same jobs that its parsed entries hold, or no spans at all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import hiredis
import msgpack
import pytest

from chasqui import DecodeError
from chasqui.bridge import JobSpans, job_columns
from chasqui.protocol.replies import parsed
from chasqui.protocol.spans import job_spans
from chasqui_spark.options import source_options
from chasqui_spark.rows import Rows

Entry = tuple[bytes, list[bytes]]


def envelope(job_id: str = "a", payload: bytes = b"\x01", created: int = 1_794_978_620_538, attempt: int = 0) -> bytes:
    """As producers write it: the time of creation always in nine bytes."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack_array_header(4)
    packer.pack(job_id)
    packer.pack(payload)
    return bytes(packer.bytes()) + b"\xcf" + created.to_bytes(8, "big") + msgpack.packb(attempt)


def entry(n: int = 0, data: bytes | None = None, name: bytes | None = None, *, ms: int = 1_794_978_620_538) -> Entry:
    fields = [b"d", envelope() if data is None else data]
    return b"%d-%d" % (ms, n), fields if name is None else [*fields, b"n", name]


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


def as_reply(entries: Sequence[Entry]) -> bytes:
    parts = [b"*%d\r\n" % len(entries)]
    for entry_id, fields in entries:
        parts += [b"*2\r\n", bulk(entry_id), b"*%d\r\n" % len(fields), *map(bulk, fields)]
    return b"".join(parts)


def shown(jobs: JobSpans) -> list[tuple[Any, ...]]:
    """Each job as entry id, its milliseconds, id, name, payload, time of creation and attempt."""

    def cut(span: Any) -> list[bytes]:
        return [jobs.data[begin:end] for begin, end in zip(*span, strict=True)]

    names = [b""] * len(jobs) if jobs.names is None else cut(jobs.names)
    entry_ids = [jobs.entry_id(i) for i in range(len(jobs))]
    assert entry_ids == cut(jobs.entry_ids)
    columns = (jobs.enqueued_ms.tolist(), cut(jobs.ids), names, cut(jobs.payloads))
    return list(zip(entry_ids, *columns, jobs.created_ms.tolist(), jobs.attempts.tolist(), strict=True))


def expected(entries: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The same from parsed entries."""
    jobs = job_columns(entries)
    assert jobs.errors is None
    ids = [job_id.encode() if isinstance(job_id, str) else job_id for job_id in jobs.ids]
    names = [name.encode() if isinstance(name, str) else name for name in jobs.names]
    entry_ids = [one[0] for one in entries]
    times = [int(entry_id.split(b"-")[0]) for entry_id in entry_ids]
    return list(zip(entry_ids, times, ids, names, jobs.payloads, jobs.created_ms, jobs.attempts, strict=True))


# What a payload may hold to look like something else: the beginning of an entry, a whole one, line ends, a star.
LOOKALIKES = [
    b"",
    b"\r\n",
    b"*" * 40,
    b"*2\r\n$15\r\n1794978620538-0\r\n",
    as_reply([entry(name=b"mail")]),
    as_reply([entry(), entry()]),
    bytes(300),
    b"x" * 65_535,
]

PLAIN = {
    "one job": [entry()],
    "names": [entry(0, name=b"mail"), entry(1, name=b""), entry(2, name="ñ".encode())],
    "no names": [entry(n) for n in range(5)],
    "long numbers in ids": [entry(0), entry(9), entry(10), entry(99_999)],
    "times of any year": [entry(ms=10**12), entry(1, ms=10**13 - 1)],
    "ids of all lengths": [entry(n, envelope("i" * n)) for n in (0, 1, 31, 32, 255)],
    "an id of more than ASCII": [entry(0, envelope("ñandú"))],
    "payloads of all lengths": [entry(n, envelope(payload=bytes(n))) for n in (0, 1, 255, 256, 65535)],
    "attempts": [entry(n, envelope(attempt=n)) for n in (0, 1, 127)],
    "times of creation": [entry(n, envelope(created=ms)) for n, ms in enumerate((0, 1, 2**32, 2**63 - 1))],
    "a name like a line": [entry(0, name=b"\r\n$1\r\nn\r\n$"), entry(1, name=b"$3\r\n")],
    "stars in a payload": [entry(0, envelope(payload=b"*2\r\n$1*2\r\n" * 30)), entry(1)],
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_plain_jobs_are_found(name: str) -> None:
    found = job_spans(as_reply(PLAIN[name]))

    assert found is not None
    assert len(found) == len(PLAIN[name])
    assert shown(found) == expected(PLAIN[name])
    assert [tuple(one) for one in found.entries()] == PLAIN[name]


NOT_PLAIN = {
    "no entries": [],
    "overrides": [entry(0), entry(1, msgpack.packb(["a", b"", 2**40, 0, {"max_attempts": 3}]))],
    "an entry without a job": [entry(), (b"1794978620538-1", [b"x", b"y"])],
    "some with names": [entry(0), entry(1, name=b"mail")],
    "another field": [(b"1794978620538-1", [b"d", envelope(), b"m", b"mail"])],
    "more fields": [(b"1794978620538-1", [b"d", envelope(), b"n", b"mail", b"x", b"y"])],
    "an old id": [entry(ms=999_999_999_999)],
    "the first id of all": [(b"0-1", [b"d", envelope()])],
    "a long number in an id": [entry(10**6)],
    "an attempt of many": [entry(0, envelope(attempt=128))],
    "a time of creation that is no date": [entry(0, envelope(created=2**63))],
    "a short time of creation": [entry(0, msgpack.packb(["a", b"", 5, 0]))],
    "a text for a payload": [entry(0, envelope().replace(b"\xc4\x01\x01", b"\xa1\x01\x00"))],
    "a large payload": [entry(0, envelope(payload=bytes(65_536)))],
    "a number for an id": [entry(0, b"\x94\x01" + envelope()[3:])],
    "bytes behind the envelope": [entry(0, envelope() + b"\x00")],
    "an envelope cut off": [entry(0, envelope()[:-1])],
    "an empty envelope": [entry(0, b"")],
    "an id longer than all": [entry(0, b"\x94\xd9\xff" + b"a" * 20)],
    "an entry in a payload": [entry(0, envelope(payload=as_reply([entry(1)])))],
    "an entry in a name": [entry(0, name=as_reply([entry(1)]))],
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_jobs_of_another_form_have_no_spans(name: str) -> None:
    assert job_spans(as_reply(NOT_PLAIN[name])) is None


@pytest.mark.parametrize("hostile", LOOKALIKES, ids=range(len(LOOKALIKES)))
def test_a_payload_that_looks_like_entries_makes_none(hostile: bytes) -> None:
    """It is found as the payload that it is, or the page is parsed."""
    entries = [entry(0, envelope(payload=hostile)), entry(1, name=None)]

    found = job_spans(as_reply(entries))

    assert found is None or shown(found) == expected(entries)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"*",
        b"*0\r\n",
        b"*-1\r\n",
        b"*1\r\n",
        b"$-1\r\n",
        b"-ERR no\r\n",
        b"*x\r\n",
        b"*9999999999999999999999\r\n" + as_reply([entry()])[4:],
        b"*2\r\n" + as_reply([entry()])[4:],
        as_reply([entry()]) + b"\r\n",
        as_reply([entry()]).replace(b"\r\nd\r\n$", b"\r\nd\r\n$9999999999"),
        as_reply([entry()]).replace(b"\r\nd\r\n$", b"\r\nd\r\n$-"),
        as_reply([entry()])[:-1].replace(b"\r\nd\r\n", b"\r\nd\r\n$" + b"9" * 200),
    ],
)
def test_bytes_that_are_no_reply_of_entries_have_no_spans(data: bytes) -> None:
    assert job_spans(data) is None


@pytest.mark.parametrize("name", [None, b"mail"], ids=["unnamed", "named"])
def test_a_reply_that_ends_early_has_no_spans(name: bytes | None) -> None:
    whole = as_reply([entry(0, name=name), entry(1, name=name)])

    assert [end for end in range(len(whole)) if job_spans(whole[:end]) is not None] == []


def test_any_change_of_bytes_is_read_as_the_parser_reads_it_or_not_at_all() -> None:
    chance = random.Random(7)
    readable = 0
    for _ in range(6000):
        name = chance.choice([None, b"mail"])
        data = bytearray(as_reply([entry(n, envelope("job", b"\x01\x02\x03"), name) for n in range(3)]))
        for _ in range(chance.choice([1, 1, 2, 5])):
            data[chance.randrange(len(data))] = chance.choice(b"*$\r\n-0123456789dn\x94\xa0\xc4\xc5\xd9\xcf\x00\xff")
        found = job_spans(bytes(data))
        if found is None:
            continue
        readable += 1
        try:
            assert shown(found) == expected(parsed(bytes(data)))
        except (AssertionError, hiredis.ProtocolError):
            # Only what no server sends: an id whose second half is no number, or text that is not UTF-8.
            tails = [found.entry_id(i).partition(b"-")[2] for i in range(len(found))]
            texts = [job[2] for job in shown(found)]
            assert not all(tail.isdigit() for tail in tails) or any(not _is_text(text) for text in texts)

    assert readable > 500


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_jobs_of_any_kind_are_found_as_the_parser_finds_them() -> None:
    chance = random.Random(11)
    for _ in range(300):
        named = chance.random() < 0.5
        entries = [
            entry(
                n,
                envelope(
                    "j" * chance.choice([0, 5, 26, 31, 32, 200]),
                    chance.randbytes(chance.choice([0, 3, 40, 255, 256, 3000])),
                    chance.choice([0, 5, 1_794_978_620_538, 2**62]),
                    chance.choice([0, 1, 127]),
                ),
                chance.choice([b"", b"mail", b"x" * 256]) if named else None,
                ms=1_794_978_620_538 + n * 7,
            )
            for n in range(chance.choice([1, 2, 60]))
        ]

        found = job_spans(as_reply(entries))

        assert found is not None
        assert shown(found) == expected(entries)


# --- Rows ----------------------------------------------------------------------------------------------------------


PAGES = {
    **PLAIN,
    "an id that is not UTF-8": [entry(0, envelope("abc").replace(b"abc", b"a\xffc")), entry(1)],
    "a name that is not UTF-8": [entry(0, name=b"\xff"), entry(1, name=b"mail")],
    "payloads of a declared kind": [entry(0, envelope(payload=msgpack.packb({"a": 1}))), entry(1)],
}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("declared", [None, "a int"], ids=["binary", "declared"])
@pytest.mark.parametrize("drop", [False, True], ids=["null", "dropped"])
def test_rows_of_spans_equal_rows_of_entries(name: str, declared: str | None, drop: bool) -> None:
    given = {"url": "redis://127.0.0.1:1/0", "queue": "q", "badJobs": "null"}
    rows = Rows(source_options(given | ({"payloadSchema": declared} if declared else {})))
    spans = job_spans(as_reply(PAGES[name]))
    assert spans is not None
    dropped: list[list[tuple[str, str]]] = [[], []]

    ours, theirs = (
        rows.batch("q", page, out if drop else None) for page, out in zip((spans, PAGES[name]), dropped, strict=True)
    )

    ours.validate(full=True)
    assert ours.equals(theirs)
    assert dropped[0] == dropped[1]


def test_a_job_that_does_not_fit_is_named_when_read_from_spans() -> None:
    given = {"url": "redis://127.0.0.1:1/0", "queue": "q", "payloadSchema": "a int", "badJobs": "fail"}
    rows = Rows(source_options(given))
    spans = job_spans(as_reply([entry(0, envelope(payload=msgpack.packb({"a": 1}))), entry(1)]))
    assert spans is not None

    with pytest.raises(DecodeError, match="entry 1794978620538-1 of queue 'q'"):
        rows.batch("q", spans)
