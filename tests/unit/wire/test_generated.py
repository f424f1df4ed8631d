"""What protoc made of the public API is what it makes of it now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

PROTO = Path(__file__).resolve().parents[3] / "proto"
SOURCE = "dflash_wire/v1/generation.proto"
GENERATED = ("generation_pb2.py", "generation_pb2.pyi", "generation_pb2_grpc.py")


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, SOURCE], cwd=PROTO, check=True
    )
    for name in GENERATED:
        made = (tmp_path / "dflash_wire" / "v1" / name).read_text(encoding="utf-8")
        kept = (PROTO / "dflash_wire" / "v1" / name).read_text(encoding="utf-8")
        assert made == kept, f"{name} is stale; run make proto"
