"""The processes that share one target, and the sum that joins what each of them computes.

Every rank holds a share of the query heads, of the key/value heads and of the MLP's columns of every
layer, so both products that end a sublayer give a partial sum on each rank; one all-reduce each makes it
whole.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from dflash_wire.errors import EngineUnavailableError, ExecutorLostError

JOIN_TIMEOUT_S = 600.0
"""The others may still load their weights."""


class RankGroup:
    """One rank's membership. Owner: its process, of which one thread at a time runs passes.

    Args:
        rank: of this process; 0 decides for all.
        num_ranks: processes in the group, at least 2.
        device: gloo joins CPUs, nccl GPUs.
        timeout_s: a sum that takes longer means a lost rank.
    """

    def __init__(self, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._store: TCPStore | None = None

    def open(self, host: str) -> int:
        """Let the others find this one, rank 0, at ``host``; return the port."""
        self._store = self._store_at(host, 0)
        return int(self._store.port)

    def join(self, host: str, port: int) -> None:
        """Wait for all ranks; every one of them must call this.

        Raises:
            EngineUnavailableError: a rank did not come.
        """
        try:
            store = self._store or self._store_at(host, port)
            is_cuda = self._device.type == "cuda"
            dist.init_process_group(
                "nccl" if is_cuda else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.num_ranks,
                timeout=self._timeout,
                device_id=torch.device("cuda", torch.cuda.current_device()) if is_cuda else None,
            )
        except RuntimeError as error:
            raise EngineUnavailableError(
                f"rank {self.rank} of {self.num_ranks} could not join the others: {error}"
            ) from error

    def _store_at(self, host: str, port: int) -> TCPStore:
        return TCPStore(
            host,
            port,
            is_master=self.rank == 0,
            timeout=timedelta(seconds=JOIN_TIMEOUT_S),
            wait_for_workers=False,
        )

    def summed(self, partial: Tensor) -> Tensor:
        """Return the sum over all ranks of ``partial``, any shape, the same on each; mutates it.

        Raises:
            ExecutorLostError: a rank is gone.
        """
        try:
            dist.all_reduce(partial)
        except RuntimeError as error:
            raise ExecutorLostError(f"a rank of the target is gone: {error}") from error
        return partial

    def close(self) -> None:
        """Leave; ranks that wait for this one notice."""
        if dist.is_initialized():
            dist.destroy_process_group()
