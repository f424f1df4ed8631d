"""Imports go down only: services -> {gateway, verifier, drafter} -> {dflash_wire, dflash_ops}."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
OURS = frozenset(
    {"services", "gateway", "drafter", "verifier", "dflash_wire", "dflash_ops", "loadtest", "tests"}
)
STANDARD = frozenset(sys.stdlib_module_names)


@dataclass(frozen=True)
class Layer:
    """What one package may import. Its own modules and the standard library always pass."""

    folder: str
    ours: frozenset[str] = frozenset()
    """Packages of this repository below it."""
    parts: frozenset[str] = frozenset()
    """Modules of other packages of this repository that it may import, and nothing else of those."""
    only: frozenset[str] | None = None
    """The only third-party packages allowed; None allows all but ``never``."""
    never: frozenset[str] = field(default_factory=frozenset)


BOTTOM = frozenset({"dflash_wire", "dflash_ops"})
LAYERS = {
    # protobuf and gRPC: what protoc makes of the public API.
    "dflash_wire": Layer("proto/dflash_wire", only=frozenset({"msgpack", "google", "grpc"})),
    "dflash_ops": Layer(
        "proto/dflash_ops",
        ours=frozenset({"dflash_wire"}),
        only=frozenset({"torch", "transformers", "safetensors"}),
    ),
    "drafter": Layer("drafter", ours=BOTTOM, never=frozenset({"ray", "fastapi", "starlette"})),
    "verifier": Layer("verifier", ours=BOTTOM, never=frozenset({"ray", "fastapi", "starlette"})),
    "gateway": Layer(
        "gateway",
        ours=frozenset({"dflash_wire"}),
        never=frozenset({"ray", "torch", "safetensors"}),
    ),
    "services": Layer(
        "services", ours=frozenset({"gateway", "drafter", "verifier"}) | BOTTOM, never=frozenset()
    ),
    # The simulator judges the block scheduler itself; all else of loadtest talks HTTP.
    "loadtest": Layer(
        "loadtest",
        parts=frozenset({"gateway.coordinator.block_scheduler"}),
        never=frozenset({"ray", "torch"}),
    ),
}


def imported_modules(source: str) -> set[str]:
    """Modules that ``source`` imports anywhere, by full name; relative imports name none."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules.add(node.module)
    return modules


def forbidden_imports(package: str, source: str) -> set[str]:
    """Packages that ``source``, a module of ``package``, imports against the rules."""
    layer = LAYERS[package]
    found = set()
    for module in imported_modules(source):
        name = module.split(".")[0]
        if name == package or any(f"{module}.".startswith(f"{part}.") for part in layer.parts):
            continue
        if name in OURS:
            is_allowed = name in layer.ours
        elif name in STANDARD:
            is_allowed = True
        else:
            is_allowed = name not in layer.never and (layer.only is None or name in layer.only)
        if not is_allowed:
            found.add(name)
    return found


@pytest.mark.parametrize("package", LAYERS)
def test_imports_go_down_only(package: str) -> None:
    folder = ROOT / LAYERS[package].folder
    modules = sorted(folder.rglob("*.py"))
    assert modules, f"{folder} has no modules"
    problems = {
        str(path.relative_to(ROOT)): found
        for path in modules
        if (found := forbidden_imports(package, path.read_text(encoding="utf-8")))
    }
    assert not problems


@pytest.mark.parametrize(
    ("package", "source", "expected"),
    [
        ("drafter", "import verifier.engine", {"verifier"}),
        ("verifier", "def f():\n    from drafter import model", {"drafter"}),
        ("gateway", "import torch.nn as nn", {"torch"}),
        ("gateway", "from services.app import build", {"services"}),
        ("gateway", "import dflash_ops.noise", {"dflash_ops"}),
        ("drafter", "import ray", {"ray"}),
        ("dflash_wire", "import numpy, msgpack, json", {"numpy"}),
        ("dflash_ops", "import torch\nfrom dflash_wire import records\nimport zmq", {"zmq"}),
        ("loadtest", "from services import bench_reference", {"services"}),
        ("loadtest", "from gateway.coordinator.block_scheduler import records", set()),
        ("loadtest", "from gateway.coordinator.block_scheduler.records import Decision", set()),
        ("loadtest", "from gateway.coordinator import planner", {"gateway"}),
        ("services", "import ray, gateway, drafter, verifier, dflash_wire, dflash_ops", set()),
        ("services", "import loadtest", {"loadtest"}),
        ("drafter", "from . import model\nimport drafter.training", set()),
    ],
)
def test_forbidden_imports_are_found(package: str, source: str, expected: set[str]) -> None:
    assert forbidden_imports(package, source) == expected


def test_every_python_folder_has_a_layer() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    folders |= {path.parent.name for path in (ROOT / "proto").glob("*/__init__.py")}
    assert folders - {"tests"} <= set(LAYERS)
