"""Drafter checkpoints on disk: z-lab's layout and vLLM speculators', DFlash and DFlash 2; and EAGLE-3's.

Whatever a DFlash checkpoint's layout, it becomes a ``Checkpoint``: z-lab's config keys, one set of tensor
names. EAGLE-3's, another model, are read by ``eagle3``.

``python -m drafter.checkpoint`` inspects and converts.
"""

from drafter.checkpoint.files import SPECULATORS, Z_LAB, Checkpoint, read_checkpoint
from drafter.checkpoint.load import build_model, load_draft_model
from drafter.checkpoint.save import checkpoint_of, save_draft_model, write_checkpoint

__all__ = [
    "SPECULATORS",
    "Z_LAB",
    "Checkpoint",
    "build_model",
    "checkpoint_of",
    "load_draft_model",
    "read_checkpoint",
    "save_draft_model",
    "write_checkpoint",
]
