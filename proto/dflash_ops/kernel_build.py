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

ROW_ATTENTION = Path(__file__).with_name("row_attention.c")
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
TIMEOUT_S = 120
DIGEST_SIZE = hashlib.sha256().digest_size
"""Bytes at a library's end that tell whether the rest is what was built."""
FAILURES = (OSError, subprocess.SubprocessError, ValueError, RuntimeError)
"""No compiler that works, no folder to keep libraries in, no home."""


def find_compiler() -> list[str] | None:
    """Return the command of the C compiler, ``$CC`` or ``cc``; None where there is none.

    Raises:
        ValueError: ``$CC`` is no command line.
    """
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    return None if shutil.which(command[0]) is None else command


def load_library(source: Path, folder: Path, macros: Mapping[str, int]) -> ctypes.CDLL | None:
    """Load what ``source`` compiles to; None, with the reason logged, where that is not to be had.

    Args:
        source: a C file.
        folder: keeps libraries; made if it is not there.
        macros: by name.
    """
    try:
        folder = _own_folder(folder)
        compiler = find_compiler()
        if compiler is None:
            logger.info("%s is not compiled: there is no C compiler here", source.name)
            return None
        defined = [f"-D{name}={value}" for name, value in macros.items()]
        library = folder / _file_name(source, compiler, "".join(defined))
        command = [*compiler, *FLAGS, *defined]
        if not _is_whole(library):  # what is loaded somewhere may be replaced
            _build(command, source, library)
        return ctypes.CDLL(str(library))
    except FAILURES as error:
        said = getattr(error, "stderr", None) or error
        logger.warning("%s is not compiled into %s: %s", source.name, folder, said)
        return None


def kept_library(source: Path, folder: Path) -> str | None:
    """Name what ``source`` compiles to here, macros aside, if ``folder`` has it and it is loaded from there.

    Makes and compiles nothing.
    """
    try:
        own = folder.expanduser().absolute()
        _check_own(own)
        compiler = find_compiler()
        if compiler is None:
            return None
        pattern = _file_name(source, compiler, "*")
        return pattern if any(map(_is_whole, own.glob(pattern))) else None
    except FAILURES:
        return None


def _own_folder(folder: Path) -> Path:
    """Make the folder if it is not there; what others may have put there is never loaded.

    Raises:
        OSError: it cannot be made, or is not this user's alone to write to.
        RuntimeError: this user has no home.
    """
    own = folder.expanduser().absolute()
    own.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_own(own)
    return own


def _check_own(folder: Path) -> None:
    """Refuse a folder that this user does not own alone.

    Raises:
        OSError: it is not there, or is not this user's alone to write to.
    """
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"others than this user may write to {folder}")


def _file_name(source: Path, compiler: list[str], macros: str) -> str:
    """Name a library by all that it depends on.

    Raises:
        OSError: the compiler cannot be run.
        subprocess.SubprocessError: it does not tell its version.
    """
    key = hashlib.sha256(source.read_bytes())
    key.update(repr((compiler, FLAGS, _run([*compiler, "--version"]), _processor())).encode())
    return f"{source.stem}{macros}-{key.hexdigest()[:16]}.so"


def _build(command: list[str], source: Path, library: Path) -> None:
    """Compile beside the library and put it in its place, for other processes may do the same.

    Raises:
        OSError: the folder cannot be written.
        subprocess.SubprocessError: the compiler does not take the source.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch, library.name)
        _run([*command, "-o", str(made), str(source), "-lm"])
        code = made.read_bytes()
        # Loaders take no notice of what follows.
        made.write_bytes(code + hashlib.sha256(code).digest())
        made.replace(library)


def _is_whole(library: Path) -> bool:
    """Whether the library is there as it was built; loading one that was cut off can end the process."""
    if not library.exists():
        return False
    kept = library.read_bytes()
    code, digest = kept[:-DIGEST_SIZE], kept[-DIGEST_SIZE:]
    return hashlib.sha256(code).digest() == digest


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=True, timeout=TIMEOUT_S
    )
    return done.stdout


def _processor() -> str:
    """What tells this machine's processor from another's: machines may share the folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name")
    return repr(sorted({line for line in lines if line.startswith(wanted)}))
