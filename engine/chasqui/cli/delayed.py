"""``delayed``: jobs that wait for their time, or for a retry."""

from __future__ import annotations

import time

from chasqui.cli.command import Call, Exit, Subparsers, add_command, at_least
from chasqui.cli.shown import age, count, many, moment, payload


def declare(commands: Subparsers) -> None:
    group = add_command(commands, "delayed", None, help="delayed jobs: list, cancel, promote")
    delayed = group.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=group.prog)
    parser = add_command(
        delayed,
        "list",
        list_,
        help="show the delayed jobs that are due next",
        examples="""
        chasquictl delayed list emails
        chasquictl delayed list emails --limit 1000 --json
        """,
    )
    parser.add_argument("--limit", type=at_least(0), default=20, metavar="N", help="how many at most (default: 20)")
    for name, run, text in (
        ("cancel", cancel, "take delayed jobs out, by id"),
        ("promote", promote, "let delayed jobs run now, by id"),
    ):
        parser = add_command(
            delayed,
            name,
            run,
            help=text,
            about="Asks before it acts. Exit code 1 when one of the jobs was not there any more.",
            examples=f"""
            chasquictl delayed {name} emails order-17
            chasquictl delayed {name} emails 01JD5M8Z3X 01JD5M8Z3Y --yes
            """,
        )
        parser.add_argument("ids", nargs="+", metavar="ID", help="ids of jobs, as `delayed list` shows them")
        parser.add_argument("--yes", action="store_true", help="do not ask")


def list_(call: Call) -> int:
    with call.producer() as producer:
        jobs = producer.list_delayed(call.args.limit)
        total = producer.stats().delayed
    now_ms = time.time_ns() // 1_000_000
    if call.screen.json:
        entries = [
            {
                "id": d.job.id if d.job else None,
                "name": d.name,
                "run_at": moment(d.run_at_ms),
                "run_at_ms": d.run_at_ms,
                "attempt": d.job.attempt if d.job else None,
                "payload": d.job.payload if d.job else d.member,
            }
            for d in jobs
        ]
        call.screen.document({"queue": call.args.queue, "total": total, "jobs": entries})
        return Exit.OK
    rows = [
        (
            d.job.id if d.job else "(no job)",
            d.name or "-",
            moment(d.run_at_ms),
            f"in {age(d.run_at_ms - now_ms)}" if d.run_at_ms > now_ms else f"overdue by {age(now_ms - d.run_at_ms)}",
            count(d.job.attempt) if d.job else "-",
            payload(d.job.payload, 40) if d.job else "-",
        )
        for d in jobs
    ]
    call.screen.table(
        ("job", "name", "runs at", "", "failed runs", "payload"), rows, numbers=("failed runs",), folded=("payload",)
    )
    call.screen.line(f"{len(jobs)} of {count(total)} shown")
    return Exit.OK


def cancel(call: Call) -> int:
    return _act(call, "cancelled", f"Take {many(len(call.args.ids), 'delayed job')} out of {call.args.queue} for good?")


def promote(call: Call) -> int:
    return _act(call, "promoted", f"Let {many(len(call.args.ids), 'delayed job')} of {call.args.queue} run now?")


def _act(call: Call, verb: str, question: str) -> int:
    if not call.screen.confirm(question, yes=call.args.yes):
        call.screen.say("not carried out")
        return Exit.NO
    ids = list(dict.fromkeys(call.args.ids))
    with call.producer() as producer:
        done = producer.promote_delayed(ids) if verb == "promoted" else producer.cancel_delayed_bulk(ids, search=True)
    if call.screen.json:
        call.screen.document({"queue": call.args.queue, verb: dict(zip(ids, done, strict=True))})
    else:
        for job_id, was_there in zip(ids, done, strict=True):
            call.screen.line(f"{job_id} {verb if was_there else 'not found among the delayed jobs'}")
    return Exit.OK if all(done) else Exit.NO
