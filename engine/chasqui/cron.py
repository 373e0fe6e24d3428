"""Cron: when does an expression fire next.

    next_fire_ms("0 9 * * MON-FRI", "Europe/London", after_ms)   the next fire, in epoch milliseconds
    check("0 9 * * MON-FRI", "Europe/London")                    raises CronError if it cannot be understood

Pure arithmetic: no clock, and no I/O but the reading of zone data. The dialect:

    [second] minute hour day-of-month month day-of-week [year]     5 fields: second 0; 7 fields: with a year
    @yearly @annually @monthly @weekly @daily @hourly              instead of fields
    *   a   a-b   */n   a/n   a-b/n   lists                        JAN..DEC, SUN..SAT; Sunday is 0 and 7
    ?                                                              in the day fields: the same as *
    day of month   L last day, 15W the weekday nearest to the 15th, inside the month
    day of week    5#2 second Friday, 5L or 5#L last Friday, a leading + asks for both day fields

When both day fields are restricted, a day needs to match one of them (with ``+``: both).

Daylight saving, by two knobs (the defaults are what the native scheduler does):

    gap      a pattern with one single time of day that the clock jumps over fires at the end of the gap
             (``shift``) or not on that day (``skip``). All other times are untouched, and patterns with
             more than one time of day never fire for times inside a gap.
    overlap  times that occur twice fire in the first pass only (``first``) or in both passes (``both``).

The answer is always later than ``after_ms``. It keeps the milliseconds of ``after_ms``, so a schedule made at
x.643 fires at .643, until the search leaps over a month or year that its own fields exclude; then they are 000.

croniter supplies the names of months and weekdays, and is the second opinion in the tests. Parsing and search
are ours: croniter reads ``2-2`` as every hour, wraps ``22-2``, refuses ``1,15W``, ends years in 2099, has no
``+``, and treats clock changes in its own way.
"""

from __future__ import annotations

import calendar
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import cache, lru_cache
from typing import NamedTuple, NoReturn
from zoneinfo import ZoneInfo, available_timezones

from croniter.croniter import DOW_ALPHAS, M_ALPHAS

from chasqui.errors import ConfigError, CronError, NoFutureFire, OptionError

MAX_EXPRESSION_CHARS = 1024

# Strangers write the expressions, so a search must end. The calendar repeats after 400 years: a pattern that did
# not match in 400 years that its year field allows is taken as one that never does.
_MAX_YEARS = 400
# A pattern whose every match falls into a gap, this many times in a row, was made to live in gaps.
_MAX_GAPS = 400

_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = _EPOCH.replace(tzinfo=UTC)
# Two days before datetime ends, to leave room for zone offsets in either direction.
_END_MS = int(datetime(9999, 12, 30, tzinfo=UTC).timestamp()) * 1000


def next_fire_ms(expression: str, tz: str | None, after_ms: int, *, gap: str = "shift", overlap: str = "first") -> int:
    """The first fire later than ``after_ms``, in epoch milliseconds.

    Raises CronError if the expression or the zone cannot be understood, NoFutureFire if nothing matches any more.
    """
    if gap not in ("shift", "skip"):
        raise OptionError(f"cron option gap is {gap!r}: expected 'shift' or 'skip'")
    if overlap not in ("first", "both"):
        raise OptionError(f"cron option overlap is {overlap!r}: expected 'first' or 'both'")
    if after_ms < 0:
        raise ConfigError(f"after_ms is {after_ms}: expected epoch milliseconds, 0 or more")
    pattern, zone = _compile(expression, tz)
    fire_ms = _search(pattern, zone, after_ms, gap, overlap) if after_ms < _END_MS else None
    if fire_ms is None or fire_ms >= _END_MS:
        raise NoFutureFire(f"cron expression {_quoted(expression)} never fires after {after_ms} (epoch milliseconds)")
    return fire_ms


def check(expression: str, tz: str | None) -> None:
    """Raises CronError if the expression or the zone cannot be understood."""
    _compile(expression, tz)


# --- search: wall clock first, then the instant ---


class _Wall(NamedTuple):
    time: datetime  # naive: what a clock on the wall shows
    carries: bool  # whether the milliseconds of the start are kept


class _Change(NamedTuple):
    """A clock change: the wall times from ``begin`` to before ``end`` do not exist, or exist twice."""

    at: int  # the first second, since the epoch, of the new offset
    begin: datetime
    end: datetime


def _search(pattern: _Pattern, zone: tzinfo, after_ms: int, gap: str, overlap: str) -> int | None:
    after_s, millis = divmod(after_ms, 1000)
    here = (_EPOCH_UTC + timedelta(seconds=after_s)).astimezone(zone)
    now = here.replace(tzinfo=None, fold=0)
    # One second on, on the wall: from the last second before a gap this is the first second inside it.
    start = now + timedelta(seconds=1)
    second_pass_ends = now
    old, new = _offsets(zone, now) if here.fold or overlap == "both" else (0, 0)
    if old > new:
        repeated = _change(zone, now, old, new)
        if overlap == "first":
            start = repeated.end
        else:
            second_pass_ends = repeated.end
            if not here.fold:
                wall = pattern.next(start)
                if wall and wall.time < repeated.end:
                    return (_seconds(wall.time) - old) * 1000 + millis * wall.carries
                start = repeated.begin

    for _ in range(_MAX_GAPS):
        wall = pattern.next(start)
        if wall is None:
            return None
        millis *= wall.carries
        old, new = _offsets(zone, wall.time)
        if old >= new:
            return (_seconds(wall.time) - (new if wall.time < second_pass_ends else old)) * 1000 + millis
        missing = _change(zone, wall.time, old, new)
        if pattern.one_time_of_day and gap == "shift":
            return missing.at * 1000 + millis
        start = missing.end
    return None


def _offsets(zone: tzinfo, wall: datetime) -> tuple[int, int]:
    """The zone's offset in seconds, by the rule before and the rule after a change; equal away from changes."""
    old = wall.replace(tzinfo=zone).utcoffset() or timedelta()
    new = wall.replace(tzinfo=zone, fold=1).utcoffset() or timedelta()
    return old.days * 86400 + old.seconds, new.days * 86400 + new.seconds


def _change(zone: tzinfo, wall: datetime, old: int, new: int) -> _Change:
    # zoneinfo does not tell its transitions; bisecting the few hours around the wall time finds this one.
    smaller, larger = sorted((old, new))
    low, high = _seconds(wall) - larger, _seconds(wall) - smaller
    while high - low > 1:
        middle = (low + high) // 2
        offset = (_EPOCH_UTC + timedelta(seconds=middle)).astimezone(zone).utcoffset()
        low, high = (middle, high) if offset == timedelta(seconds=old) else (low, middle)
    return _Change(high, _EPOCH + timedelta(seconds=high + smaller), _EPOCH + timedelta(seconds=high + larger))


def _seconds(wall: datetime) -> int:
    since = wall - _EPOCH
    return since.days * 86400 + since.seconds


# --- pattern: every field is an integer whose set bits are the allowed values ---


@dataclass(frozen=True)
class _Pattern:
    seconds: int
    minutes: int
    hours: int
    months: int
    years: int
    days: int
    last_day: bool
    nearest: frozenset[int]  # the days of 15W and the like
    weekdays: tuple[int, ...]  # Sunday is bit 0; [0] in every week, [1] to [5] the nth of the month, [6] the last
    either_day: bool  # one of the two day fields is enough
    one_time_of_day: bool
    _month_days: dict[tuple[int, int], int] = field(default_factory=dict, compare=False)

    def next(self, start: datetime) -> _Wall | None:
        """The first match at or after ``start``, on the wall: as if the zone had no clock changes."""
        year, month, day, carries = start.year, start.month, start.day, True
        time = self._time_from(start.hour, start.minute, start.second)
        if time is None:
            time, day = self._first_time(), day + 1
        for _ in range(_MAX_YEARS):
            if not self.years >> year & 1:
                year, month, day, carries = _next_bit(self.years, year), 1, 1, False
                if year < 0:
                    return None
            while month <= 12:
                if not self.months >> month & 1:
                    month, day, carries = _next_bit(self.months, month), 1, False
                    if month < 0:
                        break
                found = _next_bit(self._days_of(year, month), day)
                if found > 0:
                    if (year, month, found) != (start.year, start.month, start.day):
                        time = self._first_time()
                    return _Wall(datetime(year, month, found, *time), carries)
                month, day = month + 1, 1
            year, month, day = year + 1, 1, 1
        return None

    def _first_time(self) -> tuple[int, int, int]:
        return _next_bit(self.hours, 0), _next_bit(self.minutes, 0), _next_bit(self.seconds, 0)

    def _time_from(self, hour: int, minute: int, second: int) -> tuple[int, int, int] | None:
        """The first time of day at or after the given one, if there is one left on the day."""
        _, first_minute, first_second = self._first_time()
        if self.hours >> hour & 1:
            if self.minutes >> minute & 1 and self.seconds >> second:
                return hour, minute, _next_bit(self.seconds, second)
            if self.minutes >> minute + 1:
                return hour, _next_bit(self.minutes, minute + 1), first_second
        later = _next_bit(self.hours, hour + 1)
        return (later, first_minute, first_second) if later > 0 else None

    def _days_of(self, year: int, month: int) -> int:
        # Only 28 kinds of month exist, by first weekday and length, so each is worked out once.
        kind = calendar.monthrange(year, month)
        if kind not in self._month_days:
            self._month_days[kind] = self._days_of_kind(*kind)
        return self._month_days[kind]

    def _days_of_kind(self, first: int, length: int) -> int:
        """The matching days of a month that has ``length`` days and starts on weekday ``first`` (0 is Monday)."""
        by_date = self.days & ((2 << length) - 2) | self.last_day << length
        by_weekday = 0
        for day in range(1, length + 1):
            if day in self.nearest:
                by_date |= 1 << _nearest_weekday(day, (first + day - 1) % 7, length)
            wanted = self.weekdays[0] | self.weekdays[(day + 6) // 7] | (self.weekdays[6] if day + 7 > length else 0)
            by_weekday |= (wanted >> (first + day) % 7 & 1) << day
        return by_date | by_weekday if self.either_day else by_date & by_weekday


def _next_bit(mask: int, low: int) -> int:
    """The lowest set bit at or above ``low``, or -1."""
    rest = mask >> low
    return low + (rest & -rest).bit_length() - 1 if rest else -1


def _nearest_weekday(day: int, weekday: int, length: int) -> int:
    if weekday == 5:
        return day - 1 if day > 1 else day + 2
    if weekday == 6:
        return day + 1 if day < length else day - 2
    return day


# --- parsing ---


class _Field(NamedTuple):
    label: str
    low: int
    high: int
    names: dict[str, int]
    marks: str  # what else the field understands, for error texts


_SECOND = _Field("second", 0, 59, {}, "")
_MINUTE = _Field("minute", 0, 59, {}, "")
_HOUR = _Field("hour", 0, 23, {}, "")
_DAY = _Field("day of month", 1, 31, {}, ", L, 15W")
_MONTH = _Field("month", 1, 12, {name.upper(): int(number) for name, number in M_ALPHAS.items()}, "")
_WEEKDAY = _Field("day of week", 0, 7, {name.upper(): int(number) for name, number in DOW_ALPHAS.items()}, ", 5#2, 5L")
_YEAR = _Field("year", 1, 5000, {}, "")
_ANY_YEAR = (1 << 10000) - 2
_ANY_WEEKDAY = 0b1111111

_NICKNAMES = {
    "@YEARLY": "0 0 1 1 *",
    "@ANNUALLY": "0 0 1 1 *",
    "@MONTHLY": "0 0 1 * *",
    "@WEEKLY": "0 0 * * 0",
    "@DAILY": "0 0 * * *",
    "@HOURLY": "0 * * * *",
}
_ITEM = re.compile(r"(?:\*(?=/)|(?P<low>[A-Z0-9]+)(?:-(?P<high>[A-Z0-9]+))?)(?:/(?P<step>[0-9]+))?")
_NTH = re.compile(r"(?P<base>.+)#(?P<nth>[1-5L])|(?P<day>[0-9]+|[A-Z]{3})L")
_OFFSET = re.compile(r"([+-])(?:([0-9]{1,2}):([0-9]{1,2})|([0-9]{2})([0-9]{2}))")


@lru_cache(maxsize=1024)
def _compile(expression: str, tz: str | None) -> tuple[_Pattern, tzinfo]:
    try:
        return _pattern(expression), _zone((tz or "").strip())
    except ValueError as problem:
        raise CronError(f"cron expression {_quoted(expression)}: {problem}") from None


def _pattern(expression: str) -> _Pattern:
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"expected at most {MAX_EXPRESSION_CHARS} characters, got {len(expression)}")
    # Uppercasing turns some foreign letters into ASCII ones, so they are sent away before.
    if not expression.isascii():
        raise ValueError("expected ASCII characters only")
    text = expression.strip().upper()
    fields = _NICKNAMES.get(text, text).split()
    if not 5 <= len(fields) <= 7:
        raise ValueError(f"expected 5 to 7 fields or one of {' '.join(_NICKNAMES).lower()}, got {len(fields)} fields")
    if len(fields) == 5:
        fields.insert(0, "0")
    second, minute, hour, day, month, weekday, year = fields if len(fields) == 7 else [*fields, "*"]
    both_days, weekday = weekday.startswith("+"), weekday.removeprefix("+")
    any_day, any_weekday = day in ("*", "?"), weekday in ("*", "?")
    day_items = ["*"] if any_day else day.split(",")
    marked = {item for item in day_items if item == "L" or item.endswith("W")}
    seconds, minutes, hours = _mask(second, _SECOND), _mask(minute, _MINUTE), _mask(hour, _HOUR)
    return _Pattern(
        seconds=seconds,
        minutes=minutes,
        hours=hours,
        months=_mask(month, _MONTH),
        years=_ANY_YEAR if year == "*" else _mask(year, _YEAR),
        days=_mask(",".join(plain), _DAY) if (plain := [item for item in day_items if item not in marked]) else 0,
        last_day="L" in marked,
        nearest=frozenset(_number(item[:-1], item, _DAY) for item in marked - {"L"}),
        weekdays=(_ANY_WEEKDAY, 0, 0, 0, 0, 0, 0) if any_weekday else _weekdays(weekday),
        either_day=not (any_day or any_weekday or both_days),
        one_time_of_day=all(map(_is_single, (second, minute, hour), (seconds, minutes, hours))),
    )


def _is_single(text: str, mask: int) -> bool:
    # Part of the dialect: a real step is a rhythm, even where only one value is left of it.
    return mask.bit_count() == 1 and all(int(step) == 1 for step in re.findall("/([0-9]+)", text))


def _mask(text: str, kind: _Field) -> int:
    if text == "*":
        return (2 << kind.high) - (1 << kind.low)
    mask = 0
    for item in text.split(","):
        mask |= _item(item, kind)
    return mask


def _item(item: str, kind: _Field) -> int:
    match = _ITEM.fullmatch(item)
    if match is None:
        _refuse(item, kind, f"expected a, a-b, a/n, a-b/n, */n{kind.marks} or a list of them, or * alone")
    low = kind.low if match["low"] is None else _number(match["low"], item, kind)
    high = kind.high if match["step"] else low
    if match["high"] is not None:
        # A week that is counted up to Sunday ends with it.
        high = 7 if match["high"] == "SUN" and kind is _WEEKDAY else _number(match["high"], item, kind)
    step = int(match["step"] or 1)
    if low > high or step == 0:
        _refuse(item, kind, "expected a range that goes up and a step of 1 or more")
    # Bits that lie a step apart, in one division: looping over 5,000 years in each of 250 list items would be slow.
    step = min(step, high - low + 1)
    count = (high - low) // step + 1
    return ((1 << step * count) - 1) // ((1 << step) - 1) << low


def _number(text: str, item: str, kind: _Field) -> int:
    value = int(text) if text.isdigit() else kind.names.get(text, -1)
    if not kind.low <= value <= kind.high:
        _refuse(item, kind, f"expected {kind.low} to {kind.high}{' or '.join(['', *kind.names])}")
    return value


def _weekdays(text: str) -> tuple[int, ...]:
    masks = [0] * 7
    for item in text.split(","):
        if item == "L":
            continue  # Accepted by the dialect, though no day is the last of the week.
        match = _NTH.fullmatch(item)
        if match is None:
            base, nth = item, 0
        else:
            base = match["base"] or match["day"]
            nth = 6 if match["nth"] in (None, "L") else int(match["nth"])
        mask = _item(base, _WEEKDAY)
        # 7 is Sunday as well, except that the dialect knows no last 7.
        masks[nth] |= mask & _ANY_WEEKDAY | (mask >> 7 if nth < 6 else 0)
    return tuple(masks)


def _refuse(item: str, kind: _Field, expected: str) -> NoReturn:
    raise ValueError(f"{kind.label} {_quoted(item)}: {expected}")


def _zone(name: str) -> tzinfo:
    if name in ("", "Z") or name.upper() == "UTC":
        return UTC
    if name[0] in "+-":
        offset = _OFFSET.fullmatch(name)
        if offset is None:
            raise ValueError(f"time zone {_quoted(name)}: expected +HH:MM or +HHMM")
        ahead = timedelta(hours=int(offset[2] or offset[4]), minutes=int(offset[3] or offset[5]))
        if ahead >= timedelta(days=1):
            raise ValueError(f"time zone {_quoted(name)}: expected an offset of less than 24 hours")
        return timezone(ahead if offset[1] == "+" else -ahead)
    if name not in _zone_names():
        raise ValueError(f"time zone {_quoted(name)}: expected UTC, +HH:MM or an IANA name such as America/New_York")
    return ZoneInfo(name)


@cache
def _zone_names() -> frozenset[str]:
    # Asked by name, not by trying to open it, because file systems may ignore case. "localtime" lies beside the
    # zones, and is another zone on every machine.
    return frozenset(available_timezones() - {"localtime"})


def _quoted(text: str) -> str:
    return ascii(text) if len(text) <= 80 else f"{text[:80]!a}..."
