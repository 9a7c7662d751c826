def fetch(
    found: int,
    places: int,
    width: int,
    addresses: list[int],
    strides: list[tuple[int, ...]],
    starts: int,
    sizes: int,
    batch: int,
) -> bool: ...
def add(sums: int, rows: int, width: int, added: int, places: int, count: int, doubles: bool) -> bool: ...
