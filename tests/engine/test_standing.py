"""Promoter and scheduler in a thread of a program that has no event loop."""

from __future__ import annotations

from typing import Any

import pytest
import redis

import chasqui.standing
from chasqui import Producer, RepeatableSpec, RepeatPattern
from chasqui.options import ConnectionOptions, ConsumerOptions
from chasqui.promoter import promote
from chasqui.standing import Standing
from tests.support import eventually


def test_delayed_and_repeated_jobs_of_all_queues_reach_their_streams(url: str, client: redis.Redis, queue: str) -> None:
    standing = Standing(ConnectionOptions(url=url), ConsumerOptions(), promoter=True, scheduler=True)
    with Producer(url, queue=queue) as producer:
        producer.add_in(50, 1)
        standing.add(queue)
        standing.add(queue)
        eventually(lambda: client.xlen(f"{{chasqui:{queue}}}:stream") == 1)
        producer.upsert_repeatable(RepeatableSpec("tick", RepeatPattern.every(2500), 1))
        eventually(lambda: client.xlen(f"{{chasqui:{queue}}}:stream") >= 2, within=20)

    standing.stop()

    assert not client.exists(f"{{chasqui:{queue}}}:promoter:lock")
    assert not client.exists(f"{{chasqui:{queue}}}:scheduler:lock")


def test_a_role_that_fails_is_started_again(
    url: str, client: redis.Redis, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([ValueError("a bug")])

    async def failing(*args: Any, **options: Any) -> None:
        for error in failures:
            raise error
        await promote(*args, **options)

    monkeypatch.setattr(chasqui.standing, "promote", failing)
    standing = Standing(ConnectionOptions(url=url), ConsumerOptions(), promoter=True, scheduler=False)
    with Producer(url, queue=queue) as producer:
        producer.add_in(1, 1)
        standing.add(queue)
        eventually(lambda: client.xlen(f"{{chasqui:{queue}}}:stream") == 1)

    standing.stop()


def test_what_was_not_asked_for_does_not_run(url: str, client: redis.Redis, queue: str) -> None:
    standing = Standing(ConnectionOptions(url=url), ConsumerOptions(), promoter=False, scheduler=True)
    standing.add(queue)

    eventually(lambda: client.exists(f"{{chasqui:{queue}}}:scheduler:lock"))

    assert not client.exists(f"{{chasqui:{queue}}}:promoter:lock")
    standing.stop()


def test_stopping_what_never_ran_is_fine(url: str) -> None:
    Standing(ConnectionOptions(url=url), ConsumerOptions(), promoter=False, scheduler=False).stop()
