"""Clusters: each queue lives on one node, slots move, nodes come and go."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from chasqui import AsyncProducer, ConnectionLost, NewJob, Producer, RedisError, ServerError
from chasqui.address import parse
from chasqui.connections import AsyncNodes, Nodes, settings_of
from chasqui.embedded import EmbeddedServer, start
from chasqui.options import ConnectionOptions
from tests.conftest import server_binaries
from tests.engine.conftest import Awaited, Connect
from tests.engine.seen import ids, in_delayed, in_stream, payloads, put_dead_letter
from tests.support import eventually

SLOTS = 16384


class Cluster:
    """Primaries that share the slots evenly, and replicas of the first one."""

    def __init__(self, stack: ExitStack, binary: str | None, primaries: int = 3, replicas: int = 0) -> None:
        settings = {"cluster-enabled": "yes", "cluster-node-timeout": "1000", "appendonly": "yes"}
        settings |= {"repl-diskless-sync-delay": "0", "cluster-replica-validity-factor": "0"}
        self.nodes: list[EmbeddedServer] = []
        self.clients: list[redis.Redis] = []
        for _ in range(primaries + replicas):
            self.nodes.append(stack.enter_context(start(binary=binary, port=node_port(), config=settings)))
            self.clients.append(stack.enter_context(redis.Redis.from_url(self.nodes[-1].url, protocol=2)))
        for i, client in enumerate(self.clients):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for i, client in enumerate(self.clients[:primaries]):
            slots = range(i * SLOTS // primaries, (i + 1) * SLOTS // primaries)
            client.execute_command("CLUSTER", "ADDSLOTS", *slots)
        for node in self.nodes[1:]:
            self.clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
        self.ids = [str(client.execute_command("CLUSTER", "MYID").decode()) for client in self.clients]
        for client in self.clients:
            eventually(lambda client=client: all(name in nodes_seen_by(client) for name in self.ids), within=20)
        for client in self.clients[primaries:]:
            client.execute_command("CLUSTER", "REPLICATE", self.ids[0])
            eventually(lambda client=client: client.info("replication")["master_link_status"] == "up", within=20)
        for client in self.clients:
            eventually(lambda client=client: is_settled(client), within=20)
        eventually(self.agrees, within=20)

    def agrees(self) -> bool:
        """Whether all nodes say the same of all, and each primary has a config epoch of its own.

        Two nodes with one epoch part by raising it, and until a node has heard of that it may think another's claim the
        younger one. A move in that moment can end with a slot that no node calls its own (seen: the old owner names the
        new one and the new one the old one, for ever), and no client could follow that.
        """
        views = [claims_seen_by(client) for client in self.clients]
        epochs = {epoch for epoch, _ in views[0].values()}
        return all(view == views[0] for view in views) and len(epochs) == len(views[0])

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def owner(self, queue: str) -> int:
        """The number of the node that has the queue."""
        for i, client in enumerate(self.clients):
            try:
                client.exists(f"{{chasqui:{queue}}}:stream")
            except redis.ResponseError:
                continue
            return i
        raise AssertionError("no node has that slot")

    def move(self, queue: str, target: int) -> Callable[..., None]:
        """Move the keys of the queue's slot to another node. Until the answer is called, the old one only redirects.

        The answer tells the nodes of the new owner: this one first, then the old one and the rest, or those named.
        """
        eventually(self.agrees, within=20)
        slot, source = slot_of(queue), self.owner(queue)
        self.clients[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.ids[source])
        self.clients[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.ids[target])
        keys = self.clients[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
        if keys:
            port = self.nodes[target].port
            self.clients[source].execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *keys)

        def finish(*nodes: int) -> None:
            for i in nodes or (target, source, *range(len(self.nodes))):
                self.clients[i].execute_command("CLUSTER", "SETSLOT", slot, "NODE", self.ids[target])

        return finish

    def entangle(self, queue: str, target: int) -> Callable[[], None]:
        """Move the queue so that its old node names the new one and this one the old one, until the answer is called.

        Told in the wrong order, nodes are like that for a moment in real moves. The new one is made to forget that it
        waits for the slot, because Valkey's would else take it as soon as it hears that the old one let go.
        """
        slot, source = slot_of(queue), self.owner(queue)
        finish = self.move(queue, target)
        self.clients[target].execute_command("CLUSTER", "SETSLOT", slot, "STABLE")
        finish(source)

        def disentangle() -> None:
            self.clients[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.ids[source])
            finish()

        return disentangle


def node_port() -> int:
    """A free port whose neighbour 10,000 above, for the cluster's own talk, is free as well."""
    while True:
        with socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", 0))
            port = int(low.getsockname()[1])
            try:
                high.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
            return port


def redirections_by(client: redis.Redis) -> int:
    """How often the node has said MOVED."""
    return int(client.info("errorstats").get("errorstat_MOVED", {}).get("count", 0))


def nodes_seen_by(client: redis.Redis) -> str:
    return str(client.execute_command("CLUSTER", "NODES"))


def copied(replica: redis.Redis, queue: str) -> int:
    """How many jobs of the queue a replica holds. WAIT would tell only of what its own connection has written."""
    with replica.pipeline(transaction=False) as both:
        both.execute_command("READONLY")
        both.xlen(f"{{chasqui:{queue}}}:stream")
        return int(both.execute()[1])


def claims_seen_by(client: redis.Redis) -> dict[str, tuple[str, str]]:
    """The config epoch of each primary, and its slots."""
    nodes = client.cluster("NODES").items()
    return {name: (about["epoch"], str(about["slots"])) for name, about in nodes if "master" in about["flags"]}


def is_settled(client: redis.Redis) -> bool:
    return "cluster_state:ok" in str(client.execute_command("CLUSTER", "INFO")) and "handshake" not in nodes_seen_by(
        client
    )


def slot_of(queue: str) -> int:
    return key_slot(f"{{chasqui:{queue}}}".encode())


@pytest.fixture(params=list(server_binaries()), scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, server_binaries()[request.param])


@pytest.fixture
def on_each_node(cluster: Cluster) -> list[str]:
    """Three queues of the test's own, each on another node."""
    found: dict[int, str] = {}
    names = (f"t-{uuid.uuid4().hex[:12]}" for _ in range(10_000))
    while len(found) < 3:
        queue = next(names)
        found.setdefault(cluster.owner(queue), queue)
    return [found[i] for i in range(3)]


def test_queues_live_on_different_nodes_and_every_call_finds_its_own(
    connect: Connect, cluster: Cluster, on_each_node: list[str]
) -> None:
    for node, queue in zip(cluster.clients, on_each_node, strict=True):
        node.script_flush()
        producer = connect(cluster.url, queue=queue)
        producer.add(0)
        producer.add(1, id="i")
        producer.add_bulk(range(2, 300))
        producer.add_bulk_jobs([NewJob(300, id="j"), NewJob("later", id="k", delay_ms=60_000)])
        producer.add_in(60_000, "later")
        producer.add_in_bulk(60_000, ["later"] * 300)
        put_dead_letter(node, queue, 301)

        assert producer.replay_dlq() == 1
        assert payloads(in_stream(node, queue)) == list(range(302))
        assert payloads(in_delayed(node, queue)) == ["later"] * 302
        assert producer.cancel_delayed_bulk(["k", "unknown"]) == [True, False]
        assert producer.get_result_bulk(["i", "j"]) == [None, None]
        assert (producer.stats().waiting, producer.stats().delayed) == (302, 301)
        producer.pause()
        assert producer.stats().paused
        producer.resume()


def test_scripts_are_loaded_on_each_node_by_one_producer_per_queue_in_any_order(
    connect: Connect, cluster: Cluster, on_each_node: list[str]
) -> None:
    producers = [connect(cluster.url, queue=queue) for queue in on_each_node]
    for n in range(3):
        for client in cluster.clients:
            client.script_flush()
        for producer in producers:
            producer.add(n, id=f"i-{n}")

    for node, queue in zip(cluster.clients, on_each_node, strict=True):
        assert payloads(in_stream(node, queue)) == [0, 1, 2]


@pytest.mark.parametrize("start_node", [0, 1, 2])
def test_any_node_of_the_cluster_will_do_to_start_with(
    connect: Connect, cluster: Cluster, on_each_node: list[str], start_node: int
) -> None:
    url = f"redis+cluster://127.0.0.1:{cluster.nodes[start_node].port}"

    for queue in on_each_node:
        connect(url, queue=queue).add_bulk(range(10))

    for node, queue in zip(cluster.clients, on_each_node, strict=True):
        assert payloads(in_stream(node, queue)) == list(range(10))


def test_a_url_without_cluster_is_told_what_it_lacks(
    connect: Connect, cluster: Cluster, on_each_node: list[str]
) -> None:
    producer = connect(cluster.nodes[0].url, queue=on_each_node[1])

    for add in (lambda: producer.add(1), lambda: producer.add_bulk([1]), lambda: producer.get_result_bulk(["i"])):
        with pytest.raises(ServerError, match=r"is a node of a cluster .*redis\+cluster://"):
            add()


def test_a_producer_follows_its_queue_to_another_node(
    connect: Connect, cluster: Cluster, on_each_node: list[str]
) -> None:
    queue, adds = on_each_node[0], 0
    producer = connect(cluster.url, queue=queue)
    steps: list[Callable[[int], Any]] = [
        lambda n: producer.add(n),
        lambda n: producer.add(n, id=f"i-{n}"),
        lambda n: producer.add_bulk([n]),
        lambda n: producer.add_bulk_jobs([NewJob(n, id=f"j-{n}")]),
    ]
    for step in steps:
        step(adds)
        target = (cluster.owner(queue) + 1) % 3
        cluster.move(queue, target)()

        step(adds + 1)

        adds += 2
        assert cluster.owner(queue) == target
        assert payloads(in_stream(cluster.clients[target], queue)) == list(range(adds))


def test_a_large_bulk_follows_its_queue_in_order(connect: Connect, cluster: Cluster, on_each_node: list[str]) -> None:
    queue = on_each_node[1]
    producer = connect(cluster.url, queue=queue)
    producer.add_bulk(range(10))
    cluster.move(queue, 2)()

    made = producer.add_bulk(range(2500))

    assert ids(in_stream(cluster.clients[2], queue))[10:] == made


def test_a_node_that_has_not_heard_of_a_move_is_no_obstacle(
    connect: Connect, cluster: Cluster, on_each_node: list[str]
) -> None:
    queue = on_each_node[0]
    finish = cluster.move(queue, 1)
    finish(1, 0)

    producer = connect(f"redis+cluster://127.0.0.1:{cluster.nodes[2].port}", queue=queue)
    producer.add_bulk(range(300))
    producer.add(300)

    assert payloads(in_stream(cluster.clients[1], queue)) == list(range(301))
    finish()


each_add = pytest.mark.parametrize(
    "add",
    [
        pytest.param(lambda producer, n: producer.add(n), id="one"),
        pytest.param(lambda producer, n: producer.add(n, id=f"i-{n}"), id="with an id"),
        pytest.param(lambda producer, n: producer.add_bulk([n]), id="bulk"),
        pytest.param(lambda producer, n: producer.get_result_bulk(["i", "j"]) and producer.add(n), id="batch"),
    ],
)


@each_add
def test_redirections_in_a_circle_are_followed_until_a_node_owns_up(
    connect: Connect, cluster: Cluster, on_each_node: list[str], add: Callable[[Any, int], Any]
) -> None:
    queue = on_each_node[2]
    producer = connect(cluster.url, queue=queue, reconnect_attempts=500)
    producer.add(0)
    disentangle = cluster.entangle(queue, 0)
    told = redirections_by(cluster.clients[0])

    with ThreadPoolExecutor(1) as thread:
        adding = thread.submit(add, producer, 1)
        try:
            eventually(lambda: redirections_by(cluster.clients[0]) >= told + 5)
        finally:
            disentangle()
        adding.result(30)

    assert payloads(in_stream(cluster.clients[0], queue)) == [0, 1]


def test_redirections_in_a_circle_end_after_all_attempts(
    connect: Connect, cluster: Cluster, on_each_node: list[str]
) -> None:
    queue = on_each_node[2]
    producer = connect(cluster.url, queue=queue, reconnect_attempts=3)
    producer.add(0)
    disentangle = cluster.entangle(queue, 0)
    told = sum(redirections_by(client) for client in cluster.clients)

    for add in (lambda: producer.add(1), lambda: producer.add_bulk([1]), lambda: producer.get_result_bulk(["i"])):
        with pytest.raises(RedisError, match="MOVED"):
            add()

    disentangle()
    # The first time, once more for the first redirection, and three tries: each of the three calls.
    assert sum(redirections_by(client) for client in cluster.clients) == told + 3 * 5
    assert payloads(in_stream(cluster.clients[0], queue)) == [0]


def test_adds_go_to_the_new_node_before_the_move_has_ended(
    connect: Connect, cluster: Cluster, on_each_node: list[str]
) -> None:
    queue = on_each_node[2]
    producer = connect(cluster.url, queue=queue)
    producer.add(0)
    finish = cluster.move(queue, 0)

    producer.add(1)
    made = producer.add_bulk(range(2, 3000))
    producer.add_in(60_000, "later")
    producer.add_in_bulk(60_000, ["later"] * 300)
    assert producer.get_result("i") is None

    finish()
    assert ids(in_stream(cluster.clients[0], queue))[2:] == made
    assert payloads(in_stream(cluster.clients[0], queue)) == list(range(3000))
    assert payloads(in_delayed(cluster.clients[0], queue)) == ["later"] * 301


def test_bulks_on_their_way_while_the_queue_goes_round_are_added_once(
    connect: Connect, cluster: Cluster, on_each_node: list[str]
) -> None:
    queue = on_each_node[0]
    producer = connect(cluster.url, queue=queue, reconnect_attempts=500)
    producer.add_bulk([-1])
    moved = threading.Event()
    made: list[str] = []
    calls: list[int] = []

    def add_while_it_moves() -> None:
        while not moved.is_set():
            made.extend(producer.add_bulk(range(500)))
            made.extend(producer.add_in_bulk(60_000, range(50)))
            calls.append(len(made))

    with ThreadPoolExecutor(1) as thread:
        adding = thread.submit(add_while_it_moves)
        try:
            for target in (1, 2, 0, 2, 1):
                # An ASK is good for the move it was said in. Here the queue would be back within milliseconds, sooner
                # than a call that was told to ask there gets to do it: such calls end before the next move starts.
                calls.clear()
                eventually(lambda: len(calls) >= 2 or adding.done(), within=30)
                cluster.move(queue, target)()
        finally:
            moved.set()
        adding.result(60)

    jobs = in_stream(cluster.clients[1], queue)[1:] + in_delayed(cluster.clients[1], queue)
    assert sorted(ids(jobs)) == sorted(made)


def test_close_leaves_no_connection_to_any_node(connect: Connect, cluster: Cluster, on_each_node: list[str]) -> None:
    def connections() -> set[tuple[int, str]]:
        """All but those that nodes keep for a while after a move, to each other."""
        listed = [(i, one) for i, client in enumerate(cluster.clients) for one in client.client_list()]
        return {(i, one["id"]) for i, one in listed if one["cmd"] != "restore-asking"}

    before = connections()
    producers = [connect(cluster.url, queue=queue) for queue in on_each_node]
    for producer in producers:
        producer.add_bulk(range(10))
    cluster.move(on_each_node[0], 1)()
    producers[0].add(10)
    assert {i for i, _ in connections() - before} == {0, 1, 2}

    for producer in producers:
        producer.close()

    eventually(lambda: connections() <= before)


def test_connections_to_a_node_that_left_are_closed_at_once_or_when_they_are_given_back(cluster: Cluster) -> None:
    def connections() -> set[str]:
        return {one["id"] for one in cluster.clients[0].client_list()}

    before = connections()
    options = ConnectionOptions(url=cluster.url)
    nodes = Nodes(parse(cluster.url), options, settings_of(options, parse(cluster.url)))
    place = ("127.0.0.1", int(cluster.nodes[0].port or 0))
    pool = nodes.pool(place)
    idle, used = pool.get_connection(), pool.get_connection()
    pool.release(idle)
    assert len(connections() - before) == 2

    nodes.drop([place])
    assert len(eventually(lambda: left if len(left := connections() - before) < 2 else None)) == 1
    pool.release(used)
    eventually(lambda: connections() <= before)


def test_connections_of_asyncio_to_a_node_that_left_are_closed_as_well(cluster: Cluster) -> None:
    def connections() -> set[str]:
        return {one["id"] for one in cluster.clients[0].client_list()}

    async def drop() -> int:
        options = ConnectionOptions(url=cluster.url)
        nodes = AsyncNodes(parse(cluster.url), options, settings_of(options, parse(cluster.url)))
        place = ("127.0.0.1", int(cluster.nodes[0].port or 0))
        pool = nodes.pool(place)
        idle, used = await pool.get_connection(), await pool.get_connection()
        await pool.release(idle)
        await nodes.drop([place])
        left = eventually(lambda: left if len(left := connections() - before) < 2 else None)
        await pool.release(used)
        return len(left)

    before = connections()

    assert asyncio.run(drop()) == 1
    eventually(lambda: connections() <= before)


def test_adds_during_a_move_end_up_where_the_queue_goes(
    connect: Connect, cluster: Cluster, on_each_node: list[str]
) -> None:
    queue = on_each_node[2]
    producer = connect(cluster.url, queue=queue, reconnect_attempts=500)
    producer.add(0)
    finish = cluster.move(queue, 0)

    with ThreadPoolExecutor(1) as thread:
        adding = thread.submit(producer.add, 1)
        finish()
        adding.result(30)
    producer.add(2, id="i")

    assert payloads(in_stream(cluster.clients[0], queue)) == [0, 1, 2]


def test_a_node_restarted_between_calls_is_not_noticed(
    connect: Connect, cluster: Cluster, on_each_node: list[str]
) -> None:
    queue = on_each_node[1]
    producer = connect(cluster.url, queue=queue, reconnect_attempts=500)
    producer.add(0)

    cluster.nodes[1].restart()
    for client in cluster.clients:
        eventually(lambda client=client: is_settled(client), within=20)
    producer.add(1)
    producer.add_bulk([2])

    assert payloads(in_stream(cluster.clients[1], queue)) == [0, 1, 2]


def test_a_cluster_that_is_down_is_named(connect: Connect) -> None:
    producer = connect("redis+cluster://:hunter2@127.0.0.1:1,127.0.0.1:2", queue="q", reconnect_attempts=1)

    with pytest.raises(ConnectionLost, match=r"redis\+cluster://127\.0\.0\.1:1,127\.0\.0\.1:2 cannot be") as caught:
        producer.add(1)

    assert caught.value.sent is False
    assert "hunter2" not in str(caught.value)


def test_a_server_that_is_no_cluster_is_told(connect: Connect, url: str) -> None:
    producer = connect(url.replace("redis:", "redis+cluster:"), queue="q", reconnect_attempts=1)

    with pytest.raises(RedisError):
        producer.add(1)


def test_producers_go_on_when_a_replica_takes_the_place_of_a_dead_primary(event_loop_thread: Any) -> None:
    with ExitStack() as stack:
        cluster = Cluster(stack, None, replicas=1)
        queue = next(name for n in range(1000) for name in [f"q-{n}"] if cluster.owner(name) == 0)
        options = {"queue": queue, "reconnect_attempts": 500, "reconnect_initial_ms": 20, "reconnect_max_ms": 20}
        blocking = stack.enter_context(Producer(cluster.url, **options))
        awaited = Awaited(AsyncProducer(cluster.url, **options), event_loop_thread)
        stack.callback(lambda: awaited.close())
        blocking.add(0)
        awaited.add(1)
        eventually(lambda: copied(cluster.clients[3], queue) == 2, within=20)

        os.kill(cluster.nodes[0].pid, signal.SIGKILL)
        with ThreadPoolExecutor(2) as threads:
            adding = [threads.submit(producer.add, 2, id="i") for producer in (blocking, awaited)]
            eventually(lambda: cluster.clients[3].role()[0] == b"master", within=20)
            answers = [one.result(10) for one in adding]

        assert answers == ["i", "i"]
        assert payloads(in_stream(cluster.clients[3], queue)) == [0, 1, 2]
