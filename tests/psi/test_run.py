"""`align`, from table to table: against a plain join, who learns what, what is refused, what a killed run keeps."""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import ConfigError, DataError, FederalError
from plait.federal import loopback
from plait.federal.alignment import read_digest
from plait.psi import curve, journal, run
from plait.psi.journal import Journal
from plait.psi.pool import Pool
from plait.psi.run import align, summary

from .parties import ROLES, aligned, outcomes, read_ids, tables, write_csv

IDS = st.lists(st.text(string.ascii_letters + "äé漢🙂", min_size=1, max_size=4), unique=True, max_size=40)


def check(directory, leader, follower, **given):
    """Both find what a plain join finds, in the same order; each has its own rows."""
    tables(directory, leader, follower)
    found = aligned(directory, **given)
    ids = [read_ids(one) for one in found]
    assert ids[0] == ids[1]
    assert sorted(ids[0]) == sorted(set(leader) & set(follower))
    assert found[0].digest == found[1].digest
    for role, one in zip(ROLES, found, strict=True):
        assert one.common == len(ids[0])
        assert one.rows == {"leader": len(leader), "follower": len(follower)}
        assert read_ids(one, "note") == [f"{role}'s {id_}" for id_ in ids[0]]
    return found


@settings(max_examples=10)
@given(leader=IDS, follower=IDS, more=IDS)
def test_both_find_what_a_plain_join_finds(tmp_path_factory, leader, follower, more):
    leader, follower = [*{*leader, *more}], [*{*follower, *more}]
    check(tmp_path_factory.mktemp("psi"), leader, follower)


@pytest.mark.parametrize(
    ("leader", "follower"),
    [
        ([], []),
        (["a"], []),
        (["a"], ["a"]),
        (["a"], ["b"]),
        ([f"{n}" for n in range(50)], [f"{n}" for n in range(50, 90)]),
        ([f"{n}" for n in range(50)], [f"{n}" for n in reversed(range(50))]),
        (["a\nb", 'quoted "x"', "c,d"], ["c,d", "a\nb", "e"]),
    ],
    ids=["empty", "empty at one", "one equal", "one different", "disjoint", "equal", "quoted"],
)
def test_sets_of_every_kind(tmp_path, leader, follower):
    check(tmp_path, leader, follower)


def test_more_than_fits_into_a_bucket(tmp_path, monkeypatch):
    monkeypatch.setattr("plait.psi.spill.BUCKET_ROWS", 64)
    monkeypatch.setattr("plait.psi.output.BLOCK_ROWS", 32)
    leader, follower = [f"{n}" for n in range(700)], [f"{n}" for n in range(300, 1200)]
    check(tmp_path, leader, follower, batch=50, shards=3)
    assert sorted(path.name for path in (tmp_path / "out-leader").iterdir()) == [
        "manifest.json",
        *(f"part-0000{n}-of-00003.csv" for n in range(3)),
    ]


@pytest.mark.parametrize("reveal", ["both", "leader", "sizes"])
def test_more_than_fits_into_windows(tmp_path, reveal):
    """Points and answers go both ways through one window: neither party waits for the other for ever."""
    ids = [f"{n}" for n in range(400)]
    tables(tmp_path, ids, ids)
    leader, _ = aligned(tmp_path, reveal=reveal, window=1500)
    assert leader.common == 400


@pytest.mark.parametrize("reveal", ["both", "leader"])
def test_more_cores_than_batches_under_way(tmp_path, monkeypatch, reveal):
    """Answers do not wait for points that are not sent before there are answers."""
    monkeypatch.setattr("plait.psi.pool.cores", lambda: 16)
    ids = [f"{n}" for n in range(150)]
    tables(tmp_path, ids, ids)
    leader, _ = aligned(tmp_path, reveal=reveal, timeout=2.0)
    assert leader.common == 150


@pytest.mark.slow
def test_many_on_processes_and_threads(tmp_path):
    leader, follower = [f"{n}" for n in range(20_000)], [f"{n}" for n in range(5_000, 25_000)]
    check(tmp_path, leader, follower, batch=4096)


def test_keys_of_several_columns_do_not_run_together_and_are_normalised(tmp_path):
    columns = ("first", "last", "n")
    write_csv(tmp_path / "leader.csv", [("ab", "c", 1), ("Jose\u0301", " X ", 2), ("a", "b", 3)], columns)
    write_csv(tmp_path / "follower.csv", [("a", "bc", 7), ("JOS\u00c9", "x", 8), ("A", "B", 9)], columns)
    found = aligned(tmp_path, ["first", "last"], ignore_case=True)
    assert sorted(read_ids(found[0], "n")) == ["2", "3"]
    assert sorted(read_ids(found[1], "n")) == ["8", "9"]


def test_two_runs_have_different_orders_and_digests(tmp_path):
    ids = [f"{n}" for n in range(40)]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = (check(tmp_path / name, ids, ids) for name in ("one", "two"))
    assert read_ids(one[0]) != read_ids(two[0])
    assert read_ids(one[0]) != ids
    assert one[0].digest != two[0].digest


class TestWhoLearnsWhat:
    IDS = ([f"{n}" for n in range(60)], [f"{n}" for n in range(30, 80)])

    def test_the_leader_alone(self, tmp_path):
        tables(tmp_path, *self.IDS)
        leader, follower = aligned(tmp_path, reveal="leader")
        assert sorted(read_ids(leader)) == sorted(f"{n}" for n in range(30, 60))
        assert (follower.common, follower.files) == (None, [])
        text = (tmp_path / "out-follower" / "manifest.json").read_text()
        assert not {"common", "order"} & set(json.loads(text)["shared"])
        assert "only the leader" in summary(follower)
        with pytest.raises(DataError, match="holds no rows"):
            read_digest(tmp_path / "out-follower")

    def test_sizes_alone(self, tmp_path):
        tables(tmp_path, *self.IDS)
        leader, follower = aligned(tmp_path, reveal="sizes")
        assert leader == follower
        assert (leader.common, leader.files) == (30, [])
        assert "60 of the leader, 50 of the follower; 30 in common" in summary(leader)

    def test_in_sizes_alone_answers_cannot_be_told_apart(self, tmp_path, monkeypatch):
        """What comes back is in an order of its own: it does not say which key a point belongs to."""
        kept = {}
        monkeypatch.setattr(Journal, "remove", lambda self: kept.setdefault(self.directory.parent.name, self))
        tables(tmp_path, *self.IDS)
        aligned(tmp_path, reveal="sizes")
        answers = [bytes(row) for batch in kept["out-leader"].batches("mine") for row in batch]
        assert len(answers) == 60
        assert answers == sorted(answers)


class TestSecrets:
    def test_the_secret_is_its_owners_alone_and_is_forgotten(self, tmp_path, monkeypatch):
        modes = []
        forget = Journal.forget_secret

        def look(self):
            path = self.directory / "secret"
            if path.exists():
                modes.append((stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(self.directory.stat().st_mode)))
            forget(self)

        monkeypatch.setattr(Journal, "forget_secret", look)
        check(tmp_path, ["a", "b"], ["b"])
        assert modes == [(0o600, 0o700)] * 2
        assert not list(tmp_path.rglob("secret"))
        assert not list(tmp_path.rglob(".psi"))


class TestMistakes:
    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"reveal": "all"}, "reveal='all'"),
            ({"duplicates": "last"}, "duplicates='last'"),
            ({"key": []}, "key="),
            ({"key": ["id", "id"]}, "key="),
            ({"shards": 0}, "shards"),
            ({"batch": 0}, "batch"),
            ({"batch": 1 << 20}, "up to 65536"),
        ],
    )
    def test_arguments(self, tmp_path, settings, said):
        tables(tmp_path, ["a"], ["a"])
        given = {"key": "id", "role": "leader", "listen": "127.0.0.1:0", **settings}
        with pytest.raises(ConfigError, match=said):
            align(tmp_path / "leader.csv", out=tmp_path / "out", **given)

    def test_keys_that_are_there_twice(self, tmp_path):
        tables(tmp_path, ["a", "b", "a"], ["a", "c"])
        leader, follower = outcomes(tmp_path)
        assert isinstance(leader, DataError)
        assert "rows 1 and 3 have the same key" in str(leader)
        assert isinstance(follower, FederalError)
        assert "DataError; its own log says more" in str(follower)
        assert "rows 1" not in str(follower)

    def test_the_first_of_them_is_taken_if_asked(self, tmp_path):
        write_csv(tmp_path / "leader.csv", [("a", 1), ("b", 2), (" a", 3)])
        write_csv(tmp_path / "follower.csv", [("a", 1), ("c", 2)])
        leader, follower = aligned(tmp_path, leader={"duplicates": "first"})
        assert (read_ids(leader, "note"), leader.rows) == (["1"], {"leader": 2, "follower": 2})
        assert read_ids(follower) == ["a"]

    def test_parties_that_want_different_things(self, tmp_path):
        tables(tmp_path, ["a"], ["a"])
        for one in outcomes(tmp_path, leader={"reveal": "sizes"}, follower={"shards": 2}):
            assert isinstance(one, FederalError)
            assert "reveal" in str(one)
            assert "shards" in str(one)

    @pytest.mark.parametrize(
        ("settings", "said"), [({"key": ["id", "note"]}, "key columns"), ({"ignore_case": True}, "case folded")]
    )
    def test_parties_with_different_keys(self, tmp_path, settings, said):
        tables(tmp_path, ["a"], ["a"])
        for one in outcomes(tmp_path, follower=settings):
            assert isinstance(one, FederalError)
            assert said in str(one)

    def test_rows_that_are_there_without_a_manifest(self, tmp_path):
        tables(tmp_path, ["a"], ["a"])
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "part-00001-of-00002.csv").touch()
        with pytest.raises(ConfigError, match=r"holds aligned rows already \(part-00001"):
            align(tmp_path / "leader.csv", "id", tmp_path / "out", role="leader", listen="127.0.0.1:0")

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_table_that_changes_under_way(self, tmp_path, monkeypatch, when):
        """Rows are written by their numbers: those of another table would be other people's."""
        tables(tmp_path, ["a", "b"], ["b", "a"])
        path = tmp_path / "leader.csv"
        was, write, meet = path.read_bytes(), run.write_shards, run._talk

        def change(function, *arguments):
            done = function(*arguments)
            if "out-leader" in str(arguments):
                path.write_bytes(was + b"c,d\n")
            return done

        name, function = ("_talk", meet) if when == "before" else ("write_shards", write)
        with monkeypatch.context() as patch:
            patch.setattr(run, name, lambda *arguments: change(function, *arguments))
            leader, follower = outcomes(tmp_path)
        assert isinstance(leader, DataError)
        assert "was changed while the run was under way" in str(leader)
        path.write_bytes(was)
        given = {"role": "leader", "listen": "127.0.0.1:0", "batch": 8}
        again = align(path, "id", tmp_path / "out-leader", **given)
        assert read_ids(again) == read_ids(follower)

    def test_a_directory_that_holds_aligned_rows(self, tmp_path):
        check(tmp_path, ["a"], ["a"])
        with pytest.raises(ConfigError, match="holds aligned rows already"):
            align(tmp_path / "leader.csv", "id", tmp_path / "out-leader", role="leader", listen="127.0.0.1:0")


class _Stop(Exception):  # noqa: N818 - stands for a kill
    pass


class TestGoingOn:
    """A party that ends without a word in the middle; then both are started again."""

    LEADER, FOLLOWER = [f"{n}" for n in range(100)], [f"{n}" for n in range(40, 130)]

    def interrupt(self, directory, monkeypatch, name, after, **settings):
        """Let a function of the journal fail at some call, in the leader's run."""
        function, calls = getattr(journal, name).add, []

        def add(self, points):
            if "out-leader" in str(self._directory):
                calls.append(1)
                if len(calls) > after:
                    raise _Stop
            function(self, points)

        with monkeypatch.context() as patch:
            patch.setattr(journal.Batches, "add", add)
            leader, follower = outcomes(directory, **settings)
        assert isinstance(leader, _Stop)
        assert isinstance(follower, FederalError)

    @pytest.mark.parametrize("after", [5, 15, 24])
    def test_what_was_done_is_not_done_again(self, tmp_path, monkeypatch, after):
        tables(tmp_path, self.LEADER, self.FOLLOWER)
        self.interrupt(tmp_path, monkeypatch, "Batches", after)
        done = len(list((tmp_path / "out-leader").rglob("*/0*.bin")))
        assert done == after
        blinded, multiplied = [], []
        blind, multiply = Pool._blind, Pool._multiply
        monkeypatch.setattr(Pool, "_blind", lambda self, keys: blinded.append(len(keys)) or blind(self, keys))
        monkeypatch.setattr(Pool, "_multiply", lambda self, points: multiplied.append(1) or multiply(self, points))
        found = aligned(tmp_path)
        assert read_ids(found[0]) == read_ids(found[1])
        assert sorted(read_ids(found[0])) == sorted(set(self.LEADER) & set(self.FOLLOWER))
        whole = 13 + 12
        assert len(blinded) <= whole - min(after, 13)

    def test_a_party_that_begins_anew_is_not_met_in_the_middle(self, tmp_path, monkeypatch):
        tables(tmp_path, self.LEADER, self.FOLLOWER)
        self.interrupt(tmp_path, monkeypatch, "Batches", 16)
        (tmp_path / "out-follower").rename(tmp_path / "elsewhere")
        leader, follower = outcomes(tmp_path)
        assert isinstance(leader, FederalError)
        assert "the follower has begun another run" in str(leader)
        assert isinstance(follower, FederalError)

    def test_another_table_or_other_settings_are_another_run(self, tmp_path, monkeypatch):
        tables(tmp_path, self.LEADER, self.FOLLOWER)
        self.interrupt(tmp_path, monkeypatch, "Batches", 3)
        given = {"role": "leader", "listen": "127.0.0.1:0", "batch": 8}
        with pytest.raises(ConfigError, match="other: shards"):
            align(tmp_path / "leader.csv", "id", tmp_path / "out-leader", shards=2, **given)
        write_csv(tmp_path / "leader.csv", [("a", "b")])
        with pytest.raises(ConfigError, match="other: table"):
            align(tmp_path / "leader.csv", "id", tmp_path / "out-leader", **given)

    def test_who_has_all_ends_without_the_other(self, tmp_path, monkeypatch):
        """Killed while it writes its rows, when the other one is gone for long."""
        tables(tmp_path, self.LEADER, self.FOLLOWER)
        write = run.write_shards

        def fail(table, rows, shards, out, scratch):
            if "out-leader" in str(out):
                raise _Stop
            return write(table, rows, shards, out, scratch)

        with monkeypatch.context() as patch:
            patch.setattr(run, "write_shards", fail)
            leader, follower = outcomes(tmp_path)
        assert isinstance(leader, _Stop)
        assert not list(tmp_path.rglob("secret"))
        given = {"role": "leader", "listen": "127.0.0.1:0", "batch": 8}
        again = align(tmp_path / "leader.csv", "id", tmp_path / "out-leader", **given)
        assert read_ids(again) == read_ids(follower)
        assert again.digest == follower.digest
        assert not (tmp_path / "out-leader" / ".psi").exists()

    @pytest.mark.parametrize("left", [["settings.json"], ["settings.json", "kept.json", "found.json"], []])
    def test_killed_while_it_removes_what_the_run_has_left(self, tmp_path, monkeypatch, left):
        tables(tmp_path, self.LEADER, self.FOLLOWER)
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "remove", lambda self: None)
            leader, _ = aligned(tmp_path)
        work = tmp_path / "out-leader" / ".psi"
        for path in work.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in left:
                path.unlink()
        given = {"role": "leader", "listen": "127.0.0.1:0", "batch": 8}
        assert align(tmp_path / "leader.csv", "id", tmp_path / "out-leader", **given) == leader
        assert not work.exists()

    @pytest.mark.parametrize("reveal", ["leader", "sizes"])
    @pytest.mark.parametrize("after", [15, 24])
    def test_whoever_learns(self, tmp_path, monkeypatch, reveal, after):
        tables(tmp_path, self.LEADER, self.FOLLOWER)
        self.interrupt(tmp_path, monkeypatch, "Batches", after, reveal=reveal)
        leader, follower = aligned(tmp_path, reveal=reveal)
        assert (leader.common, follower.common) == (60, 60 if reveal == "sizes" else None)


def test_files_that_change_after_the_manifest(tmp_path):
    """Two rows that have changed places, or a shard that is gone from the manifest, are found out."""
    found = check(tmp_path, ["a", "b", "c"], ["c", "b", "a"], shards=2)[0]
    out, file = tmp_path / "out-leader", found.files[1]
    assert read_digest(out) == found.digest
    data = file.read_bytes()
    first, *rows = data.splitlines(keepends=True)
    file.write_bytes(b"".join([first, *reversed(rows)]))
    with pytest.raises(DataError, match="its digest is another one: align again"):
        read_digest(out)
    file.write_bytes(data)
    manifest = json.loads((out / "manifest.json").read_text())
    for files, said in [(manifest["files"][:1], "changed by hand"), ([{"name": "../x"}], "is no manifest")]:
        (out / "manifest.json").write_text(json.dumps(manifest | {"files": files}))
        with pytest.raises(DataError, match=said):
            read_digest(out)


def test_what_a_party_sees_cannot_be_checked_against_a_key(tmp_path, monkeypatch):
    """All frames that come to the leader are searched for anything that it could make of a key by itself."""
    frames, secrets_of = {"leader": [], "follower": []}, {}
    joined, secret = loopback.join, Journal._secret

    def record(sender, data):
        frames[sender].append(bytes(data))
        return (data,)

    def keep(self):
        secrets_of[self.directory.parent.name] = secret(self)
        return secrets_of[self.directory.parent.name]

    monkeypatch.setattr(loopback, "join", lambda one, other: joined(one, other, meddle=record))
    monkeypatch.setattr(Journal, "_secret", keep)
    leader, follower = [f"person {n}" for n in range(40)], [f"person {n}" for n in range(20, 60)]
    tables(tmp_path, leader, follower)
    aligned(tmp_path)
    mine, theirs = secrets_of["out-leader"], secrets_of["out-follower"]
    seen = b"".join(frames["follower"])
    for id_ in follower[20:]:
        key = run.key_of([id_], "")
        point = curve.hash_to_curve(key)
        known = [id_.encode(), key, point, curve.multiply(mine, point)]
        for name in ("md5", "sha1", "sha256", "sha512", "blake2b", "sha3_256"):
            known += [hashlib.new(name, data).digest() for data in (id_.encode(), key, point)]
        assert not [one for one in known if one in seen or one.hex().encode() in seen]
        assert curve.multiply(theirs, point) in seen, "this test does not look where points are"
    points = [curve.multiply(theirs, curve.hash_to_curve(run.key_of([id_], ""))) for id_ in follower]
    places = [seen.index(point) for point in points]
    assert places != sorted(places), "the order of the file shows"
    # each is on the curve, as is every key's: whether it is on the twist does not tell keys apart
    assert all(curve.is_on_curve(int.from_bytes(point, "little")) for point in points)
