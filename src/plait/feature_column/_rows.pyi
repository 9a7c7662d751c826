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
) -> bool: ...
def add(sums: int, rows: int, width: int, added: int, places: int, count: int, doubles: bool) -> bool: ...
