"""Key names, and the rules for what goes into them."""

from __future__ import annotations

from typing import Any

import pytest

from chasqui.errors import ConfigError
from chasqui.protocol.keys import Keys, checked_queue, id_bytes, name_bytes

EMAILS = Keys("emails")


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        (EMAILS.stream, "{chasqui:emails}:stream"),
        (EMAILS.delayed, "{chasqui:emails}:delayed"),
        (EMAILS.dlq, "{chasqui:emails}:dlq"),
        (EMAILS.events, "{chasqui:emails}:events"),
        (EMAILS.result("j1"), "{chasqui:emails}:result:j1"),
        (EMAILS.dedup("j1"), "{chasqui:emails}:dlid:j1"),
        (EMAILS.delayed_index("j1"), "{chasqui:emails}:didx:j1"),
        (EMAILS.repeat, "{chasqui:emails}:repeat"),
        (EMAILS.repeat_spec("r::every:5"), "{chasqui:emails}:repeat:spec:r::every:5"),
        (EMAILS.promoter_lock, "{chasqui:emails}:promoter:lock"),
        (EMAILS.scheduler_lock, "{chasqui:emails}:scheduler:lock"),
        (EMAILS.paused, "{chasqui:emails}:paused"),
    ],
)
def test_key_is_that_of_the_wire_format(key: str, wanted: str) -> None:
    assert key == wanted


@pytest.mark.parametrize("queue", ["a", "a b", "a:b", "é", "日本語", "🦀", "q" * 256])
def test_queue_name_stands_in_the_key_as_it_is(queue: str) -> None:
    assert Keys(queue).stream == f"{{chasqui:{queue}}}:stream"


@pytest.mark.parametrize(
    ("queue", "message"),
    [
        ("", "not blank"),
        (" ", "not blank"),
        ("\u3000", "not blank"),
        ("a{b", "without braces"),
        ("a}b", "without braces"),
        ("a\nb", "control characters"),
        ("a\x7fb", "control characters"),
        ("a\x00", "control characters"),
        ("q" * 257, "queue takes at most 256 bytes of UTF-8, got 257"),
        ("é" * 129, "queue takes at most 256 bytes of UTF-8, got 258"),
        ("\ud800", "queue holds characters that UTF-8 cannot write"),
        (None, "queue expects text, got NoneType"),
        (b"q", "queue expects text, got bytes"),
        (5, "queue expects text, got int"),
    ],
)
def test_bad_queue_name_is_refused(queue: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_queue(queue)


@pytest.mark.parametrize("name", ["", " ", "a{b}", "tab\there", "nul\x00in", "n" * 256, "é" * 128, "🦀" * 64])
def test_name_of_up_to_256_bytes_is_taken(name: str) -> None:
    assert name_bytes(name) == name.encode()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("n" * 257, "name takes at most 256 bytes of UTF-8, got 257"),
        ("é" * 129, "name takes at most 256 bytes of UTF-8, got 258"),
        ("\ud800", "name holds characters that UTF-8 cannot write"),
        (None, "name expects text, got NoneType"),
        (b"n", "name expects text, got bytes"),
    ],
)
def test_bad_name_is_refused(name: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        name_bytes(name)


@pytest.mark.parametrize("job_id", ["1", " a ", "a{b}", "nul\x00in", "i" * 1024, "🦀" * 256])
def test_id_of_up_to_1024_bytes_is_taken(job_id: str) -> None:
    assert id_bytes(job_id) == job_id.encode()


@pytest.mark.parametrize(
    ("job_id", "message"),
    [
        ("", "not blank"),
        (" \t\n", "not blank"),
        ("\u3000", "not blank"),
        ("i" * 1025, "id takes at most 1024 bytes of UTF-8, got 1025"),
        ("\udfff", "id holds characters that UTF-8 cannot write"),
        (5, "id expects text, got int"),
        (b"i", "id expects text, got bytes"),
    ],
)
def test_bad_id_is_refused(job_id: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        id_bytes(job_id)
