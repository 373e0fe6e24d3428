"""Exactly-once adds over a cluster: queues and the writer's home on different nodes, and slots that move."""

from __future__ import annotations

from collections import Counter

import msgpack
import pytest

from chasqui import QueueFull
from chasqui.ids import new_ids
from chasqui.options import ConnectionOptions
from chasqui.protocol.blocks import Jobs
from chasqui.staging import Staged, Stager
from chasqui.transactions import Terms, Transactions
from tests.engine.seen import in_stream
from tests.engine.test_cluster import Cluster, cluster, on_each_node

__all__ = ["cluster", "on_each_node"]
NOW = 1_794_978_620_538


def options(cluster: Cluster) -> ConnectionOptions:
    return ConnectionOptions(url=cluster.url, reconnect_initial_ms=10)


def jobs(numbers: range) -> Jobs:
    return Jobs(NOW, new_ids(len(numbers), NOW), [msgpack.packb({"n": n}) for n in numbers], b"work")


def stage(cluster: Cluster, queues: dict[str, range]) -> Staged:
    with Stager(options(cluster), stage_ttl_ms=60_000) as stager:
        for queue, numbers in queues.items():
            stager.add(queue, jobs(numbers))
        return stager.finish()


def seen(cluster: Cluster, queue: str) -> Counter[int]:
    return Counter(job.payload["n"] for job in in_stream(cluster.clients[cluster.owner(queue)], queue))


def test_a_batch_for_queues_on_all_nodes_is_published_once(cluster: Cluster, on_each_node: list[str]) -> None:
    parts = {queue: range(n * 1000, n * 1000 + 700) for n, queue in enumerate(on_each_node)}
    for _ in range(2):
        staged = stage(cluster, parts)
        with Transactions(options(cluster), Terms(durability="auto")) as transactions:
            transactions.commit(on_each_node[0], 1, [staged])

    for queue, numbers in parts.items():
        assert seen(cluster, queue) == Counter(numbers)


def test_a_crash_between_queues_is_resumed(cluster: Cluster, on_each_node: list[str]) -> None:
    """One queue is full: the others are published, and the next driver finds what is left."""
    parts = {queue: range(n * 1000, n * 1000 + (700 if n else 50)) for n, queue in enumerate(on_each_node)}
    app = on_each_node[1]
    staged, tight = stage(cluster, parts), Terms(overflow="reject", max_stream_len=500)
    with Transactions(options(cluster), tight) as transactions, pytest.raises(QueueFull, match="rows are published"):
        transactions.commit(app, 1, [staged])
    assert seen(cluster, on_each_node[0]) == Counter(parts[on_each_node[0]])

    with Transactions(options(cluster)) as transactions:
        assert transactions.commit(app, 1, [stage(cluster, parts)]) is False

    for queue, numbers in parts.items():
        assert seen(cluster, queue) == Counter(numbers)


def test_a_queue_that_moves_between_staging_and_commit_and_afterwards_is_followed(
    cluster: Cluster, on_each_node: list[str]
) -> None:
    queue = on_each_node[2]
    with Stager(options(cluster), stage_ttl_ms=60_000) as stager, Transactions(options(cluster)) as transactions:
        stager.add(queue, jobs(range(1500)))
        cluster.move(queue, (cluster.owner(queue) + 1) % 3)()
        stager.add(queue, jobs(range(1500, 3000)))
        staged = stager.finish()
        cluster.move(queue, (cluster.owner(queue) + 1) % 3)()

        transactions.commit(queue, 1, [staged])
        cluster.move(queue, (cluster.owner(queue) + 1) % 3)()

        assert transactions.commit(queue, 1, [staged]) is False

    assert seen(cluster, queue) == Counter(range(3000))


def test_a_writer_is_reset_on_all_nodes(cluster: Cluster, on_each_node: list[str]) -> None:
    app = on_each_node[2] + "-app"
    parts = {queue: range(n * 1000, n * 1000 + 10) for n, queue in enumerate(on_each_node)}
    with Transactions(options(cluster)) as transactions:
        transactions.commit(app, 5, [stage(cluster, parts)])
        [ledger] = transactions.ledgers([app])
        assert [row.published for row in ledger.queues] == [10, 10, 10]

        assert transactions.reset(app) is True

        assert transactions.ledgers([app]) == []
        assert transactions.commit(app, 0, [stage(cluster, parts)]) is True
