"""The files of a save: one pair for each server, read back by any number of servers.

DIR/shard-00000-of-00002.safetensors
    values/NAME          a variable's slice on this server, flat; or a table's rows here, [rows, dim]
    slots/SLOT/NAME      the optimizer's state of the same elements
    ids/NAME             the ids of a table's rows, in their order; only where ids are any number
DIR/shard-00000-of-00002.json
    {"body": format, server, servers, version, spec, extra, scalars, size and sha256 of the tensors; "sha256": its own}

Which elements a slice has, and which ids a table of a fixed size, follows from the spec and the number of servers.
The tensors are written in blocks, straight from where they are: a safetensors file is the length of a header (8 bytes,
little endian), the header (JSON: dtype, shape and place of each tensor), and the tensors' bytes one after another.
The JSON file is written last: a shard without it is not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from plait.atomic import atomic_path, write_atomic
from plait.cluster.ps.placement import Placement
from plait.cluster.ps.spec import DTYPES, ModelSpec, TableSpec
from plait.errors import CheckpointError, ClusterError, MismatchError

__all__ = ["Saved", "ShardState", "open_shards", "read_shards", "slots_of", "write_shard"]

_FORMAT = 1
_BLOCK_BYTES = 1 << 22
_BLOCK_ROWS = 1 << 16
_MAX_JSON = 1 << 28
_NAME = re.compile(r"shard-([0-9]{5})-of-([0-9]{5})\.json")
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardState:
    """All that one server has."""

    spec: ModelSpec
    server: int
    servers: int
    version: int
    extra: dict[str, Any]
    """The caller's own, such as the last step of each worker."""
    scalars: dict[str, dict[str, float]]
    """Numbers of the optimizer's state, by the names of variables and tables."""
    tensors: dict[str, Tensor]


def write_shard(directory: Path, state: ShardState) -> None:
    """Write one server's files; whole, on disk when it returns."""
    stem = _stem(state.server, state.servers)
    try:
        with atomic_path(directory / f"{stem}.safetensors") as temporary, temporary.open("wb") as stream:
            size, digest = _write_tensors(stream, state.tensors)
        body = {
            "format": _FORMAT,
            "server": state.server,
            "servers": state.servers,
            "version": state.version,
            "spec": state.spec.to_json(),
            "extra": state.extra,
            "scalars": state.scalars,
            "tensors": {"size": size, "sha256": digest},
        }
        write_atomic(directory / f"{stem}.json", _seal(body))
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{stem} cannot be written in {directory}: {error}. Name a directory that can be written, with room"
        ) from error


def open_shards(directory: Path) -> Saved:
    """Look at a save: all its shards must be there and be of one model."""
    directory = Path(directory)
    found = [hit for hit in map(_NAME.fullmatch, _names(directory)) if hit]
    if not found:
        raise CheckpointError(f"{directory} holds no shards; name a directory with shard-*-of-*.json files")
    totals = sorted({int(hit[2]) for hit in found})
    if len(totals) > 1:
        raise CheckpointError(
            f"{directory} holds shards of {totals[0]} servers and of {totals[1]}: keep one save there"
        )
    stems = {hit[0].removesuffix(".json") for hit in found}
    missing = [stem for stem in (_stem(server, totals[0]) for server in range(totals[0])) if stem not in stems]
    if missing or len(stems) > totals[0]:
        raise CheckpointError(
            f"{directory} does not hold a whole save of {totals[0]} servers: it has {len(stems)} shards"
            + (f", {missing[0]} is missing" if missing else "")
        )
    bodies = [_read_body(directory, server, totals[0]) for server in range(totals[0])]
    spec = _spec(directory, bodies[0]["spec"])
    for server, body in enumerate(bodies):
        if body["spec"] != bodies[0]["spec"]:
            raise CheckpointError(f"in {directory}, shards 0 and {server} are of different models")
    return Saved(directory, spec, bodies)


class Saved:
    """A save on disk."""

    def __init__(self, directory: Path, spec: ModelSpec, bodies: list[dict[str, Any]]) -> None:
        self.directory = directory
        self.spec = spec
        self.servers = len(bodies)
        self.placement = Placement(spec, self.servers)
        self.versions = [int(body["version"]) for body in bodies]
        self.extras: list[dict[str, Any]] = [body["extra"] for body in bodies]
        self._bodies = bodies

    def scalars(self, server: int, name: str) -> dict[str, float]:
        found: dict[str, float] = self._bodies[server]["scalars"].get(name, {})
        return found

    def check_spec(self, spec: ModelSpec) -> None:
        """Raises MismatchError that says where the save's model is another one."""
        saved, wanted = self.spec.to_json(), spec.to_json()
        for key, title in (("variables", "variable"), ("tables", "table"), ("optimizers", "optimizer")):
            for number, (old, new) in enumerate(zip(saved[key], wanted[key], strict=False)):
                if old != new:
                    raise MismatchError(
                        f"the shards in {self.directory} have {title} {number} as {old}; it is {new} now"
                    )
            if len(saved[key]) != len(wanted[key]):
                raise MismatchError(
                    f"the shards in {self.directory} have {len(saved[key])} {key}; there are {len(wanted[key])} now"
                )

    def verify(self, servers: Iterable[int]) -> None:
        """Compare files of tensors with their checksums, byte by byte."""
        for server in servers:
            path, expected = self._tensors(server), self._bodies[server]["tensors"]
            digest, size = hashlib.sha256(), 0
            with _reading(path), path.open("rb") as stream:
                while block := stream.read(_BLOCK_BYTES):
                    digest.update(block)
                    size += len(block)
            if size != expected["size"]:
                raise CheckpointError(f"{path} has {size} bytes, {expected['size']} were written")
            if digest.hexdigest() != expected["sha256"]:
                raise CheckpointError(f"{path} was altered, its checksum is not what was written")

    @contextlib.contextmanager
    def open(self, server: int) -> Iterator[Any]:
        """The tensors of one shard, mapped: safetensors' `keys()`, `get_tensor(name)` and `get_slice(name)`."""
        from safetensors import safe_open  # noqa: PLC0415  not needed to serve

        path = self._tensors(server)
        with _reading(path):
            opened = safe_open(path, framework="pt")
        with opened as tensors:
            yield tensors

    def rows(self, server: int, table: int, tensors: Any) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """The ids, rows and state of a table in one shard, in blocks."""
        spec = self.spec.tables[table]
        values = tensors.get_slice(f"values/{spec.name}")
        slots = slots_of(tensors, spec.name)
        count = values.get_shape()[0]
        for start in range(0, count, _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, count)
            state = {slot: tensors.get_slice(f"slots/{slot}/{spec.name}")[start:stop] for slot in slots}
            yield self._ids(server, spec, tensors, start, stop), values[start:stop], state

    def elements(self, variable: int, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Which shards have elements of a variable: server, its first and last of these, where its slice begins."""
        for server in range(self.servers):
            for number, first, last in self.placement.slices(server):
                low, high = max(first, start), min(last, stop)
                if number == variable and (low < high or start == stop):
                    yield server, low, high, first

    def _ids(self, server: int, spec: TableSpec, tensors: Any, start: int, stop: int) -> Tensor:
        if spec.rows is None:
            ids: Tensor = tensors.get_slice(f"ids/{spec.name}")[start:stop]
            return ids
        return torch.arange(start, stop) * self.servers + server

    def _tensors(self, server: int) -> Path:
        return self.directory / f"{_stem(server, self.servers)}.safetensors"


def read_shards(directory: Path) -> dict[str, Tensor]:
    """Variables in their shapes and tables, joined over the shards, by name.

    A table whose ids are any number is sorted by them; they are under NAME/ids.
    """
    saved = open_shards(directory)
    saved.verify(range(saved.servers))
    joined = {item.name: torch.zeros(item.numel, dtype=DTYPES[item.dtype]) for item in saved.spec.variables}
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {item.name: [] for item in saved.spec.tables}
    for server in range(saved.servers):
        with saved.open(server) as tensors:
            for number, start, stop in saved.placement.slices(server):
                name = saved.spec.variables[number].name
                joined[name][start:stop] = tensors.get_tensor(f"values/{name}")
            for number, table in enumerate(saved.spec.tables):
                blocks = saved.rows(server, number, tensors)
                parts[table.name] += [(ids, values) for ids, values, _ in blocks]
    joined = {item.name: joined[item.name].view(item.shape) for item in saved.spec.variables}
    for table in saved.spec.tables:
        joined |= _join(table, parts.pop(table.name))
    return joined


def _join(spec: TableSpec, parts: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    ids = torch.cat([torch.zeros(0, dtype=torch.int64), *(ids for ids, _ in parts)])
    order = ids.argsort()
    values = torch.cat([torch.zeros(0, spec.dim, dtype=DTYPES[spec.dtype]), *(rows for _, rows in parts)])[order]
    return {spec.name: values} if spec.rows is not None else {spec.name: values, f"{spec.name}/ids": ids[order]}


def slots_of(tensors: Any, name: str) -> list[str]:
    """The names of the state tensors that a shard has of a variable or a table."""
    keys = [key.split("/", 2) for key in tensors.keys() if key.startswith("slots/")]  # noqa: SIM118  not a dict
    return [slot for _, slot, of in keys if of == name]


def _stem(server: int, servers: int) -> str:
    return f"shard-{server:05d}-of-{servers:05d}"


def _write_tensors(stream: BinaryIO, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """A safetensors file; returns its size and checksum."""
    # the wider first, so that each begins at a multiple of its width
    ordered = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header, place = {}, 0
    for name in ordered:
        tensor = tensors[name]
        end = place + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    head = memoryview(len(text).to_bytes(8, "little") + text)
    for block in itertools.chain([head], *(_blocks(tensors[name]) for name in ordered)):
        digest.update(block)
        stream.write(block)
    return 8 + len(text) + place, digest.hexdigest()


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's bytes, where they are."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    for start in range(0, len(data), _BLOCK_BYTES):
        yield data[start : start + _BLOCK_BYTES].data


def _canonical(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True, allow_nan=False) + "\n").encode()


def _seal(body: Any) -> bytes:
    """The only bytes that mean this body."""
    return _canonical({"body": body, "sha256": hashlib.sha256(_canonical(body)).hexdigest()})


def _read_body(directory: Path, server: int, servers: int) -> dict[str, Any]:
    path = directory / f"{_stem(server, servers)}.json"
    with _reading(path):
        size = path.stat().st_size
        if size > _MAX_JSON:
            raise CheckpointError(f"{path} has {size} bytes, {_MAX_JSON} are allowed")
        data = path.read_bytes()
        body: dict[str, Any] = json.loads(data)["body"]
        if _seal(body) != data:
            raise CheckpointError(f"{path} was altered, its checksum or form is not what was written")
        if body["format"] != _FORMAT:
            raise CheckpointError(f"{path} has format {body['format']!r}, this plait reads format {_FORMAT}")
        if (body["server"], body["servers"]) != (server, servers):
            raise CheckpointError(f"{path} is of server {body['server']} of {body['servers']}: it was renamed")
        return body


def _spec(directory: Path, tree: Any) -> ModelSpec:
    try:
        return ModelSpec.from_json(tree)
    except ClusterError as error:
        raise CheckpointError(f"the shards in {directory} are of a model that plait cannot hold: {error}") from error


def _names(directory: Path) -> list[str]:
    try:
        return [entry.name for entry in directory.iterdir()]
    except OSError as error:
        raise CheckpointError(f"the shards in {directory} cannot be listed: {error}") from error


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever a strange file makes a parser raise is a CheckpointError that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
