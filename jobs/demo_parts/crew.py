"""The demo's workers: two processes, of which one is killed with jobs in its hands, and replaced."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from chasqui import Producer
from demo_parts.orders import QUEUE

WORKER = Path(__file__).with_name("worker.py")


class Crew:
    """Starts them when entered, and ends all that are left when left. When it is time, one is killed; ``held`` tells
    with how many jobs in its hands, which others run again.
    """

    def __init__(self, url: str, time_to_kill: Callable[[], bool]) -> None:
        self.held = 0
        self._url, self._time_to_kill = url, time_to_kill
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._ending = threading.Event()
        self._killer = threading.Thread(target=self._kill)

    def __enter__(self) -> Crew:
        self._start("worker-1")
        self._start("worker-2")
        self._killer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._killer.join()
        for worker in self._workers.values():
            worker.terminate()
        for worker in self._workers.values():
            worker.wait(60)

    def _start(self, name: str) -> None:
        command = [sys.executable, str(WORKER), self._url, QUEUE, name]
        self._workers[name] = subprocess.Popen(command, stdin=subprocess.PIPE)

    def _kill(self) -> None:
        with Producer(self._url, queue=QUEUE) as producer:
            while not self.held and not self._ending.wait(0.01):
                for name, worker in list(self._workers.items()) if self._time_to_kill() else ():
                    worker.send_signal(signal.SIGSTOP)  # so that it ends none of them while we look
                    held = sum(seen.pending for seen in producer.overview().workers if seen.name == name)
                    if held:
                        worker.kill()
                        self._workers.pop(name).wait()
                        self._start("worker-3")
                        self.held = held
                        break
                    worker.send_signal(signal.SIGCONT)
