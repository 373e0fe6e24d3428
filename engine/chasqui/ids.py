"""New job ids: ULIDs, many at a time."""

from __future__ import annotations

import secrets

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]
_RUN = 1 << 20  # ids that share one random prefix


def new_ids(count: int, now_ms: int) -> list[str]:
    """ULIDs of that moment, ascending. They share 60 random bits and count up in the last 20, starting at a random
    place: as unique as independent ones between processes, at a fraction of the cost.
    """
    ids: list[str] = []
    start, random = secrets.randbits(19), secrets.randbits(59)
    while len(ids) < count:
        head = _ulid_head(now_ms, random)
        stop = min(_RUN, start + count - len(ids))
        for block in range(start & ~1023, stop, 1024):
            prefix = head + _PAIRS[block >> 10]
            ids += [prefix + pair for pair in _PAIRS[max(0, start - block) : stop - block]]
        start, random = 0, random + 1
    return ids


def _ulid_head(now_ms: int, random: int) -> str:
    value = (now_ms & (1 << 48) - 1) << 60 | random
    # 108 bits in 22 letters of 5: the first letter of a ULID carries only three.
    return "".join(_ALPHABET[value >> 5 * k & 31] for k in range(21, -1, -1))
