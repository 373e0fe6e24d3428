"""How a range of entries becomes partitions, without reading them. Pure: who asks the server is told what to ask.

Nothing in a stream tells how many entries lie between two ids. Ids hold times, so a guess between two times finds out
whether entries stand there, and how densely: a range is cut where guesses fall into gaps, and what remains is weighed
by length times density. Guesses go where the weight is, so that a day with ten bursts ends up as ten pieces. Inside one
millisecond ids are numbered, and the numbers do the weighing.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from pyspark.sql.datasource import InputPartition

from chasqui.bridge import Sample, id_parts, id_text, predecessor, successor

PROBES_PER_PARTITION = 16
_TEETH = 3
SMALL = 5000
"""Where nobody says otherwise: a partition of fewer entries is not worth a task of its own."""

Id = tuple[int, int]
Guesses = Generator[list[Id], list[Sample], list[str]]


@dataclass(frozen=True, slots=True)
class Range:
    """Entries of one queue behind ``after``, up to and including ``upto``; ``weight`` is about how many.

    ``batch`` is where the batch begins, for ranges that must not lose entries to trimming before they are read;
    ``added`` how many entries the stream had ever had at ``after``, where that is known.
    """

    queue: str
    after: str
    upto: str
    weight: float = 1.0
    batch: str | None = None
    added: int | None = None


class RangePartition(InputPartition):
    """What one task reads."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        super().__init__(None)
        self.ranges = tuple(ranges)

    def __repr__(self) -> str:
        return f"RangePartition({', '.join(f'{r.queue}({r.after}, {r.upto}]' for r in self.ranges)})"


class QueuesPartition(InputPartition):
    """Queues whose lists one task reads."""

    def __init__(self, queues: Sequence[str]) -> None:
        super().__init__(None)
        self.queues = tuple(queues)

    def __repr__(self) -> str:
        return f"QueuesPartition({', '.join(self.queues)})"


def partitions_wanted(entries: int, least: int | None, cores: int) -> int:
    """How many partitions so many entries are worth; ``least`` is what the user asked for."""
    return least if least is not None else max(1, min(cores, -(-entries // SMALL)))


def parts_of(counts: Mapping[str, int], wanted: int) -> dict[str, int]:
    """How many pieces each queue's range is cut into, so that they are ``wanted`` in all, or some more."""
    total = sum(counts.values())
    if not total:
        return dict.fromkeys(counts, 1)
    return {queue: max(1, -(-wanted * count // total)) for queue, count in counts.items()}


def fair_order(waiting: Mapping[str, int], turn: int) -> list[str]:
    """The order in which queues get their share of a limit: those with little first, so that what they leave goes to
    the others. Where there was not one for each, ``turn`` lets all of them come first in time.
    """
    order = sorted(waiting, key=lambda queue: (waiting[queue], queue))
    start = turn % len(order) if order else 0
    return order[start:] + order[:start]


def share(left: int, queues_left: int) -> int:
    """What the next queue may have of what is left."""
    return -(-left // queues_left)


def packed(ranges: Sequence[Range], bins: int) -> list[RangePartition]:
    """Ranges put together such that small ones share a task: about ``bins`` of about the same weight, in order."""
    total = sum(r.weight for r in ranges)
    size = total / max(1, bins)
    found: list[list[Range]] = []
    weight = 0.0
    for one in ranges:
        if found and weight + one.weight <= size * 1.001:
            found[-1].append(one)
            weight += one.weight
        else:
            found.append([one])
            weight = one.weight
    return [RangePartition(some) for some in found]


def cut(queue: str, after: str, upto: str, cuts: Sequence[str], weight: float) -> list[Range]:
    """A range cut behind each of these ids."""
    ends = [c for c in cuts if id_parts(after) < id_parts(c) < id_parts(upto)] + [upto]
    starts = [after, *ends[:-1]]
    return [Range(queue, a, b, weight / len(ends)) for a, b in zip(starts, ends, strict=True)]


def cuts_of_walk(marks: Sequence[str], step: int, entries: int, parts: int | None) -> list[str]:
    """Where to cut a range that was walked: at each mark, or at those that make about equal parts."""
    if parts is None:
        return list(marks)
    places = [round(i * entries / parts / step) for i in range(1, parts)]
    return [marks[p - 1] for p in dict.fromkeys(places) if 1 <= p <= len(marks)]


# --- Weighing by guesses ---


@dataclass(slots=True)
class _Piece:
    """From one entry to another; ``rates`` are entries per millisecond at its two ends."""

    first: Id
    last: Id
    rates: tuple[float, float]

    @property
    def single(self) -> bool:
        return self.first[0] == self.last[0]

    @property
    def most(self) -> float:
        return self._weight(max(self.rates))

    @property
    def weight(self) -> float:
        return self._weight(sum(self.rates) / 2)

    def _weight(self, rate: float) -> float:
        if self.single:
            return float(self.last[1] - self.first[1] + 1)
        return max(1.0, rate * (self.last[0] - self.first[0]))

    def comb(self, teeth: int) -> list[Id]:
        """So many guesses at equal distances, fewer where there are not so many milliseconds."""
        first, span = self.first[0], self.last[0] - self.first[0]
        times = dict.fromkeys(first + max(1, span * i // (teeth + 1)) for i in range(1, teeth + 1))
        return [(ms, 0) for ms in times if ms <= self.last[0]]

    def inside(self, fraction: float) -> Id:
        """An id about so far into the piece: the first one behind a cut."""
        if self.single:
            return self.first[0], self.first[1] + round(fraction * (self.last[1] - self.first[1] + 1))
        return self.first[0] + round(fraction * (self.last[0] - self.first[0] + 1)), 0


def cuts_by_guessing(after: str, upto: str, parts: int) -> Guesses:
    """Where to cut a range into about equal parts; yields ids to look around at, and is sent what stands there."""
    if parts < 2:
        return []
    budget = PROBES_PER_PARTITION * parts - 2
    low, high = yield [successor(id_parts(after)), id_parts(upto)]
    last = high.at if high.at is not None else high.before
    if low.at is None or last is None:
        return []
    rate_first = _rate(low.at, low.at_to, low.at_count)
    rate_last = _rate(high.before, high.before_from, high.before_count)
    pieces = [_Piece(low.at, last, (rate_first, rate_last))]
    # First a comb over the whole range, as dense as an even stream needs; then again where the weight turns out to be.
    combs = [(pieces[0], 2 * parts - 1)]
    while combs and budget > 0:
        guesses: list[tuple[_Piece, list[Id]]] = []
        for piece, teeth in combs:
            between = piece.comb(min(teeth, budget))
            budget -= len(between)
            guesses.append((piece, between))
        samples = iter((yield [guess for _, some in guesses for guess in some]))
        for piece, some in guesses:
            pieces.remove(piece)
            rest: _Piece | None = piece
            for sample in islice(samples, len(some)):
                if rest is not None:
                    before, rest = _split(rest, sample)
                    pieces += [before] if before is not None else []
            pieces += [rest] if rest is not None else []
        total = sum(piece.most for piece in pieces)
        heavy = [p for p in pieces if not p.single and p.most > 0.75 * total / parts]
        combs = [(piece, _TEETH) for piece in sorted(heavy, key=lambda piece: -piece.most)]
    pieces.sort(key=lambda piece: piece.first)
    return _quantiles(pieces, parts)


def _split(piece: _Piece, sample: Sample) -> tuple[_Piece | None, _Piece | None]:
    """The pieces on both sides of a guess; what stands between the entries next to it is a gap, and belongs to neither.
    Entries at the ends may have been deleted meanwhile: then a side is empty.
    """
    before = after = None
    if sample.before is not None and sample.before >= piece.first:
        rate = _rate(sample.before, sample.before_from, sample.before_count)
        before = _Piece(piece.first, min(sample.before, piece.last), (piece.rates[0], rate))
    if sample.at is not None and sample.at <= piece.last:
        rate = _rate(sample.at, sample.at_to, sample.at_count)
        after = _Piece(max(sample.at, piece.first), piece.last, (rate, piece.rates[1]))
    return before, after


def _rate(near: Id | None, far: Id | None, count: int) -> float:
    if near is None or far is None:
        return 0.0
    return count / max(1, abs(far[0] - near[0]))


def _quantiles(pieces: Sequence[_Piece], parts: int) -> list[str]:
    total = sum(piece.weight for piece in pieces)
    cuts: list[str] = []
    passed, wanted = 0.0, total / parts
    for piece in pieces:
        while len(cuts) < parts - 1 and passed + piece.weight >= wanted:
            begin = piece.inside((wanted - passed) / piece.weight)
            cuts.append(id_text(predecessor(begin)))
            wanted += total / parts
        passed += piece.weight
    return cuts
