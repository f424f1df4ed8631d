"""Copy the finished pair to where it is served from, and hold it to its size."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import safe_open

from dflash_wire.errors import ConfigError

MAX_PAIR_BYTES = 16 * 10**6
TARGET_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "recipe.json",
)
DRAFTER_FILES = ("config.json", "model.safetensors", "recipe.json")


def export_pair(work: Path, out: Path) -> dict[str, int]:
    """Copy ``work/target`` and ``work/drafter`` below ``out``.

    Returns:
        Bytes of ``target``, ``drafter`` and their ``total``.

    Raises:
        ConfigError: a file is missing, a tensor is not bf16, or the pair is larger than 16 MB.
    """
    sizes = {
        "target": _copy(work / "target", out / "target", TARGET_FILES),
        "drafter": _copy(work / "drafter", out / "drafter", DRAFTER_FILES),
    }
    sizes["total"] = sum(sizes.values())
    if sizes["total"] > MAX_PAIR_BYTES:
        raise ConfigError(f"the pair has {sizes['total']} bytes, more than {MAX_PAIR_BYTES}")
    return sizes


def _copy(source: Path, destination: Path, names: tuple[str, ...]) -> int:
    missing = [name for name in names if not (source / name).is_file()]
    if missing:
        raise ConfigError(f"{source} lacks {', '.join(missing)}: run the earlier stages first")
    with safe_open(source / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            if tensors.get_slice(name).get_dtype() != "BF16":
                raise ConfigError(f"{source}: tensor {name} is not bf16")
    destination.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, destination / name)
    return sum((destination / name).stat().st_size for name in names)
