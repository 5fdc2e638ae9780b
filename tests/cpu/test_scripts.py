"""The two commands, as far as they need no server: syntax, usage, set-up decisions, arguments, messages."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dsa_plugin.tools import serve, serve_wait
from sglang_dsa_plugin.tools.serve_plan import PORT, Failure, Launch, plan_launch, split_arguments, value_of

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))


def bash(*command, **options):
    return subprocess.run(["bash", *map(str, command)], capture_output=True, text=True, timeout=60, **options)


# The shell scripts


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda p: p.name)
def test_syntax(script):
    result = bash("-n", script)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name", ["serve.sh", "test.sh"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_prints_usage_from_anywhere_and_sets_nothing_up(name, flag, tmp_path):
    result = subprocess.run(
        [ROOT / "scripts" / name, "-x", flag], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert result.returncode == 0
    assert result.stdout.startswith(f"usage: scripts/{name}")
    assert result.stderr == ""


def test_no_process_is_ended_by_name():
    for script in SCRIPTS:
        assert not re.search(r"\b(pkill|killall)\b", script.read_text())


@pytest.fixture
def checkout(tmp_path):
    """A checkout in a path with a space, with an environment whose pip only notes that it was called."""
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    (root / "scripts" / "common.sh").write_text((ROOT / "scripts" / "common.sh").read_text())
    (root / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"""#!/usr/bin/env bash
if [[ "$1 $2 $3" == "-m pip install" ]]; then
    printf '%s\\n' "${{@: -1}}" >>"{tmp_path}/pip.calls"
    echo "Collecting torch"
    [[ -z ${{PIP_BREAKS:-}} ]] || {{ echo "ERROR: no route to host"; exit 1; }}
    echo "Successfully installed x"
    exit 0
fi
exec "{sys.executable}" "$@"
"""
    )
    python.chmod(0o755)
    return root


def set_up(root, extras="", **env):
    return bash(
        "-c", f"set -euo pipefail; source scripts/common.sh; setup {extras}", cwd=root, env={**os.environ, **env}
    )


def pip_calls(root):
    calls = root.parent / "pip.calls"
    return calls.read_text().splitlines() if calls.exists() else []


def test_second_setup_skips_pip_and_extras_include_the_base(checkout):
    assert set_up(checkout, "test").returncode == 0
    assert pip_calls(checkout) == [f"{checkout}[test]"]
    set_up(checkout, "test")
    set_up(checkout)
    assert len(pip_calls(checkout)) == 1


def test_setup_without_extras_is_not_enough_for_the_tests(checkout):
    set_up(checkout)
    set_up(checkout, "test")
    assert pip_calls(checkout) == [str(checkout), f"{checkout}[test]"]


def test_changed_pyproject_and_moved_checkout_install_again(checkout):
    set_up(checkout)
    (checkout / "pyproject.toml").write_text("[project]\nname = 'y'\n")
    set_up(checkout)
    assert len(pip_calls(checkout)) == 2
    moved = checkout.rename(checkout.with_name("moved checkout"))
    set_up(moved)
    assert pip_calls(moved) == [str(checkout), str(checkout), str(moved)]


def test_failed_install_says_so_and_leaves_no_stamp(checkout):
    set_up(checkout)
    (checkout / "pyproject.toml").write_text("[project]\nname = 'z'\n")
    result = set_up(checkout, PIP_BREAKS="yes")
    assert result.returncode == 1
    assert "ERROR: no route to host" in result.stderr
    assert "error: pip could not install the project" in result.stderr
    assert not list((checkout / ".venv").glob(".installed-*"))
    assert set_up(checkout).returncode == 0
    assert len(pip_calls(checkout)) == 3


def test_setup_releases_its_lock_before_what_comes_next(checkout):
    result = bash("-c", "source scripts/common.sh; setup; exec flock -n .setup.lock true", cwd=checkout)
    assert result.returncode == 0


# Arguments


def arguments_of(launch):
    """The words after `-m sglang.launch_server`."""
    return launch.command[launch.command.index("sglang.launch_server") + 1 :]


def plan(*arguments, on_cpu=True):
    return plan_launch(list(arguments), on_cpu=on_cpu, tiny_model=Path("/somewhere/.models/tiny"))


def test_without_arguments_everything_needed_is_added():
    launch = plan()
    words = arguments_of(launch)
    assert launch.command[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert value_of(words, "--model-path") == "/somewhere/.models/tiny"
    assert value_of(words, "--port") == str(launch.port)
    assert value_of(words, "--max-total-tokens") == "32768"
    assert value_of(words, "--max-running-requests") == "16"
    assert words.count("--sleep-on-idle") == 1
    assert launch.url == f"http://127.0.0.1:{launch.port}"


@pytest.mark.parametrize("form", [["--max-total-tokens", "512"], ["--max-total-tokens=512"]])
def test_users_values_win_over_the_defaults_of_a_cpu(form):
    words = arguments_of(plan(*form))
    assert value_of(words, "--max-total-tokens") == "512"
    assert sum(word.startswith("--max-total-tokens") for word in words) == 1
    assert value_of(words, "--max-running-requests") == "16"


def test_a_switch_is_added_once_and_not_against_a_config_file(tmp_path):
    assert arguments_of(plan("--sleep-on-idle")).count("--sleep-on-idle") == 1
    config = tmp_path / "server.yaml"
    config.write_text("sleep-on-idle: false\n")
    assert "--sleep-on-idle" not in arguments_of(plan("--config", str(config)))


def test_a_gpu_gets_no_defaults_of_a_cpu():
    launch = plan("--model", "m", on_cpu=False)
    assert not [word for word in arguments_of(launch) if word.startswith(("--max-", "--sleep-"))]
    assert all(note.startswith((f"port {PORT}", "no folder m here")) for note in launch.notes)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("words", [[], ["--model", "m"], ["--prefill-attention-backend", "dsa"]])
def test_no_flag_is_added_that_a_model_without_dsa_is_refused_for(words, on_cpu):
    """A DSA model gets the backend unasked (tests/cpu/adapter)."""
    assert not any(word.startswith("--attention-backend") for word in arguments_of(plan(*words, on_cpu=on_cpu)))
    assert value_of(arguments_of(plan("--attention-backend", "triton")), "--attention-backend") == "triton"


@pytest.mark.parametrize("form", [["--model", "a b"], ["--model-path", "a b"], ["--model=a b"], ["--model-path=a b"]])
def test_given_model_is_passed_on_and_no_small_one_asked_for(form):
    words = arguments_of(plan(*form))
    assert words[: len(form)] == form
    assert not any("tiny" in word for word in words)


def test_smoke_is_ours_and_the_rest_is_sglangs():
    assert split_arguments(["--smoke", "--tp-size", "2"]) == (True, ["--tp-size", "2"])
    assert split_arguments(["--tp-size", "2"]) == (False, ["--tp-size", "2"])


def test_values_in_a_config_file_count_as_given(tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text("model-path: some/model\nmax_total_tokens: 4096\nhost: 0.0.0.0\nattention-backend: dsa\n")
    launch = plan("--config", str(config))
    words = arguments_of(launch)
    assert words[:2] == ["--config", str(config)]
    assert "--model-path" not in words
    assert "--max-total-tokens" not in words
    assert launch.url.startswith("http://127.0.0.1:")
    assert value_of(words, "--max-running-requests") == "16"


@pytest.mark.parametrize("content", [None, "- a list\n", "key: [unclosed\n"])
def test_unreadable_config_file_is_named(tmp_path, content):
    config = tmp_path / "bad.yaml"
    if content is not None:
        config.write_text(content)
    with pytest.raises(Failure, match=r"bad\.yaml"):
        plan("--config", str(config))


@pytest.mark.parametrize("flag", ["--model", "--model-path"])
def test_a_model_that_is_not_there_is_said_at_once(flag, tmp_path):
    with pytest.raises(Failure, match=f"--model {tmp_path}/none is not there: give a folder"):
        plan(flag, f"{tmp_path}/none")
    launch = plan(flag, "some/name")
    assert "some/name" in launch.command
    assert launch.model_note == "no folder some/name here: taken as a Hugging Face name"
    assert launch.model_note in launch.notes


def test_a_name_taken_for_one_on_hugging_face_is_told_again_with_the_failure(tmp_path):
    log = tmp_path / "serve.log"
    log.write_text("Traceback (most recent call last):\nOSError: cannot connect\n")
    for model, last in (("mine", "no folder mine here: taken as a Hugging Face name"), ("s3://mine", "OSError: c")):
        assert serve_wait.died(1, log, plan("--model", model)).splitlines()[-1].strip().startswith(last)


def test_half_a_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(Failure, match=f"--model {tmp_path} is a folder without config.json"):
        plan("--model", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Failure, match=rf"--model {tmp_path} is a folder without \*\.safetensors"):
        plan("--model", str(tmp_path))
    assert plan("--model", str(tmp_path), "--load-format", "dummy").model_note is None
    (tmp_path / "model-00001-of-00001.safetensors").touch()
    launch = plan("--model", str(tmp_path))
    assert str(tmp_path) in launch.command and launch.model_note is None
    (tmp_path / "config.json").rename(tmp_path / "params.json")  # Mistral's own format
    assert str(tmp_path) in plan("--model", str(tmp_path)).command


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
@pytest.mark.parametrize("port", [[], ["--port", "31234"]])
def test_an_address_of_no_machine_is_refused_by_its_flag(host, port):
    """Of the ranges kept for documentation (RFC 5737, RFC 3849)."""
    with pytest.raises(Failure, match=f"--host {host} is not an address of this machine"):
        plan("--host", host, *port)


def test_taken_port_is_an_error_when_asked_for_and_avoided_when_not(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Failure, match=f"--port {port} is taken"):
            plan("--port", str(port))
        monkeypatch.setattr("sglang_dsa_plugin.tools.serve_plan.PORT", port)
        launch = plan()
    assert launch.port != port
    assert f"port {port} is taken: using {launch.port}" in launch.notes


def test_a_port_where_another_server_is_starting_is_left_to_it(tmp_path, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    monkeypatch.setattr("sglang_dsa_plugin.tools.serve_plan.PORT", free)
    first, second = serve.Ports(tmp_path), serve.Ports(tmp_path)
    tiny = Path("/somewhere/.models/tiny")
    assert plan_launch([], on_cpu=True, tiny_model=tiny, claim=first.claim).port == free
    launch = plan_launch([], on_cpu=True, tiny_model=tiny, claim=second.claim)
    assert launch.port != free and f"port {free} is taken: using {launch.port}" in launch.notes
    with pytest.raises(Failure, match=f"--port {free}: another server of this checkout is starting"):
        plan_launch(["--port", str(free)], on_cpu=True, tiny_model=tiny, claim=second.claim)


@pytest.mark.parametrize("port", ["none", "0", "65536"])
def test_a_port_that_is_no_port_is_refused(port):
    with pytest.raises(Failure, match=f"--port {port} is not a port number"):
        plan("--port", port)


@pytest.mark.parametrize("words", [["--port"], ["--port", "--smoke"], ["--model"]])
def test_flag_without_its_value_is_named(words):
    with pytest.raises(Failure, match=f"{words[0]} needs a value"):
        plan(*words)


def test_what_to_paste_reaches_this_machine():
    launch = Launch([], "::", 8000, "https", "secret", ())
    text = serve.how_to_ask(launch)
    assert "ready: https://[::1]:8000" in text
    assert "curl -k https://[::1]:8000/v1/chat/completions" in text
    assert "secret" not in text
    assert subprocess.run(["bash", "-n"], input=text.partition("\n\n")[2], text=True).returncode == 0


# What a server that ended is reported to have died of


def test_cause_of_death_is_the_exception_and_not_the_noise(tmp_path):
    log = tmp_path / "serve.log"
    log.write_text(
        "INFO: fine so far\nTraceback (most recent call last):\n  File 'x.py', line 1, in f\n    g()\n"
        "ValueError: 300 MiB are left for the KV cache, lower it\n[2030-01-01] Killed: later\n"
    )
    told = serve_wait.died(1, log)
    assert told.splitlines() == [
        f"the server ended with status 1; its log: {log}",
        "  ValueError: 300 MiB are left for the KV cache, lower it",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "sglang-dsa-plugin could not start: sglang 0.7.1 is outside the supported range <0.6,>=0.5.23; install "
        "sglang==0.5.23 (sglang 0.7.1 installed, 0.5.23 tested; remedy: pip install sglang==0.5.23). The server does",
        "sglang-dsa-plugin: error: --page-size 32 cannot be served for a DSA model",
        "sglang-dsa-plugin: error: SGLANG_DSA_PLUGIN='yes' is not allowed; use one of on, off",
        "launch_server.py: error: unrecognized arguments: --nonsense",
        "sglang serve: error: unrecognized arguments: --nonsense",
    ],
)
def test_launcher_that_speaks_without_a_traceback_is_heard(tmp_path, line):
    log = tmp_path / "serve.log"
    log.write_text(f"usage: ...\n{line}\n" + "trailing noise\n" * 40)
    assert serve_wait.died(2, log).splitlines()[1:] == [f"  {line}"]


def test_without_an_exception_the_last_lines_are_shown(tmp_path):
    log = tmp_path / "serve.log"
    log.write_text("".join(f"line {i}\n" for i in range(50)))
    assert serve_wait.died(-9, log).splitlines()[1:] == [f"  line {i}" for i in range(30, 50)]


def test_progress_shows_what_sglang_logged_last(tmp_path):
    log = tmp_path / "serve.log"
    log.write_text("/a/b.py:1: UserWarning: noise\n")
    assert serve_wait._last_line(log) == "importing SGLang"
    log.write_text("[2030-01-01 10:00:00] Load weight begin. avail mem=1 GB\n/a/b.py:1: UserWarning: noise\n  warn\n")
    assert serve_wait._last_line(log) == "Load weight begin. avail mem=1 GB"


# Starting and stopping


def test_the_whole_process_group_ends_with_the_server(tmp_path):
    """A launcher that ignores SIGTERM's default and leaves a child behind, as a crashed one would."""
    child = "import time; time.sleep(600)"
    code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid, flush=True)"
    script = (
        "import sys\nsys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nfrom sglang_dsa_plugin.tools import serve\n"
        "from sglang_dsa_plugin.tools.serve_plan import Launch\nimport time\n"
        f"launch = Launch([sys.executable, '-c', {code + '; p.wait()'!r}], '127.0.0.1', 1, 'http', None, ())\n"
        "log = Path(sys.argv[2])\n"
        "with serve.running(launch, log):\n"
        "    while not log.read_text().strip(): time.sleep(0.05)\n"
    )
    log = tmp_path / "logs" / "serve.log"
    result = subprocess.run([sys.executable, "-c", script, str(ROOT), str(log)], capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr
    pid = int(log.read_text())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1]


def test_server_that_dies_at_once_is_reported_with_its_log(tmp_path):
    launch = Launch([sys.executable, "-c", "raise ValueError('no such model')"], "127.0.0.1", 1, "http", None, ())
    log = tmp_path / "serve.log"
    with log.open("wb") as output:
        server = subprocess.Popen(launch.command, stdout=output, stderr=subprocess.STDOUT)
        with pytest.raises(Failure, match=r"ended with status 1.*\n  ValueError: no such model"):
            serve_wait.wait_ready(server, launch, log, limit_s=30)
