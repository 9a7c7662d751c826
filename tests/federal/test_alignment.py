"""The manifest of aligned rows: read, checked, compared by two parties, and kept with checkpoints."""

from __future__ import annotations

import json

import pytest

from plait import efl
from plait.atomic import file_digest
from plait.errors import DataError, FederalError
from plait.federal.alignment import MANIFEST, digest_of, read_digest, read_manifest

from .pair import LEFT, RIGHT, follower_loss, leader_loss, make, outcomes, trained

TRAIN = efl.procedure_fn.train


def write(directory, files=("part-0.csv",), **shared):
    directory.mkdir(parents=True, exist_ok=True)
    for name in files:
        (directory / name).write_text("id\n1\n")
    shared = {"reveal": "both", "order": "x", **shared}
    manifest = {
        "shared": shared,
        "digest": digest_of(shared),
        "files": [{"name": name, "bytes": 5, "rows": 1, "sha256": file_digest(directory / name)} for name in files],
    }
    (directory / MANIFEST).write_text(json.dumps(manifest))
    return directory


def test_a_manifest_is_read(tmp_path):
    write(tmp_path, rows=3)
    assert read_manifest(tmp_path)["shared"]["rows"] == 3
    assert read_digest(tmp_path) == digest_of({"order": "x", "rows": 3, "reveal": "both"})


def test_what_is_not_whole(tmp_path):
    with pytest.raises(DataError, match="is not there"):
        read_manifest(tmp_path)
    for text in ("", "[]", "{}", '{"shared": {}, "digest": "x"}'):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(DataError, match="is no manifest"):
            read_manifest(tmp_path)
    write(tmp_path)
    (tmp_path / MANIFEST).write_text((tmp_path / MANIFEST).read_text().replace('"x"', '"y"'))
    with pytest.raises(DataError, match="changed by hand"):
        read_manifest(tmp_path)
    write(tmp_path)
    (tmp_path / "part-0.csv").write_text("id\n")
    with pytest.raises(DataError, match="not as `plait psi` has written it"):
        read_digest(tmp_path)
    (tmp_path / "part-0.csv").unlink()
    with pytest.raises(DataError, match="not as `plait psi` has written it"):
        read_digest(tmp_path)


def test_a_party_without_rows(tmp_path):
    with pytest.raises(DataError, match="holds no rows: reveal='sizes'"):
        read_digest(write(tmp_path, (), reveal="sizes"))


def run(directories, checkpoints=None):
    """Train both parties, each with its aligned rows; what came of each."""

    def function(place, fields, loss):
        def fit(joined):
            given = {"checkpoint_dir": checkpoints / joined.role, "save_steps": 2} if checkpoints else {}
            return trained(make(fields, loss, joined=joined, model={"aligned": directories[place]}), TRAIN(3), **given)

        return fit

    return outcomes(function(0, LEFT, leader_loss), function(1, RIGHT, follower_loss))


def test_parties_of_one_alignment_train(tmp_path):
    one, other = write(tmp_path / "one"), write(tmp_path / "other")
    assert not [found for found in run((one, other)) if isinstance(found, BaseException)]


@pytest.mark.parametrize("second", ["another", None])
def test_parties_of_two_do_not(tmp_path, second):
    one = write(tmp_path / "one")
    other = None if second is None else write(tmp_path / "other", order="another")
    for found in run((one, other)):
        assert isinstance(found, FederalError)
        assert "aligned rows" in str(found)


def test_a_checkpoint_is_of_one_alignment(tmp_path):
    one, other = write(tmp_path / "one"), write(tmp_path / "other", order="another")
    assert not [found for found in run((one, one), tmp_path) if isinstance(found, BaseException)]
    assert not [found for found in run((one, one), tmp_path) if isinstance(found, BaseException)]
    for found in run((other, other), tmp_path):
        assert isinstance(found, (DataError, FederalError))
    texts = " ".join(map(str, run((None, None), tmp_path)))
    assert "was made with aligned rows" in texts
    assert "of no alignment" in texts
