"""New job ids."""

from __future__ import annotations

import itertools

import pytest

from chasqui import ids
from chasqui.ids import new_ids

CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
NOW_MS = 1_794_978_620_538


def moment(job_id: str) -> int:
    """The time that a ULID says: its first ten letters, five bits each."""
    value = 0
    for letter in job_id[:10]:
        value = value << 5 | CROCKFORD.index(letter)
    return value


def ascending(found: list[str]) -> bool:
    return all(a < b for a, b in itertools.pairwise(found))


def test_id_has_26_letters_of_crockfords_alphabet() -> None:
    for job_id in new_ids(1000, NOW_MS):
        assert len(job_id) == 26
        assert set(job_id) <= set(CROCKFORD)


@pytest.mark.parametrize("now_ms", [0, 1, NOW_MS, 2**48 - 1])
def test_id_starts_with_its_time(now_ms: int) -> None:
    assert {moment(job_id) for job_id in new_ids(100, now_ms)} == {now_ms}


def test_time_part_is_that_of_the_specifications_example() -> None:
    """V6 of the wire format was made some milliseconds before its envelope."""
    assert moment("01M7PH093YFYEBXA72WT9K6X7B") == 0x1A1ED10247E


def test_later_ids_sort_after_earlier_ones() -> None:
    assert new_ids(1, NOW_MS)[0] < new_ids(1, NOW_MS + 1)[0]


def test_ids_of_one_call_ascend() -> None:
    assert ascending(new_ids(10_000, NOW_MS))


def test_ids_are_unique_over_200_000_in_many_calls_of_one_millisecond() -> None:
    found = [job_id for _ in range(2000) for job_id in new_ids(100, NOW_MS)]

    assert len(set(found)) == 200_000


@pytest.mark.parametrize("count", [0, 1, 2])
def test_as_many_ids_as_asked_for(count: int) -> None:
    assert len(new_ids(count, NOW_MS)) == count


def test_more_than_a_run_of_ids_in_one_call_are_unique_and_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids come in runs of 2**20: here the first run is short, and its head the highest there is."""
    monkeypatch.setattr(ids.secrets, "randbits", lambda bits: 2**bits - 1)
    count = 2**19 + 2

    found = new_ids(count, NOW_MS)

    assert len(set(found)) == count
    assert {moment(job_id) for job_id in (found[0], found[-1])} == {NOW_MS}
    assert ascending(found)


def test_more_than_2_to_the_20_ids_in_one_call() -> None:
    count = 2**20 + 1

    found = new_ids(count, NOW_MS)

    assert len(found) == len(set(found)) == count
