"""What counts as the same key at both parties: a row's key columns, normalised, as bytes."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from plait.errors import DataError

__all__ = ["RULE", "RULE_IGNORING_CASE", "key_of"]

RULE = "NFC, stripped"
RULE_IGNORING_CASE = "NFC, stripped, case folded"
"""What the parties compare, so that both write keys in the same way."""


def key_of(values: Sequence[Any], where: str, *, ignore_case: bool = False) -> bytes:
    r"""A row's key: each value as text, normalised, with its length before it, so that no two rows run together.

    A whole number is its decimal digits. Text is put into Unicode's form NFC and loses white space at both ends; with
    `ignore_case` it is case folded in between. `where` is for the error, which names no value.

    >>> key_of([" Jose\u0301 ", 7], "row 1") == key_of(["Jos\u00e9", "7"], "row 2")
    True
    """
    texts = [_text(value, where, ignore_case=ignore_case) for value in values]
    if not any(texts):
        raise DataError(f"{where} has an empty key: leave such rows out, or name another key column")
    return b"".join([part for text in texts for part in (len(text).to_bytes(4, "little"), text)])


def _text(value: Any, where: str, *, ignore_case: bool) -> bytes:
    if type(value) is int:
        return b"%d" % value
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise DataError(
                f"{where} has a key that is not UTF-8: write it as text, in hexadecimal digits say"
            ) from None
    if not isinstance(value, str):
        raise DataError(f"{where} has a key of type {type(value).__name__}: keys are texts and whole numbers")
    if value.isascii():
        return (value.casefold() if ignore_case else value).strip().encode()
    text = unicodedata.normalize("NFC", value)
    if ignore_case:
        text = unicodedata.normalize("NFC", text.casefold())
    try:
        return text.strip().encode()
    except UnicodeEncodeError:
        raise DataError(f"{where} has a key that UTF-8 cannot write (a lone surrogate): mend the file") from None
