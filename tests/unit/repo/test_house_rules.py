"""House rules that a machine can hold: file length, banned names, declared dependencies."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
MAX_LINES = 400
CODE_FOLDERS = ("services", "gateway", "drafter", "verifier", "proto", "loadtest")
BANNED_NAMES = frozenset({"block", "block_size", "accepted"})
OURS = frozenset(
    {"services", "gateway", "drafter", "verifier", "dflash_wire", "dflash_ops", "loadtest"}
)
IMPORT_NAMES = {
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "grpcio-tools": "grpc_tools",
    "protobuf": "google",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
}
"""Distributions whose import name differs from their own."""
LANGCHAIN = frozenset({"langchain_core", "langchain_openai"})
"""Of a program among the tests that runs in an environment of its own."""
SHIPPED_WITH = {"pydantic_core": "pydantic"}
"""Modules of a distribution that another one pins to an exact version."""


def python_files(*folders: str) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    )


def test_files_are_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files(*CODE_FOLDERS, "tests")
    }
    assert lengths
    assert {name: count for name, count in lengths.items() if count > MAX_LINES} == {}


def defined_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of everything ``source`` gives a name to."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def banned_names(source: str) -> list[tuple[int, str]]:
    return [(line, name) for line, name in defined_names(source) if name in BANNED_NAMES]


def test_no_banned_names() -> None:
    problems = {
        str(path.relative_to(ROOT)): found
        for path in python_files(*CODE_FOLDERS)
        if (found := banned_names(path.read_text(encoding="utf-8")))
    }
    assert problems == {}


def test_banned_names_are_found() -> None:
    source = "def f(block):\n    self.accepted = 1\n    block_size = len(draft_block)\n"
    assert banned_names(source) == [(1, "block"), (2, "accepted"), (3, "block_size")]


def import_name(requirement: str) -> str:
    distribution = re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower()
    return IMPORT_NAMES.get(distribution, distribution.replace("-", "_"))


def third_party(folders: tuple[str, ...]) -> dict[str, str]:
    """Imported third-party package -> one file that imports it."""
    found: dict[str, str] = {}
    for path in python_files(*folders):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            tops = (name.split(".")[0] for name in names)
            for name in (SHIPPED_WITH.get(top, top) for top in tops):
                if name not in sys.stdlib_module_names and name not in OURS:
                    found.setdefault(name, str(path.relative_to(ROOT)))
    return found


def declared(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = list(project["dependencies"])
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    return {import_name(requirement) for requirement in requirements}


# `dflash` and `speculators` are public reference packages, installed for tests and benchmarks without
# dependencies; `proto` is Google's, which a test above checks for.
@pytest.mark.parametrize(
    ("folders", "extras", "others"),
    [
        (("services", "gateway", "drafter", "verifier", "proto"), ("guided", "gemma"), {"dflash"}),
        (("loadtest",), ("loadtest",), set()),
        (("tests",), ("test", "guided"), {"dflash", "proto", "speculators", *LANGCHAIN}),
    ],
    ids=["packages", "loadtest", "tests"],
)
def test_imports_are_declared(
    folders: tuple[str, ...], extras: tuple[str, ...], others: set[str]
) -> None:
    allowed = declared(*extras) | others
    if "tests" in folders:
        allowed |= {path.stem for path in python_files("tests")}  # fakes shared by an area's tests
    undeclared = {
        name: where for name, where in third_party(folders).items() if name not in allowed
    }
    assert undeclared == {}


def test_constraints_pin_every_declared_dependency() -> None:
    pins = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line and not line.startswith("#")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        requirements += extra
    names = {re.split(r"[\[<>=!~; ]", r, maxsplit=1)[0].lower() for r in requirements}
    assert names - pins == set()
