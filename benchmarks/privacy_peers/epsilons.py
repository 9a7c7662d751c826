"""What Opacus' PRV accountant says of 60,000 rows, batch 256, 20 epochs of whole batches, delta 1e-5.

`python epsilons.py` in an environment with torch, scipy, opt_einsum and opacus 1.6.
"""

from __future__ import annotations

import json

from opacus.accountants import PRVAccountant

ROWS, BATCH, EPOCHS, DELTA = 60_000, 256, 20, 1e-5


def main() -> None:
    found = {}
    for noise in (0.5, 0.7, 1.0, 1.3):
        accountant = PRVAccountant()
        accountant.history = [(noise, BATCH / ROWS, EPOCHS * (ROWS // BATCH))]
        found[noise] = accountant.get_epsilon(DELTA)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
