"""The page in a browser: a picture goes in, classes and confidences come out."""

from __future__ import annotations

import json

import cv2
import numpy as np
import pytest

from .browser import CHROMIUM, browser
from .serving import export_sums, server

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

NAMES = "[...document.querySelectorAll('#bars .name')].map(e => e.textContent)"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "sums"
    export_sums(directory, facts={"step": 12, "preprocess": {"scale": 1 / 255, "mean": [0, 0, 0], "std": [0.5, 1, 1]}})
    return directory


@pytest.fixture
def green(tmp_path):
    """A picture that is wider than high: green in the middle, red at the sides that are cut off."""
    picture = np.zeros((64, 128, 3), np.uint8)
    picture[:, :, 2] = 255
    picture[:, 30:98] = (0, 204, 51)  # blue, green, red
    path = tmp_path / "green.png"
    cv2.imwrite(str(path), picture)
    return path


def test_the_page_in_a_browser(exported, green, tmp_path):
    with server(exported) as process, browser(tmp_path / "chromium") as page:
        page.open(f"http://127.0.0.1:{process.port}/")
        page.wait_for("document.querySelector('#facts td') !== null")
        assert page.value("document.getElementById('model').value") == "sums"
        assert "12" in page.value("document.getElementById('facts').innerText")
        assert page.value("document.getElementById('go').disabled")

        # a picture: red 51 / 255 / 0.5 = 0.4, green 204 / 255 = 0.8, blue 0, then a softmax
        page.choose_file("#file", green)
        page.wait_for("!document.getElementById('bars').hidden")
        powers = np.exp([0.4, 0.8, 0.0])
        red, green_share, blue = (f"{share * 100:.1f} %" for share in powers / powers.sum())
        assert page.value(NAMES) == [f"green{green_share}", f"red{red}", f"blue{blue}"]
        widths = page.value(
            "[...document.querySelectorAll('#bars rect:last-child')].map(e => e.getBoundingClientRect().width)"
        )
        assert widths[0] > widths[1] > widths[2] > 0

        # other pixels are asked for again, at once
        page.value("(() => { const e = document.getElementById('pixels'); e.value = 'unit'; e.onchange(); })()")
        page.wait_for(f"{NAMES}[0] !== 'green{green_share}'")

        # pasted JSON, wrong and right
        page.value("document.getElementById('tab-json').click()")
        page.value("document.getElementById('json').value = '{'; document.getElementById('go').click()")
        page.wait_for("document.getElementById('error').innerText.includes('not JSON')")
        content = {
            "inputs": [{"name": "images", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": [0] * 128 + [9] * 64}]
        }
        page.value(f"document.getElementById('json').value = {json.dumps(json.dumps(content))}")
        page.value("document.getElementById('go').click()")
        page.wait_for(f"document.getElementById('error').hidden && {NAMES}[0].startsWith('blue')")

        # the policy lets it do all that, and nothing was asked for elsewhere
        assert page.complaints == []
        grounds = []
        for scheme in ("light", "dark"):
            page.appearance(scheme)
            grounds.append(page.value("getComputedStyle(document.body).backgroundColor"))
        assert grounds[0] != grounds[1]
