"""``python -m verifier.gguf FILE OUT``: a GGUF file as a folder that the server loads.

GGUF keeps a model's config, tokenizer and quantised weights in one file, under names of its own. transformers
can read it, but would widen the weights at every start, in every process. Here it is done once; what is
written is an ordinary target, so nothing else knows of GGUF.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from dflash_wire.errors import ConfigError
from verifier.families import check_target_config

READERS = ("accelerate", "gguf")
"""What transformers needs to read such a file."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MOST_ABSENT = 0.5
"""Share of a model's numbers that a file may lack until its tensors are looked at one by one. transformers
has made room for the whole model by then."""
MOST_SAID = 300
"""Characters of another library's message that are passed on."""


def convert(file: Path, out: Path, dtype: torch.dtype, chat_template: str | None = None) -> int:
    """Write the model in ``file`` as a folder of config.json, safetensors and tokenizer.json.

    Args:
        file: a GGUF file of a family that is served, quantised or not.
        out: folder to create; it appears whole or not at all.
        dtype: of the weights as stored. bfloat16 rounds off much less than 4 to 8 bits have done before, and
            passes then read half the memory (ADR 7); float32 keeps every bit.
        chat_template: Jinja; in place of the file's own, if it has one.

    Returns:
        how many numbers the model has.

    Raises:
        ConfigError: ``file`` cannot be read, is of a family that is not served, or lacks tensors; ``out``
            is there already, if only as a link to nowhere; the chat template is no Jinja; a package that
            reads GGUF is missing.
    """
    if not file.is_file():
        raise ConfigError(f"there is no file {file}")
    if chat_template is not None:
        _check_template(chat_template, "the chat template")
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} is there already; remove it, or name another folder")
    if missing := [name for name in READERS if find_spec(name) is None]:
        raise ConfigError(
            f"GGUF files are read with {' and '.join(READERS)}: pip install {' '.join(missing)}"
        )
    config, tensors, others = _read(file)
    tokenizer = others[-1]
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    elif tokenizer.chat_template is not None:
        what = f"the chat template of {file} (--chat-template names another)"
        _check_template(tokenizer.chat_template, what)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
        save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
        config.dtype = dtype
        for part in (config, *others):
            part.save_pretrained(unfinished)
        # mkdtemp's and safetensors' are their owner's alone; everybody may read what others wrote.
        unfinished.chmod(0o755)
        (unfinished / "model.safetensors").chmod(0o644)
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return sum(tensor.numel() for tensor in tensors.values())


def _read(file: Path) -> tuple[Any, dict[str, Tensor], list[Any]]:
    """The config, float32 tensors by transformers' names, generation config and tokenizer."""
    from verifier.gguf_header import read_header  # needs READERS

    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        header = read_header(file)
        config = AutoConfig.from_pretrained(file.parent, **source)
        check_target_config(config)
        _check_size(config, header.num_numbers)
        # transformers' types know of no second value.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # with a message of our own
            **source,
        )
        model, loading = loaded
        for name, found, wanted in sorted(loading["mismatched_keys"]):
            raise ValueError(f"{name} is {list(found)}, and its model wants {list(wanted)}")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    except ConfigError:
        raise
    except Exception as error:
        # A sound header may say anything of the model, and transformers fails at it in any way.
        said = " ".join(str(error).split())[:MOST_SAID]
        if not isinstance(error, ValueError | OSError):
            said = f"{type(error).__name__}: {said}"
        raise ConfigError(f"{file} is no GGUF file that transformers can read: {said}") from error
    if absent := sorted(loading["missing_keys"]):
        # transformers would fill them with random numbers.
        raise ConfigError(f"{file} lacks {len(absent)} tensors of its model, as {absent[0]}")
    config.architectures = [type(model).__name__]
    tensors = model.state_dict()
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return config, tensors, [model.generation_config, tokenizer]


def _check_size(config: Any, num_numbers: int) -> None:
    """Refuse a model that is much larger than what is there of it, before memory is taken for it.

    Raises:
        ValueError: it is.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    needed = sum(parameter.numel() for parameter in model.parameters())
    if num_numbers < (1 - MOST_ABSENT) * needed:
        raise ValueError(f"its model has {needed} numbers, and its tensors have {num_numbers}")


def _check_template(template: object, what: str) -> None:
    """Compile a chat template as transformers does.

    Raises:
        ConfigError: it is no Jinja.
    """
    try:
        if not isinstance(template, str):
            raise TypeError("it is no text")
        render_jinja_template([], chat_template=template)
    except (TemplateError, TypeError, SyntaxError, RecursionError) as error:
        raise ConfigError(f"{what} is no Jinja: {error}") from error


def main(argv: list[str] | None = None) -> int:
    """Convert what the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m verifier.gguf", description="A GGUF file as a folder that is served."
    )
    parser.add_argument("file", type=Path, help="GGUF file")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights")
    parser.add_argument("--chat-template", type=Path, help="Jinja file, in place of the model's")
    arguments = parser.parse_args(argv)
    try:
        template = arguments.chat_template and arguments.chat_template.read_text(encoding="utf-8")
        count = convert(arguments.file, arguments.out, DTYPES[arguments.dtype], template)
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.out}: {arguments.dtype}, {count} numbers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
