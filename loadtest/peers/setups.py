"""Every way in which a server is started here, and its command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from loadtest.peers.places import Places

OURS = "ours"
LOOP = "dflash"
"""The public package: a loop in one process, one stream, no server."""
MAX_STREAMS = 16
CONTEXT = 2048
NO_BINDING = "nobind"


@dataclass(frozen=True)
class Setup:
    """One way to start one server.

    ``name`` is peer, number type and mode with slashes. A mode is ``plain``, ``ngram`` or ``dflash:w``
    with the draft block size ``w``, anchor included; peers count the ``w - 1`` draft tokens.
    """

    name: str
    peer: str
    command: list[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)
    keep_alive: bool = True
    num_threads: int = 1
    """Of a loop without a server; servers have it in their command."""


@dataclass(frozen=True)
class Settings:
    """What the command lines are made of."""

    places: Places
    pair: Mapping[str, Path]
    port: int
    vllm_threads: int
    llama_threads: int
    vllm_bind: str = NO_BINDING
    """CPUs for vLLM's threads, as ``0-1``; it then spins 5 ms whatever ``KMP_BLOCKTIME`` says."""


def draft_block_width(mode: str) -> int | None:
    """The draft block size of ``dflash:w``; None for other modes."""
    name, _, width = mode.partition(":")
    return int(width) if name == "dflash" else None


def vllm_setup(settings: Settings, dtype: str, mode: str) -> Setup:
    """vLLM's server. Prefix cache off, since all servers compute every prompt anew here."""
    places = settings.places
    command = [
        *(str(places.python("vllm")), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(settings.pair["target"]), "--served-model-name", "pair"),
        *("--host", "127.0.0.1", "--port", str(settings.port), "--dtype", dtype),
        *("--max-model-len", str(CONTEXT), "--max-num-seqs", str(MAX_STREAMS)),
        *("--no-enable-prefix-caching", "--generation-config", "vllm"),
        *("--disable-uvicorn-access-log",),
    ]
    width = draft_block_width(mode)
    speculation: dict[str, object] = {}
    if width is not None:
        speculation = {
            "method": "dflash",
            "model": str(settings.pair["drafter"]),
            "num_speculative_tokens": width - 1,
        }
    elif mode == "ngram":
        speculation = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 4}
    if speculation:
        command += ["--speculative-config", json.dumps(speculation)]
    environment = {
        "LD_PRELOAD": str(places.openmp),
        # Intel's OpenMP lets idle threads spin for 200 ms; 1 ms leaves the cores to the others.
        "KMP_BLOCKTIME": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # vLLM overrides the line above and this one when it binds threads to CPUs.
        "OMP_NUM_THREADS": str(settings.vllm_threads),
        "VLLM_CPU_OMP_THREADS_BIND": settings.vllm_bind,
        # What it compiles; the second start of the same setup is faster.
        "VLLM_CACHE_ROOT": str(places.of("vllm") / "cache"),
        # How long to start is for the caller to say; on a busy machine it takes more than its ten minutes.
        "VLLM_ENGINE_READY_TIMEOUT_S": "3600",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # It runs in our folder, whose packages it must not find.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": "",
    }
    return Setup(f"vllm/{dtype}/{mode}", "vllm", command, environment)


def llama_setup(settings: Settings, number_type: str, mode: str) -> Setup:
    """llama.cpp's server. It closes connections without saying so, so none is kept."""
    places, threads = settings.places, str(settings.llama_threads)
    command = [
        *(str(places.llama_server), "-m", str(places.gguf("target", number_type))),
        *("--host", "127.0.0.1", "--port", str(settings.port), "--alias", "pair"),
        *("--parallel", str(MAX_STREAMS), "--ctx-size", str(MAX_STREAMS * CONTEXT)),
        *("--threads", threads, "--no-cache-prompt", "--cache-ram", "0", "--metrics"),
    ]
    # The cache in f32 is what makes f32 output comparable with ours.
    is_exact = number_type == "f32"
    if is_exact:
        command += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
    width = draft_block_width(mode)
    if width is not None:
        command += ["--spec-type", "draft-dflash", "--spec-draft-n-max", str(width - 1)]
        command += ["-md", str(places.gguf("drafter", number_type))]
        command += ["--spec-draft-threads", threads]
        if is_exact:
            command += ["--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32"]
    # Its OpenMP threads would spin at barriers, and take the cores from each other and the client.
    environment = {"OMP_WAIT_POLICY": "passive"}
    return Setup(f"llama/{number_type}/{mode}", "llama", command, environment, keep_alive=False)


def all_setups(settings: Settings) -> list[Setup]:
    """Everything that can be asked for, ours first."""
    vllm_modes = ("plain", "dflash:16", "dflash:8", "ngram")
    llama_modes = ("plain", "dflash:16", "dflash:8", "dflash:4")
    return [
        Setup(OURS, OURS),
        *(vllm_setup(settings, d, m) for d in ("bfloat16", "float32") for m in vllm_modes),
        *(llama_setup(settings, t, m) for t in ("bf16", "f32") for m in llama_modes),
        # Alone it may gain from a second thread, beside anything else it collapses: the better one counts.
        *(Setup(f"{LOOP}/float32/threads:{n}", LOOP, num_threads=n) for n in (1, 2)),
    ]


def choose(setups: list[Setup], patterns: list[str]) -> list[Setup]:
    """Those whose name fits a pattern.

    Raises:
        ValueError: a pattern fits none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(setup.name, pattern) for setup in setups):
            names = ", ".join(setup.name for setup in setups)
            raise ValueError(f"no setup is called {pattern!r}; there are {names}")
    return [s for s in setups if any(fnmatchcase(s.name, pattern) for pattern in patterns)]
