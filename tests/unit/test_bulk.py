"""Bulk adds as protocol bytes: read by another parser, they are the commands that single adds would send."""

from __future__ import annotations

import itertools
from typing import Any

import hiredis
import msgpack
import pytest

from chasqui.job import Backoff, RetryOverride
from chasqui.protocol.bulk import FIRST_JOBS, PIECE_BYTES, PIECE_JOBS, Bulk, envelope_size
from chasqui.protocol.codec import Envelope, encode_envelope, encode_member, retry_fields

CREATED = 1_794_978_620_538
SIZES = [0, 1, 255, 256, 65_535, 65_536]
NAMES = [b"", b"n", "é".encode(), b"n" * 256]
RETRIES = [None, RetryOverride(), RetryOverride(300), RetryOverride(3, Backoff.exponential(100, multiplier=1.5))]
SHAPES = list(itertools.product(SIZES, NAMES, RETRIES))


def bulk_of(shapes: list[tuple[int, bytes, RetryOverride | None]], *, delayed: bool = False, trim: int = 0) -> Bulk:
    """A bulk with a job of each shape: payload size, name, override."""
    count = len(shapes)
    return Bulk(
        target="{chasqui:q}:delayed" if delayed else "{chasqui:q}:stream",
        created_at_ms=CREATED,
        ids=[f"{i:026d}" for i in range(count)],
        payloads=[bytes([i % 251]) * size for i, (size, _, _) in enumerate(shapes)],
        names=[name for _, name, _ in shapes],
        retries=[b"" if retry is None else msgpack.packb(retry_fields(retry)) for _, _, retry in shapes],
        run_at_ms=[CREATED + 1000 + i for i in range(count)] if delayed else None,
        trim=trim,
    )


def plain(count: int, size: int = 1) -> Bulk:
    return bulk_of([(size, b"n", None)] * count)


def envelopes(bulk: Bulk, shapes: list[tuple[int, bytes, RetryOverride | None]]) -> list[bytes]:
    return [
        encode_envelope(Envelope(bulk.ids[i], bulk.payloads[i], CREATED, 0, retry))
        for i, (_, _, retry) in enumerate(shapes)
    ]


def commands(data: bytes) -> list[Any]:
    reader = hiredis.Reader()
    reader.feed(data)
    found = []
    while (command := reader.gets()) is not False:
        found.append(command)
    assert not reader.has_data()
    return found


def all_bytes(bulk: Bulk, start: int = 0) -> bytes:
    return b"".join(data for data, _ in bulk.pieces(start))


@pytest.mark.parametrize("trim", [0, 1000])
def test_stream_bulk_is_the_xadds_of_the_same_jobs(trim: int) -> None:
    bulk = bulk_of(SHAPES, trim=trim)

    limit = [b"MAXLEN", b"~", b"1000"] if trim else []
    assert commands(all_bytes(bulk)) == [
        [b"XADD", b"{chasqui:q}:stream", *limit, b"*", b"d", envelope, *([b"n", name] if name else [])]
        for envelope, name in zip(envelopes(bulk, SHAPES), bulk.names, strict=True)
    ]


def test_delayed_bulk_is_the_zadds_of_the_same_jobs() -> None:
    bulk = bulk_of(SHAPES, delayed=True)

    assert commands(all_bytes(bulk)) == [
        [b"ZADD", b"{chasqui:q}:delayed", b"%d" % (CREATED + 1000 + i), encode_member(name, envelope)]
        for i, (envelope, name) in enumerate(zip(envelopes(bulk, SHAPES), bulk.names, strict=True))
    ]


@pytest.mark.parametrize("delayed", [False, True], ids=["stream", "delayed"])
def test_piece_says_how_many_commands_it_holds(delayed: bool) -> None:
    for data, count in bulk_of(SHAPES * 3, delayed=delayed).pieces(0):
        assert len(commands(data)) == count


@pytest.mark.parametrize(
    ("jobs", "counts"),
    [
        (0, []),
        (1, [1]),
        (FIRST_JOBS, [FIRST_JOBS]),
        (FIRST_JOBS + 1, [FIRST_JOBS, 1]),
        (5 * FIRST_JOBS + 1, [FIRST_JOBS, 4 * FIRST_JOBS, 1]),
        (5 * FIRST_JOBS + 2 * PIECE_JOBS + 50, [FIRST_JOBS, 4 * FIRST_JOBS, PIECE_JOBS, PIECE_JOBS, 50]),
    ],
)
def test_first_piece_is_small_and_the_others_grow_to_their_number_of_jobs(jobs: int, counts: list[int]) -> None:
    assert [count for _, count in plain(jobs).pieces(0)] == counts


def test_jobs_of_one_name_are_written_as_those_of_many() -> None:
    shapes = [(size, b"n", RETRIES[2]) for size in SIZES for _ in range(50)]
    alike, mixed = bulk_of(shapes), bulk_of([*shapes, (0, b"another", None)])

    assert commands(all_bytes(mixed))[:-1] == commands(all_bytes(alike))


@pytest.mark.parametrize("delayed", [False, True], ids=["stream", "delayed"])
def test_some_jobs_of_a_bulk_are_those_with_their_numbers(delayed: bool) -> None:
    bulk = bulk_of(SHAPES, delayed=delayed)
    kept = [0, 5, 7, len(SHAPES) - 1]

    assert commands(all_bytes(bulk.only(kept))) == [commands(all_bytes(bulk))[i] for i in kept]


@pytest.mark.parametrize(
    ("size", "counts"),
    [
        (PIECE_BYTES // 4, [5, 5]),
        (PIECE_BYTES // 2, [3, 3, 3, 1]),
        (PIECE_BYTES, [2, 2, 2, 2, 2]),
        (PIECE_BYTES + 1, [1] * 10),
    ],
)
def test_piece_ends_with_the_job_that_fills_it(size: int, counts: list[int]) -> None:
    assert [count for _, count in plain(10, size).pieces(0)] == counts


@pytest.mark.parametrize("delayed", [False, True], ids=["stream", "delayed"])
@pytest.mark.parametrize("start", [0, 1, 99, 100, 101, len(SHAPES) * 3 - 1, len(SHAPES) * 3])
def test_pieces_from_a_job_on_are_the_tail_of_all(start: int, delayed: bool) -> None:
    bulk = bulk_of(SHAPES * 3, delayed=delayed)

    tail, whole = all_bytes(bulk, start), all_bytes(bulk)

    assert whole.endswith(tail)
    assert len(commands(tail)) == len(bulk) - start


@pytest.mark.parametrize("retry", RETRIES, ids=["none", "empty", "attempts", "backoff"])
@pytest.mark.parametrize("size", SIZES)
def test_envelope_size_is_that_of_the_envelope(size: int, retry: RetryOverride | None) -> None:
    override = b"" if retry is None else msgpack.packb(retry_fields(retry))

    assert envelope_size(size, len(override)) == len(
        encode_envelope(Envelope("0" * 26, bytes(size), CREATED, 0, retry))
    )
