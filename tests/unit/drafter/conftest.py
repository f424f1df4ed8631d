"""Makes the helpers importable under importlib mode; one thread for tiny models."""

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "verifier")]  # tiny targets are the verifier's too
torch.set_num_threads(1)
