"""A shop and a bank find out which customers they share, by name and birthday, before they train together.

python examples/psi/people.py

At two companies each types its own command; here, both parties are threads of one process:

plait psi --role leader --ids shop.csv --key name --key born --ignore-case --listen 0.0.0.0:5051 --certs mine --out rows
plait psi --role follower --ids bank.csv --key name --key born --ignore-case --peer shop:5051 --certs mine --out rows
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plait.federal.communicator import Communicator
from plait.psi.run import align

SHOP = """name,born,orders
Ada Lovelace,1815-12-10,12
José García,1980-01-02,7
Grace Hopper,1906-12-09,31
李雷,1990-05-06,4
"""
BANK = """name,born,balance
Grace Hopper,1906-12-09,100
JOSÉ GARCÍA,1980-01-02,250
Grace Hopper,1985-03-03,9000
李雷 ,1990-05-06,70
"""


def main():
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(2) as threads:
        directory = Path(made)
        (directory / "leader.csv").write_text(SHOP, encoding="utf-8")
        (directory / "follower.csv").write_text(BANK, encoding="utf-8")

        def party(end):
            ids, out = directory / f"{end.role}.csv", directory / f"rows-{end.role}"
            return align(ids, ["name", "born"], out, ignore_case=True, communicator=end)

        shop, bank = threads.map(party, Communicator.pair())
        print(
            f"{shop.rows['leader']} customers of the shop, {bank.rows['follower']} of the bank, {shop.common} of both"
        )
        rows = [found.files[0].read_text(encoding="utf-8").splitlines()[1:] for found in (shop, bank)]
        for one, other in zip(*rows, strict=True):
            print(f"{one:<28} {other}")
        print("the same rows in the same order at both:", shop.digest == bank.digest)


if __name__ == "__main__":
    main()
