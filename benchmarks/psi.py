"""What it costs to find common rows: `plait psi`, and openmined-psi's raw protocol beside it, CPU time per element.

Two processes, one for each party, over mutual TLS on this machine; half of the keys are common. CPU time is that of
both parties together, from start to end, reading and writing of tables included; an element is a row of one party and
a row of the other. `python benchmarks/psi.py`; the environment with openmined-psi is made once and kept (`--peers DIR`).
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))
RESULT = HERE / "results" / "psi.json"
OPENMINED = "openmined-psi==2.0.6"
ENVIRONMENTS = Path(tempfile.gettempdir()) / "plait-psi-peers"
COMMAND = [sys.executable, "-c", "from plait.cli import main; main()", "psi"]
MOST_SHARE, MOST_GIB = 0.5, 1.5
"""Of openmined-psi's CPU time, and of memory in a party."""


def make_tables(rows: int, directory: Path) -> None:
    draw = random.Random(0)
    for role, first in (("leader", 0), ("follower", rows // 2)):
        numbers = list(range(first, first + rows))
        draw.shuffle(numbers)
        with (directory / f"{role}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "age", "city"])
            writer.writerows([f"person-{number:09d}", number % 90, "Hangzhou"] for number in numbers)


def run_plait(rows: int) -> dict[str, Any]:
    from plait.federal.certificates import init
    from plait.launch.environment import free_ports

    directory = Path(tempfile.mkdtemp(prefix="plait-psi-"))
    try:
        make_tables(rows, directory)
        init(directory / "certs", ["leader", "follower"])
        place = f"127.0.0.1:{free_ports(1, '127.0.0.1')[0]}"
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent / "src")}
        begin, processes = time.perf_counter(), {}
        for role, where in (("leader", "--listen"), ("follower", "--peer")):
            given = ["--role", role, where, place, "--ids", f"{role}.csv", "--key", "id", "--out", f"out-{role}"]
            with (directory / f"{role}.log").open("w") as log:
                processes[role] = subprocess.Popen(
                    [*COMMAND, *given, "--certs", "certs"], cwd=directory, env=environ, stdout=log, stderr=log
                )
        used = {}
        for role, process in processes.items():
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0, (directory / f"{role}.log").read_text()[-3000:]
            used[role] = usage
        seconds = time.perf_counter() - begin
        cpu = sum(usage.ru_utime + usage.ru_stime for usage in used.values())
        files = [directory / f"out-{role}" / "part-00000-of-00001.csv" for role in used]
        assert files[0].read_bytes() == files[1].read_bytes(), "the rows differ"
        common = files[0].read_bytes().count(b"\n") - 1
        assert common == rows - rows // 2
        return {
            "rows": rows,
            "common": common,
            "cpu_seconds": cpu,
            "us_per_element": cpu / rows * 1e6,
            "seconds": seconds,
            "cores_used": cpu / seconds,
            "gib": max(usage.ru_maxrss for usage in used.values()) / 2**20,
        }
    finally:
        shutil.rmtree(directory)


def run_openmined(rows: int, peers: Path) -> dict[str, Any]:
    python = peers / "openmined" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", OPENMINED], check=True)
    done = subprocess.run(
        [str(python), str(HERE / "psi_peers" / "openmined.py"), str(rows)], check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return {**found, "us_per_element": found["cpu_seconds"] / rows * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000, 3_000_000])
    parser.add_argument("--peer-rows", type=int, default=100_000, help="its cost per element does not depend on it")
    parser.add_argument("--peers", type=Path, default=ENVIRONMENTS)
    parser.add_argument("--result", type=Path, default=RESULT)
    given = parser.parse_args()
    from plait.psi import native

    way = "ipp-crypto, eight at a time" if native.load() else "cryptography, one by one"
    peer = run_openmined(given.peer_rows, given.peers)
    print(f"openmined-psi  {peer['rows']:>9,} rows  {peer['us_per_element']:6.1f} us an element", flush=True)
    found = []
    for rows in given.rows:
        one = run_plait(rows)
        one["share_of_openmined"] = one["us_per_element"] / peer["us_per_element"]
        found.append(one)
        print(
            f"plait ({way})  {rows:>9,} rows  {one['us_per_element']:6.1f} us an element, {one['seconds']:.1f} s, "
            f"{one['cores_used']:.2f} cores, {one['gib']:.2f} GiB a party, {one['share_of_openmined']:.2f} of it",
            flush=True,
        )
    wrong = [one for one in found if one["share_of_openmined"] > MOST_SHARE or one["gib"] > MOST_GIB]
    about = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "cores": os.cpu_count()}
    about |= {"machine": platform.machine(), "python": platform.python_version(), "multiplication": way}
    given.result.write_text(json.dumps({**about, "openmined": peer, "plait": found}, indent=2) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
