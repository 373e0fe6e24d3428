"""Blocks: what is staged, how large it gets, and that nothing is lost or turned round on the way."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from chasqui import DecodeError, RetryOverride
from chasqui.ids import new_ids
from chasqui.protocol.blocks import Block, BlockBuilder, Dead, Jobs, packed_retry, unique_ids
from chasqui.protocol.codec import decode_envelope
from chasqui.protocol.scripts import SCRIPT_BYTES
from chasqui.protocol.transact import Manifest, Stage, next_limit

NOW = 1_794_978_620_538


def jobs(payloads: list[bytes], **columns: Any) -> Jobs:
    return Jobs(NOW, new_ids(len(payloads), NOW), payloads, **columns)


def numbered(*numbers: int, **columns: Any) -> Jobs:
    return jobs([msgpack.packb(n) for n in numbers], **columns)


def read(block: Block) -> list[Any]:
    found = msgpack.unpackb(block.data, raw=True)
    assert isinstance(found, list)
    return found


def built(*parts: Jobs) -> list[Block]:
    builder = BlockBuilder()
    blocks = [block for part in parts for block in builder.add(part)]
    blocks += builder.rest()
    assert builder.size == 0
    assert list(builder.rest()) == []
    return blocks


def payload_of(envelope: bytes) -> Any:
    return msgpack.unpackb(decode_envelope(envelope).payload)


def test_a_block_has_at_most_a_thousand_jobs_and_small_parts_share_one() -> None:
    many = built(numbered(*range(2500)))
    assert [block.rows for block in many] == [1000, 1000, 500]

    shared = built(*(numbered(n) for n in range(1500)))
    assert [block.rows for block in shared] == [1000, 500]
    assert [payload_of(e) for block in shared for e in read(block)[2:]] == list(range(1500))


def test_a_block_has_at_most_a_mebibyte_unless_one_job_has_more() -> None:
    sizes = [10, 600_000, 600_000, 10, 3_000_000, 10, 400_000, 400_000, 400_000]
    blocks = built(jobs([msgpack.packb(b"x" * size) for size in sizes]))

    for block in blocks:
        assert block.rows == 1 or len(block.data) <= SCRIPT_BYTES + 100
    assert [len(payload_of(e)) for block in blocks for e in read(block)[2:]] == sizes


@pytest.mark.parametrize("size", [1, 30, 31, 32, 200, 255, 256, 60_000, 65_535, 65_536, 70_000])
def test_envelopes_of_any_size_are_framed_so_that_lua_can_read_them(size: int) -> None:
    [block] = built(jobs([b"x" * size], name=b"n"))

    kind, name, envelope = read(block)

    assert (kind, name) == (b"same", b"n")
    assert decode_envelope(envelope).payload == b"x" * size
    # After the array's header, the kind and the name. Lua's cmsgpack knows neither str8 (d9) nor bin (c4-c6).
    first = block.data[3 + len(b"\xa4same") + len(b"\xa1n")]
    assert first & 0xE0 == 0xA0 or first in (0xDA, 0xDB)


def test_jobs_for_later_and_now_are_staged_apart_each_in_order() -> None:
    mixed = numbered(1, 2, 3, 4, run_at_ms=[None, NOW + 9, None, NOW + 8])

    now, later = built(mixed)

    assert [payload_of(e) for e in read(now)[2:]] == [1, 3]
    assert read(later)[1::2] == [b"%d" % (NOW + 9), b"%d" % (NOW + 8)]


def test_names_that_differ_and_names_that_do_not_are_staged_apart() -> None:
    same, named = built(numbered(1, 2, name=b"a"), numbered(3, 4, names=[b"a", b""]))

    assert read(same)[:2] == [b"same", b"a"]
    assert read(named)[::2][0] == b"named"
    assert read(named)[1::2] == [b"a", b""]


def test_retries_are_part_of_the_envelope() -> None:
    override = RetryOverride(7)
    [block] = built(numbered(1, 2, retries=[b"", packed_retry(override)]))

    first, second = (decode_envelope(e) for e in read(block)[2:])
    assert (first.retry, second.retry) == (None, override)
    assert packed_retry(None) == b""


def test_ids_of_a_block_are_found_again_from_any_place() -> None:
    given = Jobs(NOW, [f"id-{n}" for n in range(300)], [b"\x01"] * 300, marker_ttls_s=[9] * 300)
    first, second = built(given)

    assert (first.rows, second.rows) == (250, 50)
    assert unique_ids(first.data, 240, 100) == [f"id-{n}" for n in range(240, 250)]
    assert unique_ids(second.data, 0, 2) == ["id-250", "id-251"]


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", msgpack.packb([b"unique", b"x"]), msgpack.packb(7)])
def test_bytes_that_are_no_block_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        unique_ids(data, 0, 10)


def test_dead_letters_have_blocks_of_their_own() -> None:
    builder = BlockBuilder()
    found = [*builder.add_dead(Dead(b"e", b"n", "malformed", "why")), *builder.rest()]

    assert [read(block) for block in found] == [[b"dead", b"e", b"n", b"malformed", b"why"]]


def test_a_manifest_is_known_by_what_is_in_it_and_not_by_the_order() -> None:
    stages = [Stage(f"{n:032x}", n, n * 10) for n in range(2500)]
    one, other = Manifest({"a": stages, "b": stages[:1]}), Manifest({"b": stages[:1], "a": stages[::-1]})

    assert one.id == other.id
    assert len(one.pieces()) == 4
    again = Manifest.of(one.pieces())
    assert (again.id, again.rows) == (one.id, one.rows)
    assert Manifest({"a": stages[1:]}).id != Manifest({"a": stages}).id


def test_a_manifest_of_other_bytes_is_refused() -> None:
    for piece in (b"\xc1", msgpack.packb(1), msgpack.packb(["q", [["id", "many", 1]]])):
        with pytest.raises(DecodeError):
            Manifest.of([piece])


def test_slices_shrink_when_they_keep_the_server_and_grow_when_they_do_not() -> None:
    assert next_limit(1000, 40.0) == 100
    assert next_limit(60, 400.0) == 50
    assert next_limit(500, 1.0) == 1000
    assert next_limit(1000, 1.0) == 1000
    assert next_limit(500, 5.0) == 500
