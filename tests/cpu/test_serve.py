"""How scripts/serve.sh ends and waits: whatever becomes of its terminal, and whoever answers on the port."""

import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sglang_dsa_plugin.tools import serve, serve_wait
from sglang_dsa_plugin.tools.serve_plan import Failure, Launch
from sglang_dsa_plugin.tools.serve_wait import wait_ready

ROOT = Path(__file__).parents[2]


def launch_of(code, port=1):
    """A server that is this Python program."""
    return Launch([sys.executable, "-c", code], "127.0.0.1", port, "http", None, ())


@pytest.fixture
def dead_pipe():
    """The write end of a pipe that nobody reads, as `serve.sh 2>&1 | head` leaves it."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


def python(code, *arguments, **options):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, **options)


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and "Z" not in stat.read_text().split(")")[1]


def wait_for(found, what, limit_s=30):
    end = time.monotonic() + limit_s
    while not found():
        assert time.monotonic() < end, f"no {what} after {limit_s} s"
        time.sleep(0.05)


# A terminal that is closed, a pipe that ended


@pytest.mark.parametrize("terminal", [False, True])
def test_messages_and_progress_outlive_standard_error(dead_pipe, terminal):
    code = (
        "import sys\nfrom sglang_dsa_plugin.tools.serve_wait import Progress, say\n"
        f"sys.stderr.isatty = lambda: {terminal}\n"
        "say('text')\nprogress = Progress()\nprogress.show(0, 'text')\nprogress.clear()\nprint('alive', flush=True)\n"
    )
    process = python(code, stdout=subprocess.PIPE, stderr=dead_pipe, text=True)
    assert process.communicate(timeout=60)[0] == "alive\n"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_no_server_is_left_when_standard_error_is_gone(dead_pipe, number, tmp_path):
    log = tmp_path / "serve.log"
    code = (
        # Whoever runs these tests under nohup hands on signals that are ignored.
        f"import signal\nsignal.signal({int(number)}, signal.SIG_DFL)\n"
        "import sys, time\nfrom pathlib import Path\nfrom sglang_dsa_plugin.tools import serve\n"
        "from sglang_dsa_plugin.tools.serve_plan import Launch\n"
        "server = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
        "launch = Launch([sys.executable, '-c', server], '127.0.0.1', 1, 'http', None, ())\n"
        "serve.stop_with_this_command()\n"
        "with serve.running(launch, Path(sys.argv[1])):\n    time.sleep(600)\n"
    )
    process = python(code, log, stderr=dead_pipe)
    try:
        wait_for(lambda: log.exists() and log.read_text().endswith("\n"), "server")
        pid = int(log.read_text())
        assert alive(pid)
        process.send_signal(number)
        process.wait(60)
        left = alive(pid)
        if left:
            os.kill(pid, signal.SIGKILL)
        assert not left
    finally:
        process.kill()
        process.wait()


def test_a_standard_output_that_nobody_reads_ends_the_command_with_its_server(dead_pipe, tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom sglang_dsa_plugin.tools import serve\n"
        "from sglang_dsa_plugin.tools.serve_plan import Launch\n"
        "server = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
        "launch = Launch([sys.executable, '-c', server], '127.0.0.1', 1, 'http', None, ())\n"
        "serve.runs_on_cpu = lambda: True\nserve.plan_launch = lambda *_, **__: launch\n"
        "def wait(*_):\n"
        "    while not Path(sys.argv[1], '.logs', 'serve-1.log').read_text().endswith('\\n'): pass\n"
        "    return 0.0\n"
        "serve.wait_ready = wait\nsys.exit(serve.main([sys.argv[1]]))\n"
    )
    process = python(code, tmp_path, stdout=dead_pipe, stderr=subprocess.PIPE, text=True)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert said.splitlines()[-1] == "error: nobody reads the standard output any more"
    assert not alive(int((tmp_path / ".logs" / "serve-1.log").read_text()))


# Another program on the port


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def another_program():
    """The port of a program that answers every question with 200."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_another_programs_answer_is_not_the_servers(another_program, tmp_path):
    launch, log = launch_of("import time; time.sleep(600)", another_program), tmp_path / "serve.log"
    with serve.running(launch, log) as server, pytest.raises(Failure) as failure:
        wait_ready(server, launch, log, limit_s=1)
    assert "not ready after 1 s" in str(failure.value)
    assert f"port {another_program} is answered by another program" in str(failure.value)


def test_a_server_that_found_its_port_taken_is_told_by_the_port(another_program, tmp_path):
    code = f"import socket, time; time.sleep(2); socket.create_server(('127.0.0.1', {another_program}))"
    launch, log = launch_of(code, another_program), tmp_path / "serve.log"
    with serve.running(launch, log) as server, pytest.raises(Failure) as failure:
        wait_ready(server, launch, log, limit_s=30)
    assert "OSError: [Errno 98]" in str(failure.value)
    assert f"port {another_program} is answered by another program: give another --port" in str(failure.value)


@pytest.mark.parametrize("below", [False, True])
def test_the_servers_own_answer_counts_without_a_word_in_its_log(below, tmp_path):
    """As with --log-level warning; below: a process that the server started listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = (
        "from http.server import *\nclass H(BaseHTTPRequestHandler):\n"
        " def do_GET(self): self.send_response(200); self.end_headers()\n def log_message(self, *_): pass\n"
        f"HTTPServer(('127.0.0.1', {port}), H).serve_forever()"
    )
    if below:
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    launch, log = launch_of(code, port), tmp_path / "serve.log"
    with serve.running(launch, log) as server:
        assert wait_ready(server, launch, log, limit_s=60) < 60
    assert log.read_text() == ""


def test_a_signal_that_the_caller_ignores_stays_ignored():
    """`nohup scripts/serve.sh` goes on when the terminal is closed."""
    code = (
        "import signal\nfrom sglang_dsa_plugin.tools import serve\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nserve.stop_with_this_command()\n"
        "print([signal.getsignal(n) is signal.SIG_IGN for n in (signal.SIGHUP, signal.SIGTERM)])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[True, False]\n"


# What is said while it starts, and the model of a first start


def test_progress_leaves_out_that_somebody_asked_whether_it_is_ready(tmp_path):
    log = tmp_path / "log"
    asked = '[2026-11-29 10:00:02] INFO:     127.0.0.1:53000 - "GET /health HTTP/1.1" 503 Service Unavailable\n'
    log.write_text("[2026-11-29 10:00:01 TP0] Load weight begin.\n" + 3 * asked)
    assert serve_wait._last_line(log) == "Load weight begin."
    log.write_text(asked)
    assert serve_wait._last_line(log) == "importing SGLang"


def made_by(monkeypatch, before):
    """As if the command that makes the model took a while, in which `before` happened."""

    def run(command, **_options):
        Path(command[-1]).mkdir()
        (Path(command[-1]) / "config.json").write_text("{}")
        before()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(serve.subprocess, "run", run)


def test_two_first_starts_make_one_model(tmp_path, monkeypatch):
    tiny = tmp_path / "models" / "tiny"

    def another_is_faster():
        tiny.mkdir()
        (tiny / "config.json").write_text('{"first": 1}')

    made_by(monkeypatch, another_is_faster)
    serve.make_tiny_model(tiny)
    assert (tiny / "config.json").read_text() == '{"first": 1}'
    assert [path.name for path in tiny.parent.iterdir()] == ["tiny"]


def test_something_else_in_the_models_place_is_named(tmp_path, monkeypatch):
    tiny = tmp_path / "models" / "tiny"

    def in_the_way():
        tiny.mkdir()
        (tiny / "notes.txt").write_text("mine")

    made_by(monkeypatch, in_the_way)
    with pytest.raises(Failure, match=r"could not be put at .*tiny: .*; remove what is there"):
        serve.make_tiny_model(tiny)
    assert (tiny / "notes.txt").read_text() == "mine"
