"""worker() in other deployments, in a Spark of its own: ``python consume_elsewhere.py <deployment> '<json>'``.

``local-cluster``: executors in processes of their own; one of them is killed by a job, once. ``connect``: a Spark
Connect server, and a client that has nothing but its protocol.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from chasqui_spark import worker
from tests.spark.sink_elsewhere import session


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def main() -> None:
    about: dict[str, Any] = json.loads(sys.argv[2])
    home, deployment = about["home"], sys.argv[1]

    def handler(job: Any) -> int:
        folder = Path(home)
        if job.payload == 20 and deployment == "local-cluster" and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(parent(os.getppid()), signal.SIGKILL)  # this process's daemon belongs to the executor
        with (folder / "seen").open("a") as seen:
            seen.write(f"{job.payload}\n")
        if job.payload == 30:
            raise ValueError("not this one")
        return int(job.payload)

    spark = session(deployment)
    query = worker(
        spark,
        url=about["url"],
        queue=about["queue"],
        handler=handler,
        checkpoint=f"{home}/checkpoint",
        trigger={"availableNow": True},
        max_attempts=1,
        store_results=True,
        min_partitions=2,
        jobs_per_partition=10,
    )
    assert query.awaitTermination(120)
    print("TOLD " + json.dumps(sum(progress.numInputRows for progress in query.recentProgress)), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
