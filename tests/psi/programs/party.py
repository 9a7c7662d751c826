"""Starts parties that align tables, as its input says; each in a process of its own that may be killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path

from plait.federal import link  # noqa: F401  imported before there are children
from plait.psi.run import align


def run(order):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    path = Path(order["code"])
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(0)
    try:
        align(**order["arguments"])
        code = 0
    except BaseException:  # noqa: BLE001  a child has to end here
        traceback.print_exc()
        code = 1
    temporary = path.with_suffix(".tmp")
    temporary.write_text(str(code))
    temporary.replace(path)
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            run(json.loads(line))
        print(pid, flush=True)
