"""The page to try a model with: one file that needs nothing from elsewhere."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

__all__ = ["page"]

FILE = Path(__file__).with_name("page.html")


@functools.cache
def page() -> tuple[str, str]:
    """The page, and the policy that lets a browser run its own script and style and nothing else."""
    html = FILE.read_text(encoding="utf-8")
    sources = {tag: _digest(html, tag) for tag in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; "
        "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def _digest(html: str, tag: str) -> str:
    found = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    assert found is not None  # noqa: S101 - our own file
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"
