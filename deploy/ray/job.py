# ruff: noqa: INP001 - a script
"""A cluster on Ray's nodes: `ray job submit --working-dir . -- python job.py --workers 4 --servers 2 train.py args...`.

The working directory, with this file and the script, is copied to every node; plait has to be installed there.
"""

from __future__ import annotations

import argparse
import sys

from plait.launch import ray


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, required=True, help="processes that train")
    parser.add_argument("--servers", type=int, default=0, help="parameter servers; without any, a collective group")
    parser.add_argument("--max-restarts", type=int, default=3, help="how often a process, or the group, starts again")
    parser.add_argument("--cpus", type=float, default=1, help="of each process")
    parser.add_argument("--gpus", type=float, default=0, help="of each worker")
    parser.add_argument("--log-dir", help="where, on the driver's node, the output of each process goes")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="script.py args..., or -m module args...")
    options = vars(parser.parse_args())
    return ray.run(options.pop("command"), **options)


if __name__ == "__main__":
    sys.exit(main())
