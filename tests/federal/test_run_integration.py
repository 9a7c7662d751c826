from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from plait.federal import supervise
from plait.federal.run import federate, party
from plait.federal.settings import VARIABLES

HEAD = f"""
import os, signal, subprocess, sys, time
from pathlib import Path
here = Path(__file__).parent
role = os.environ[{VARIABLES["role"]!r}]
index, restart = int(os.environ.get("PLAIT_INDEX", 0)), int(os.environ.get("PLAIT_RESTART", 0))
def wait_for(*names):
    until = time.monotonic() + 20
    while not all((here / name).exists() for name in names):
        assert time.monotonic() < until
        time.sleep(0.01)
def starts():
    names = [f"start{{number}}" for number in range(9)]
    number = [(here / name).exists() for name in names].index(False)
    (here / names[number]).touch()
    return number
"""


def wait_until(look, seconds=20.0):
    until = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < until, "it did not come to that in time"
        time.sleep(0.01)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def write(tmp_path):
    def written(body, name="script.py"):
        (tmp_path / name).write_text(HEAD + textwrap.dedent(body))
        return str(tmp_path / name)

    return written


@pytest.fixture
def both(write, tmp_path):
    """Run a leader and a follower of these lines; the exit code, and the lines that were shown."""

    def run(leader, follower, out=None, **options):
        out = io.StringIO() if out is None else out
        options = {"insecure": True, "log_dir": tmp_path / "logs", **options}
        code = federate(write(leader, "leader.py"), write(follower, "follower.py"), out=out, **options)
        return code, out.getvalue().splitlines()

    return run


def of(lines, name):
    """What one party has shown."""
    pairs = [line.partition(" | ") for line in lines]
    return [text for who, bar, text in pairs if bar and who.strip() == name]


# ---- plait party


@pytest.fixture
def one(write, capfd):
    """Run one party of these lines; its exit code, what it has written to each stream."""

    def run(body, *args, **options):
        capfd.readouterr()
        code = party(
            [write(body), *args], role="leader", **({"listen": "a:1"} if "peer" not in options else {}), **options
        )
        streams = capfd.readouterr()
        return code, streams.out.splitlines(), streams.err.splitlines()

    return run


def test_a_party_finds_itself_in_its_environment_and_its_output_passes_through(one, monkeypatch):
    monkeypatch.setenv(VARIABLES["listen"], "here:6")
    monkeypatch.setenv(VARIABLES["job"], "other")
    monkeypatch.setenv("RANK", "1")
    body = f"""
        print(*(os.environ.get(name) for name in {[*VARIABLES.values(), "RANK"]}), sys.argv[1:])
        print("beside", file=sys.stderr)
        sys.exit(3)
    """
    given = {"peer": "far:5", "job": "digits", "timeout": 2.5, "certs": Path("there"), "insecure": True}
    code, out, err = one(body, "--role", "mine", **given)
    assert list(VARIABLES) == ["role", "listen", "peer", "job", "certs", "insecure", "timeout"]
    assert out == ["leader None far:5 digits there 1 2.5 1 ['--role', 'mine']"]
    assert err == ["beside"]
    assert code == 3


def test_what_is_not_given_may_stand_in_the_environment(one, monkeypatch):
    monkeypatch.setenv(VARIABLES["certs"], "there")
    _, out, _ = one(f"print(os.environ[{VARIABLES['certs']!r}], {VARIABLES['job']!r} in os.environ)")
    assert out == ["there False"]


KILLED = """
    number = starts()
    print("start", number)
    if number < 2:
        os.kill(os.getpid(), signal.SIGKILL) if number else sys.exit(75)
    sys.exit(4)
"""


def test_a_party_that_is_killed_is_started_again(one):
    code, out, err = one(KILLED)
    assert out == ["start 0", "start 1", "start 2"]
    causes = ["1 of 3: the leader ended with exit code 75", "2 of 3: the leader ended with SIGKILL"]
    assert err == [f"plait party: restart {cause}" for cause in causes]
    assert code == 4


def test_a_partys_restarts_are_used_up(one):
    code, out, _ = one(KILLED, restarts=1)
    assert out == ["start 0", "start 1"]
    assert code == 128 + signal.SIGKILL


LISTENS = """
    def heard(number, frame):
        print("heard", signal.Signals(number).name)
        sys.exit(0 if number == signal.SIGTERM else 9)
    signal.signal(signal.SIGTERM, heard)
    signal.signal(signal.SIGINT, heard)
    sleeper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    (here / "new").write_text(f"{os.getpid()} {sleeper.pid}")
    (here / "new").rename(here / "ready")
    time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 9)])
def test_signals_go_on_to_the_script_and_nothing_is_left_behind(one, tmp_path, number, code):
    def later():
        wait_until((tmp_path / "ready").exists)
        os.kill(os.getpid(), number)

    killer = threading.Thread(target=later)
    killer.start()
    found = one(LISTENS)
    killer.join()
    assert found == (code, [f"heard {number.name}"], [])
    pids = [int(pid) for pid in (tmp_path / "ready").read_text().split()]
    wait_until(lambda: not any(map(is_running, pids)), 5)


def test_kill_9_of_plait_party_leaves_nothing(write, tmp_path):
    program = "import sys; from plait.federal.run import party; party(sys.argv[1:], role='leader', listen='a:1')"
    launcher = subprocess.Popen([sys.executable, "-c", program, write(LISTENS)])
    try:
        wait_until((tmp_path / "ready").exists, 60)
    finally:
        launcher.kill()
        launcher.wait()
    pids = [int(pid) for pid in (tmp_path / "ready").read_text().split()]
    wait_until(lambda: not any(map(is_running, pids)), 5)


# ---- plait federate


def test_both_parties_are_shown_and_kept_in_logs(both, tmp_path):
    body = "print('I am the', role, sys.argv[1:]); print('beside', file=sys.stderr)"
    code, lines = both(body, body, args=["--x", "1"])
    assert code == 0
    assert lines[0] == f"plait federate: leader and follower, logs in {tmp_path / 'logs'}"
    for role in ("leader", "follower"):
        said = [f"I am the {role} ['--x', '1']", "beside"]
        assert of(lines, role) == said
        assert (tmp_path / "logs" / f"{role}.log").read_text().splitlines() == said


MEET = """
    import socket, ssl
    from plait.federal.settings import Party, split_endpoint
    me = Party.find()
    certs = Path(me.certs)
    assert not me.insecure and certs.parent.stat().st_mode & 0o777 == 0o700
    purpose = ssl.PROTOCOL_TLS_SERVER if me.listen else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(purpose)
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.load_verify_locations(certs / "ca.pem")
    context.load_cert_chain(certs / f"{role}.pem", certs / f"{role}.key")
    where = split_endpoint("endpoint", me.of_worker(index).endpoint)
    if me.listen:
        server = socket.create_server(where)
        (here / f"listens{index}").touch()
        plain, _ = server.accept()
    else:
        wait_for(f"listens{index}")
        plain = socket.create_connection(where)
    with context.wrap_socket(plain, server_side=bool(me.listen)) as line:
        line.sendall(f"{role} {index}".encode())
        print("met", line.recv(100).decode(), "certs in", certs)
"""
PLACE = """
    from plait.cluster.roles import find_role
    place = find_role()
    print(role, place.kind, place.index, place.workers, place.servers)
"""


def test_they_meet_over_mutual_tls_with_certificates_of_this_run_alone(both):
    code, lines = both(MEET, MEET, insecure=False)
    assert code == 0, lines
    assert of(lines, "leader")[0].startswith("met follower 0")
    assert of(lines, "follower")[0].startswith("met leader 0")
    assert not Path(of(lines, "leader")[0].partition("certs in ")[2]).parent.exists()


def test_workers_meet_in_pairs_and_know_their_place_in_the_cluster(both, tmp_path):
    code, lines = both(MEET + PLACE, MEET, insecure=False, workers=2)
    assert code == 0, lines
    for index in range(2):
        met, place = of(lines, f"leader {index}")
        assert met.startswith(f"met follower {index} ")
        assert place == f"leader worker {index} 2 0"
    names = ["follower-0.log", "follower-1.log", "leader-0.log", "leader-1.log"]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == names


def test_given_certificates_are_used(both, tmp_path):
    body = f"print(os.environ[{VARIABLES['certs']!r}])"
    _, lines = both(body, body, insecure=False, certs=tmp_path / "mine")
    assert of(lines, "leader") == of(lines, "follower") == [str(tmp_path / "mine")]


def test_a_killed_party_is_started_again_while_the_other_waits(both):
    follower = """
        print("start", restart)
        (here / f"follower{restart}").touch()
        if restart < 2:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    code, lines = both("wait_for('follower2'); print('done', restart)", follower)
    assert code == 0, lines
    assert of(lines, "leader") == ["done 0"]
    note = "plait federate: restart {} of 3: the follower ended with SIGKILL"
    assert of(lines, "follower") == ["start 0", note.format(1), "start 1", note.format(2), "start 2"]


def test_a_party_of_workers_is_started_again_as_a_whole(both):
    leader = """
        print("start", restart)
        (here / f"leader{index}-{restart}").touch()
        if restart == 0:
            wait_for("leader0-0", "leader1-0")
            os.kill(os.getpid(), signal.SIGKILL) if index == 1 else time.sleep(60)
    """
    code, lines = both(leader, "wait_for('leader0-1', 'leader1-1'); print('done', restart)", workers=2)
    assert code == 0, lines
    assert of(lines, "leader 0")[::2] == of(lines, "leader 1")[::2] == ["start 0", "start 1"]
    assert of(lines, "follower 0") == of(lines, "follower 1") == ["done 0"]


def test_an_error_of_one_ends_the_other_and_its_last_words_are_shown(both, tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "LAST_SECONDS", 0.3)
    begin = time.monotonic()
    code, lines = both("wait_for('there'); raise RuntimeError('no luck')", "(here / 'there').touch(); time.sleep(60)")
    assert time.monotonic() - begin < 10
    assert code == 1
    at = lines.index("plait federate: the leader failed first: exit code 1. Its last lines:")
    assert lines[-2:] == ["    RuntimeError: no luck", f"plait federate: its log: {tmp_path / 'logs' / 'leader.log'}"]
    assert of(lines[:at], "leader")[-1] == "RuntimeError: no luck"


def test_the_other_may_end_by_itself_and_is_not_blamed(both):
    leader = "(here / 'failed').touch(); sys.exit(3)"
    follower = """
        wait_for("failed")
        time.sleep(0.3)
        print("the leader has failed")
        sys.exit(1)
    """
    code, lines = both(leader, follower)
    assert code == 3
    assert of(lines, "follower") == ["the leader has failed"]
    assert "plait federate: the leader failed first: exit code 3. Its last lines:" in lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_both(both, tmp_path, number):
    def later():
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
        os.kill(os.getpid(), number)

    killer = threading.Thread(target=later)
    killer.start()
    body = "signal.signal(signal.SIGINT, signal.SIG_DFL); (here / f'ready-{role}').touch(); time.sleep(60)"
    code, lines = both(body, body)
    killer.join()
    assert code == 128 + number
    assert lines[-1] == f"plait federate: {number.name}: ending both parties"


def test_kill_9_of_plait_federate_leaves_nothing(write, tmp_path):
    body = f"""
        sleeper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        (here / f"new-{{role}}").write_text(f"{{os.getpid()}} {{sleeper.pid}} {{os.environ[{VARIABLES["certs"]!r}]}}")
        (here / f"new-{{role}}").rename(here / role)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    """
    program = "import sys; from plait.federal.run import federate; federate(*sys.argv[1:3], log_dir=sys.argv[3])"
    scripts = [write(body, "leader.py"), write(body, "follower.py")]
    command = [sys.executable, "-c", program, *scripts, str(tmp_path / "logs")]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        files = [tmp_path / "leader", tmp_path / "follower"]
        wait_until(lambda: all(file.exists() for file in files), 60)
    finally:
        launcher.kill()
        launcher.wait()
    facts = [file.read_text().split() for file in files]
    wait_until(lambda: not any(is_running(int(pid)) for fact in facts for pid in fact[:2]), 5)
    wait_until(lambda: not Path(facts[0][2]).exists(), 5)


def test_in_a_terminal_both_parties_stand_side_by_side(both, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    code, _ = both("print('hello from', role)", "print('hello from', role)", out=out)
    assert code == 0
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())[-3500:]
    line = next(line for line in last.splitlines()[::-1] if "hello" in line)
    assert line.index("hello from leader") < 60 < line.index("hello from follower")
    assert "leader: ended well" in last
