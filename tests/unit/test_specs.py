"""Stored repeat specs, against what the original wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from chasqui.errors import DecodeError
from chasqui.job import Backoff, RetryOverride
from chasqui.protocol.specs import StoredSpec, decode_spec, encode_spec, payload_element
from chasqui.repeat import MissedFires, RepeatableSpec, RepeatPattern

CASES = json.loads((Path(__file__).parents[1] / "golden" / "repeat.json").read_text())["cases"]
STORED = [case for case in CASES if case["group"] != "refused"]


def pattern_of(args: dict[str, Any]) -> RepeatPattern:
    given = args.get("pattern") or args["repeat"]
    if given["kind"] == "every":
        return RepeatPattern.every(given["interval_ms"])
    return RepeatPattern.cron(given.get("expression"), given.get("tz"))


def missed_of(given: dict[str, Any] | None) -> MissedFires:
    kind = (given or {"kind": "skip"})["kind"].replace("-", "_")
    return MissedFires(kind, (given or {}).get("max_catchup"))


def spec_of(case: dict[str, Any]) -> tuple[RepeatableSpec, bytes]:
    args = case["args"]
    payload = bytes.fromhex(args["payload_hex"]) if "payload_hex" in args else msgpack.packb(args["data"])
    spec = RepeatableSpec(
        args.get("job_name", args.get("name")),
        pattern_of(args),
        None,
        key=args.get("key", ""),
        limit=args.get("limit"),
        start_after_ms=args.get("start_after_ms"),
        end_before_ms=args.get("end_before_ms"),
        missed_fires=missed_of(args.get("missed_fires")),
    )
    return spec, payload


@pytest.mark.parametrize("case", STORED, ids=lambda case: case["key"][:40])
def test_a_spec_is_stored_in_the_bytes_of_the_original(case: dict[str, Any]) -> None:
    spec, payload = spec_of(case)

    stored = StoredSpec(
        spec.resolved_key,
        spec.job_name,
        spec.pattern,
        payload_element(payload),
        spec.limit,
        spec.start_after_ms,
        spec.end_before_ms,
        spec.missed_fires,
        spec.retry,
    )

    assert spec.resolved_key == case["key"]
    assert encode_spec(stored).hex() == case["spec_hex"]
    assert decode_spec(bytes.fromhex(case["spec_hex"])) == stored


@pytest.mark.parametrize("case", [c for c in STORED if "upserted_ms" not in c], ids=lambda case: case["key"][:40])
def test_the_first_fire_is_that_of_the_original(case: dict[str, Any]) -> None:
    spec, _ = spec_of(case)

    assert spec.first_fire_ms(0) == case["score_ms"]


@pytest.mark.parametrize("case", [c for c in CASES if c["group"] == "refused"], ids=lambda case: str(case["args"])[:60])
def test_what_the_original_refuses_is_refused(case: dict[str, Any]) -> None:
    def upsert() -> None:
        spec, _ = spec_of(case)
        spec.first_fire_ms(1_794_978_620_538)

    with pytest.raises(ValueError):
        upsert()


def test_a_spec_with_retry_has_ten_elements_and_reads_back() -> None:
    stored = StoredSpec(
        "k",
        "job",
        RepeatPattern.every(5),
        b"\xc4\x01\xc0",
        None,
        None,
        None,
        MissedFires.skip(),
        RetryOverride(3, Backoff.fixed(10)),
    )

    data = encode_spec(stored)

    assert data[0] == 0x9A
    assert decode_spec(data) == stored


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        b"\xc1",
        b"\x90",
        b"\x98",
        msgpack.packb(["k", "j", {"Never": [1]}, b"\xc0", None, None, None, 0]),
        msgpack.packb(["k", "j", {"Every": ["x"]}, b"\xc0", None, None, None, 0]),
        msgpack.packb(["k", "j", {"Every": [0]}, b"\xc0", None, None, None, 0]),
        msgpack.packb(["k", "j", {"Every": [5]}, b"", None, None, None, 0]),
        msgpack.packb(["k", "j", {"Every": [5]}, b"\xc1", None, None, None, 0]),
        msgpack.packb(["k", "j", {"Every": [5]}, "text", None, None, None, 0]),
        msgpack.packb(["k", "j", {"Every": [5]}, b"\xc0", -1, None, None, 0]),
        msgpack.packb(["k", "j", {"Every": [5]}, b"\xc0", None, None, None, 0, {"FireAll": [0]}]),
        msgpack.packb(["k", "j", {"Every": [5]}, b"\xc0", None, None, None, 0, None, None, None]),
    ],
)
def test_bytes_that_are_no_spec_give_a_typed_error(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_spec(data)
