"""From a model name in the config to a local folder."""

from __future__ import annotations

from pathlib import Path

from dflash_wire.errors import ConfigError

REPOSITORY_ROOT = Path(__file__).resolve().parents[1]
DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "mask_embedding.pt"]


def resolve_model_path(name: str) -> str:
    """Return an absolute local folder for a folder name or a hub id.

    Relative folders are looked up in the working directory, then beside this repository's code. Hub
    ids are downloaded (safetensors and text files only).

    Raises:
        ConfigError: neither a folder nor a hub id that can be fetched.
    """
    for base in (Path.cwd(), REPOSITORY_ROOT):
        candidate = base / Path(name).expanduser()
        if (candidate / "config.json").is_file():
            return str(candidate.resolve())
    if name.count("/") != 1 or name.startswith((".", "/", "models/")):
        raise ConfigError(f"model {name!r} is neither a folder with a config.json nor a hub id")
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(name, allow_patterns=DOWNLOADED))
    except Exception as error:
        raise ConfigError(f"cannot fetch model {name!r} from the hub: {error}") from error
