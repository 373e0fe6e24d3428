"""Reader over a cluster: queues live on different nodes, and are found on all of them."""

from __future__ import annotations

from contextlib import ExitStack

from chasqui import Producer
from chasqui.bridge import ConnectionOptions, JobSpans, Position, Reader
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
        assert [sum(len(page) for page in reader.job_pages(name)) for name in names] == [3] * 12
        assert [stats.waiting for stats in reader.stats(names, "default").values()] == [3] * 12


def test_pages_of_jobs_follow_a_queue_to_another_node() -> None:
    with ExitStack() as stack:
        cluster = Cluster(stack, None)
        with Producer(cluster.url, queue="q") as producer:
            producer.add_bulk(range(3000))
        reader = stack.enter_context(Reader(ConnectionOptions(url=cluster.url)))
        target = (cluster.owner("q") + 1) % 3
        pages = reader.job_pages("q")
        found = [next(pages)]

        # Half-way the keys are with the new node, which gives them only to those who say that they were sent there.
        finish = cluster.move("q", target)
        found.append(next(pages))
        finish()
        found += pages

    ids = [page.entry_id(i) for page in found if isinstance(page, JobSpans) for i in range(len(page))]
    ids += [entry[0] for page in found if not isinstance(page, JobSpans) for entry in page]
    assert len(ids) == len(set(ids)) == 3000
    assert {type(page) for page in found} == {list, JobSpans}
