"""What of a step is sent again, where to and when: for every answer that a server may give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hiredis
import pytest

from chasqui.address import parse
from chasqui.errors import ConnectionLost
from chasqui.options import ConnectionOptions
from chasqui.protocol.flow import Batch, Command, Fed, Feed, Refusal
from chasqui.protocol.slots import SlotMap, slot_of
from chasqui.tries import Tries

KEY = "{chasqui:q}:stream"
SLOT = slot_of(KEY)
A, B = ("10.0.0.1", 1), ("10.0.0.2", 2)
MOVED, ASK = Refusal("MOVED", f"{SLOT} 10.0.0.2:2"), Refusal("ASK", f"{SLOT} 10.0.0.2:2")
TRYAGAIN, DOWN, LOADING = Refusal("TRYAGAIN", "later"), Refusal("CLUSTERDOWN", "down"), Refusal("LOADING", "yet")
OOM = Refusal("OOM", "full")
UNREACHABLE, LOST = ConnectionLost("no way", sent=False), ConnectionLost("gone", sent=True)
FEED = Feed(
    KEY, lambda: iter([(packed("XADD", KEY, "1") + packed("XADD", KEY, "2"), 2), (packed("XADD", KEY, "3"), 1)])
)


def packed(*args: str) -> bytes:
    return hiredis.pack_command(args)  # type: ignore[arg-type]


def batch(*names: str, safe: bool = False) -> Batch:
    return Batch(tuple(Command((name, KEY), safe=safe) for name in names))


def tries_of(step: Command | Batch | Feed, attempts: int = 3, url: str = "redis+cluster://10.0.0.1:1") -> Tries:
    return Tries(step, ConnectionOptions(reconnect_attempts=attempts, reconnect_initial_ms=100), parse(url))


def pool() -> Any:
    return SimpleNamespace(slots=SlotMap([A]), place=A)


def hear(tries: Tries, *replies: Any) -> None:
    tries.answered(tries.heard(list(replies), pool()))


def sent_by(tries: Tries) -> list[bytes]:
    return [data.split(b"\r\n")[2] for data in tries.packed()]


def test_only_what_was_redirected_is_sent_again() -> None:
    tries = tries_of(batch("A", "B", "C"))

    hear(tries, b"a", MOVED, OOM)
    assert (tries.over, tries.wait_s, sent_by(tries)) == (False, 0.0, [b"B"])

    hear(tries, b"b")
    assert tries.over
    assert tries.result() == [b"a", b"b", OOM]


def test_what_never_left_is_sent_again_without_what_was_answered() -> None:
    tries = tries_of(batch("A", "B"))
    hear(tries, b"a", MOVED)

    tries.lost(UNREACHABLE)
    assert sent_by(tries) == [b"B"]
    assert tries.wait_s > 0

    hear(tries, b"b")
    assert tries.result() == [b"a", b"b"]


def test_a_rest_that_never_left_is_told_as_sent_because_a_part_was() -> None:
    tries = tries_of(batch("A", "B"), attempts=0)
    hear(tries, b"a", MOVED)

    with pytest.raises(ConnectionLost) as caught:
        tries.lost(UNREACHABLE)

    assert caught.value.sent


def test_a_lost_reply_is_the_end_unless_the_step_is_safe() -> None:
    with pytest.raises(ConnectionLost):
        tries_of(batch("A")).lost(LOST)

    tries = tries_of(batch("A", safe=True))
    tries.lost(LOST)
    assert not tries.over


def test_the_first_redirection_costs_neither_a_wait_nor_a_try() -> None:
    tries = tries_of(Command(("A", KEY)), attempts=1)
    waits = []
    while not tries.over:
        hear(tries, MOVED)
        waits.append(tries.wait_s)

    assert [wait > 0 for wait in waits] == [False, True, False]
    with pytest.raises(Refusal) as caught:
        tries.result()
    assert caught.value is MOVED


def test_lost_connections_and_refusals_share_the_tries() -> None:
    tries = tries_of(Command(("A", KEY)), attempts=2)

    tries.lost(UNREACHABLE)
    hear(tries, DOWN)
    assert not tries.over
    assert tries.look_again

    with pytest.raises(ConnectionLost):
        tries.lost(UNREACHABLE)


def test_ask_sends_asking_before_each_command_there_and_only_once() -> None:
    tries = tries_of(batch("A", "B"))

    hear(tries, ASK, ASK)
    assert tries.ask == B
    assert sent_by(tries) == [b"ASKING", b"A", b"ASKING", b"B"]

    hear(tries, b"OK", TRYAGAIN, b"OK", b"b")
    assert (tries.ask, sent_by(tries)) == (None, [b"A"])
    assert tries.wait_s > 0


def test_a_node_asked_that_is_gone_is_not_asked_again() -> None:
    tries = tries_of(Command(("A", KEY)))
    hear(tries, ASK)

    tries.lost(UNREACHABLE)

    assert tries.ask is None


def test_moved_is_noted_in_the_map() -> None:
    at = pool()
    tries_of(Command(("A", KEY))).heard([MOVED], at)

    assert at.slots.owner(SLOT) == B


@pytest.mark.parametrize("refusal", [MOVED, ASK, TRYAGAIN, DOWN], ids=lambda refusal: refusal.code)
def test_a_feed_of_which_nothing_was_taken_is_sent_again(refusal: Refusal) -> None:
    tries = tries_of(FEED)

    tries.fed(tries.taken([refusal] * 3, 3, pool()))
    assert not tries.over

    tries.ask = None
    tries.fed(tries.taken([None] * 3, 3, pool()))
    assert tries.over
    assert tries.result() == Fed([None] * 3, 3)


def test_a_feed_that_is_refused_each_time_is_final() -> None:
    tries = tries_of(FEED, attempts=0)
    tries.fed(tries.taken([DOWN], 1, pool()))

    assert tries.over
    assert tries.result() == Fed([DOWN], 1, final=True)


@pytest.mark.parametrize(
    "fed", [Fed([None, MOVED], 2), Fed([MOVED, None], 2), Fed([OOM, OOM], 2), Fed([MOVED], 2, LOST), Fed([], 0, LOST)]
)
def test_a_feed_that_was_taken_in_part_is_the_flows_business(fed: Fed) -> None:
    tries = tries_of(FEED)
    tries.fed(fed)

    assert tries.over
    assert tries.result() is fed


def test_a_feed_that_was_asked_elsewhere_has_asking_before_each_command() -> None:
    tries = tries_of(FEED)
    tries.ask = B

    pieces = list(tries.pieces(FEED))

    asking = packed("ASKING")
    assert b"".join(data for data, _ in pieces) == b"".join(asking + packed("XADD", KEY, n) for n in "123")
    assert [count for _, count in pieces] == [4, 2]


def test_answers_to_asking_are_not_counted() -> None:
    tries = tries_of(FEED)
    tries.ask = B
    assert tries.taken([None, None, None, OOM, None, None], 6, pool()) == Fed([None, OOM, None], 3)

    tries.ask = B
    assert tries.cut_off([None, None, None], 6, LOST) == Fed([None], 3, LOST)


def test_a_refusal_that_closes_the_connection_answers_the_first_command_without_an_answer() -> None:
    assert tries_of(FEED).cut_off([None], 3, LOADING) == Fed([None, LOADING], 3)
    with pytest.raises(Refusal):
        tries_of(FEED).cut_off([], 3, LOADING)


def test_one_refusal_for_a_whole_step_leaves_what_was_answered() -> None:
    tries = tries_of(batch("A", "B"), attempts=0)
    hear(tries, b"a", MOVED)

    tries.refused(LOADING)

    assert tries.result() == [b"a", LOADING]


def test_where_there_is_no_cluster_answers_are_left_alone() -> None:
    tries = tries_of(batch("A"), url="redis://10.0.0.1:1")

    assert tries.heard([ASK], None) == [ASK]
    assert tries.ask is None
