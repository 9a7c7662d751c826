"""`plait psi` hands on what it was given, and says what came of it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from plait import cli
from plait.psi import run

WORDS = "--role leader --ids people.csv --key id --key birthday --listen 127.0.0.1:7 --out aligned"


def test_what_it_is_given(monkeypatch):
    given = {}

    def align(ids, key, out, **settings):
        given.update(settings, ids=ids, key=key, out=out)
        return run.Alignment(common=2, rows={"leader": 3, "follower": 4000}, digest="ab", files=[Path("aligned/part")])

    monkeypatch.setattr(run, "align", align)
    more = "--reveal both --duplicates first --ignore-case --shards 2 --certs mine --timeout 5"
    done = CliRunner().invoke(cli.app, ["psi", *WORDS.split(), *more.split()])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "keys      3 of the leader, 4,000 of the follower; 2 in common",
        "rows      aligned/part",
        "digest    ab",
    ]
    assert (given["ids"], given["key"], given["out"]) == (Path("people.csv"), ["id", "birthday"], Path("aligned"))
    assert given["certs"] == "mine"
    assert (given["duplicates"], given["ignore_case"], given["shards"], given["timeout"]) == ("first", True, 2, 5.0)
    assert (given["role"], given["listen"], given["peer"], given["insecure"]) == ("leader", "127.0.0.1:7", None, None)


def test_a_mistake(tmp_path):
    done = CliRunner().invoke(cli.app, ["psi", *WORDS.replace("people.csv", str(tmp_path / "absent.csv")).split()])
    assert done.exit_code != 0
    assert "is not there, or no file" in str(done.exception)
