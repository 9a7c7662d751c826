"""Files on a real S3 server, started here; and a table of operations that give the same on both kinds of place."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from plait.data import files, stores
from plait.data.copying import copy, copy_parallel, rename
from plait.data.files import File
from plait.errors import DataError

from .s3_server import *  # noqa: F403 - fixtures
from .s3_server import START_SECONDS


@pytest.fixture(params=["local", "s3"])
def root(request, tmp_path):
    """A directory that is there, on both kinds of place."""
    url = f"{tmp_path}/root" if request.param == "local" else request.getfixturevalue("bucket") + "/root"
    files.make_dirs(url)
    return url


@pytest.fixture
def tree(root):
    """a.txt (1 byte), b/c.txt (2), b/d/e.txt (3), .hidden (4), empty/."""
    for number, name in enumerate(["a.txt", "b/c.txt", "b/d/e.txt", ".hidden"], 1):
        files.write(f"{root}/{name}", "x" * number)
    files.make_dirs(f"{root}/empty")
    return root


NAMES = ["plain", "two words", "a#b", "what?", "50%", "%41", ".dot", "é中文", "[x]*", "a+b&c=d", "'\"", "~"]


def test_any_name_comes_back(root):
    for name in NAMES:
        files.write(f"{root}/{name}/{name}", name)
        rename(f"{root}/{name}/{name}", f"{root}/{name}/{name}2")
    assert files.list_directory(root) == sorted(NAMES)
    for name in NAMES:
        assert files.list_directory(f"{root}/{name}") == [f"{name}2"]
        assert files.read(f"{root}/{name}/{name}2") == name
        files.remove(f"{root}/{name}/{name}2")
        assert not files.exists(f"{root}/{name}/{name}2")


def test_text_and_bytes(root):
    files.write(f"{root}/f", "é\r\nb\n")
    assert files.read(f"{root}/f") == "é\r\nb\n"
    assert files.read(f"{root}/f", binary=True) == "é\r\nb\n".encode()
    files.append(f"{root}/f", "c")
    files.append(f"{root}/f", b"\xc3\xa9")
    assert files.read(f"{root}/f") == "é\r\nb\ncé"
    files.append(f"{root}/new", "made")
    assert files.read(f"{root}/new") == "made"
    files.write(f"{root}/f", b"")
    assert files.get_size(f"{root}/f") == 0


def test_a_file_of_text(root):
    with File(f"{root}/deep/f", "w") as file:
        assert file.writable()
        assert file.write("one\n") == 4
        file.writelines(["twö\n", "three"])
        file.flush()
        assert file.size() == 14
    with File(f"{root}/deep/f") as file:
        assert file.readable()
        assert file.seekable()
        assert not file.writable()
        assert file.size() == 14
        assert file.readline() == "one\n"
        assert file.readlines() == ["twö\n", "three"]
        assert file.seek(4) == 4
        assert next(file) == "twö\n"
        assert list(file) == ["three"]
    assert file.closed


def test_a_file_of_bytes(root):
    with File(f"{root}/f", "wb") as file:
        file.write(bytes(range(100)))
        assert file.tell() == 100
    with File(f"{root}/f", "rb") as file:
        assert file.seek(-2, 2) == 98
        assert file.read() == bytes([98, 99])
        file.seek(10)
        assert file.read(2) == bytes([10, 11])
    with File(f"{root}/f", "r+b") as file:
        file.seek(1)
        file.write(b"new")
        file.seek(0)
        assert file.read(5) == b"\0new\4"
    with File(f"{root}/f", "a+b") as file:
        file.write(b"end")
        file.seek(0)
        assert len(file.read()) == 103
    assert files.read(f"{root}/f", binary=True) == b"\0new" + bytes(range(4, 100)) + b"end"


def write_half(url, mode):
    with File(url, mode) as file:
        file.write("half")
        raise RuntimeError("stop")


@pytest.mark.parametrize("mode", ["w", "w+"])
def test_a_block_that_raises_changes_nothing(root, mode):
    files.write(f"{root}/f", "old")
    with pytest.raises(RuntimeError, match="stop"):
        write_half(f"{root}/f", mode)
    assert files.read(f"{root}/f") == "old"
    assert files.list_directory(root) == ["f"]


def test_facts(tree):
    assert files.exists(f"{tree}/a.txt")
    assert files.exists(f"{tree}/b")
    assert files.exists(f"{tree}/b/")
    assert not files.exists(f"{tree}/a.txt/")
    assert not files.exists(f"{tree}/a")
    assert files.is_directory(f"{tree}/empty")
    assert not files.is_directory(f"{tree}/a.txt")
    assert not files.is_directory(f"{tree}/none")
    info = files.stat(f"{tree}/b/c.txt")
    assert (info.length, info.is_directory) == (2, False)
    assert abs(info.mtime_nsec / 1e9 - time.time()) < 60
    assert files.stat(f"{tree}/b").is_directory
    assert files.get_size(f"{tree}/b/d/e.txt") == 3
    assert files.get_size(f"{tree}/b") == 2
    assert files.get_size(tree, recursive=True) == 10


def test_lists(tree):
    assert files.list_directory(tree) == [".hidden", "a.txt", "b", "empty"]
    everything = [".hidden", "a.txt", "b", "b/c.txt", "b/d", "b/d/e.txt", "empty"]
    assert files.list_directory(f"{tree}/", recursive=True) == everything
    assert files.list_directory(f"{tree}/empty") == []
    entries = list(files.scan_dir(f"{tree}/b"))
    kinds = [(entry.name, entry.is_dir(), entry.is_file()) for entry in entries]
    assert kinds == [("c.txt", False, True), ("d", True, False)]
    assert entries[0].path == f"{tree}/b/c.txt"
    assert entries[0].stat().length == 2


def test_walk(tree):
    assert list(files.walk(tree)) == [
        (tree, ["b", "empty"], [".hidden", "a.txt"]),
        (f"{tree}/b", ["d"], ["c.txt"]),
        (f"{tree}/b/d", [], ["e.txt"]),
        (f"{tree}/empty", [], []),
    ]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*", ["a.txt", "b", "empty"]),
        (".*", [".hidden"]),
        ("?.txt", ["a.txt"]),
        ("[ab]*", ["a.txt", "b"]),
        ("*/*.txt", ["b/c.txt"]),
        ("**/*.txt", ["a.txt", "b/c.txt", "b/d/e.txt"]),
        ("b/**", ["b/c.txt", "b/d", "b/d/e.txt"]),
        ("b/c.txt", ["b/c.txt"]),
        ("a.txt/*", []),
        ("none/*", []),
        ("none", []),
    ],
)
def test_glob(tree, pattern, found):
    assert files.glob(f"{tree}/{pattern}") == [f"{tree}/{name}" for name in found]


def test_directories(root):
    files.mk_dir(f"{root}/a")
    with pytest.raises(FileExistsError):
        files.mk_dir(f"{root}/a")
    with pytest.raises(FileNotFoundError):
        files.mk_dir(f"{root}/x/y")
    files.make_dirs(f"{root}/x/y/z/")
    files.make_dirs(f"{root}/x.y")
    assert files.list_directory(root, recursive=True) == ["a", "x", "x.y", "x/y", "x/y/z"]
    files.write(f"{root}/f", "")
    with pytest.raises(FileExistsError):
        files.make_dirs(f"{root}/f")


def test_what_is_missing(root):
    for function in [files.read, files.stat, files.remove, files.list_directory, files.get_size, files.scan_dir]:
        with pytest.raises(FileNotFoundError):
            function(f"{root}/none")
    for mode in ["r", "r+", "rb"]:
        with pytest.raises(FileNotFoundError):
            File(f"{root}/none", mode)
    with pytest.raises(FileNotFoundError):
        list(files.walk(f"{root}/none"))
    for function in [copy, copy_parallel, rename]:
        with pytest.raises(FileNotFoundError):
            function(f"{root}/none", f"{root}/target")
    assert files.list_directory(root) == []


def test_what_is_of_the_other_kind(tree):
    for mode in ["r", "w", "a", "r+"]:
        with pytest.raises(IsADirectoryError):
            File(f"{tree}/b", mode)
    for function in [files.list_directory, files.scan_dir]:
        with pytest.raises(NotADirectoryError):
            function(f"{tree}/a.txt")
    with pytest.raises(NotADirectoryError, match="use copy"):
        copy_parallel(f"{tree}/a.txt", f"{tree}/x")
    with pytest.raises(IsADirectoryError, match="copy_parallel"):
        copy(f"{tree}/b", f"{tree}/x")
    with pytest.raises(IsADirectoryError):
        copy(f"{tree}/a.txt", f"{tree}/b")


@pytest.mark.parametrize(
    ("url", "recursive", "left"),
    [
        ("a.txt", False, [".hidden", "b", "empty"]),
        ("a.txt", True, [".hidden", "b", "empty"]),
        ("a.txt/", True, [".hidden", "a.txt", "b", "empty"]),
        ("b", False, [".hidden", "a.txt", "b", "empty"]),
        ("b", True, [".hidden", "a.txt", "empty"]),
        ("b/", True, [".hidden", "a.txt", "empty"]),
        ("empty", True, [".hidden", "a.txt", "b"]),
    ],
)
def test_remove(tree, url, recursive, left):
    files.remove(f"{tree}/{url}", recursive=recursive)
    assert files.list_directory(tree) == left


def test_rename_inside_a_place(tree):
    rename(f"{tree}/a.txt", f"{tree}/b/c.txt")
    assert files.read(f"{tree}/b/c.txt") == "x"
    rename(f"{tree}/b", f"{tree}/moved")
    rename(f"{tree}/moved", f"{tree}/moved/")
    inside = [".hidden", "empty", "moved", "moved/c.txt", "moved/d", "moved/d/e.txt"]
    assert files.list_directory(tree, recursive=True) == inside
    with pytest.raises(OSError, match="inside"):
        rename(f"{tree}/moved", f"{tree}/moved/d2")
    with pytest.raises(FileExistsError):
        rename(f"{tree}/moved", f"{tree}/empty")
    with pytest.raises(IsADirectoryError):
        rename(f"{tree}/.hidden", f"{tree}/empty")
    assert files.list_directory(tree, recursive=True) == inside


@pytest.fixture(params=["local", "s3"])
def other(request, tmp_path):
    """A directory that is not there, to copy to."""
    return str(tmp_path / "other") if request.param == "local" else request.getfixturevalue("bucket") + "/other"


@pytest.mark.parametrize("threads", [0, 3])
def test_a_tree_is_copied(tree, other, threads):
    copy_parallel(tree, other, threads=threads)
    assert files.list_directory(other, recursive=True) == files.list_directory(tree, recursive=True)
    assert files.read(f"{other}/b/d/e.txt") == "xxx"
    assert files.get_size(tree, recursive=True) == 10


def test_some_files_of_a_tree_are_copied(tree, other):
    copy_parallel(tree, other, file_list=["b/d/e.txt", "a.txt"])
    assert files.list_directory(other, recursive=True) == ["a.txt", "b", "b/d", "b/d/e.txt"]
    for name, error in [("none", FileNotFoundError), ("b", IsADirectoryError)]:
        with pytest.raises(error):
            copy_parallel(tree, other, file_list=[name])


def test_one_file_is_copied(tree, other):
    copy(f"{tree}/b/c.txt", f"{other}/deep/x")
    assert files.read(f"{other}/deep/x") == "xx"
    files.write(f"{tree}/a.txt", "")
    copy(f"{tree}/a.txt", f"{other}/deep/x")
    assert files.get_size(f"{other}/deep/x") == 0


def test_rename_to_another_place(tree, other):
    rename(f"{tree}/b", f"{other}/b")
    rename(f"{tree}/a.txt", f"{other}/a.txt")
    assert files.list_directory(tree) == [".hidden", "empty"]
    assert files.list_directory(other, recursive=True) == ["a.txt", "b", "b/c.txt", "b/d", "b/d/e.txt"]


def test_the_same_size_is_not_the_same_file(tree, other):
    copy(f"{tree}/b/c.txt", f"{other}/x")
    files.write(f"{tree}/b/c.txt", "yy")
    copy(f"{tree}/b/c.txt", f"{other}/x")
    assert files.read(f"{other}/x") == "yy"


BIG = 3 * stores.PART_BYTES + 12345


@pytest.fixture
def big(tmp_path):
    files.write(tmp_path / "big", os.urandom(BIG))
    return tmp_path / "big"


def test_a_file_in_parts(big, bucket, client, tmp_path):
    copy(big, f"{bucket}/one")
    copy(f"{bucket}/one", f"{bucket}/two")
    copy(f"{bucket}/two", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == big.read_bytes()
    tags = [client.head_object(Bucket=bucket[5:], Key=key)["ETag"] for key in ["one", "two"]]
    assert tags[0] == tags[1]
    assert tags[0].endswith('-4"')


def test_parts_of_another_size_are_understood(big, bucket, client, tmp_path):
    """Uploaded by another program, downloaded, and not downloaded again."""
    upload = client.create_multipart_upload(Bucket=bucket[5:], Key="x")["UploadId"]
    data, part, parts = big.read_bytes(), 5 << 20, []
    for number, start in enumerate(range(0, BIG, part), 1):
        names = {"Bucket": bucket[5:], "Key": "x", "UploadId": upload, "PartNumber": number}
        parts.append(
            {"PartNumber": number, "ETag": client.upload_part(**names, Body=data[start : start + part])["ETag"]}
        )
    client.complete_multipart_upload(Bucket=bucket[5:], Key="x", UploadId=upload, MultipartUpload={"Parts": parts})
    copy(f"{bucket}/x", tmp_path / "x")
    before = (tmp_path / "x").stat()
    copy(f"{bucket}/x", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == data
    assert (tmp_path / "x").stat().st_ino == before.st_ino


def test_an_etag_that_is_no_checksum_is_verified_by_content(big, bucket, tmp_path, monkeypatch):
    head = stores.S3Store.head
    monkeypatch.setattr(
        stores.S3Store, "head", lambda *path, **more: {**head(*path, **more), "ETag": '"' + "0" * 32 + '"'}
    )
    copy(big, f"{bucket}/x")
    copy(f"{bucket}/x", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == big.read_bytes()


def test_a_broken_download_is_an_error(bucket, tmp_path, monkeypatch):
    files.write(f"{bucket}/x", "right")
    monkeypatch.setattr(stores.S3Store, "download", lambda self, path, local: files.write(local, "wrong"))
    with pytest.raises(DataError, match=f"{bucket}/x.*target.*copy it again"):
        copy(f"{bucket}/x", tmp_path / "target")
    assert os.listdir(tmp_path) == []


def test_a_broken_upload_is_an_error(big, bucket, monkeypatch):
    monkeypatch.setattr(stores.S3Store, "upload", lambda self, local, path: self.client.pipe_file(path, b"wrong"))
    with pytest.raises(DataError, match=f"{bucket}/x"):
        copy(big, f"{bucket}/x")


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/x", "a//x", "./x"])
def test_a_key_does_not_lead_out_of_the_target(bucket, client, tmp_path, key):
    client.put_object(Bucket=bucket[5:], Key=f"data/{key}", Body=b"evil")
    with pytest.raises(DataError, match="cannot be copied"):
        copy_parallel(f"{bucket}/data", tmp_path / "in" / "target")
    assert os.listdir(tmp_path) == []


class Between:
    """Stands between the store and its client: notes what is asked, shortens pages, may refuse to remove."""

    def __init__(self, monkeypatch, refuse=False):
        self.client, self.refuse, self.asked = stores.S3Store().client, refuse, []
        monkeypatch.setattr(stores.S3Store, "client", self)

    def call_s3(self, method, **arguments):
        self.asked.append(method)
        if method == "delete_objects" and self.refuse:
            return {"Errors": [{"Key": "d/0", "Message": "Access Denied"}]}
        return self.client.call_s3(method, **{"MaxKeys": 2, **arguments})


def test_more_files_than_a_page_holds(bucket, monkeypatch):
    for number in range(5):
        files.write(f"{bucket}/d/{number}", "")
    between = Between(monkeypatch)
    monkeypatch.setattr(stores, "_DELETE_AT_ONCE", 2)
    assert files.list_directory(f"{bucket}/d") == ["0", "1", "2", "3", "4"]
    assert between.asked.count("list_objects_v2") == 4, "one to see whether it is a directory, three pages"
    files.remove(f"{bucket}/d", recursive=True)
    assert between.asked.count("delete_objects") == 3
    assert files.list_directory(bucket) == []


def test_what_is_not_removed_is_an_error(bucket, monkeypatch):
    files.write(f"{bucket}/d/0", "")
    Between(monkeypatch, refuse=True)
    with pytest.raises(OSError, match="Access Denied.*d/0"):
        files.remove(f"{bucket}/d", recursive=True)


def test_a_file_and_a_directory_of_one_name(bucket):
    files.write(f"{bucket}/d/b", "file")
    files.write(f"{bucket}/d/b/c", "inside")
    assert files.read(f"{bucket}/d/b") == "file"
    assert files.list_directory(f"{bucket}/d") == ["b"]
    assert files.get_size(f"{bucket}/d", recursive=True) == 10
    assert list(files.walk(f"{bucket}/d")) == [(f"{bucket}/d", [], ["b"]), (f"{bucket}/d/b", [], ["c"])]


def test_obs_is_the_same_as_s3(bucket):
    files.write(f"{bucket}/d/x", "there")
    other = bucket.replace("s3://", "obs://")
    assert files.read(f"{other}/d/x") == "there"
    assert files.glob(f"{other}/*/x") == [f"{other}/d/x"]
    assert [entry.path for entry in files.scan_dir(other)] == [f"{other}/d"]
    rename(f"{other}/d/x", f"{bucket}/d/x")
    assert files.exists(f"{bucket}/d/x")


def test_a_forked_process_has_a_client_of_its_own(bucket):
    files.write(f"{bucket}/x", "there")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads, as in every program that reads s3
        process = multiprocessing.get_context("fork").Process(target=files.write, args=(f"{bucket}/y", "from below"))
        process.start()
    process.join(START_SECONDS)
    assert process.exitcode == 0
    assert files.read(f"{bucket}/y") == "from below"


def test_a_bucket(bucket, client):
    assert files.is_directory(bucket)
    assert files.is_directory(f"{bucket}/")
    assert files.list_directory(bucket) == []
    files.make_dirs(bucket)
    files.write(f"{bucket}/x", "")
    assert files.glob(f"{bucket}/*") == [f"{bucket}/x"]
    files.remove(bucket, recursive=True)
    assert files.exists(bucket)
    for function in [files.stat, files.make_dirs, files.list_directory]:
        with pytest.raises(FileNotFoundError):
            function("s3://no-such-bucket-here")
    with pytest.raises(FileNotFoundError):
        files.write("s3://no-such-bucket-here/x", "x")


def test_set_auth_wins_over_the_environment(server, bucket, monkeypatch):
    files.write(f"{bucket}/x", "there")
    for name in ["AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]:
        monkeypatch.delenv(name)
    host, port = server.removeprefix("http://").split(":")
    files.set_auth("key", "secret", host, int(port), is_secure=False, path_style=True, retry=2, client_timeout=20)
    assert files.read(f"{bucket}/x") == "there"


def test_what_others_write_is_seen(bucket, client):
    assert files.list_directory(bucket) == []
    client.put_object(Bucket=bucket[5:], Key="x", Body=b"1")
    assert files.list_directory(bucket) == ["x"]
    client.put_object(Bucket=bucket[5:], Key="x", Body=b"22")
    assert files.read(f"{bucket}/x") == "22"
    client.delete_object(Bucket=bucket[5:], Key="x")
    assert not files.exists(f"{bucket}/x")


COUNT, EACH = 10, 20_000_000
PROGRAM = "import sys; from plait.data.copying import copy_parallel; copy_parallel(sys.argv[1], sys.argv[2], threads=2)"


def cut_off(source, target, done):
    """Copy in another process and kill it once `done()` counts two files or more; what it counted then."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(source), str(target)])
    try:
        until = time.monotonic() + START_SECONDS
        while process.poll() is None and done() < 2 and time.monotonic() < until:
            time.sleep(0.005)
        assert process.poll() is None, "the copy ended before it was cut"
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert 2 <= done() < COUNT
    return done()


@pytest.fixture
def much(tmp_path):
    """200 MB in ten files."""
    folder = tmp_path / "much"
    for number in range(COUNT):
        files.write(folder / f"{number % 2}" / f"{number}", os.urandom(EACH))
    return folder


def assert_same(folder, other):
    names = [name for name in files.list_directory(folder, recursive=True) if "/" in name]
    assert len(names) == COUNT
    assert all(files.read(f"{other}/{name}", binary=True) == (folder / name).read_bytes() for name in names)


def test_an_upload_that_is_killed_goes_on(much, bucket, client):
    client.put_bucket_versioning(Bucket=bucket[5:], VersioningConfiguration={"Status": "Enabled"})

    def there():
        return {thing["Key"] for thing in client.list_objects_v2(Bucket=bucket[5:]).get("Contents", [])} - {"up/"}

    def versions():
        return {(item["Key"], item["VersionId"]) for item in client.list_object_versions(Bucket=bucket[5:])["Versions"]}

    cut_off(much, f"{bucket}/up", lambda: len(there()))
    before = {(key, version) for key, version in versions() if not key.endswith("/")}
    copy_parallel(much, f"{bucket}/up", threads=2)
    assert_same(much, f"{bucket}/up")
    after = [(key, version) for key, version in versions() if not key.endswith("/")]
    assert before <= set(after)
    assert len(after) == COUNT, "a file that was there was copied again"


def test_a_download_that_is_killed_goes_on(much, bucket, tmp_path):
    copy_parallel(much, f"{bucket}/down")
    target = tmp_path / "down"

    def finished():
        return list(target.glob("[01]/[0-9]"))

    cut_off(f"{bucket}/down", target, lambda: len(finished()))
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in finished()}
    assert all(path.read_bytes() == (much / path.relative_to(target)).read_bytes() for path in before)
    for path in target.rglob(".*.tmp"):
        os.utime(path, (0, 0))  # as if it had been killed long ago
    copy_parallel(f"{bucket}/down", target)
    assert_same(much, target)
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in before} == before
    assert list(target.rglob(".*.tmp")) == []


def test_the_example_of_outputs_writes_to_s3(bucket, tmp_path):
    script = Path(__file__).parents[2] / "examples" / "mox" / "outputs.py"
    command = [sys.executable, str(script), f"{bucket}/outputs.csv"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120, capture_output=True)
    rows = files.read(f"{bucket}/outputs.csv").splitlines()
    assert len(rows) > 10
