"""``dlq``: look at dead letters, choose among them, put them back, delete them."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from chasqui.cli.command import Call, Exit, Subparsers, add_command, at_least, past_ms
from chasqui.cli.shown import count, many, moment, payload, printable
from chasqui.job import U64_MAX, DlqEntry
from chasqui.producer import Producer
from chasqui.protocol.replies import entry_ms

# Dead letters read, and moved, at a time. One may have a megabyte.
PAGE = 100
_WIDE = 140


def declare(commands: Subparsers) -> None:
    group = add_command(commands, "dlq", None, help="dead letters: peek, filter, replay, purge")
    dlq = group.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=group.prog)
    parser = add_command(
        dlq,
        "peek",
        peek,
        help="show the oldest dead letters",
        examples="""
        chasquictl dlq peek emails
        chasquictl dlq peek emails --limit 5 --json
        """,
    )
    parser.add_argument("--limit", type=at_least(0), default=20, metavar="N", help="how many at most (default: 20)")
    parser = add_command(
        dlq,
        "filter",
        filter_,
        help="show the dead letters that match, and count them by reason and name",
        about="Exit code 1 when none does.",
        examples="""
        chasquictl dlq filter emails --since 1h
        chasquictl dlq filter emails --reason retries_exhausted --name welcome --limit 1000
        """,
    )
    _choice(parser)
    parser.add_argument("--limit", type=at_least(0), default=20, metavar="N", help="how many to show (default: 20)")
    parser = add_command(
        dlq,
        "replay",
        replay,
        help="put dead letters back into the queue, with their attempts counted anew",
        about="Oldest first; asks before it acts. Those that are no jobs stay where they are.",
        examples="""
        chasquictl dlq replay emails --limit 100
        chasquictl dlq replay emails --reason retries_exhausted --since 2h --rate 50 --yes
        chasquictl dlq replay emails --name welcome --dry-run
        """,
    )
    _choice(parser)
    _acting(parser, limit=100)
    parser.add_argument("--rate", type=at_least(1), metavar="N", help="put back at most N a second")
    parser = add_command(
        dlq,
        "purge",
        purge,
        help="delete dead letters for good",
        about="Oldest first; asks before it acts.",
        examples="""
        chasquictl dlq purge emails --reason decode_failed
        chasquictl dlq purge emails --yes
        """,
    )
    _choice(parser)
    _acting(parser, limit=None)


def _choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reason", help="only with this reason: retries_exhausted, unrecoverable, decode_failed, ...")
    parser.add_argument("--name", help="only jobs of this name; '' for those without one")
    parser.add_argument("--since", metavar="TIME", help="only since then: 15m (ago), or 2026-11-18T10:00:00Z")


def _acting(parser: argparse.ArgumentParser, limit: int | None) -> None:
    shown = "all that match" if limit is None else str(limit)
    parser.add_argument("--limit", type=at_least(0), default=limit, metavar="N", help=f"at most (default: {shown})")
    parser.add_argument("--dry-run", action="store_true", help="only tell what would be done")
    parser.add_argument("--yes", action="store_true", help="do not ask")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which dead letters are meant."""

    reason: str | None
    name: str | None
    since_ms: int | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Choice:
        return cls(args.reason, args.name, None if args.since is None else past_ms(args.since))

    @property
    def everything(self) -> bool:
        return self.reason is None and self.name is None and self.since_ms is None

    @property
    def start(self) -> str | None:
        """The place in the stream after which they begin."""
        return f"{self.since_ms - 1}-{U64_MAX}" if self.since_ms else None

    def has(self, entry: DlqEntry) -> bool:
        return (self.reason is None or entry.reason == self.reason) and (self.name is None or entry.name == self.name)


def peek(call: Call) -> int:
    with call.producer() as producer:
        entries = producer.peek_dlq(call.args.limit)
        total = producer.stats().dlq
    by_reason = Counter(entry.reason for entry in entries)
    if call.screen.json:
        call.screen.document(
            {
                "queue": call.args.queue,
                "total": total,
                "entries": [_as_json(entry) for entry in entries],
                "by_reason": dict(sorted(by_reason.items())),
            }
        )
        return Exit.OK
    _show(call, entries)
    reasons = ", ".join(f"{number} {reason}" for reason, number in by_reason.most_common())
    call.screen.line(f"{len(entries)} of {count(total)} shown{': ' + reasons if reasons else ''}")
    return Exit.OK


def filter_(call: Call) -> int:
    choice, limit = Choice.of(call.args), call.args.limit
    kept: list[DlqEntry] = []
    groups: Counter[tuple[str, str]] = Counter()
    with call.producer() as producer, call.screen.progress("reading", producer.stats().dlq) as advance:
        for page in _pages(producer, choice):
            matching = [entry for entry in page if choice.has(entry)]
            groups.update((entry.reason, entry.name) for entry in matching)
            kept += matching[: max(0, limit - len(kept))]
            advance(len(page))
    ordered = sorted(groups.items(), key=lambda item: (-item[1], item[0]))
    if call.screen.json:
        call.screen.document(
            {
                "queue": call.args.queue,
                "matching": groups.total(),
                "groups": [{"reason": r, "name": n, "count": c} for (r, n), c in ordered],
                "entries": [_as_json(entry) for entry in kept],
            }
        )
    else:
        _show(call, kept)
        call.screen.line(f"{len(kept)} of {count(groups.total())} that match")
        rows = [(reason, name or "-", count(number)) for (reason, name), number in ordered]
        call.screen.table(("reason", "name", "count"), rows, numbers=("count",))
    return Exit.OK if groups else Exit.NO


def replay(call: Call) -> int:
    """Killed half way: every dead letter is either still there or back in the queue, never both, never neither."""
    choice, limit, rate = Choice.of(call.args), call.args.limit, call.args.rate
    with call.producer() as producer:
        wanted = _count(call, producer, choice, limit, jobs_only=True)
        letters = many(wanted, "dead letter")
        if not _go_ahead(call, f"Put {letters} of {call.args.queue} back?", "replay", wanted):
            return Exit.OK if call.args.dry_run or not wanted else Exit.NO
        done = 0
        with _accounting(call, "replayed", lambda: done, wanted), call.screen.progress("replaying", wanted) as advance:
            for ids in _chosen(producer, choice, limit, jobs_only=True, page=min(PAGE, rate or PAGE)):
                started = time.monotonic()
                done += producer.replay_dlq(ids=ids)
                advance(len(ids))
                if rate:
                    time.sleep(max(0.0, len(ids) / rate - (time.monotonic() - started)))
    return _tell(call, "replayed", done, wanted)


def purge(call: Call) -> int:
    choice, limit = Choice.of(call.args), call.args.limit
    with call.producer() as producer:
        wanted = _count(call, producer, choice, limit, jobs_only=False)
        letters = many(wanted, "dead letter")
        if not _go_ahead(call, f"Delete {letters} of {call.args.queue} for good?", "purge", wanted):
            return Exit.OK if call.args.dry_run or not wanted else Exit.NO
        done = 0
        with _accounting(call, "purged", lambda: done, wanted), call.screen.progress("deleting", wanted) as advance:
            for ids in _chosen(producer, choice, limit, jobs_only=False, page=PAGE):
                done += producer.purge_dlq(ids=ids)
                advance(len(ids))
    return _tell(call, "purged", done, wanted)


def _accounting(call: Call, verb: str, done: Callable[[], int], wanted: int) -> AbstractContextManager[None]:
    def so_far() -> str:
        left = max(0, wanted - done())
        # At least, because of the page under way nobody has heard.
        return f"{verb} at least {done():,} of {many(wanted, 'dead letter')}; go on with --limit {left}"

    return call.screen.accounting(so_far)


def _pages(producer: Producer, choice: Choice, end_ms: int | None = None) -> Iterator[list[DlqEntry]]:
    """All dead letters from the choice's start, page by page; ``end_ms``: none that came later."""
    after = choice.start
    while page := producer.peek_dlq(PAGE, after=after):
        after = page[-1].dlq_id
        kept = [entry for entry in page if end_ms is None or entry_ms(entry.dlq_id) <= end_ms]
        if kept:
            yield kept
        if len(kept) < len(page):
            return


def _matching(producer: Producer, choice: Choice, limit: int | None, *, jobs_only: bool) -> Iterator[DlqEntry]:
    # Up to what is there now: a replayed job that fails at once comes back, and would be replayed for ever.
    end_ms = producer.overview().now_ms
    left = limit
    for page in _pages(producer, choice, end_ms):
        for entry in page:
            if left == 0:
                return
            if choice.has(entry) and (entry.job is not None or not jobs_only):
                left = None if left is None else left - 1
                yield entry


def _chosen(
    producer: Producer, choice: Choice, limit: int | None, *, jobs_only: bool, page: int
) -> Iterator[Sequence[str]]:
    ids: list[str] = []
    for entry in _matching(producer, choice, limit, jobs_only=jobs_only):
        ids.append(entry.dlq_id)
        if len(ids) == page:
            yield ids
            ids = []
    if ids:
        yield ids


def _count(call: Call, producer: Producer, choice: Choice, limit: int | None, *, jobs_only: bool) -> int:
    if choice.everything and not jobs_only:
        total = producer.stats().dlq
        return total if limit is None else min(limit, total)
    with call.screen.progress("choosing", None) as advance:
        found = 0
        for _ in _matching(producer, choice, limit, jobs_only=jobs_only):
            found += 1
            advance(1)
    return found


def _go_ahead(call: Call, question: str, verb: str, wanted: int) -> bool:
    if call.args.dry_run or not wanted:
        if call.screen.json:
            call.screen.document({"queue": call.args.queue, "matching": wanted, _DONE[verb]: 0})
        else:
            call.screen.line(f"would {verb} {many(wanted, 'dead letter')}" if wanted else "no dead letters match")
        return False
    if call.screen.confirm(question, yes=call.args.yes):
        return True
    call.screen.say("not carried out")
    return False


_DONE = {"replay": "replayed", "purge": "purged"}


def _tell(call: Call, verb: str, done: int, wanted: int) -> int:
    if call.screen.json:
        call.screen.document({"queue": call.args.queue, "matching": wanted, verb: done})
    else:
        call.screen.line(f"{verb} {done:,} of {many(wanted, 'dead letter')}")
    return Exit.OK if done else Exit.NO


def _show(call: Call, entries: Sequence[DlqEntry]) -> None:
    heads = ("dead letter", "source", "job", "name", "reason", "detail", "bytes", "payload")
    rows = [
        (
            entry.dlq_id,
            entry.source_id or "-",
            entry.job.id if entry.job else "-",
            entry.name or "-",
            entry.reason,
            printable(entry.detail or (entry.error or "").partition("\n")[0] or "-", 60),
            count(len(entry.payload)),
            payload(entry.job.payload, 40) if entry.job else "-",
        )
        for entry in entries
    ]
    # On a narrow terminal what people read comes first; a wide one, a file and --json have all of it.
    left_out = {"source", "bytes"} if call.screen.live and call.screen.console.width < _WIDE else set()
    kept = [i for i, head in enumerate(heads) if head not in left_out]
    shown = [[row[i] for i in kept] for row in rows]
    call.screen.table([heads[i] for i in kept], shown, numbers=("bytes",), folded=("detail", "payload"))


def _as_json(entry: DlqEntry) -> dict[str, Any]:
    job = entry.job
    return {
        "dlq_id": entry.dlq_id,
        "at": moment(entry_ms(entry.dlq_id)),
        "source_id": entry.source_id,
        "job_id": job.id if job else None,
        "name": entry.name,
        "reason": entry.reason,
        "detail": entry.detail,
        "error": entry.error,
        "bytes": len(entry.payload),
        "payload": job.payload if job else entry.payload,
    }
