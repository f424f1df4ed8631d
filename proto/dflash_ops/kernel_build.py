"""Builds kernels with the system's C compiler, once per machine. Knows no torch."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
TIMEOUT_S = 120


def find_compiler() -> list[str] | None:
    """Return the command of the C compiler, ``$CC`` or ``cc``; None where there is none."""
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    return None if shutil.which(command[0]) is None else command


def load_library(source: Path, folder: Path, macros: Mapping[str, int]) -> ctypes.CDLL | None:
    """Load what ``source`` compiles to; None, with the reason logged, where that is not to be had.

    Args:
        source: a C file.
        folder: keeps libraries; made if it is not there.
        macros: by name.
    """
    compiler = find_compiler()
    if compiler is None:
        logger.info("%s is not compiled: there is no C compiler here", source.name)
        return None
    command = [*compiler, *FLAGS, *(f"-D{name}={value}" for name, value in macros.items())]
    try:
        library = _built(command, source, folder)
        try:
            return ctypes.CDLL(str(library))
        except OSError:  # a full disk, say; what is loaded somewhere may be unlinked
            library.unlink()
            return ctypes.CDLL(str(_built(command, source, folder)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        logger.warning("%s is not compiled: %s", source.name, said)
        return None


def _built(command: list[str], source: Path, folder: Path) -> Path:
    """The library's path; it is built once for a source, a command, a compiler and a machine.

    Raises:
        OSError: the folder cannot be written.
        subprocess.SubprocessError: the compiler does not take the source.
    """
    key = hashlib.sha256(source.read_bytes())
    key.update(repr((command, _run([command[0], "--version"]), _instructions())).encode())
    library = folder / f"{source.stem}-{key.hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch, library.name)
            _run([*command, "-o", str(made), str(source), "-lm"])
            made.replace(library)  # processes that start together each build it for themselves
    return library


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    return done.stdout


def _instructions() -> str:
    """What tells this machine's processor from another's: machines may share the folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
