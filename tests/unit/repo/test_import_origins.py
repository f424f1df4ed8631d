"""Which file an import name really resolves to: ours from this checkout, ``proto`` from Google."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = {
    "services": "services",
    "gateway": "gateway",
    "drafter": "drafter",
    "verifier": "verifier",
    "dflash_wire": "proto/dflash_wire",
    "dflash_ops": "proto/dflash_ops",
}


def test_proto_is_googles() -> None:
    import proto

    assert hasattr(proto, "Message"), f"proto resolves to {proto}"
    assert not (ROOT / "proto" / "__init__.py").exists()


@pytest.mark.parametrize("package", FOLDERS)
def test_package_comes_from_this_checkout(package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).resolve() == ROOT / FOLDERS[package] / "__init__.py"


def module_names(package: str) -> list[str]:
    folder = ROOT / FOLDERS[package]
    names = []
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        if parts[-1] == "__main__":
            continue
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


@pytest.mark.parametrize(
    ("package", "heavy"),
    [("gateway", ("ray",)), ("dflash_wire", ("torch", "ray", "numpy", "pydantic"))],
)
def test_package_loads_without(package: str, heavy: tuple[str, ...]) -> None:
    """Not even through a third party: checked in a fresh interpreter."""
    program = (
        f"import importlib, sys\nsys.path[:0] = {[str(ROOT), str(ROOT / 'proto')]!r}\n"
        f"for name in {module_names(package)!r}: importlib.import_module(name)\n"
        f"print(sorted(set({heavy!r}) & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert output.returncode == 0, output.stderr
    assert output.stdout.strip().splitlines()[-1] == "[]"
