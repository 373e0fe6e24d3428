"""Replies of a feed, counted where that will do: the same as parsed one by one, wherever the network cuts them."""

from __future__ import annotations

import random

import pytest

from chasqui.protocol.flow import Refusal
from chasqui.redis_io import _ids_in, _parser_of_many

ID, OTHER_ID = b"$15\r\n1794978620538-0\r\n", b"$17\r\n1794978620538-123\r\n"
ERROR = b"-ERR no $1 - such :thing\r\n"
OTHERS = [b":1\r\n", b"+OK\r\n", b"$-1\r\n", b"*-1\r\n", b"*1\r\n:1\r\n", ERROR, b"-OOM\r\n"]


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_ids_of_entries_are_counted(count: int) -> None:
    assert _ids_in(ID * count) == count
    assert _ids_in((ID + OTHER_ID) * count) == 2 * count


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_other_replies_among_them_are_left_to_the_parser(other: bytes, place: int) -> None:
    replies = [ID, OTHER_ID]
    replies.insert(place, other)
    taken: list[Refusal | None] = []

    refused = _parser_of_many()(b"".join(replies), taken)

    assert [reply is not None for reply in taken] == [reply.startswith(b"-") for reply in replies]
    assert refused is other.startswith(b"-")


@pytest.mark.parametrize("cut", range(1, 2 * len(ID)))
def test_ids_that_have_not_come_to_their_end_are_not_counted(cut: int) -> None:
    whole = ID * 2
    taken: list[Refusal | None] = []
    take = _parser_of_many()

    take(whole[:cut], taken)
    assert len(taken) == cut // len(ID)

    take(whole[cut:], taken)
    assert taken == [None, None]


def test_any_replies_cut_anywhere_are_what_they_are() -> None:
    chance = random.Random(11)
    for _ in range(2000):
        replies = chance.choices(
            [ID, OTHER_ID, *OTHERS], weights=[20, 20, *[1] * len(OTHERS)], k=chance.randrange(1, 9)
        )
        data = b"".join(replies)
        cuts = sorted(chance.sample(range(len(data) + 1), k=min(3, len(data))))
        taken: list[Refusal | None] = []
        take = _parser_of_many()
        refused = [
            take(part, taken) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if (part := data[a:b])
        ]

        assert [None if reply is None else f"{reply}" for reply in taken] == [
            f"{Refusal('ERR', 'no $1 - such :thing')}" if reply is ERROR else "OOM " if reply == b"-OOM\r\n" else None
            for reply in replies
        ]
        assert any(refused) is any(reply.startswith(b"-") for reply in replies)


def test_no_bytes_are_the_end_of_the_connection() -> None:
    with pytest.raises(ConnectionResetError):
        _parser_of_many()(b"", [])
