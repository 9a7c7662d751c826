from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from plait.launch import processes
from plait.launch.processes import Guard, Processes, describe, end, exit_status


@pytest.fixture
def cluster(tmp_path):
    made = Processes(tmp_path / "sockets")
    yield made
    made.close()


@pytest.fixture
def start(cluster, tmp_path):
    """Start a process that runs these lines of Python."""
    children = []

    def started(code, environ=None):
        log = tmp_path / f"worker-{len(children)}.log"
        child = cluster.child("worker", len(children), [sys.executable, "-u", "-S", "-c", code], log)
        children.append(child)
        child.start(os.environ if environ is None else environ)
        return child

    yield started
    assert end(children, 0.0, wait=cluster.wait) == []


@pytest.fixture
def code_of(cluster, wait_until):
    """Wait for the end of a process; its code."""

    def wait(child):
        wait_until(lambda: cluster.wait(0.1) or child.code is not None)
        return child.code

    return wait


@pytest.mark.parametrize(
    ("code", "number", "words", "status"),
    [
        ("", 0, "exit code 0", 0),
        ("raise SystemExit(7)", 7, "exit code 7", 7),
        ("import os; os.kill(os.getpid(), 9)", -9, "SIGKILL", 137),
        ("import os; os.kill(os.getpid(), 40)", -40, "signal 40", 168),
    ],
)
def test_how_it_ended(start, code, number, words, status, code_of):
    found = code_of(start(code))
    assert (found, describe(found), exit_status(found)) == (number, words, status)


def test_output_and_errors_go_into_the_log_in_the_order_they_were_written(start, code_of):
    child = start("import sys\nfor i in range(3):\n print('out', i)\n print('err', i, file=sys.stderr)")
    assert code_of(child) == 0
    assert child.log.read_text() == "out 0\nerr 0\nout 1\nerr 1\nout 2\nerr 2\n"


def test_a_restart_appends_a_note_on_a_line_of_its_own(start, code_of):
    child = start("print('unfinished', end='')")
    code_of(child)
    child.start(os.environ, "once more")
    code_of(child)
    text = child.log.read_text()
    assert text == "unfinished\nonce more\nunfinished"
    assert text[child.began :] == "unfinished"


def test_its_environment_is_the_one_given_and_it_reads_nothing(start, code_of):
    child = start("import os, sys; print(os.environ['A'], len(os.environ) < 4, sys.stdin.read())", environ={"A": "b"})
    assert code_of(child) == 0
    assert child.log.read_text() == "b True \n"


def test_it_is_not_in_our_session(start, code_of):
    child = start("import os; print(os.getsid(0) == os.getpid())")
    code_of(child)
    assert child.log.read_text() == "True\n"


GRANDCHILD = """
import subprocess, sys, time
sleeper = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])
print(sleeper.pid)
"""


def pid_in(log, wait_until):
    wait_until(lambda: log.read_text().endswith("\n"))
    return int(log.read_text())


def test_what_it_has_started_dies_with_it(start, wait_until, all_gone, code_of):
    child = start(GRANDCHILD + "sys.exit(3)")
    assert code_of(child) == 3
    all_gone([pid_in(child.log, wait_until)])


def test_what_it_has_started_is_killed_with_it(start, wait_until, all_gone, cluster):
    child = start(GRANDCHILD + "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)")
    pid = pid_in(child.log, wait_until)
    assert end([child], 0.1, wait=cluster.wait) == []
    assert child.code == -9
    all_gone([pid])


def test_sigterm_is_for_the_process_itself_which_may_still_need_its_own(start, wait_until, cluster):
    child = start(
        GRANDCHILD.replace("print(sleeper.pid)", "")
        + "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0 if sleeper.poll() is None else 9))\n"
        "print('ready')\ntime.sleep(60)"
    )
    wait_until(lambda: child.log.read_text() == "ready\n")
    assert end([child], 10.0, wait=cluster.wait) == []
    assert child.code == 0


def test_a_hurry_ends_the_time_of_grace(start, wait_until, cluster):
    child = start("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\ntime.sleep(60)")
    wait_until(lambda: child.log.read_text() == "ready\n")
    begin = time.monotonic()
    assert end([child], 30.0, wait=cluster.wait, hurry=lambda: True) == []
    assert time.monotonic() - begin < 10
    assert child.code == -9


def test_a_stopped_process_is_ended_too(start, cluster):
    child = start("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    assert end([child], 0.2, wait=cluster.wait) == []
    assert child.code in (-9, -15)


def test_waiting_ends_when_the_first_process_ends(start, cluster):
    slow, quick = start("import time; time.sleep(30)"), start("")
    begin = time.monotonic()
    cluster.wait(20.0)
    assert time.monotonic() - begin < 15
    assert quick.code == 0
    assert slow.code is None


def test_processes_are_seen_in_the_order_in_which_they_have_ended(start, cluster, code_of, wait_until):
    children = [start(f"import time; time.sleep({0.6 - 0.2 * index})") for index in range(3)]
    time.sleep(1.5)
    for child in children:
        assert code_of(child) == 0
    assert children[2].ended < children[1].ended < children[0].ended


def test_where_the_system_does_not_wake_us_we_look(monkeypatch, tmp_path, wait_until, cluster):
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    cluster = Processes(tmp_path / "sockets")
    child = cluster.child("worker", 0, [sys.executable, "-S", "-c", "raise SystemExit(4)"], tmp_path / "log")
    child.start(os.environ)
    wait_until(lambda: cluster.wait(5.0) or child.code is not None)
    cluster.close()
    assert child.code == 4


def test_signals_for_one_that_has_ended_go_nowhere(start, code_of):
    child = start("")
    code_of(child)
    child.tell(signal.SIGTERM)
    child.tell(signal.SIGKILL)
    assert child.code == 0


def test_a_process_that_cannot_be_killed_is_named(monkeypatch):
    class Hanging:
        code = None

        def tell(self, number):
            pass

    monkeypatch.setattr(processes, "_GONE_SECONDS", 0.05)
    child = Hanging()
    assert end([child], 0.0, wait=time.sleep) == [child]


def test_the_guard_kills_what_was_not_removed(start, tmp_path, code_of):
    (tmp_path / "other").mkdir()
    child, guard = start("import time; time.sleep(60)"), Guard(tmp_path / "other")
    guard.add(child.pid)
    guard.close()
    assert code_of(child) == -9
    assert not (tmp_path / "other").exists()


def test_a_guard_that_was_killed_is_no_error(cluster, start, code_of):
    cluster._guard._process.kill()
    cluster._guard._process.wait()
    assert code_of(start("")) == 0
