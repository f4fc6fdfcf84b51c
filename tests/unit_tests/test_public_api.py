"""The root exports the public names, all of them documented, and nothing else."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import langchain_swarmkv
from langchain_swarmkv import errors

# The names of the design that this version has. Cross-model reuse and the disk store come later.
DESIGNED = {
    "AnalystNode",
    "BudgetReport",
    "ChatSwarmKV",
    "DeviceLockManager",
    "DocumentNode",
    "DocumentRef",
    "EngineConfig",
    "FakeEngine",
    "KVSnapshot",
    "MemorySnapshotStore",
    "SamplingParams",
    "SnapshotStore",
    "SwarmEngine",
    "SwarmState",
    "SwarmStateGraph",
    "check_budget",
    "merge_findings",
}


def modules() -> Iterator[ModuleType]:
    """Every module of the package, the examples that the wheel carries excepted."""
    yield langchain_swarmkv
    for found in pkgutil.walk_packages(langchain_swarmkv.__path__, "langchain_swarmkv."):
        if ".examples" not in found.name:
            yield importlib.import_module(found.name)


MODULES = list(modules())


def as_ruff_sorts(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_the_root_is_its_all() -> None:
    """Sorted, without doubles, and no public name besides, submodules excepted."""
    exported = langchain_swarmkv.__all__
    assert exported == sorted(set(exported), key=as_ruff_sorts)
    public = {
        name
        for name, value in vars(langchain_swarmkv).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert public == set(exported)


def test_the_root_has_what_was_designed() -> None:
    """And every error."""
    assert set(langchain_swarmkv.__all__) >= DESIGNED | set(errors.__all__)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_modules_say_what_they_are_and_what_they_export(module: ModuleType) -> None:
    """A docstring; and `__all__` names what the module itself defines, sorted."""
    assert module.__doc__
    if not hasattr(module, "__all__"):
        return
    assert module.__all__ == sorted(set(module.__all__), key=as_ruff_sorts)
    for name in module.__all__:
        assert hasattr(module, name)


def public_members() -> Iterator[tuple[str, object]]:
    """Everything that can be reached from the root by public names, except inherited members."""
    for name in langchain_swarmkv.__all__:
        value = getattr(langchain_swarmkv, name)
        yield name, value
        if inspect.isclass(value):
            for member_name, member in vars(value).items():
                if not member_name.startswith("_"):
                    yield f"{name}.{member_name}", member


def needs_docstring(value: object) -> bool:
    return (
        inspect.isclass(value)
        or inspect.isroutine(value)
        or isinstance(value, (property, staticmethod, classmethod))
    )


def test_every_public_thing_has_a_docstring() -> None:
    """Classes their own; a method that overrides another may have that one's."""
    missing = []
    for name, value in public_members():
        class_name, _, member = name.partition(".")
        kind = getattr(langchain_swarmkv, class_name)
        docstring = inspect.getdoc(getattr(kind, member)) if member else kind.__doc__
        if needs_docstring(value) and not docstring:
            missing.append(name)
    assert missing == []


def test_public_things_come_from_the_package() -> None:
    """Nothing of another library is passed on under our name."""
    for name in langchain_swarmkv.__all__:
        value = getattr(langchain_swarmkv, name)
        if needs_docstring(value):
            assert value.__module__.startswith("langchain_swarmkv."), name


def test_the_package_imports_the_defining_module_never_the_root() -> None:
    """Or the floors would lean on their roof."""
    root = Path(langchain_swarmkv.__file__).parent
    for path in root.rglob("*.py"):
        if path == root / "__init__.py" or "examples" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module != "langchain_swarmkv", path
            elif isinstance(node, ast.Import):
                assert "langchain_swarmkv" not in [alias.name for alias in node.names], path


def test_types_are_shipped() -> None:
    """The marker for type checkers lies beside the code."""
    assert (Path(langchain_swarmkv.__file__).parent / "py.typed").exists()
