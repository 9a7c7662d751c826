"""Who may import whom, how long things may get, and what may not stand in the repository."""

from __future__ import annotations

import ast
import functools
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "plait"
MODULES = sorted(SOURCE.rglob("*.py"))

LEVELS = {
    "errors": 0, "atomic": 0, "rng": 0, "version": 0, "launch": 1,
    "variables": 1, "optim": 1, "data": 1, "nets": 1, "privacy": 1.5, "nn": 1.5,
    "engine": 2, "feature_column": 2.5,
    "federal": 3, "cluster": 3, "export": 3, "inspection": 3,
    "psi": 3.5,
    "serve": 4, "efl": 4, "train": 4, "mox": 4, "openks": 4,
    "__init__": 5, "demo": 6, "cli": 7, "__main__": 8,
}  # fmt: skip
"""A room imports itself and rooms of lower levels. `plait` itself is `__init__`."""

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60

WITHOUT_TEST = {
    "__main__.py": "the command; tests/test_cli.py",
    "efl/framework/task_scope.py": "gives names of the engine; tests/efl/test_conformance.py",
    "efl/optimizer_fn.py": "same",
    "efl/procedure_fn.py": "same",
    "efl/stage.py": "same",
}
"""Modules that need no test file of their name, and why."""

PICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}

TEXT_SUFFIXES = {".cfg", ".ci", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", ""}
SKIPPED = {".git", ".venv", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", "__pycache__", "demo-output"}
SKIPPED |= {"dist", "build", "node_modules"}
MACHINE_PATH = re.compile(r"(?<![\w.~:/$}-])/(?:work|root|home|tmp|Users)/[\w.]")
UNFINISHED = re.compile(r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX"]) + r")\b")


def name_of(path):
    return path.relative_to(SOURCE).as_posix()


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def room_of(parts):
    """The room that a dotted path inside plait leads to; names that are no room belong to `plait` itself."""
    return parts[0] if parts and parts[0] in LEVELS else "__init__"


def imported_rooms(path):
    """Every room of plait that a module imports, wherever in it the import stands."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively: write the full name"
            names = [[*(node.module or "").split("."), alias.name] for alias in node.names]
        else:
            continue
        yield from (room_of(parts[1:]) for parts in names if parts[0] == "plait")


def text_files():
    for folder, folders, files in os.walk(ROOT):
        folders[:] = sorted(set(folders) - SKIPPED)
        yield from (Path(folder, name) for name in sorted(files) if Path(name).suffix in TEXT_SUFFIXES)


def found_in(pattern, path):
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []
    lines = enumerate(text.splitlines(), 1)
    return [f"{path.relative_to(ROOT)}:{number}: {line.strip()}" for number, line in lines if pattern.search(line)]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_room_imports_only_rooms_below_it(path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert room in LEVELS, f"the room {room!r} is new: give it a level"
    wrong = {other for other in imported_rooms(path) if other != room and LEVELS[other] >= LEVELS[room]}
    assert not wrong, f"{name_of(path)} imports {sorted(wrong)}"


def test_nobody_but_plait_itself_the_demo_and_the_command_imports_a_door():
    doors = {room for room, level in LEVELS.items() if level == 4}
    importers = {name_of(path).split("/")[0] for path in MODULES if doors & set(imported_rooms(path))}
    assert importers - doors <= {"__init__.py", "demo", "cli.py"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_file_is_too_long(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_function_is_too_long(path):
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def in_order(names):
    """Constants, then classes, then the rest, each by the alphabet: the order that ruff keeps."""

    def key(name):
        kind = 0 if name.isupper() else 1 if name[:1].isupper() else 2
        return kind, name

    return sorted(names, key=key)


def public_names(path):
    for node in tree_of(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return ast.literal_eval(node.value)
    return None


@pytest.mark.parametrize("path", [path for path in MODULES if path.read_text().count("\n") > 1], ids=name_of)
def test_every_module_says_in_order_what_is_public(path):
    names = public_names(path)
    assert names is not None, "write an __all__"
    assert names == in_order(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "__init__.py"], ids=name_of)
def test_every_module_has_a_test_of_its_name(path):
    if name_of(path) in WITHOUT_TEST:
        return
    folder = ROOT / "tests" / path.parent.relative_to(SOURCE)
    names = [f"test_{path.stem}.py", f"test_{path.stem}_integration.py"]
    assert any((folder / name).exists() for name in names), f"write {folder.relative_to(ROOT)}/{names[0]}"


@pytest.mark.parametrize("name", WITHOUT_TEST)
def test_what_needs_no_test_defines_nothing(name):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    assert not [node for node in ast.walk(tree_of(SOURCE / name)) if isinstance(node, kinds)]


def calls_in(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_is_pickled(path):
    imported = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & PICKLERS
    for function, keywords in calls_in(path):
        assert function != "torch.save", "write safetensors"
        if function == "torch.load":
            assert keywords.get("weights_only") == "True"
        assert keywords.get("allow_pickle", "False") == "False"


def test_nothing_is_left_unfinished():
    assert [line for path in text_files() for line in found_in(UNFINISHED, path)] == []


def test_no_text_names_a_place_on_somebodys_machine():
    assert [line for path in text_files() for line in found_in(MACHINE_PATH, path)] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see " + "/" + "tmp/x", True),
        ("path='" + "/" + "home/me'", True),
        ("https://example.org/" + "home/page", False),
        ("docs/" + "work/x", False),
    ],
)
def test_what_counts_as_such_a_place(text, found):
    assert bool(MACHINE_PATH.search(text)) is found
