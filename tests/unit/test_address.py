"""Server URLs: what is read from them, and what is never said about them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from chasqui.address import DEFAULT_URL, Address, parse
from chasqui.errors import OptionError

LOCAL = (("127.0.0.1", 6379),)


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        (DEFAULT_URL, {"kind": "single", "hosts": LOCAL}),
        ("redis://", {"kind": "single", "hosts": LOCAL}),
        ("redis:///5", {"kind": "single", "hosts": LOCAL, "db": 5}),
        ("redis://h", {"kind": "single", "hosts": (("h", 6379),)}),
        ("REDIS://h:7000/2", {"kind": "single", "hosts": (("h", 7000),), "db": 2}),
        ("redis://h?db=3", {"kind": "single", "hosts": (("h", 6379),), "db": 3}),
        ("rediss://h:7000", {"kind": "single", "hosts": (("h", 7000),), "tls": True}),
        ("redis://[::1]", {"kind": "single", "hosts": (("::1", 6379),)}),
        ("redis://[::1]:7000/1", {"kind": "single", "hosts": (("::1", 7000),), "db": 1}),
        ("redis://u:p@[fe80::1]:7000", {"kind": "single", "hosts": (("fe80::1", 7000),)}),
        ("unix:///run/redis.sock", {"kind": "single", "path": "/run/redis.sock"}),
        ("unix:///a%20b.sock?db=4", {"kind": "single", "path": "/a b.sock", "db": 4}),
        ("redis+cluster://a:1,b,c:3", {"kind": "cluster", "hosts": (("a", 1), ("b", 6379), ("c", 3))}),
        ("rediss+cluster://a:1/0", {"kind": "cluster", "hosts": (("a", 1),), "tls": True}),
        ("redis+cluster://[::1]:1,[::2]:2", {"kind": "cluster", "hosts": (("::1", 1), ("::2", 2))}),
        ("redis+sentinel://a,b:1/main", {"kind": "sentinel", "hosts": (("a", 26379), ("b", 1)), "service": "main"}),
        (
            "rediss+sentinel://a/main/6",
            {"kind": "sentinel", "hosts": (("a", 26379),), "service": "main", "db": 6, "tls": True},
        ),
        ("embedded://", {"kind": "embedded"}),
    ],
)
def test_url_says_where_the_server_is(url: str, wanted: dict[str, Any]) -> None:
    address = parse(url)

    read = {name: getattr(address, name) for name in ("kind", "hosts", "path", "tls", "db", "service")}
    assert read == {"hosts": (), "path": "", "tls": False, "db": 0, "service": "", **wanted}


@pytest.mark.parametrize(
    ("url", "username", "password"),
    [
        ("redis://h", None, None),
        ("redis://:pw@h", None, "pw"),
        ("redis://ana@h", "ana", None),
        ("redis://ana:pw@h", "ana", "pw"),
        ("redis://ana:p%40%3A%2F%3F%23w@h", "ana", "p@:/?#w"),
        ("redis://a%40b:p%C3%A9@h", "a@b", "pé"),
        ("redis://ana:p@w@h", "ana", "p@w"),
        ("redis://ana:p:w@h", "ana", "p:w"),
        ("unix://ana:pw@/run/redis.sock", "ana", "pw"),
        ("redis+cluster://ana:pw@a:1,b:2", "ana", "pw"),
        ("redis+sentinel://ana:pw@a,b/main", "ana", "pw"),
    ],
)
def test_url_brings_user_and_password(url: str, username: str | None, password: str | None) -> None:
    address = parse(url)

    assert (address.username, address.password) == (username, password)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "got text without ://"),
        ("localhost:6379", "got text without ://"),
        ("http://h", "got the scheme 'http'"),
        ("://h", "got the scheme ''"),
        ("redis://h:port", "not well formed"),
        ("redis://h:99999", "not well formed"),
        ("redis://[::1", "not well formed"),
        ("redis://a..b", "not well formed"),
        ("redis://" + "a" * 64, "not well formed"),
        ("redis://\udcff", "not well formed"),
        ("redis://h:0", "expects a port from 1 to 65535"),
        ("redis://u:p#w@h", "a # in a password is written %23"),
        ("unix:///run/a#b.sock", "nothing behind a #"),
        ("redis://h/1/2", "nothing behind the database number"),
        ("redis+sentinel://h/main/1/2", "nothing behind the database number"),
        ("redis://h/٣", "expects a database number"),
        ("redis://:6379", "expects a host"),
        ("redis://a,b", "expects one host, got 2; use redis+cluster:// or redis+sentinel://"),
        ("redis+cluster://a,", "expects a host"),
        ("redis://h/x", "expects a database number"),
        ("redis://h/-1", "expects a database number"),
        ("redis://h/1234567", "expects a database number"),
        ("redis://h?db=x", "expects a database number"),
        ("redis://h?ssl=1&a=2", "takes only db after the question mark"),
        ("redis+cluster://h/1", "expects database 0, got 1"),
        ("redis+sentinel://h", "expects the service's name"),
        ("unix://", "expects the path of a socket"),
    ],
)
def test_bad_url_is_refused_with_the_reason(url: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse(url)

    assert message in caught.value.message


@pytest.mark.parametrize(
    "url",
    [
        "redis:s3cret@h",
        "http://u:s3cret@h",
        "redis://u:s3cret@h:port",
        "redis://u:s3cret@h:99999",
        "redis://u:s3cret@[::1",
        "redis://u:s3cret@a,b",
        "redis://u:s3cret@h/x",
        "redis://u:s3cret@h/1/2",
        "redis://u:s3cret@h:0",
        "redis://u:s3cret#x@h",
        "redis://u:s3cret@a..b",
        "redis://u:s3cret@h?ssl=1",
        "redis+cluster://u:s3cret@h/1",
        "redis+sentinel://u:s3cret@h",
        "unix://u:s3cret@",
        "redis://u:[s3cret@h",
        "redis://u:s3cret/@h",
        "redis://u:s3cret?@h",
        "redis://u:s3cret#@h",
        "redis://u:/s3cret@h",
        "redis://u:1/s3cret@h",
        "redis://u:1?s3cret=@h",
        "redis://u:1?a=s3cret@h&s3cret=1",
    ],
)
def test_password_is_not_in_the_error(url: str) -> None:
    """Also where a character that belongs percent-encoded moves part of it to another place of the URL."""
    with pytest.raises(OptionError) as caught:
        parse(url)

    error = caught.value
    assert "s3cret" not in str(error) + repr(error)
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None


def test_user_and_password_are_not_in_repr() -> None:
    text = repr(parse("redis://ana:s3cret@h"))

    assert "ana" not in text
    assert "s3cret" not in text


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:6379",
        "rediss://h:6379",
        "redis://[::1]:6379",
        "unix:///run/redis.sock",
        "redis+cluster://a:1,b:2",
        "rediss+cluster://[::1]:1,[::2]:2",
        "redis+sentinel://a:1,b:2/main",
    ],
)
def test_shown_address_is_the_url_without_credentials(url: str) -> None:
    assert parse(url.replace("://", "://ana:s3cret@")).shown == url


def test_address_pickles_with_its_credentials() -> None:
    address: Address = pickle.loads(pickle.dumps(parse("redis://ana:s3cret@h")))

    assert address == parse("redis://ana:s3cret@h")
