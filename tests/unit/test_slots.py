"""The map of a cluster: what nodes say, and what redirections add to it."""

from __future__ import annotations

import random

import pytest
from redis.crc import key_slot

from chasqui.protocol.flow import Refusal
from chasqui.protocol.slots import SLOTS, SlotMap, slot_of

A, B, C = ("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.3", 3)
REPLY = [[0, 9, [b"10.0.0.1", 1, b"id"], [b"10.0.0.3", 3, b"id"]], [10, SLOTS - 1, [b"10.0.0.2", 2, b"id", []]]]


def learned() -> SlotMap:
    slots = SlotMap([A])
    slots.learn(REPLY, A)
    return slots


@pytest.mark.parametrize(
    "key", ["k", "{chasqui:q}:stream", "{}k", "{", "}{k}", "a{b}c{d}", "{{a}}", "é{ñ}", "{a", "a}b{c}", ""]
)
def test_slot_of_a_key_is_the_servers(key: str) -> None:
    assert slot_of(key) == key_slot(key.encode())


def test_slots_of_many_keys_are_the_servers() -> None:
    alphabet = "ab{}é"
    keys = ["".join(random.Random(i).choices(alphabet, k=i % 9)) for i in range(2000)]

    assert [slot_of(key) for key in keys] == [key_slot(key.encode()) for key in keys]


def test_a_map_that_was_told_nothing_asks_the_nodes_of_the_url() -> None:
    slots = SlotMap([A, B])

    assert slots.owner(0) is None
    assert slots.primaries() == []
    assert slots.to_ask() == ([A, B], [])


def test_owners_are_those_that_a_node_names() -> None:
    slots = learned()

    assert [slots.owner(slot) for slot in (0, 9, 10, SLOTS - 1)] == [A, A, B, B]
    assert slots.primaries() == [A, B]
    assert slots.to_ask() == ([A, B, C], [])


@pytest.mark.parametrize("host", [b"", None, b"?"])
def test_a_node_without_a_name_is_where_it_was_found(host: bytes | None) -> None:
    slots = SlotMap([A])
    slots.learn([[0, SLOTS - 1, [host, 7, b"id"]]], A)

    assert slots.owner(0) == ("10.0.0.1", 7)


def test_slots_that_nobody_claims_have_no_owner() -> None:
    slots = learned()
    slots.learn(REPLY[:1], A)

    assert (slots.owner(9), slots.owner(10)) == (A, None)


def test_nodes_that_are_no_longer_named_are_told() -> None:
    assert learned().learn(REPLY[1:], B) == {A, C}


@pytest.mark.parametrize(
    ("where", "place"), [("10.0.0.9:7", ("10.0.0.9", 7)), (":7", ("10.0.0.1", 7)), ("::1:7", ("::1", 7))]
)
def test_moved_changes_the_owner_of_one_slot(where: str, place: tuple[str, int]) -> None:
    slots = learned()

    assert slots.follow(Refusal("MOVED", f"5 {where}"), A) is None
    assert [slots.owner(slot) for slot in (4, 5, 6)] == [A, place, A]
    assert place in slots.to_ask()[0]


def test_ask_leads_elsewhere_once() -> None:
    slots = learned()

    assert slots.follow(Refusal("ASK", "5 10.0.0.9:7"), A) == ("10.0.0.9", 7)
    assert slots.owner(5) == A


def test_other_refusals_lead_nowhere() -> None:
    assert learned().follow(Refusal("CLUSTERDOWN", "Hash slot not served"), A) is None


def test_a_node_that_did_not_answer_is_asked_last_until_it_does() -> None:
    slots = learned()
    slots.doubt(A)

    assert slots.owner(10) is None
    assert slots.to_ask() == ([B, C], [A])

    slots.learn(REPLY, A)
    assert slots.to_ask() == ([A, B, C], [])


def test_a_redirection_to_a_node_that_did_not_answer_is_believed() -> None:
    slots = learned()
    slots.doubt(A)
    slots.follow(Refusal("MOVED", "5 10.0.0.1:1"), B)

    assert slots.owner(5) == A
    assert slots.to_ask()[1] == []
