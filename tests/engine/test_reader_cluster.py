"""Reader over a cluster: queues live on different nodes, and are found on all of them."""

from __future__ import annotations

from contextlib import ExitStack

from chasqui import Producer
from chasqui.bridge import ConnectionOptions, Position, Reader
from tests.engine.test_cluster import Cluster


def test_queues_of_all_nodes_are_found_and_read() -> None:
    names = [f"q{i}" for i in range(12)]
    with ExitStack() as stack:
        cluster = Cluster(stack, None)
        for name in names:
            with Producer(cluster.url, queue=name) as producer:
                producer.add_bulk([1, 2, 3])
        assert {cluster.owner(name) for name in names} == {0, 1, 2}
        reader = stack.enter_context(Reader(ConnectionOptions(url=cluster.url)))

        assert reader.discover("q*") == sorted(names)
        positions = reader.positions("jobs", names)
        assert [isinstance(p, Position) and p.length for p in positions.values()] == [3] * 12
        assert [reader.walk("jobs", name, "0-0", "+").entries for name in names] == [3] * 12
        assert [sum(len(page) for page in reader.pages("jobs", name)) for name in names] == [3] * 12
        assert [stats.waiting for stats in reader.stats(names, "default").values()] == [3] * 12
