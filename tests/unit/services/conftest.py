"""One thread: these tensors are too small to share."""

import sys
from pathlib import Path

import torch

# Importlib mode puts no test folder on the path; helpers live beside their tests.
HERE = Path(__file__).parent
# Tiny targets are the verifier's too, random drafters the drafter's.
sys.path[:0] = [str(HERE), str(HERE.parent / "verifier"), str(HERE.parent / "drafter")]

torch.set_num_threads(1)
