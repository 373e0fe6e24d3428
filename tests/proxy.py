"""A proxy in front of a test server that breaks the connection at a chosen command.

It reads the protocol, so "the second EVALSHA" means exactly that one, whatever else is sent on how many connections:

    with Proxy(server.port) as proxy:
        proxy.on("EVALSHA", nth=2, act=DROP_REPLY)
        producer = Producer(proxy.url)

What can happen to a command:

    CUT            it never reaches the server; the client's connection is closed
    DROP_REPLY     the server carries it out; the client's connection is closed in place of the reply
    HALF_REPLY     the same in the middle of the reply
    GARBAGE        the same, after bytes that are no reply
    delay(s)       the reply comes late
    kill(pid)      SIGKILL to that process, then as CUT
    kill_after(pid)  the server carries it out, then SIGKILL, then as DROP_REPLY
    call(f)        f() runs, then the command passes as usual

Each rule acts once; everything before and after passes. Commands of one connection are forwarded one by one, so what
a client pipelined behind a cut command has not been carried out either.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, Self


@dataclass(frozen=True)
class Act:
    """What becomes of one command: ``before`` runs, it is forwarded or not, ``after`` runs, the reply passes or a
    part of it, or something else ``instead``.
    """

    before: Callable[[], object] = lambda: None
    forward: bool = True
    after: Callable[[], object] = lambda: None
    reply: float = 1
    instead: bytes = b""


PASS = Act()
CUT = Act(forward=False)
DROP_REPLY = Act(reply=0)
HALF_REPLY = Act(reply=0.5)
GARBAGE = Act(reply=0, instead=b"HTTP/1.1 400 Bad Request\r\n\r\n")


def delay(seconds: float) -> Act:
    return Act(after=lambda: time.sleep(seconds))


def kill(pid: int) -> Act:
    return Act(before=lambda: os.kill(pid, signal.SIGKILL), forward=False)


def kill_after(pid: int) -> Act:
    return Act(after=lambda: os.kill(pid, signal.SIGKILL), reply=0)


def call(function: Callable[[], object]) -> Act:
    return Act(before=function)


class Proxy:
    """Listens on a free port of loopback until the ``with`` block ends. ``counts``: commands seen, by name."""

    def __init__(self, target_port: int) -> None:
        self.counts: Counter[str] = Counter()
        self.connections = 0
        self._target_port = target_port
        self._rules: dict[tuple[str, int], Act] = {}
        self._watches: list[list[Any]] = []
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def on(self, command: str, *, nth: int = 1, act: Act, having: str = "") -> None:
        """Do that to the ``nth`` command of that name, counted from now; the name ``*`` counts all commands. With
        ``having`` only those count in which that text stands, such as a script's hash.
        """
        with self._lock:
            if having:
                self._watches.append([command.upper(), having.encode(), nth, act])
            else:
                self._rules[command.upper(), self.counts[command.upper()] + nth] = act

    def refuse(self) -> None:
        """Take no more connections, as if the server were gone; those that are open stay."""
        _shut(self._listener)
        self._listener.close()

    def lead_to(self, port: int) -> None:
        """Take new connections to that server; those that are open stay where they are."""
        self._target_port = port

    def drop_all(self) -> None:
        """Close all connections that are open; new ones are taken, unless ``refuse`` was called."""
        with self._lock:
            for open_socket in self._sockets:
                _shut(open_socket)

    def close(self) -> None:
        """Close the port and all connections."""
        with self._lock:
            self._closed = True
            for open_socket in [self._listener, *self._sockets]:
                _shut(open_socket)
        for thread in self._threads:
            thread.join(5)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=[client], daemon=True)
            with self._lock:
                self.connections += 1
                self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, EOFError):
            server = socket.create_connection(("127.0.0.1", self._target_port))
            with server, client.makefile("rb") as commands, server.makefile("rb") as replies:
                if self._register(client, server):
                    self._relay(client, server, commands, replies)

    def _register(self, *pair: socket.socket) -> bool:
        with self._lock:
            self._sockets.update(pair)
            return not self._closed

    def _relay(self, client: socket.socket, server: socket.socket, commands: BinaryIO, replies: BinaryIO) -> None:
        try:
            while True:
                command = read_value(commands)
                act = self._next_act(command)
                act.before()
                if not act.forward:
                    return
                server.sendall(command)
                reply = read_value(replies)
                act.after()
                client.sendall(act.instead or reply[: int(act.reply * len(reply))])
                if act.reply < 1:
                    return
        finally:
            _shut(server)
            _hang_up(client, commands)

    def _next_act(self, command: bytes) -> Act:
        name = command.split(b"\r\n", 3)[2].decode().upper()
        with self._lock:
            self.counts[name] += 1
            self.counts["*"] += 1
            for watch in self._watches:
                if watch[0] == name and watch[1] in command:
                    watch[2] -= 1
                    if watch[2] == 0:
                        self._watches.remove(watch)
                        found: Act = watch[3]
                        return found
            act = self._rules.pop((name, self.counts[name]), PASS)
            return act if act is not PASS else self._rules.pop(("*", self.counts["*"]), PASS)


def read_value(stream: BinaryIO) -> bytes:
    """The bytes of one command or reply, whole; EOFError when the other side has closed."""
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise EOFError
    kind, rest = line[:1], line[1:-2]
    if kind == b"*":
        return line + b"".join(read_value(stream) for _ in range(int(rest)))
    if kind == b"$" and rest != b"-1":
        body = stream.read(int(rest) + 2)
        if len(body) != int(rest) + 2:
            raise EOFError
        return line + body
    return line


def _hang_up(client: socket.socket, commands: BinaryIO) -> None:
    """End a connection such that the replies sent so far arrive: a close with commands unread would reset it."""
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_WR)
        client.settimeout(5)
        while commands.read(1 << 16):
            pass


def _shut(open_socket: socket.socket) -> None:
    with contextlib.suppress(OSError):
        open_socket.shutdown(socket.SHUT_RDWR)
