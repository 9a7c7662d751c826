"""Which version answers, and when another takes its place."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np
import pytest

from plait.errors import DataError, UnavailableError
from plait.serve import models
from plait.serve.metrics import Metrics
from plait.serve.models import Models, find_models
from plait.serve.settings import Settings

from .parted import open_part, write_follower, write_leader


def use(directory, main, asker=None, **settings):
    async def run():
        found = Models(directory, Settings(**settings), Metrics(), asker)
        try:
            await found.start()
            return await main(found)
        finally:
            found.close()

    return asyncio.run(run())


async def ask(served):
    return float((await served.batcher.infer({"x": np.ones((1, 3), "f4")}, 1, 10.0))["y"][0, 0])


def test_a_model_directory_or_one_of_several(publish, tmp_path):
    folder = publish(1)
    publish(10)
    assert find_models(folder) == {"doubler": folder}
    assert find_models(tmp_path) == {"doubler": folder}

    async def main(found):
        return [(served.name, served.version) for served in found]

    assert use(tmp_path, main) == [("doubler", "10")]


def test_nothing_to_serve(tmp_path):
    with pytest.raises(DataError, match="no exported model"):
        use(tmp_path, None)


def test_a_new_number_takes_the_place_and_the_old_one_finishes(publish):
    folder = publish(9, 2.0)

    async def main(found):
        old = found.get("doubler")
        publish(10, 3.0)
        await found.look()
        assert await ask(old) == 2.0
        assert await ask(found.get("doubler")) == 3.0
        shutil.rmtree(folder / "10")
        await found.look()
        return found.get("doubler").version

    assert use(folder, main) == "9"


def test_a_broken_version_is_said_once_and_not_served(publish, caplog):
    folder = publish(1)

    async def main(found):
        publish(2, "no number")
        await found.look()
        await found.look()
        assert found.get("doubler").version == "1"
        publish(3, 5.0)
        await found.look()
        return await ask(found.get("doubler"))

    assert use(folder, main) == 5.0
    assert caplog.text.count("version 2 cannot be served") == 1


def test_a_broken_version_that_is_mended_is_served(publish, caplog):
    folder = publish(1)

    async def main(found):
        publish(2, "no number")
        await found.look()
        shutil.rmtree(folder / "2")
        publish(2, 5.0)
        await found.look()
        assert await ask(found.get("doubler")) == 5.0
        publish(3, "no number")
        await found.look()
        (folder / "3" / "factor.json").write_text("6.0 ")  # as somebody does who copies file by file
        await found.look()
        return await ask(found.get("doubler"))

    assert use(folder, main) == 6.0
    assert caplog.text.count("cannot be served") == 2


def test_a_broken_version_at_the_start_is_an_error(publish):
    folder = publish(1, outputs=[{"name": "y", "dtype": "complex64", "shape": [None]}])
    with pytest.raises(DataError, match="complex64"):
        use(folder, None)


def test_a_new_model_is_found(publish, tmp_path):
    publish(1)

    async def main(found):
        shutil.copytree(tmp_path / "doubler", tmp_path / "other")
        await found.look()
        return sorted(served.name for served in found)

    assert use(tmp_path, main) == ["doubler", "other"]


def test_watching_survives_a_directory_that_is_away(publish, monkeypatch, caplog):
    folder = publish(1)

    async def main(found):
        watch = asyncio.create_task(found.watch())
        away = folder.rename(folder.with_name("away"))
        while "could not be read" not in caplog.text:  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.01)
        away.rename(folder)
        publish(2, 4.0)
        while found.get("doubler").version != "2":  # noqa: ASYNC110 - same
            await asyncio.sleep(0.01)
        watch.cancel()
        await asyncio.wait([watch])
        return await ask(found.get("doubler"))

    assert use(folder, main, poll=0.01) == 4.0


def test_the_settings_reach_the_loader(publish, monkeypatch):
    folder, seen = publish(1), []
    load = models.load
    monkeypatch.setattr(models, "load", lambda path, **options: seen.append(options) or load(path))

    async def main(found):
        return None

    use(folder, main, threads=3, format="torch")
    assert seen == [{"format": "torch", "threads": 3}]


class Followers:
    """Stands where an Asker does; has the parts of these pairs."""

    peer = "follower"

    def __init__(self, *pairs):
        self.pairs = set(pairs)

    def ask(self, pair, keys):
        if pair not in self.pairs:
            raise UnavailableError(f"no part of {pair}")
        return {"the/half": np.full((len(keys), 2), 5, "f4")}


@pytest.fixture
def by_hand(monkeypatch):
    monkeypatch.setattr(models, "load", open_part)


def test_a_part_takes_the_place_once_the_other_party_has_its_own(tmp_path, by_hand, monkeypatch, caplog):
    write_leader(tmp_path, "one")
    asker = Followers("one")

    async def main(found):
        write_leader(tmp_path, "two", factor=10.0)
        with monkeypatch.context() as patch:
            patch.setattr(models, "load", lambda *_, **__: pytest.fail("it was loaded, though it has to wait"))
            for _ in range(3):
                await found.look()
                assert [served.version for served in found] == ["1"]
        asker.pairs.add("two")
        await found.look()
        (served,) = found
        inputs = {"own": np.ones((1, 2), "f4"), "id": np.array([7])}
        return served.version, (await served.batcher.infer(inputs, 1, 10.0))["sum"].tolist()

    assert use(tmp_path, main, asker) == ("2", [[60, 60]])
    assert caplog.text.count("version 2 waits: no part of two") == 1


def test_a_part_is_served_though_the_other_party_is_away_at_the_start(tmp_path, by_hand):
    write_leader(tmp_path, "one")

    async def main(found):
        (served,) = found
        with pytest.raises(UnavailableError, match="no part of one"):
            await served.batcher.infer({"own": np.ones((1, 2), "f4"), "id": np.array([7])}, 1, 10.0)

    use(tmp_path, main, Followers())


def test_a_part_without_the_other_party(tmp_path, by_hand):
    write_leader(tmp_path / "leader")
    with pytest.raises(DataError, match="leader is the leader's part of a model: say where the other party is"):
        use(tmp_path, None)
    write_follower(tmp_path / "followers")
    with pytest.raises(DataError, match="followers is the follower's part, for the other party alone: .* --rows"):
        use(tmp_path / "followers", None, Followers())
