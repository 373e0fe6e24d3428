"""``txn``: ledgers and stages of exactly-once writes, such as those of Spark's sink."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from chasqui.cli.command import Call, Exit, Subparsers, add_command
from chasqui.cli.shown import age, count
from chasqui.errors import ServerError
from chasqui.options import ConnectionOptions
from chasqui.protocol import observe, reading
from chasqui.redis_io import Link
from chasqui.transactions import Ledger, Transactions

_HOME = re.compile(rb"\{chasqui-txn:([^{}]+)\}:txn", re.DOTALL)
_STAGE = re.compile(rb"\{chasqui:([^{}]+)\}:stage:.+", re.DOTALL)


def declare(commands: Subparsers) -> None:
    group = add_command(commands, "txn", None, help="exactly-once writes: list, show, stages, reset")
    txn = group.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=group.prog)
    add_command(
        txn,
        "list",
        list_,
        help="show every writer: its last version, and whether that is all published",
        examples="chasquictl txn list",
        queue=False,
    )
    parser = add_command(
        txn,
        "show",
        show,
        help="show one writer, queue by queue",
        about="Exit code 1 when there is none of that name.",
        examples="chasquictl txn show nightly-leads",
        queue=False,
    )
    parser.add_argument("app", metavar="APP", help="its txnAppId, or the id of the streaming query")
    add_command(
        txn,
        "stages",
        stages,
        help="show rows that are staged: written, but not committed (yet, or ever)",
        about="Those of runs that failed expire by themselves.",
        examples="chasquictl txn stages",
        queue=False,
    )
    parser = add_command(
        txn,
        "reset",
        reset,
        help="forget a writer, so that its next version may be any",
        about="For a checkpoint that was deleted, restored or copied. Asks before it acts. After it, a version that "
        "was written before and comes again is written again.",
        examples="""
        chasquictl txn reset nightly-leads
        chasquictl txn reset nightly-leads --discard --yes
        """,
        queue=False,
    )
    parser.add_argument("app", metavar="APP", help="its txnAppId, or the id of the streaming query")
    parser.add_argument(
        "--discard", action="store_true", help="also when a version is half published: the rest is lost"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")


def list_(call: Call) -> int:
    options = call.options(ConnectionOptions, "")
    with Transactions(options) as transactions:
        ledgers = transactions.ledgers(_found(options, b"{chasqui-txn:*}:txn", _HOME))
    if call.screen.json:
        call.screen.document({"writers": [_as_json(ledger) for ledger in ledgers]})
        return Exit.OK
    rows = [(a.app_id, count(a.version), a.state, count(len(a.queues)), _progress(a)) for a in ledgers]
    heads = ("writer", "version", "state", "queues", "published")
    call.screen.table(heads, rows, numbers=("version", "queues", "published"))
    return Exit.OK


def show(call: Call) -> int:
    with Transactions(call.options(ConnectionOptions, "")) as transactions:
        found = transactions.ledgers([call.args.app])
    if not found:
        call.screen.say(f"there is no writer {call.args.app!r}; chasquictl txn list shows all")
        return Exit.NO
    [ledger] = found
    if call.screen.json:
        call.screen.document(_as_json(ledger))
        return Exit.OK
    call.screen.line(f"writer {ledger.app_id}, version {ledger.version}: {ledger.state}")
    rows = [(row.queue, count(row.version), row.state, f"{row.published} of {row.rows}") for row in ledger.queues]
    call.screen.table(("queue", "version", "state", "published"), rows, numbers=("version", "published"))
    return Exit.OK


def stages(call: Call) -> int:
    options = call.options(ConnectionOptions, "")
    link = Link(options)
    keys: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    next_ms: dict[str, int] = {}
    adopted: Counter[str] = Counter()
    try:
        for key, queue in _scanned(link, b"{chasqui:*}:stage:*", _STAGE):
            try:
                held, left_ms = link.run(observe.blocks_and_ttl(key))
            except ServerError as error:
                call.screen.say(f"{key} is passed over: {error.message}")
                continue
            keys[queue] += 1
            blocks[queue] += held
            if left_ms < 0:
                adopted[queue] += 1
            else:
                next_ms[queue] = min(left_ms, next_ms.get(queue, left_ms))
    finally:
        link.close()
    if call.screen.json:
        rows = [
            {
                "queue": queue,
                "stages": keys[queue],
                "blocks": blocks[queue],
                "adopted": adopted[queue],
                "first_expires_ms": next_ms.get(queue),
            }
            for queue in sorted(keys)
        ]
        call.screen.document({"queues": rows})
        return Exit.OK
    heads = ("queue", "stages", "blocks", "adopted by a ledger", "first expires in")
    table = [
        (q, count(keys[q]), count(blocks[q]), count(adopted[q]), age(next_ms[q]) if q in next_ms else "-")
        for q in sorted(keys)
    ]
    call.screen.table(heads, table, numbers=heads[1:])
    return Exit.OK


def reset(call: Call) -> int:
    app = call.args.app
    with Transactions(call.options(ConnectionOptions, "")) as transactions:
        known = transactions.ledgers([app])
        if not known:
            call.screen.say(f"there is no writer {app!r}; chasquictl txn list shows all")
            return Exit.NO
        question = f"Forget writer {app}, whose last version is {known[0].version} ({known[0].state})?"
        if not call.screen.confirm(question, yes=call.args.yes):
            call.screen.say("not carried out")
            return Exit.NO
        done = transactions.reset(app, discard=call.args.discard)
    if call.screen.json:
        call.screen.document({"writer": app, "reset": done})
    else:
        call.screen.line("reset" if done else "not found")
    return Exit.OK if done else Exit.NO


def _progress(ledger: Ledger) -> str:
    return f"{sum(row.published for row in ledger.queues)} of {sum(row.rows for row in ledger.queues)}"


def _as_json(ledger: Ledger) -> dict[str, object]:
    return {
        "writer": ledger.app_id,
        "version": ledger.version,
        "state": ledger.state,
        "queues": list(ledger.queues),
    }


def _found(options: ConnectionOptions, pattern: bytes, shape: re.Pattern[bytes]) -> list[str]:
    link = Link(options)
    try:
        return sorted({name for _, name in _scanned(link, pattern, shape)})
    finally:
        link.close()


def _scanned(link: Link, pattern: bytes, shape: re.Pattern[bytes]) -> Iterator[tuple[str, str]]:
    """Keys of that shape and the name in each, from every server that holds some."""
    for route in link.primaries():
        for key in link.run(reading.matching(pattern, route)):
            match = shape.fullmatch(key)
            try:
                if match:
                    yield key.decode(), match[1].decode()
            except UnicodeDecodeError:
                continue  # not a name that we write
