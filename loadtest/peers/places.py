"""Where each peer's own environment lies, and whether it is there."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from loadtest.processes import ROOT

HOME = ROOT / "build" / "peers"
PEERS = ("vllm", "llama", "dflash")
VLLM_VERSION = "0.32.0"
LLAMA_VERSION = "0.3.36"
"""Of llama-cpp-python, whose source distribution holds llama.cpp."""
GGUF_TYPES = ("f32", "bf16")


@dataclass(frozen=True)
class Places:
    """Paths below one folder for all peers; nothing of it is in the project's environment."""

    home: Path = HOME

    def of(self, peer: str) -> Path:
        """The folder of one peer."""
        return self.home / peer

    def python(self, peer: str) -> Path:
        """The interpreter of a peer's environment."""
        return self.of(peer) / "venv" / "bin" / "python"

    @property
    def openmp(self) -> Path:
        """Intel's OpenMP runtime, which vLLM's CPU build brings and wants preloaded."""
        return self.of("vllm") / "venv" / "lib" / "libiomp5.so"

    @property
    def llama_source(self) -> Path:
        """llama.cpp's source tree."""
        release = f"llama_cpp_python-{LLAMA_VERSION}"
        return self.of("llama") / "src" / release / "vendor" / "llama.cpp"

    @property
    def llama_server(self) -> Path:
        """The built server."""
        return self.of("llama") / "cmake" / "bin" / "llama-server"

    def gguf(self, role: str, number_type: str) -> Path:
        """A converted checkpoint; ``role`` is ``target`` or ``drafter``."""
        return self.of("llama") / f"{role}-{number_type}.gguf"

    def reason_file(self, peer: str) -> Path:
        """Says why the last installation of a peer failed; absent after one that did not."""
        return self.of(peer) / "reason.txt"

    def missing(self, peer: str) -> str | None:
        """Why a peer cannot be measured here, in one line; None when it can."""
        reason = self.reason_file(peer)
        if reason.is_file():
            return reason.read_text(encoding="utf-8").strip()
        if peer == "dflash":
            return None if find_spec("dflash") else "package dflash is not installed: make test"
        needed = [self.python("vllm"), self.openmp]
        if peer == "llama":
            files = [self.gguf(role, kind) for role in ("target", "drafter") for kind in GGUF_TYPES]
            needed = [self.llama_server, *files]
        absent = next((path for path in needed if not path.exists()), None)
        return None if absent is None else f"not installed: {absent.name} is missing"
