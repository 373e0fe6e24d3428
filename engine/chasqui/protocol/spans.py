"""Where the parts of jobs stand in the bytes of one XRANGE reply, found for all entries at once.

A parsed reply is seven Python objects for each job, all of which a connector throws away once they are in its columns.
Here a reply stays one piece of memory: numpy finds where entries begin and reads lengths and types a whole page at a
time. Nothing is guessed: each length leads to the place where the next thing must begin, the last one to the end of the
reply, so bytes inside a payload that look like an entry make the page one that is not understood. Such a page, and one
whose jobs are not all of the plain form that producers write, has no spans: it is parsed like any other reply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from chasqui.protocol.columns import JobSpans

if TYPE_CHECKING:
    from chasqui.protocol.columns import Numbers, Span

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

# *2 CRLF $15 CRLF 1794978620538-0 CRLF *4 CRLF $1 CRLF d CRLF $60 CRLF ... CRLF $1 CRLF n CRLF $4 CRLF mail CRLF
_ID_AT, _LENGTH_AT = 9, 6  # from the star of an entry
_MS_DIGITS = 13  # of ids made from 2001 to 2286
_NAMED, _UNNAMED = b"\r\n*4\r\n$1\r\nd\r\n$", b"\r\n*2\r\n$1\r\nd\r\n$"
_NAME = b"\r\n$1\r\nn\r\n$"
_LONGEST = 2**31 - 1  # Arrow counts places in 32 bits
_MOST_DIGITS = 10
# MessagePack
_FIXARRAY_4, _FIXSTR, _STR8, _BIN8, _BIN16, _UINT64, _FIXINT_TOP = 0x94, 0xA0, 0xD9, 0xC4, 0xC5, 0xCF, 0x7F
_CREATED = 9  # type and eight bytes


def job_spans(data: bytes) -> JobSpans | None:
    """The jobs in the bytes of a reply to XRANGE; None where it is empty or not all of the plain form."""
    head = data.find(b"\r\n")
    if not data.startswith(b"*") or not data[1:head].isdigit() or len(data) > _LONGEST:
        return None
    # Bytes of no meaning behind the end: a place found by a wrong length is read there, and not understood.
    a = np.frombuffer(data + bytes(64), np.uint8)
    entries = _entries(a[: len(data)])
    if not len(entries) or len(entries) != int(data[1:head]) or entries[0] != head + 2:
        return None
    id_begin = entries + _ID_AT
    id_end = id_begin + 10 + (a[entries + _LENGTH_AT] - ord("0"))
    found = _fields(a, id_end, len(data))
    if found is None:
        return None
    envelope, names, end = found
    if end[-1] != len(data) or not np.array_equal(end[:-1], entries[1:]):
        return None
    enqueued = _decimal(a, id_begin, _MS_DIGITS)
    parts = _envelope(a, *envelope)
    if parts is None or enqueued is None:
        return None
    ids, payloads, created, attempts = parts
    return JobSpans(data, (id_begin, id_end), enqueued, ids, names, payloads, created, attempts)


def _entries(a: Bytes) -> Numbers:
    """Where entries may begin: a star, with the signs of an entry around an id of 10 to 19 characters behind it."""
    stars = np.flatnonzero(a[: max(0, len(a) - _ID_AT - _MS_DIGITS)] == ord("*"))
    signs = ((1, "2"), (2, "\r"), (3, "\n"), (4, "$"), (5, "1"), (7, "\r"), (8, "\n"), (_ID_AT + _MS_DIGITS, "-"))
    for offset, sign in signs:
        stars = stars[a[stars + offset] == ord(sign)]
    length = a[stars + _LENGTH_AT]
    return stars[(length >= ord("0")) & (length <= ord("9"))]


def _fields(a: Bytes, at: Numbers, size: int) -> tuple[Span, Span | None, Numbers] | None:
    """Envelopes, names and the ends of entries whose fields begin there: ``d``, or ``d`` and ``n``."""
    named = _is_at(a, at, _NAMED)
    if not named and not _is_at(a, at, _UNNAMED):
        return None
    envelope = _string(a, at + len(_NAMED), size)
    if envelope is None:
        return None
    if not named:
        return envelope, None, envelope[1] + 2
    if not _is_at(a, envelope[1], _NAME):
        return None
    name = _string(a, envelope[1] + len(_NAME), size)
    return None if name is None else (envelope, name, name[1] + 2)


def _string(a: Bytes, at: Numbers, size: int) -> Span | None:
    """The strings whose lengths stand there, each with its line's end behind it."""
    length = np.zeros(len(at), np.int64)
    going = np.ones(len(at), np.bool_)
    for _ in range(_MOST_DIGITS):
        digit = a[at].astype(np.int64) - ord("0")
        going &= (digit >= 0) & (digit <= 9)
        if not going.any():
            break
        length = np.where(going, 10 * length + digit, length)
        at = at + going
    begin = at + 2
    end = begin + length
    if end.max() > size - 2 or not _is_at(a, at, b"\r\n") or not _is_at(a, end, b"\r\n"):
        return None
    return begin, end


def _envelope(a: Bytes, begin: Numbers, end: Numbers) -> tuple[Span, Span, Numbers, Numbers] | None:
    """Id, payload, time of creation and attempt, where all envelopes are [str, bin, uint64, fixint]."""
    if not (a[begin] == _FIXARRAY_4).all():
        return None
    kind = a[begin + 1].astype(np.int64)
    short = (kind & 0xE0) == _FIXSTR
    if not (short | (kind == _STR8)).all():
        return None
    id_begin = begin + np.where(short, 2, 3)
    id_end = id_begin + np.where(short, kind & 0x1F, a[begin + 2])
    if (id_end > end).any():
        return None
    kind = a[id_end].astype(np.int64)
    small = kind == _BIN8
    if not (small | (kind == _BIN16)).all():
        return None
    begin = id_end + np.where(small, 2, 3)
    first = a[id_end + 1].astype(np.int64)
    payload_end = begin + np.where(small, first, first << 8 | a[id_end + 2])
    if not np.array_equal(payload_end + _CREATED + 1, end) or not (a[payload_end] == _UINT64).all():
        return None
    attempts = a[payload_end + _CREATED].astype(np.int64)
    created = np.zeros(len(end), np.uint64)
    for i in range(1, _CREATED):
        created = created << np.uint64(8) | a[payload_end + i]
    if attempts.max() > _FIXINT_TOP or created.max() > np.iinfo(np.int64).max:
        return None
    return (id_begin, id_end), (begin, payload_end), created.astype(np.int64), attempts


def _decimal(a: Bytes, at: Numbers, digits: int) -> Numbers | None:
    """Numbers of so many digits."""
    value = np.zeros(len(at), np.int64)
    for i in range(digits):
        digit = a[at + i].astype(np.int64) - ord("0")
        if digit.min() < 0 or digit.max() > 9:
            return None
        value = 10 * value + digit
    return value


def _is_at(a: Bytes, at: Numbers, text: bytes) -> bool:
    return all((a[at + i] == sign).all() for i, sign in enumerate(text))
