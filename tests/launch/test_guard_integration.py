from __future__ import annotations

import subprocess
import sys

from plait.launch.guard import watch

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def test_what_is_left_is_killed_and_the_directory_removed(tmp_path):
    left, done = (subprocess.Popen(SLEEP, start_new_session=True) for _ in range(2))
    try:
        directory = tmp_path / "sockets"
        directory.mkdir()
        (directory / "socket").touch()
        watch([f"+{done.pid}\n", f"+{left.pid}\n", f"-{done.pid}\n"], str(directory))
        assert left.wait(5) == -9
        assert done.poll() is None
        assert not directory.exists()
    finally:
        for process in (left, done):
            process.kill()
            process.wait()


def test_groups_and_directories_that_are_gone_are_no_error(tmp_path):
    process = subprocess.Popen([sys.executable, "-S", "-c", ""], start_new_session=True)
    process.wait()
    watch([f"+{process.pid}\n"], str(tmp_path / "missing"))
