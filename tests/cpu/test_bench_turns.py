"""`sglang-dsa bench server`: servers asked in turn, here small programs that answer as SGLang does."""

import json
import os
import signal
import sys
import time

import psutil
import pytest
from typer.testing import CliRunner

from sglang_dsa_plugin.cli import app
from sglang_dsa_plugin.tools import bench_server, bench_turns
from sglang_dsa_plugin.tools.bench_turns import Contestant
from sglang_dsa_plugin.tools.serve import running
from sglang_dsa_plugin.tools.serve_plan import Launch
from sglang_dsa_plugin.tools.serve_wait import wait_ready
from tests.server.harness import free_port

# A token every STEP seconds, of a prompt so many 1000 tokens as well before the first. With BREAKS answers are refused
# after so many.
SERVER = """
import http.server, json, os, sys, time
step, breaks = float(os.environ["STEP"]), int(os.environ.get("BREAKS", "0"))
asked = 0
class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    def log_message(self, *_): pass
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        global asked
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked += 1
        if breaks and asked > breaks:
            self.send_response(500); self.end_headers(); return
        self.send_response(200); self.end_headers()
        time.sleep(step * len(body["input_ids"]) / 1000)
        for token in range(1, body["sampling_params"]["max_new_tokens"] + 1):
            time.sleep(step)
            self.wfile.write(f'data: {{"meta_info": {{"completion_tokens": {token}}}}}\\n\\n'.encode())
            self.wfile.flush()
if os.environ.get("SGLANG_DSA_PLUGIN") == "on": print("[x] sglang-dsa-plugin 0.1.0 serves a model", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def launch_at(port):
    return Launch([sys.executable, "-c", SERVER, str(port)], "127.0.0.1", port, "http", None, ())


@pytest.fixture
def two(tmp_path):
    """A fast server and a slow one."""
    slow, fast = launch_at(free_port()), launch_at(free_port())
    with (
        running(fast, tmp_path / "fast", {"STEP": "0.004"}) as one,
        running(slow, tmp_path / "slow", {"STEP": "0.03"}) as other,
    ):
        wait_ready(one, fast, tmp_path / "fast", 30)
        wait_ready(other, slow, tmp_path / "slow", 30)
        yield [Contestant("plugin", 0, fast, one), Contestant("builtin", 0, slow, other)]


def test_every_case_has_a_value_of_each_turn_and_tells_the_servers_apart(two):
    with bench_turns.side_by_side(two):
        bench_turns.take_turns(two, [1000, 3000], [1, 3], 20, turns=2)
    fast, slow = (one.figures for one in two)
    assert (
        fast.keys()
        == slow.keys()
        == {
            *("first token, S=1000", "first token, S=3000"),
            *(f"first token, S={s}, B=3, {which}" for s in (1000, 3000) for which in ("median", "last")),
            *(f"per token, S={s}, B={b}" for s in (1000, 3000) for b in (1, 3)),
        }
    )
    for case in fast:
        # Of each turn at least one, of those that take no time more.
        assert 2 <= len(slow[case]) <= len(fast[case]) <= 2 * bench_turns._MOST
    assert len(fast["first token, S=1000"]) == 2 * bench_turns._MOST and len(slow["per token, S=3000, B=3"]) == 2
    # The program sleeps for so long and a little more.
    assert min(slow["first token, S=3000"]) >= 120 and 16 <= min(fast["first token, S=3000"]) < 120
    assert min(slow["per token, S=1000, B=3"]) >= 29.5 and 3.9 <= min(fast["per token, S=1000, B=3"]) < 29.5


def rests(one, expected):
    """Whether a server is stopped, or running if that is expected; a signal takes a moment."""
    end = time.monotonic() + 5
    while (found := psutil.Process(one.server.pid).status() == psutil.STATUS_STOPPED) != expected:
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return found


def test_servers_rest_while_another_is_asked_and_go_on_afterwards(two, monkeypatch):
    seen = []

    expected = [[False, True], [True, False], [True, False], [False, True], [False, True], [True, False]]

    def ask(client, *_):
        seen.append([rests(one, wanted) for one, wanted in zip(two, expected[len(seen)], strict=True)])
        return {"case": [1.0]}

    monkeypatch.setattr(bench_turns, "ask", ask)
    with bench_turns.side_by_side(two):
        assert all(rests(one, True) for one in two)
        bench_turns.take_turns(two, [1], [1], 8, turns=2)
    # Turns begin with either of them.
    assert seen == expected
    assert not any(rests(one, False) for one in two)


def test_servers_share_their_cores_and_this_process_gets_its_own_back(two, monkeypatch):
    given = []
    monkeypatch.setattr(bench_turns.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(bench_turns.os, "sched_setaffinity", lambda who, cores: given.append((who, list(cores))))
    with bench_turns.side_by_side(two):
        pass
    of_servers = [cores for who, cores in given if who]
    assert len(of_servers) >= 2 and all(cores == [0, 1, 2, 3, 4, 5] for cores in of_servers)
    assert [cores for who, cores in given if not who] == [[6, 7], list(range(8))]


def test_a_server_that_ends_or_refuses_is_out_and_the_others_are_asked(two):
    os.killpg(two[0].server.pid, signal.SIGKILL)
    two[0].server.wait()
    with bench_turns.side_by_side(two):
        bench_turns.take_turns(two, [10], [1], 8, turns=1)
    assert two[0].failed and not two[0].figures
    assert two[1].failed is None and len(two[1].figures["first token, S=10"]) == bench_turns._MOST


@pytest.fixture
def on_stand_ins(monkeypatch):
    """The command on such servers; the built-in takes seven times as long."""
    steps = {"plugin": {"STEP": "0.004"}, "builtin": {"STEP": "0.03"}}
    sides = {side: setting | steps[side] for side, setting in bench_server.SIDES.items()}
    monkeypatch.setattr(bench_server, "SIDES", sides)
    monkeypatch.setattr(bench_server, "plan_launch", lambda *_, **__: launch_at(free_port()))
    monkeypatch.setattr(bench_server, "make_shape", lambda *_: None)
    monkeypatch.setattr(bench_server, "require_gpu", lambda _: None)
    monkeypatch.setattr(bench_server, "stop_with_this_command", lambda: None)
    return sides


def invoke(*options):
    return CliRunner().invoke(
        app, ["bench", "server", "--prompts", "1000", "--concurrency", "2", "--new-tokens", "30", *options]
    )


def test_the_command_compares_both_sides(on_stand_ins, tmp_path):
    out = tmp_path / "figures.json"
    result = invoke("--turns", "2", "--each", "2", "--json", str(out))
    assert result.exit_code == 0, result.output
    runs = json.loads(out.read_text())["runs"]
    assert [(run["side"], run["number"]) for run in runs] == [(s, n) for n in (0, 1) for s in ("plugin", "builtin")]
    assert all(len(values) >= 2 for run in runs for values in run["ms"].values())
    assert "2 servers" in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("│ per token,")]
    assert 3 < float(line.split("│")[-2]) < 10
    # Nothing is left of them.
    assert not [p for p in psutil.process_iter(["cmdline"]) if SERVER in (p.info["cmdline"] or ())]


def test_a_side_that_is_not_what_it_says_is_told_and_makes_the_exit_status(on_stand_ins, tmp_path):
    on_stand_ins["builtin"] |= {"SGLANG_DSA_PLUGIN": "on"}
    out, began = tmp_path / "figures.json", time.monotonic()
    result = invoke("--turns", "1", "--each", "1", "--json", str(out))
    assert result.exit_code == 1 and time.monotonic() - began < 60
    plugin, builtin = json.loads(out.read_text())["runs"]
    assert plugin["ms"] and "does not say that this is the builtin" in builtin["failed"]
