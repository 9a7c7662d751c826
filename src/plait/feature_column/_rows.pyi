def fetch(
    found: int,
    places: int,
    table: int,
    width: int,
    ids: list[int],
    strides: list[tuple[int, ...]],
    starts: int,
    sizes: int,
    batch: int,
) -> bool: ...
def add(sums: int, rows: int, places: int, count: int, added: int, width: int, doubles: bool) -> bool: ...
