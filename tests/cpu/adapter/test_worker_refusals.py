"""A refusal in a scheduler process becomes the launcher's; all else stays SGLang's, in both processes."""

import multiprocessing
import os
import time

import pytest

from sglang_dsa_plugin.adapter.hooks import worker_refusals
from sglang_dsa_plugin.config import UnsupportedModel
from sglang_dsa_plugin.plan import Refusal

FORK = multiprocessing.get_context("fork")
TEXT = "--quantization fp8: not here; leave the flag out"


@pytest.fixture
def launcher(monkeypatch):
    """This process as a launcher that listens."""
    monkeypatch.setenv(worker_refusals.PLACE, "")
    monkeypatch.setattr(worker_refusals, "_memory", None)
    worker_refusals.listen()
    yield
    os.close(worker_refusals._memory)


def scheduler(error, pipe):
    """A scheduler process as SGLang runs it: what in_worker raises goes to the log, here to the pipe."""

    def build(_self, _server_args, _port_args):
        if error is not None:
            raise error

    try:
        worker_refusals.in_worker(build, object(), "server_args", "port_args")
        pipe.send("ready")
    except Exception as raised:
        pipe.send(f"logged: {raised}")


def started(*errors):
    """Pipes and processes of as many schedulers, each with what its construction raises."""
    readers, processes = [], []
    for error in errors:
        reader, writer = FORK.Pipe(duplex=False)
        process = FORK.Process(target=scheduler, args=(error, writer))
        process.start()
        writer.close()
        readers.append(reader)
        processes.append(process)
    return readers, processes


def wait(readers, _processes):
    """As SGLang waits: for each in turn, to the end."""
    found = []
    for reader in readers:
        while not reader.poll(timeout=5.0):
            pass
        found.append(reader.recv())
    return found


@pytest.mark.parametrize("error", [Refusal(TEXT), UnsupportedModel(TEXT)], ids=["flag", "model"])
def test_a_refusal_is_raised_by_the_launcher_which_ends_its_schedulers(launcher, error):
    readers, processes = started(error)
    with pytest.raises(Refusal) as raised:
        worker_refusals.in_launcher(wait, readers, processes)
    assert str(raised.value) == TEXT
    assert [process.exitcode for process in processes] == [-9]


def test_the_refusal_of_any_rank_is_seen_while_another_is_waited_for(launcher):
    silent, never = FORK.Pipe(duplex=False)
    readers, processes = started(Refusal(TEXT), Refusal(TEXT))
    with pytest.raises(Refusal, match=f"^{TEXT}$"):
        worker_refusals.in_launcher(wait, [silent, *readers], processes)
    never.close()


def test_a_refusal_from_before_the_wait_is_seen(launcher, monkeypatch):
    """Also where the scheduler has gone meanwhile."""
    monkeypatch.setattr(worker_refusals, "_WAITS_S", 0.0)
    readers, processes = started(Refusal(TEXT))
    processes[0].join(10)
    assert processes[0].exitcode == 1
    with pytest.raises(Refusal, match=f"^{TEXT}$"):
        worker_refusals.in_launcher(wait, readers, processes)


def test_what_is_started_next_hears_no_earlier_refusal(launcher):
    """A model of another kind, for whose arguments nobody listens anew."""
    with pytest.raises(Refusal, match=f"^{TEXT}$"):
        worker_refusals.in_launcher(wait, *started(Refusal(TEXT)))
    assert worker_refusals.in_launcher(wait, *started(None)) == ["ready"]


@pytest.mark.parametrize("cut", [1, 5, len("größer".encode())])
def test_half_a_sentence_is_not_told(launcher, cut):
    written = "größer".encode()
    os.pwrite(worker_refusals._memory, written[:cut], 0)
    assert worker_refusals._found() is None
    os.pwrite(worker_refusals._memory, written + b"\0", 0)
    assert worker_refusals._found() == "größer"


def test_other_errors_and_successes_are_left_to_sglang(launcher):
    readers, processes = started(RuntimeError("a fault"), None)
    assert worker_refusals.in_launcher(wait, readers, processes) == ["logged: a fault", "ready"]
    with pytest.raises(RuntimeError, match="Rank 0 scheduler died"):
        worker_refusals.in_launcher(died, readers, processes)


def died(_readers, _processes):
    raise RuntimeError("Rank 0 scheduler died")


@pytest.mark.parametrize("place", ["", f"/proc/{os.getppid()}/fd/0", "/proc/{}/fd/987654"])
def test_where_no_launcher_listens_sglang_is_told(monkeypatch, place):
    """Without a DSA model, below another process than the launcher, and where its memory is gone."""
    monkeypatch.setenv(worker_refusals.PLACE, place.format(os.getpid()))
    monkeypatch.setattr(worker_refusals, "_memory", None)
    readers, processes = started(Refusal(TEXT))
    given = []
    assert worker_refusals.in_launcher(lambda r, p: given.append(r) or wait(r, p), readers, processes) == [
        f"logged: {TEXT}"
    ]
    assert given[0] is readers


def test_an_earlier_launch_of_this_process_is_forgotten(launcher):
    assert worker_refusals._left(TEXT) is False  # this process is not its own launcher
    os.write(worker_refusals._memory, b"of an earlier launch\0")
    assert worker_refusals._found() == "of an earlier launch"
    worker_refusals.listen()
    assert worker_refusals._found() is None


def test_poll_keeps_to_its_time(launcher):
    reader, _writer = FORK.Pipe(duplex=False)
    begun = time.monotonic()
    assert worker_refusals.Reader(reader).poll(0.7) is False
    assert 0.6 < time.monotonic() - begun < 5
