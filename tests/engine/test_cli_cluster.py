"""chasquictl against a cluster: queues on every node are found, asked about and cleaned up."""

from __future__ import annotations

import pytest

from tests.engine.cli_tools import Ctl
from tests.engine.test_cluster import Cluster
from tests.engine.test_cluster import cluster as cluster
from tests.engine.test_cluster import on_each_node as on_each_node
from tests.engine.test_transactions import jobs, stage


def test_commands_find_their_queue_on_whichever_node_it_is(
    cluster: Cluster, on_each_node: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ctl = Ctl(cluster.url, capsys, monkeypatch)
    for queue in on_each_node:
        ctl.json("add", queue, "1", "--delay", "1h", "--id", "i")
        assert ctl.json("delayed", "promote", queue, "i", "--yes")["promoted"] == {"i": True}
        assert ctl.json("inspect", queue)["waiting"] == 1
        found = {f["check"]: f for f in ctl.json("doctor", queue, code=1)["findings"]}
        assert found["workers"]["found"].startswith("1 jobs wait and no worker")
        assert found["persistence"]["found"].startswith("append-only file")
    assert ctl("bench", "--jobs", "500", "--json").code == 0


def test_writers_and_stages_are_found_on_all_nodes(
    cluster: Cluster, on_each_node: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(cluster.url, {queue: jobs(1) for queue in on_each_node})

    found = Ctl(cluster.url, capsys, monkeypatch).json("txn", "stages")

    assert set(on_each_node) <= {row["queue"] for row in found["queues"]}
