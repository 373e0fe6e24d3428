"""Server URLs, read once: what kind of deployment, and what redis-py needs to reach it."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from chasqui.errors import OptionError

DEFAULT_URL = "redis://127.0.0.1:6379/0"
_SCHEMES = {
    "redis": "single",
    "rediss": "single",
    "unix": "single",
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
    "embedded": "embedded",
}
_DEFAULT_PORTS = {"single": 6379, "sentinel": 26379, "cluster": 6379}


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is. User and password are kept out of ``repr``; ``shown`` is what errors may say."""

    kind: str
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    tls: bool = False
    db: int = 0
    service: str = ""
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        scheme = ("rediss" if self.tls else "redis") + ("" if self.kind == "single" else f"+{self.kind}")
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{scheme}://{hosts}" + (f"/{self.service}" if self.service else "")


def parse(url: str) -> Address:
    """Read a URL; an error never repeats it, because it may hold a password."""
    scheme, separator, rest = url.partition("://")
    kind = _SCHEMES.get(scheme.lower())
    if not separator or kind is None:
        raise OptionError(
            f"url expects one of {', '.join(f'{s}://' for s in _SCHEMES)}, got "
            + (f"the scheme {scheme!r:.40}" if separator else "text without ://")
        )
    if kind == "embedded":
        return Address(kind)
    try:
        return _parse(scheme.lower(), kind, rest)
    except ValueError as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"url is not well formed for {scheme}:// (it is not shown: it may hold a password)") from None


def _parse(scheme: str, kind: str, rest: str) -> Address:
    parts = urlsplit(f"x://{rest}")
    if "#" in rest:
        raise OptionError("url takes nothing behind a #; a # in a password is written %23")
    credentials, _, hostpart = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    user = unquote(username) or None
    secret = unquote(password) or None
    query = dict(parse_qsl(parts.query))
    unknown = set(query) - {"db"}
    if unknown:
        raise OptionError("url takes only db after the question mark; a ? in a password is written %3F")
    segments = [unquote(s) for s in parts.path.split("/") if s]
    if scheme == "unix":
        if not parts.path:
            raise OptionError("url unix:// expects the path of a socket, such as unix:///run/redis.sock")
        return Address(kind, path=unquote(parts.path), db=_db(query.get("db")), username=user, password=secret)
    hosts = (
        tuple(_host(h, _DEFAULT_PORTS[kind]) for h in hostpart.split(","))
        if hostpart
        else (("127.0.0.1", _DEFAULT_PORTS[kind]),)
    )
    if kind == "single" and len(hosts) > 1:
        raise OptionError(
            f"url {scheme}:// expects one host, got {len(hosts)}; use {scheme}+cluster:// or {scheme}+sentinel://"
        )
    service = ""
    if kind == "sentinel":
        if not segments:
            raise OptionError(
                "url redis+sentinel:// expects the service's name, such as redis+sentinel://host:26379/mymaster"
            )
        service = segments.pop(0)
    db = _db(segments.pop(0) if segments else query.get("db"))
    if segments:
        raise OptionError("url takes nothing behind the database number; a / in a password is written %2F")
    if kind == "cluster" and db:
        raise OptionError(f"url redis+cluster:// expects database 0, got {db}: a cluster has no other")
    return Address(
        kind, hosts=hosts, tls=scheme.startswith("rediss"), db=db, service=service, username=user, password=secret
    )


def _host(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"x://{text}")
    if not parts.hostname:
        raise OptionError("url expects a host")
    parts.hostname.encode("idna")  # an error now, and not when it is looked up
    if parts.port == 0:
        raise OptionError("url expects a port from 1 to 65535, got 0")
    return parts.hostname, parts.port or default_port


def _db(text: str | None) -> int:
    if text is None:
        return 0
    if not (text.isascii() and text.isdecimal()) or len(text) > 6:
        raise OptionError("url expects a database number after the host; a / or ? in a password is written %2F or %3F")
    return int(text)
