from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.launch import run, supervise


def of(lines, name):
    """What one process has shown."""
    return [line.removeprefix(f"[{name}] ") for line in lines if line.startswith(f"[{name}] ")]


def test_lines_are_shown_with_names_and_kept_in_logs(launch, tmp_path):
    code, lines = launch("print('first', kind, index, sys.argv[1:]); print('second', file=sys.stderr)", "--x", "1")
    assert code == 0
    assert lines[0] == f"plait launch: 2 processes, logs in {tmp_path / 'logs'}"
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["worker-0.log", "worker-1.log"]
    for index in range(2):
        said = [f"first worker {index} ['--x', '1']", "second"]
        assert of(lines, f"worker {index}") == said
        assert (tmp_path / "logs" / f"worker-{index}.log").read_text().splitlines() == said


ROLES = """
    from plait.cluster.roles import find_role
    role = find_role()
    print(role.kind, role.index, role.workers, role.servers, role.is_chief, role.restart)
    print(role.server_endpoints, role.master, oct(Path(os.environ["PLAIT_SOCKETS"]).stat().st_mode & 0o777))
"""


def test_every_process_finds_its_role(launch):
    code, lines = launch(ROLES, workers=1, servers=1)
    assert code == 0, lines
    assert of(lines, "worker 0")[0] == "worker 0 1 1 True 0"
    assert of(lines, "server 0")[0] == "server 0 1 1 False 0"
    assert of(lines, "worker 0")[1] == of(lines, "server 0")[1]
    assert re.fullmatch(r"\('127.0.0.1:\d+',\) None 0o700", of(lines, "server 0")[1])


def test_ports_may_be_chosen(launch):
    body = "print(os.environ.get('PLAIT_SERVER_ENDPOINTS'), os.environ.get('PLAIT_MASTER'))"
    _, lines = launch(body, workers=1, servers=2, port=4567)
    assert of(lines, "worker 0") == ["127.0.0.1:4567,127.0.0.1:4568 None"]
    _, lines = launch(body, workers=1, port=4567)
    assert of(lines, "worker 0") == ["None 127.0.0.1:4567"]


def test_the_environment_may_be_given(launch):
    _, lines = launch("print(os.environ['GIVEN'], 'RANK' in os.environ)", workers=1, environ={"GIVEN": "1"})
    assert of(lines, "worker 0") == ["1 True"]


def test_nothing_is_left_in_the_temporary_directory(launch):
    _, lines = launch("print(os.environ['PLAIT_SOCKETS'])", workers=1)
    directory = Path(of(lines, "worker 0")[0])
    assert directory.parent == Path(tempfile.gettempdir())
    assert not directory.exists()


def test_the_exit_code_and_the_last_words_are_those_of_the_worker_that_died(launch, tmp_path):
    code, lines = launch("""
        print(*range(30), sep="\\n")
        if index == 1:
            raise SystemExit(7)
        time.sleep(60)
    """)
    assert code == 7
    log = tmp_path / "logs" / "worker-1.log"
    report = ["plait launch: worker 1 failed first: exit code 7. Its last lines:"]
    report += [f"    {number}" for number in range(10, 30)]
    assert lines[-22:] == [*report, f"plait launch: its log: {log}"]


def test_a_worker_killed_by_a_signal(launch):
    code, lines = launch("os.kill(os.getpid(), signal.SIGSEGV) if index == 0 else time.sleep(60)")
    assert code == 128 + signal.SIGSEGV
    assert "plait launch: worker 0 failed first: SIGSEGV. Its last lines:" in lines


def test_an_exception_is_shown_twice_where_it_happened_and_at_the_end(launch):
    code, lines = launch("raise RuntimeError('no luck')", workers=1)
    assert code == 1
    assert lines.count("[worker 0] RuntimeError: no luck") == lines.count("    RuntimeError: no luck") == 1


def test_the_first_that_failed_is_named_not_the_one_that_fell_over_it(launch, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    code, lines = launch("""
        end = os.open(here / "pipe", os.O_WRONLY if index == 1 else os.O_RDONLY)
        if index == 0:
            os.read(end, 1)  # until worker 1 is gone
        raise SystemExit(20 + index)
    """)
    assert code == 21, lines


GROUP = """
    print("attempt", restart, os.environ["PLAIT_MASTER"])
    (here / f"{index}-{restart}").touch()
    while restart < 2 and (index == 0 or not (here / f"0-{restart}").exists()):
        time.sleep(0.01)
    raise SystemExit(5 if restart < 2 else 0)
"""


def test_a_group_is_started_again_as_a_whole_and_meets_elsewhere(launch, tmp_path):
    code, lines = launch(GROUP, max_restarts=2)
    assert code == 0, lines
    found = of(lines, "worker 0")
    assert [line.split()[:2] for line in found[::2]] == [["attempt", str(number)] for number in range(3)]
    assert found[1] == "plait launch: restart 1 of 2: worker 1 ended with exit code 5"
    assert len({line.split()[2] for line in found[::2]}) == 3
    assert (tmp_path / "logs" / "worker-0.log").read_text().splitlines() == found


def test_the_groups_restarts_are_used_up(launch):
    code, lines = launch(GROUP, max_restarts=1)
    assert code == 5
    assert [line.split()[1] for line in of(lines, "worker 0")[::2]] == ["0", "1"]


def test_with_servers_each_process_is_started_again_by_itself(launch):
    code, lines = launch(
        """
        print("start", restart)
        (here / f"{kind}{index}-{restart}").touch()
        if restart == 0 and (kind, index) in [("worker", 1), ("server", 0)]:
            os.kill(os.getpid(), signal.SIGKILL)
        while not ((here / "worker1-1").exists() and (here / "server0-1").exists()):
            time.sleep(0.01)
        """,
        servers=2,
        max_restarts=1,
    )
    assert code == 0, lines
    starts = {name: of(lines, name) for name in ("worker 0", "worker 1", "server 0", "server 1")}
    again = ["start 0", "plait launch: restart 1 of 1: {} ended with SIGKILL", "start 1"]
    assert starts == {
        "worker 0": ["start 0"],
        "worker 1": [again[0], again[1].format("worker 1"), again[2]],
        "server 0": [again[0], again[1].format("server 0"), again[2]],
        "server 1": ["start 0"],
    }


def test_a_server_that_dies_too_often_ends_all(launch):
    code, lines = launch("raise SystemExit(9) if kind == 'server' else time.sleep(60)", servers=1, max_restarts=1)
    assert code == 9
    assert "plait launch: server 0 failed first: exit code 9. Its last lines:" in lines


def test_servers_that_do_not_end_are_ended(launch, monkeypatch):
    monkeypatch.setattr(supervise, "SERVER_SECONDS", 0.3)
    code, lines = launch("time.sleep(60 if kind == 'server' else 0)", servers=1)
    assert code == 0
    assert lines[-1] == "plait launch: server 0: told to end 0.3 s after the last worker"


def test_modules_run_as_with_python(tmp_path, monkeypatch, capsys):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    assert run(["-m", "package.module", "-m", "1"], workers=1) == 0
    assert capsys.readouterr().out.splitlines()[1] == "[worker 0] __main__ package ['-m', '1']"
    assert len(list(tmp_path.glob(f"plait-logs/*-{os.getpid()}/worker-0.log"))) == 1


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ([], {}, "no script"),
        (["missing.py"], {}, "the script missing.py does not exist in "),
        (["-m", "no_such_module.at_all"], {}, "-m no_such_module.at_all: no such module"),
        (["-m"], {}, "-m : no such module"),
        (["--server", "1"], {}, "--server: not an option of plait launch; options stand before the script"),
        ([__file__], {"workers": 0}, "workers=0: write a whole number from 1 on"),
        ([__file__], {"servers": -1}, "servers=-1: write a whole number from 0 on"),
        ([__file__], {"max_restarts": -1}, "max_restarts=-1: write"),
        ([__file__], {"port": 65535}, "port=65535: write a number from 1 to 65534"),
        ([__file__], {"log_dir": __file__}, "cannot be made: File exists; name another directory"),
    ],
)
def test_what_cannot_be_launched_is_said_at_once(command, options, words):
    out = io.StringIO()
    with pytest.raises(ConfigError, match=re.escape(words)):
        run(command, **{"workers": 2, "log_dir": "nowhere", **options}, out=out)
    assert out.getvalue() == ""
    assert not Path("nowhere").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_the_launcher_ends_all(launch, tmp_path, wait_until, number):
    def later():
        wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2)
        os.kill(os.getpid(), number)

    killer = threading.Thread(target=later)
    killer.start()
    begin = time.monotonic()
    code, lines = launch("(here / f'ready{index}').touch(); time.sleep(60)", max_restarts=3)
    killer.join()
    assert code == 128 + number
    assert time.monotonic() - begin < 10
    assert lines[-1] == f"plait launch: {number.name}: ending all processes"


def test_in_a_thread(launch):
    found = []
    thread = threading.Thread(target=lambda: found.append(launch("print('here')", workers=1)))
    thread.start()
    thread.join(20)
    assert found[0][0] == 0


def test_a_fast_writer_is_not_slowed_much_and_nothing_is_lost(launch, tmp_path):
    code, lines = launch(
        """
        begin = time.perf_counter()
        for _ in range(100):
            sys.stdout.write("a line of a rather usual length, written without a pause\\n" * 1000)
            sys.stdout.flush()
        print(time.perf_counter() - begin)
        """,
        workers=1,
    )
    assert code == 0
    assert len(lines) == 1 + 100_000 + 1
    assert float(of(lines, "worker 0")[-1]) < 2.0


@pytest.mark.slow
def test_a_script_for_torchrun_survives_kill_9_of_a_worker(launch):
    """The group that is left has to be ended, and the new one to meet where nobody of the old one is."""
    code, lines = launch(
        """
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        for step in range(5):
            if (restart, step, index) in [(0, 3, 1), (1, 2, 0)]:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(total)
        print(total.item())
        dist.destroy_process_group()
        """,
        max_restarts=2,
    )
    assert code == 0, lines
    assert of(lines, "worker 0")[-1] == of(lines, "worker 1")[-1] == "32.0"
    causes = [line.partition(": restart ")[2] for line in of(lines, "worker 1") if "restart" in line]
    assert causes == ["1 of 2: worker 1 ended with SIGKILL", "2 of 2: worker 0 ended with SIGKILL"]


COMMAND = [sys.executable, "-c", "from plait.cli import main; main()", "launch"]
FAMILY = """
    sleeper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    new = here / f"new-{kind}{index}"
    new.write_text(f"{os.getpid()} {sleeper.pid} {os.environ['PLAIT_SOCKETS']}")
    new.rename(here / f"{kind}{index}")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
"""


def test_kill_9_of_the_launcher_leaves_nothing(write_script, tmp_path, wait_until, all_gone):
    command = [*COMMAND, "--workers", "2", "--servers", "1", "--log-dir", str(tmp_path / "logs"), write_script(FAMILY)]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        files = [tmp_path / name for name in ("worker0", "worker1", "server0")]
        wait_until(lambda: all(file.exists() for file in files), seconds=60)
    finally:
        launcher.kill()
        launcher.wait()
    facts = [file.read_text().split() for file in files]
    all_gone([int(pid) for fact in facts for pid in fact[:2]])
    wait_until(lambda: not Path(facts[0][2]).exists())


def test_the_command_ends_with_the_code_of_the_worker_that_died(write_script, tmp_path):
    script = write_script("print(sys.argv[1:]); sys.exit(42 if index == 1 else 0)")
    options = ["--workers", "2", "--max-restarts", "0", "--log-dir", str(tmp_path / "logs")]
    done = subprocess.run(
        [*COMMAND, *options, script, "--workers", "9"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 42
    assert "[worker 1] ['--workers', '9']\n" in done.stdout
    assert "worker 1 failed first: exit code 42" in done.stdout
    assert done.stderr == ""
