from __future__ import annotations

import os
import subprocess
import sys

import pytest

from plait.data import stores
from plait.data.stores import LocalStore, S3Store, place_of
from plait.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "store", "path"),
    [
        ("a/b", LocalStore, "a/b"),
        ("file:///a/b", LocalStore, "/a/b"),
        ("s3://bucket/key", S3Store, "bucket/key"),
        ("obs://bucket/key", S3Store, "bucket/key"),
    ],
)
def test_a_scheme_names_a_store(url, store, path):
    place = place_of(url)
    assert isinstance(place.store, store)
    assert place.path == path


def test_an_unknown_scheme_is_an_error_that_names_those_there_are():
    with pytest.raises(ConfigError, match="s3://"):
        place_of("gopher://a/b")


def test_a_local_tree_is_listed_in_order_and_circles_end(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("12345")
    os.symlink(tmp_path, tmp_path / "a" / "up")
    found = LocalStore().tree(str(tmp_path))
    assert [name for name, _ in found] == ["a", "a/up", "a/x"]
    assert found[-1][1].length == 5


def test_without_s3fs_the_error_says_what_to_install():
    program = """
import sys
sys.modules["s3fs"] = None
import plait
from plait.data import files
assert "fsspec" not in sys.modules
try:
    files.exists("s3://bucket/key")
except plait.errors.ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'plait[s3]'" in done.stdout


def test_settings_of_s3():
    try:
        stores.set_auth(
            "me", "secret", "host", 80, is_secure=False, ssl_verify=False, path_style=True, client_timeout=3
        )
        assert stores._auth == {
            "key": "me",
            "secret": "secret",
            "endpoint_url": "http://host:80",
            "client_kwargs": {"verify": False},
            "config_kwargs": {"s3": {"addressing_style": "path"}, "connect_timeout": 3, "read_timeout": 3},
        }
        stores.set_auth(server="host")
        assert stores._auth == {"endpoint_url": "https://host"}
        stores.set_auth(server="http://host:1", retry=3)
        assert stores._auth == {"endpoint_url": "http://host:1", "config_kwargs": {"retries": {"max_attempts": 3}}}
        with pytest.raises(ConfigError, match="without a server"):
            stores.set_auth(port=80)
    finally:
        stores.set_auth()
    assert stores._auth == {}
