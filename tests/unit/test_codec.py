"""Envelopes and delayed members, against the bytes that the original wrote and read."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import pytest

from chasqui.errors import DecodeError
from chasqui.job import Backoff, RetryOverride
from chasqui.payload import PayloadCodec
from chasqui.protocol.codec import (
    Envelope,
    decode_envelope,
    decode_name,
    encode_envelope,
    encode_member,
    split_member,
)
from chasqui.protocol.replies import fields

Case = dict[str, Any]
GOLDEN = Path(__file__).parents[1] / "golden"
ENCODED: list[Case] = json.loads((GOLDEN / "envelope.json").read_text(encoding="utf-8"))["cases"]
DECODED: list[Case] = json.loads((GOLDEN / "decode.json").read_text(encoding="utf-8"))["cases"]

pack = PayloadCodec().pack


def labelled(cases: list[tuple[int, Case]]) -> Any:
    """Cases as parameters, named by their group and their place in the file."""
    return pytest.mark.parametrize("case", [pytest.param(case, id=f"{case['group']}-{i}") for i, case in cases])


def chosen(cases: list[Case], wanted: Any) -> Any:
    return labelled([(i, case) for i, case in enumerate(cases) if wanted(case)])


# --- Writing -------------------------------------------------------------------------------------------------------


def retry_of(case: Case) -> RetryOverride | None:
    """The override that a recorded call asked for: ``attempts`` and ``backoff`` of the shim, ``retry`` of the core."""
    args = case["args"]
    if case["op"].startswith("native."):
        given = args.get("opts", {}).get("retry")
        return None if given is None else RetryOverride(given.get("max_attempts"), backoff_of(given.get("backoff")))
    if args.get("attempts") is None and args.get("backoff") is None:
        return None
    return RetryOverride(args.get("attempts"), backoff_of(args.get("backoff")))


def backoff_of(given: Any) -> Backoff | None:
    if given is None:
        return None
    if isinstance(given, int):
        return Backoff.fixed(given)
    multiplier = given.get("multiplier")
    return Backoff(**{**given, "multiplier": None if multiplier is None else float(multiplier)})


def envelope_of(case: Case) -> bytes:
    payload = bytes.fromhex(case["payload_hex"])
    return encode_envelope(Envelope(case["id"], payload, case["created_at_ms"], 0, retry_of(case)))


@chosen(ENCODED, lambda case: "stream_fields" in case)
def test_stream_entry_has_the_originals_bytes(case: Case) -> None:
    assert envelope_of(case).hex() == case["stream_fields"]["d"]


@chosen(ENCODED, lambda case: "zset_member" in case)
def test_delayed_member_has_the_originals_bytes(case: Case) -> None:
    args = case["args"]
    name = args.get("name") or args.get("opts", {}).get("name") or ""

    assert encode_member(name.encode(), envelope_of(case)).hex() == case["zset_member"]


@chosen(ENCODED, lambda case: "data" in case)
def test_payload_has_the_originals_bytes(case: Case) -> None:
    assert pack(case["data"]).hex() == case["payload_hex"]


def test_every_recorded_envelope_is_in_the_stream_or_delayed() -> None:
    assert all(("stream_fields" in case) != ("zset_member" in case) for case in ENCODED)


CREATED = 0x1A1ED10247A
FIXED_5 = Backoff.fixed(100_000, jitter_ms=5)
TRIPLED = Backoff.exponential(100, multiplier=3.0, max_delay_ms=10_000, jitter_ms=0)
BULK_ID, LATER_ID, TWICE_ID = "01M7PH093YFYEBXA72WT9K6X7B", "01M7PH093X5SP5E4SFRPEXMJCP", "01M7PH093XPNT7AK6BYZEGA5SE"
STREAM_VECTORS = {
    "V1": (
        Envelope("job-1", pack({"to": "a", "n": 1}), CREATED, 0),
        "94 a5 6a6f622d31 c409 82a2746fa161a16e01 cf000001a1ed10247a 00",
    ),
    "V2": (
        Envelope("job-2", pack(None), CREATED + 1, 0, RetryOverride(7)),
        "95 a5 6a6f622d32 c401 c0 cf000001a1ed10247b 00 9207c0",
    ),
    "V3": (
        Envelope("job-3", pack(b"raw"), CREATED + 1, 0, RetryOverride(7, Backoff.fixed(250))),
        "95 a5 6a6f622d33 c405 c403726177 cf000001a1ed10247b 00 9207 95 a5 6669786564 ccfa c0c0c0",
    ),
    "V4": (
        Envelope("job-4", pack([1, 2.5, "s"]), CREATED + 1, 0, RetryOverride(backoff=TRIPLED)),
        "95 a5 6a6f622d34 c40d 9301cb4004000000000000a173 cf000001a1ed10247b 00 92c0 95 ab 6578706f6e656e7469616c 64 "
        "cd2710 cb4008000000000000 00",
    ),
    "V5": (
        Envelope("job-5", pack({"a": None}), CREATED + 2, 0, RetryOverride(backoff=FIXED_5)),
        "95 a5 6a6f622d35 c404 81a161c0 cf000001a1ed10247c 00 92c0 95 a5 6669786564 ce000186a0 c0c0 05",
    ),
    "V6": (
        Envelope(BULK_ID, pack(1), CREATED + 4, 0),
        "94 ba 30314d3750483039335946594542584137325754394b36583742 c401 01 cf000001a1ed10247e 00",
    ),
}
MEMBER_VECTORS = {
    "V7": (
        b"x",
        Envelope("job-d1", pack({"d": 1}), CREATED + 2, 0),
        "01000000 78 94a66a6f622d6431c40481a16401cf000001a1ed10247c00",
    ),
    "V8": (
        b"",
        Envelope(LATER_ID, pack({"d": 1}), CREATED + 3, 0),
        "00000000 94ba30314d375048303933583553503545345346525045584d4a4350c40481a16401cf000001a1ed10247d00",
    ),
    "V9": (
        b"y",
        Envelope(TWICE_ID, pack({"d": 2}), CREATED + 3, 0, RetryOverride(2)),
        "01000000 79 95ba30314d37504830393358504e5437414b3642595a454741355345c40481a16402cf000001a1ed10247d009202c0",
    ),
    "V10": (
        b"f",
        Envelope("j-fail", pack({"k": "fail"}), 0x1A1ED119679, 0).with_attempt(1),
        "01000000 66 94a66a2d6661696cc40881a16ba46661696ccf000001a1ed11967901",
    ),
}


@pytest.mark.parametrize("vector", STREAM_VECTORS)
def test_stream_vector_of_the_specification(vector: str) -> None:
    envelope, wanted = STREAM_VECTORS[vector]

    assert encode_envelope(envelope) == bytes.fromhex(wanted)


@pytest.mark.parametrize("vector", MEMBER_VECTORS)
def test_delayed_vector_of_the_specification(vector: str) -> None:
    name, envelope, wanted = MEMBER_VECTORS[vector]

    assert encode_member(name, encode_envelope(envelope)) == bytes.fromhex(wanted)


def test_unknown_backoff_and_whole_multiplier_are_normalised_when_written_back() -> None:
    """V11: kind "linear" becomes "unknown", multiplier 2 becomes a float."""
    hand_made = msgpack.packb(["lin", pack({"a": 1}), 0x1A1ED1399A2, 0, [9, ["linear", 60_000, None, 2, None]]])

    retried = decode_envelope(hand_made).with_attempt(1)

    assert encode_member(b"linear", encode_envelope(retried)) == bytes.fromhex(
        "06000000 6c696e656172 95a36c696ec40481a16101cf000001a1ed1399a201 9209 95 a7 756e6b6e6f776e cdea60 c0 "
        "cb4000000000000000 c0"
    )


# --- Reading -------------------------------------------------------------------------------------------------------

# What the original refuses and we read: a payload that stands in the array as it is, as Rust-native producers write
# it, instead of inside a bin. There is no other reason to differ.
INLINE_PAYLOADS = {
    "94a169a3616263cf000001a1ed1399a200": "text",
    "94a169a0cf000001a1ed1399a200": "empty text",
    "94a16905cf000001a1ed1399a200": "a number",
    "94a169fbcf000001a1ed1399a200": "a negative number",
    "94a169cb3ff8000000000000cf000001a1ed1399a200": "a float",
    "94a169c0cf000001a1ed1399a200": "nil",
    "94a169c3cf000001a1ed1399a200": "true",
    "94a16981a16101cf000001a1ed1399a200": "a map",
    "94a16991cd0100cf000001a1ed1399a200": "an array with 256, so not of bytes",
    "94a16991cd012ccf000001a1ed1399a200": "an array with 300, so not of bytes",
    "94a16991ffcf000001a1ed1399a200": "an array with -1, so not of bytes",
    "94a16991c3cf000001a1ed1399a200": "an array with true",
    "94a16991a161cf000001a1ed1399a200": "an array with text",
    "94a169c702014142cf000001a1ed1399a200": "an extension",
    "94a169d6ff00000001cf000001a1ed1399a200": "a timestamp",
    f"94a169{'91' * 100}01cf000001a1ed1399a200": "arrays in arrays",
    "94a56a6f622d31622d31c40982a2746fa161a16e01cf000001a1ed1399a200": "three numbers, and trailing bytes",
    "94a56a6f622d316f622d31c40982a2746fa161a16e01cf000001a1ed1399a200": "three numbers, and trailing bytes",
}
# The original turns these away for other reasons than their bytes; that is the worker's business.
NOT_ABOUT_BYTES = {"retries_exhausted", "oversize_payload"}


def refused(case: Case) -> bool:
    return not case["accepted"] and case["dlq_reason"] == "decode_failed" and case["d"] not in INLINE_PAYLOADS


def retry_shown(retry: RetryOverride | None) -> Any:
    """An override in the words of the recording."""
    if retry is None:
        return None
    backoff = retry.backoff
    if backoff is None:
        return {"max_attempts": retry.max_attempts, "backoff": None}
    number = backoff.multiplier
    return {
        "max_attempts": retry.max_attempts,
        "backoff": {
            "kind": backoff.kind,
            "delay_ms": backoff.delay_ms,
            "max_delay_ms": backoff.max_delay_ms,
            "multiplier": str(number) if number is not None and not math.isfinite(number) else number,
            "jitter_ms": backoff.jitter_ms,
        },
    }


@chosen(DECODED, lambda case: case["accepted"])
def test_what_the_original_accepts_is_read_alike(case: Case) -> None:
    envelope = decode_envelope(bytes.fromhex(case["d"]))

    assert {
        "id": envelope.id,
        "payload_hex": envelope.payload.hex(),
        "created_at_ms": envelope.created_at_ms,
        "attempt": envelope.attempt,
        "retry": retry_shown(envelope.retry),
    } == {key: case[key] for key in ("id", "payload_hex", "created_at_ms", "attempt", "retry")}


@chosen(DECODED, lambda case: case["accepted"])
def test_what_the_original_accepts_is_written_back_alike(case: Case) -> None:
    envelope = decode_envelope(bytes.fromhex(case["d"]))
    outcome = case["after_failure"]

    if outcome["to"] == "delayed":
        again = encode_envelope(envelope.with_attempt(envelope.attempt + 1))
        assert encode_member(case["name"].encode(), again).hex() == outcome["member"]
    else:
        assert encode_envelope(envelope).hex() == outcome["d"]


@chosen(DECODED, refused)
def test_what_the_original_refuses_is_refused(case: Case) -> None:
    with pytest.raises(DecodeError):
        decode_envelope(bytes.fromhex(case["d"]))


@pytest.mark.parametrize("data", INLINE_PAYLOADS, ids=lambda data: data[:40])
def test_inline_payload_is_read_and_kept_inline(data: str) -> None:
    envelope = decode_envelope(bytes.fromhex(data))

    assert envelope.inline
    assert bytes.fromhex(data).startswith(encode_envelope(envelope))


def test_inline_payloads_are_all_that_we_read_and_the_original_refuses() -> None:
    extra = set()
    for case in DECODED:
        if case["accepted"] or case["dlq_reason"] != "decode_failed":
            continue
        try:
            decode_envelope(bytes.fromhex(case["d"]))
        except DecodeError:
            continue
        extra.add(case["d"])

    assert extra == set(INLINE_PAYLOADS)


@chosen(DECODED, lambda case: not case["accepted"] and case["dlq_reason"] in NOT_ABOUT_BYTES)
def test_what_the_original_refuses_for_budget_or_size_is_an_envelope_or_oversize(case: Case) -> None:
    data = bytes.fromhex(case["d"])

    if case["dlq_reason"] == "oversize_payload":
        assert len(data) > case["max_payload_bytes"]
    else:
        assert decode_envelope(data).attempt >= 0


@chosen(DECODED, lambda case: case["group"] == "entry")
def test_fields_of_an_entry_are_found_by_name_and_the_first_counts(case: Case) -> None:
    flat = [part for name, value in case["fields"] for part in (name.encode(), bytes.fromhex(value))]

    found = fields(flat)

    assert found.get(b"d") == (None if case["d"] is None else bytes.fromhex(case["d"]))
    assert decode_name(found.get(b"n")) == (case["n"] or "")


@pytest.mark.parametrize("raw", [None, b"", b"\xff\xfe"], ids=["missing", "empty", "not UTF-8"])
def test_name_that_cannot_be_read_means_unnamed(raw: bytes | None) -> None:
    assert decode_name(raw) == ""


def test_split_undoes_encode_member() -> None:
    assert split_member(encode_member("é".encode(), b"envelope")) == ("é".encode(), b"envelope")


@pytest.mark.parametrize("member", [b"", b"\x00\x00\x00", b"\x05\x00\x00\x00abcd", b"\xff\xff\xff\xffabcd"])
def test_member_shorter_than_it_says_is_refused(member: bytes) -> None:
    with pytest.raises(DecodeError):
        split_member(member)


# --- Hostile bytes -------------------------------------------------------------------------------------------------

FULL_RETRY = [3, ["exponential", 100, 60_000, 1.5, 10]]
ORDINARY = msgpack.packb(["job-1", b"\x81\xa1a\x01", CREATED, 2])
WITH_RETRY = msgpack.packb(["job-1", b"\x81\xa1a\x01", CREATED, 2, FULL_RETRY])
AS_MAP = msgpack.packb({"id": "job-1", "payload": b"\x01", "created_at_ms": CREATED, "retry": {"max_attempts": 3}})
INLINE = msgpack.packb(["job-1", {"a": [1, {"b": None}]}, CREATED, 2, [None, [{"fixed": None}, 5, None, 2, None]]])
VALID = {"ordinary": ORDINARY, "with retry": WITH_RETRY, "as map": AS_MAP, "inline": INLINE}

UP_TO_KIND = bytes.fromhex("95a169c40481a16101cf000001a1ed1399a20092c095")
AFTER_KIND = bytes.fromhex("05c0c0c0")


@pytest.mark.parametrize("data", VALID.values(), ids=VALID)
def test_envelope_cut_short_anywhere_is_refused(data: bytes) -> None:
    decode_envelope(data)

    for length in range(len(data)):
        with pytest.raises(DecodeError):
            decode_envelope(data[:length])


@pytest.mark.parametrize(
    "data",
    [
        "ddffffffff",
        "dfffffffff",
        "94dbffffffff",
        "94a169c6ffffffff00",
        "94a169ddffffffff00",
        "94a169dfffffffff00",
        "94a169c9ffffffff01",
        "95a169c400cf000001a1ed1399a200ddffffffff",
        "95a169c400cf000001a1ed1399a200dfffffffff",
        "95a169c400cf000001a1ed1399a20092c0ddffffffff",
        "84a26964a169a77061796c6f6164c400ad637265617465645f61745f6d7301a17addffffffff",
    ],
)
def test_claimed_length_of_billions_is_refused_without_allocating_for_it(data: str) -> None:
    raw = bytes.fromhex(data)
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            decode_envelope(raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 256 * 1024


DEEP = b"\x91" * 100_000 + b"\xc0"
DEEP_MAP = b"\x81\x01" * 100_000 + b"\xc0"


@pytest.mark.parametrize(
    "data",
    [
        DEEP,
        DEEP_MAP,
        b"\x94\xa1i" + DEEP + b"\x01\x00",
        b"\x94\xa1i" + DEEP_MAP + b"\x01\x00",
        b"\x95\xa1i\xc4\x00\x01\x00" + DEEP,
        UP_TO_KIND + DEEP + AFTER_KIND,
        UP_TO_KIND + DEEP_MAP + AFTER_KIND,
        b"\x84\xa2id\xa1i\xa7payload\xc4\x00\xadcreated_at_ms\x01\xa1z" + DEEP,
    ],
    ids=["arrays", "maps", "payload", "payload of maps", "retry", "kind", "kind of maps", "ignored field"],
)
def test_nesting_of_100_000_levels_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_envelope(data)


@pytest.mark.parametrize("level", [b"\x91", b"\x81\xc0"], ids=["arrays", "maps"])
def test_ignored_field_may_nest_1022_levels(level: bytes) -> None:
    data = b"\x84\xa2id\xa1i\xa7payload\xc4\x00\xadcreated_at_ms\x01\xa1z" + level * 1022 + b"\xc0"

    assert decode_envelope(data) == Envelope("i", b"", 1, 0)


@pytest.mark.parametrize(
    "kind",
    [
        "8190c0",
        "8180c0",
        "81c0c0",
        "81d7ffffffffffffffffffc0",
        "81c70cffffffffffffffffffffffffffc0",
        "81a56669786564c3",
    ],
    ids=["array key", "map key", "nil key", "bad timestamp key", "bad long timestamp key", "value not nil"],
)
def test_odd_tagged_backoff_kind_is_refused(kind: str) -> None:
    with pytest.raises(DecodeError):
        decode_envelope(UP_TO_KIND + bytes.fromhex(kind) + AFTER_KIND)


def mutated(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                changed[at:at] = rng.choice(
                    (b"\x81", b"\x91", b"\xc0", b"\xc1", b"\xdd", b"\xd7\xff", b"\xcf", b"\xcb")
                )
            case 2:
                del changed[at : at + rng.randint(1, 3)]
            case _:
                changed[at:at] = changed[at : at + rng.randint(1, 8)]
    return bytes(changed)


@pytest.mark.parametrize("data", VALID.values(), ids=VALID)
def test_mutated_envelope_gives_a_stable_value_or_a_decode_error(data: bytes) -> None:
    rng = random.Random(20_261_118)
    broken: list[str] = []
    for _ in range(2500):
        changed = mutated(rng, data)
        try:
            written = encode_envelope(decode_envelope(changed))
            stable = encode_envelope(decode_envelope(written)) == written
        except DecodeError:
            continue
        except Exception as error:  # noqa: BLE001  any other error is what this test looks for
            broken.append(f"{changed.hex()}: {error!r}")
        else:
            if not stable:
                broken.append(f"{changed.hex()}: not read back as it was written")

    assert broken == []
