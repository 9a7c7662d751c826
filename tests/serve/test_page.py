"""The page's text: nothing from elsewhere, and a policy that lets its own script run."""

from __future__ import annotations

import base64
import hashlib
import re

from plait.serve.page import page


def test_it_needs_nothing_from_elsewhere():
    html, _ = page()
    addresses = set(re.findall(r"https?://[^\s\"']+", html))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", html)
    assert not re.search(r"\son\w+=", html.split("<script>")[0])
    assert " style=" not in html


def test_the_policy_names_its_script():
    html, policy = page()
    script = re.search("<script>(.*)</script>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy
