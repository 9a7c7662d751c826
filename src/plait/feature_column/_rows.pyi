def fetch(
    found: int,
    places: int,
    table: int,
    width: int,
    ids: list[int],
    strides: list[int] | None,
    starts: int,
    sizes: int,
    batch: int,
    across: int,
) -> bool: ...
def add(
    sums: int,
    rows: int,
    width: int,
    added: int,
    places: int,
    examples: int,
    columns: int,
    along: int,
    across: int,
    doubles: bool,
) -> bool: ...
