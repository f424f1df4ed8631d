"""One thread: these tensors are too small to share."""

import torch

torch.set_num_threads(1)
