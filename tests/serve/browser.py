"""Chromium without a window, driven through a pair of pipes: no package between it and the test."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    def __init__(self, write, read):
        self._write, self._read = write, read
        self._number, self._session = 0, None
        self.complaints = []

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _message(self):
        found = b""
        while not found.endswith(b"\0"):
            part = self._read.read(1)
            assert part, "chromium has ended"
            found += part
        return json.loads(found[:-1])

    def _note(self, event):
        if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(event["params"]))

    def open(self, url):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "DOM", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)

    def value(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script, seconds=20):
        until = time.monotonic() + seconds
        while not (found := self.value(script)):
            assert time.monotonic() < until, f"{script} stays {found}; {self.value('document.body.innerText')}"
            time.sleep(0.05)
        return found

    def choose_file(self, selector, path):
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(path)], nodeId=node)

    def appearance(self, scheme, width=1060, height=760):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def browser(folder):
    """A page of a new browser that keeps its files in `folder`."""
    to_read, write = os.pipe()
    read, to_write = os.pipe()
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
        "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={folder}",
    ]  # fmt: skip
    redirected = f'exec "$@" 3<&{to_read} 4>&{to_write}'
    process = subprocess.Popen(
        ["bash", "-c", redirected, "bash", *command],
        pass_fds=(to_read, to_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_read)
    os.close(to_write)
    try:
        with open(read, "rb") as stream:
            page = Page(write, stream)
            yield page
            page._session = None
            page.call("Browser.close")
    finally:
        os.close(write)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
