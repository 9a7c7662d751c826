from __future__ import annotations

import io
import os
import re
import socket

import pytest

from plait.errors import ConfigError
from plait.federal import run
from plait.federal.run import _free_range, _Plan, federate, party
from plait.federal.settings import VARIABLES, Party

PORTS = range(20100, 20102)


def found_by(monkeypatch, environ):
    """The Party of a process with these variables."""
    with monkeypatch.context() as patch:
        for name in VARIABLES.values():
            patch.delenv(name, raising=False)
        for name, value in environ.items():
            patch.setenv(name, value)
        return Party.find()


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ([], {}, "nothing stands where the script should"),
        (["--jobs", "x"], {}, "--jobs stands where the script should: write `plait party"),
        (["missing.py"], {}, "the script missing.py does not exist in "),
        (["-m", "no_such_module.at_all"], {}, "-m no_such_module.at_all: no such module"),
        ([__file__], {"role": "boss"}, "role='boss': write 'leader' or 'follower'"),
        ([__file__], {"listen": None}, "listen=None and peer=None: give one of them"),
        ([__file__], {"peer": "a:1"}, "give one of them"),
        ([__file__], {"listen": "somewhere"}, "listen='somewhere': write HOST:PORT"),
        ([__file__], {"timeout": 0.0}, "timeout=0.0: write a number above 0"),
        ([__file__], {"job": ""}, "job='': write a name"),
        ([__file__], {"restarts": -1}, "restarts=-1: write a whole number from 0 on"),
    ],
)
def test_a_party_that_cannot_be_run_is_told_at_once(command, options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        party(command, **{"role": "leader", "listen": "127.0.0.1:1", **options})


@pytest.mark.parametrize(
    ("follower", "options", "words"),
    [
        ("missing.py", {}, "the follower's script missing.py does not exist in "),
        (__file__, {"workers": 0}, "workers=0: write a whole number from 1 on"),
        (__file__, {"restarts": -1}, "restarts=-1: write a whole number from 0 on"),
        (__file__, {"certs": "there", "insecure": True}, "certs='there' and insecure=True: give one of them"),
        (__file__, {"log_dir": __file__}, "cannot be made: File exists; name another directory"),
    ],
)
def test_a_federation_that_cannot_be_run_is_told_at_once(follower, options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    with pytest.raises(ConfigError, match=re.escape(words)):
        federate(__file__, follower, **options, out=out)
    assert out.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


def test_the_leader_listens_where_the_follower_dials(monkeypatch):
    plan = _Plan(1, PORTS[:1], "certs", {})
    parties = [found_by(monkeypatch, plan.environments(role, 0)[0]) for role in ("leader", "follower")]
    assert parties[0] == Party(role="leader", listen="127.0.0.1:20100", certs="certs")
    assert parties[1] == Party(role="follower", peer="127.0.0.1:20100", certs="certs")


def test_without_certificates_they_talk_in_plain_text(monkeypatch):
    found = found_by(monkeypatch, _Plan(1, PORTS[:1], None, {}).environments("leader", 0)[0])
    assert found == Party(role="leader", listen="127.0.0.1:20100", insecure=True)


def test_what_was_meant_for_another_process_is_not_inherited(monkeypatch):
    outer = dict.fromkeys(VARIABLES.values(), "of another") | {"RANK": "3", "MASTER_ADDR": "far", "KEPT": "1"}
    outer |= {VARIABLES["job"]: "digits", VARIABLES["timeout"]: "5"}
    environ = _Plan(1, PORTS[:1], "certs", outer).environments("follower", 2)[0]
    assert found_by(monkeypatch, environ) == Party(
        role="follower", peer="127.0.0.1:20100", certs="certs", job="digits", timeout=5.0
    )
    assert {"RANK", "MASTER_ADDR"} & environ.keys() == set()
    assert (environ["KEPT"], environ["PLAIT_RESTART"]) == ("1", "2")


def test_the_parties_share_the_cores(monkeypatch):
    monkeypatch.setattr(run, "cores", lambda: 8)
    threads = [_Plan(workers, PORTS, None, {}).environments("leader", 0)[0]["OMP_NUM_THREADS"] for workers in (1, 2, 9)]
    assert threads == ["4", "2", "1"]
    assert _Plan(2, PORTS, None, {"OMP_NUM_THREADS": "5"}).environments("leader", 0)[1]["OMP_NUM_THREADS"] == "5"


def test_workers_are_a_group_that_meets_anew_and_off_the_parties_ports(monkeypatch):
    monkeypatch.setattr(run, "free_ports", lambda count, host: list(range(20101, 20101 + count)))
    environs = _Plan(2, PORTS, "certs", {}).environments("leader", 1)
    assert [environ["PLAIT_INDEX"] for environ in environs] == ["0", "1"]
    assert {environ["PLAIT_WORKER_ENDPOINTS"] for environ in environs} == {"127.0.0.1:20102,127.0.0.1:20103"}
    assert {environ["PLAIT_RESTART"] for environ in environs} == {"1"}
    assert {environ[VARIABLES["listen"]] for environ in environs} == {"127.0.0.1:20100"}


def test_free_ports_stand_in_a_row():
    ports = _free_range(3)
    assert len(ports) == 3
    assert ports.step == 1
    with socket.socket() as one:
        one.bind(("127.0.0.1", ports[1]))


def test_ports_in_use_are_passed_by(monkeypatch):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        taken = held.getsockname()[1]
        monkeypatch.setattr(run, "_PORTS", range(taken, taken + 2))
        with pytest.raises(ConfigError, match="no 1 free ports in a row"):
            _free_range(1)


def test_the_variables_of_this_process_stay_as_they_are(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")
    before = dict(os.environ)
    assert party([str(script)], role="leader", listen="127.0.0.1:1") == 0
    assert dict(os.environ) == before
