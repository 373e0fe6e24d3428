"""Error replies: which code a refusal has."""

from __future__ import annotations

import pytest
import redis.exceptions as rx

from chasqui.address import parse
from chasqui.redis_errors import connection_lost, refusal_of

SHA = "1d6b24190f8c48ceaee37f22341f56b53c3b9e97"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (rx.ResponseError("WRONGTYPE Operation against a key"), "WRONGTYPE", "Operation against a key"),
        (rx.ResponseError("wrong number of arguments"), "ERR", "wrong number of arguments"),
        (rx.OutOfMemoryError("command not allowed"), "OOM", "command not allowed"),
        # As Redis 6.2 tells it of a command inside a script.
        (
            rx.ResponseError(
                f"Error running script (call to f_{SHA}): @user_script:17: @user_script: 17: -OOM command x"
            ),
            "OOM",
            "command x",
        ),
        (
            rx.ResponseError(f"ERR Error running script (call to f_{SHA}): @user_script:1: WRONGTYPE Operation"),
            "WRONGTYPE",
            "Operation",
        ),
        (
            rx.ResponseError("Error running script (call to f_x): -OOM"),
            "ERR",
            "Error running script (call to f_x): -OOM",
        ),
    ],
)
def test_a_refusal_has_the_code_of_what_was_refused(error: Exception, code: str, text: str) -> None:
    refusal = refusal_of(error)

    assert (refusal.code, refusal.text) == (code, text)


def test_silence_of_a_tls_port_is_explained() -> None:
    lost = connection_lost(rx.TimeoutError("Timeout"), parse("rediss://h:1"), sent=False)

    assert lost.message == (
        "rediss://h:1 cannot be reached: TimeoutError Timeout. A port without TLS is silent to rediss://; redis:// is "
        "for those."
    )
    assert "TLS" not in connection_lost(rx.TimeoutError("Timeout"), parse("redis://h:1"), sent=False).message
