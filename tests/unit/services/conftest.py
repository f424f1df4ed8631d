"""One thread: these tensors are too small to share."""

import sys
from pathlib import Path

import torch

# Importlib mode puts no test folder on the path; helpers live beside their tests.
sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)
