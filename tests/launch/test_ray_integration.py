from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile

import pytest

from plait.errors import ConfigError
from plait.launch import ray

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs plait[ray]")

SCRIPT = """
    print("start", kind, index, restart, sys.argv[1:], os.environ["GIVEN"], os.environ["OMP_NUM_THREADS"])
    print(os.environ.get("PLAIT_SERVER_ENDPOINTS"), os.environ.get("PLAIT_MASTER"))
    (here / f"{sys.argv[1]}-{kind}{index}-{restart}").write_text(str(os.getpid()))
    what = sys.argv[1]
    if what == "fail" and index == 1:
        print("x" * 3_000_000)
        raise SystemExit(7)
    if what == "served" and restart == 0 and index == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "group" and restart == 0 and index == 1:
        raise SystemExit(3)
    if what == "lost" and restart == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    if what == "fail" or (what in ("group", "lost") and restart == 0):
        time.sleep(60)
"""

DRIVER = """
import io, json, sys
import ray
from plait.launch.ray import run
from plait.errors import ClusterError
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
found = {}
for what, options in json.loads(sys.argv[3]).items():
    out = io.StringIO()
    code = run([sys.argv[1], what], **options, log_dir=f"{sys.argv[2]}/{what}", out=out, environ={"GIVEN": "given"})
    found[what] = [code, out.getvalue()]
from plait.launch import ray as launcher
launcher._ROOM_SECONDS = 1.0
try:
    run([sys.argv[1], "crowd"], workers=3, cpus=2, log_dir=f"{sys.argv[2]}/crowd")
except ClusterError as error:
    found["crowd"] = [1, str(error)]
print(json.dumps(found))
"""

RUNS = {
    "served": {"workers": 1, "servers": 1, "max_restarts": 1},
    "group": {"workers": 2, "max_restarts": 1},
    "fail": {"workers": 2, "max_restarts": 0},
    "lost": {"workers": 1, "max_restarts": 1},
}


@needs_ray
@pytest.mark.slow
def test_ray_places_restarts_and_ends_processes(write_script, tmp_path, all_gone):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-c", DRIVER, write_script(SCRIPT), str(tmp_path), json.dumps(RUNS)]
    environ = {**os.environ, "TMPDIR": str(temporary), "RAY_TMPDIR": tempfile.gettempdir()}  # Ray's needs a short name
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    codes = {what: code for what, (code, _) in found.items()}
    assert codes == {"served": 0, "group": 0, "fail": 7, "lost": 0, "crowd": 1}, found
    check_served(found["served"][1], tmp_path)
    check_group(found["group"][1])
    check_failure(found["fail"][1])
    assert "restart 1 of 1: worker 0 ended with SIGKILL" in found["lost"][1]
    assert "Ray had no room for 3 processes within 1 s: they need [{'CPU': 2}" in found["crowd"][1]
    assert not list(temporary.glob("plait-*"))
    all_gone([int(file.read_text()) for what in RUNS for file in tmp_path.glob(f"{what}-*")])


def check_served(shown, folder):
    lines = shown.splitlines()
    for name in ("worker 0", "server 0"):
        own = [line.removeprefix(f"[{name}] ") for line in lines if line.startswith(f"[{name}] ")]
        first = f"start {name} 0 ['served'] given 1"
        assert [own[0], own[2], own[3]] == [
            first,
            f"plait launch: restart 1 of 1: {name} ended with SIGKILL",
            first.replace(" 0 ['", " 1 ['"),
        ]
        assert re.fullmatch(r"\d+\.\d+\.\d+\.\d+:\d+ None", own[1])
        assert own[4] == own[1]
        log = folder / "served" / f"{name.replace(' ', '-')}.log"
        assert log.read_text().splitlines() == own


def check_group(shown):
    places = re.findall(r"\[worker 0\] None (\S+)", shown)
    assert len(set(places)) == 2
    assert "[worker 0] plait launch: restart 1 of 1: worker 1 ended with exit code 3" in shown


def check_failure(shown):
    assert "plait launch: worker 1 failed first: exit code 7." in shown
    assert shown.count("x") > 3_000_000


def test_without_ray_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'plait\[ray\]'"):
        ray.run([__file__], workers=1, log_dir=tmp_path)
