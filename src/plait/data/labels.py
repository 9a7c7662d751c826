"""`labels.txt`: which number stands for which class; and the order of names that people expect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from plait.data import files
from plait.data.stores import Url, place_of
from plait.errors import DataError

__all__ = ["MAX_LABEL_BYTES", "natural_key", "read_labels", "read_text", "write_labels"]

MAX_LABEL_BYTES = 16 << 20
"""Of a `labels.txt`: a hundred thousand classes with long names are a tenth of it."""

_LINE_END = re.compile(r"\r\n|\n|\r")
_MARK = re.compile(r"(?:^|(?<=\s))([0-9]{1,9})\s*:")
_DIGITS = re.compile(r"([0-9]+)")


def read_labels(url: Url) -> dict[int, str]:
    """Names by number, in order, of a file with one `number: name` a line, or several on one line.

    The numbers have to be those from 0 up to the last, each once; names may be the same, as two of ImageNet's are.
    A name may have spaces in it. A second `number:` on a line begins another label where it is the next number, and
    belongs to the name where it is any other.
    """
    source = place_of(url).url
    labels: dict[int, str] = {}
    lines: dict[int, int] = {}
    for line, number, name in _parsed(read_text(url, MAX_LABEL_BYTES), source):
        if number in labels:
            raise DataError(
                f"{source!r} line {line}: the number {number} is there twice, for {labels[number]!r} in line"
                f" {lines[number]} and for {name!r}; give each class a number of its own"
            )
        labels[number], lines[number] = name, line
    if not labels:
        raise DataError(
            f"{source!r} has no labels in it; write a line 'number: name' for each class, from '0: name' on"
        )
    missing = next((number for number in range(len(labels)) if number not in labels), None)
    if missing is not None:
        raise DataError(
            f"{source!r} has {len(labels)} labels, but none with the number {missing}: numbers go from 0 to"
            f" {len(labels) - 1}; write '{missing}: name' for the class that is missing ('0: background' where numbers"
            " began at 1)"
        )
    return {number: labels[number] for number in range(len(labels))}


def write_labels(url: Url, names: Sequence[str]) -> None:
    """Write `names`, numbered from 0, one a line; what is there is replaced as a whole or not at all."""
    source = place_of(url).url
    if not names:
        raise DataError(f"{source!r} was not written: there are no labels to write")
    text = "".join(f"{number}: {name}\n" for number, name in enumerate(names))
    if len(text.encode(errors="replace")) > MAX_LABEL_BYTES:
        raise DataError(f"{source!r} was not written: {len(names)} labels take more than {MAX_LABEL_BYTES} bytes")
    for number, name in enumerate(names):
        # what would not come back as it was: a line's end in a name, a space around it, 'x 1: y' before number 1
        if not _comes_back(number, name):
            raise DataError(
                f"{source!r} was not written: the name {name!r} of label {number} would not be read back as it is;"
                " rename it without line ends, outer spaces and colons behind numbers"
            )
    files.write(url, text)


def read_text(url: Url, limit: int) -> str:
    """A small UTF-8 file, with or without a byte order mark; one that is longer than `limit` bytes is not read."""
    place = place_of(url)
    info = place.stat()
    if info.is_directory:
        raise DataError(f"{place.url!r} is a directory; a text file has to be there")
    if info.length > limit:
        raise DataError(f"{place.url!r} has {info.length} bytes, a file of labels at most {limit}; is it another file?")
    with place.store.open(place.path) as file:
        data = file.read(limit)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{place.url!r} line {line} is not text in UTF-8 ({error.reason}); save it as UTF-8") from error
    if "\0" in text:
        raise DataError(f"{place.url!r} line {text[: text.index(chr(0))].count(chr(10)) + 1} has a zero byte: no text")
    return text


def natural_key(name: str) -> tuple[Any, ...]:
    """For `sorted(key=)`: runs of digits count as numbers, so that `label_2` comes before `label_10`."""
    parts: list[Any] = _DIGITS.split(name)
    # numbers without leading zeros compare by length, then by digits: any length will do, and nothing is converted
    for place in range(1, len(parts), 2):
        digits = parts[place].lstrip("0")
        parts[place] = (len(digits), digits)
    return tuple(parts), name


def _parsed(text: str, source: str) -> Iterator[tuple[int, int, str]]:
    """(line, number, name) of each label in the file."""
    for line, content in enumerate(_LINE_END.split(text), 1):
        if not content.strip():
            continue
        found = list(_pieces(content.strip()))
        if not found:
            raise DataError(f"{source!r} line {line} is {_short(content)}; write 'number: name', as in '0: daisy'")
        for number, name in found:
            if not name:
                raise DataError(f"{source!r} line {line}: the label {number} has no name; write '{number}: name'")
            yield line, number, name


def _pieces(content: str) -> Iterator[tuple[int, str]]:
    """The labels of a line; none, if it does not begin with one."""
    first = _MARK.match(content)
    if first is None:
        return
    number, start = int(first[1]), first.end()
    for mark in _MARK.finditer(content, start):
        if int(mark[1]) == number + 1:
            yield number, content[start : mark.start()].strip()
            number, start = number + 1, mark.end()
    yield number, content[start:].strip()


def _comes_back(number: int, name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    line = f"{number}: {name}"
    return bool(name) and "\0" not in name and not _LINE_END.search(name) and list(_pieces(line)) == [(number, name)]


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
