"""openmined-psi's raw protocol, both parties in one process: `openmined.py ROWS` prints CPU seconds and what is common.

The other one of its ways with the same result as ours is compared: RAW, and the intersection itself, not its size.
"""

from __future__ import annotations

import json
import sys
import time

import private_set_intersection.python as psi


def main(rows: int) -> None:
    ours = [f"person-{number:09d}" for number in range(rows)]
    theirs = [f"person-{number:09d}" for number in range(rows // 2, rows + rows // 2)]
    client = psi.client.CreateWithNewKey(reveal_intersection=True)
    server = psi.server.CreateWithNewKey(reveal_intersection=True)
    begin, cpu = time.perf_counter(), time.process_time()
    setup = psi.ServerSetup()
    setup.ParseFromString(server.CreateSetupMessage(1e-9, rows, theirs, psi.DataStructure.RAW).SerializeToString())
    request = psi.Request()
    request.ParseFromString(client.CreateRequest(ours).SerializeToString())
    response = psi.Response()
    response.ParseFromString(server.ProcessRequest(request).SerializeToString())
    common = client.GetIntersection(setup, response)
    print(
        json.dumps(
            {
                "rows": rows,
                "common": len(common),
                "cpu_seconds": time.process_time() - cpu,
                "seconds": time.perf_counter() - begin,
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
