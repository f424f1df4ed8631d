"""A rank of a split target in a process of its own, without Ray; and the verifier of rank 0 over such ranks.

As a program: ``rank_process.py TARGET RANK NUM_RANKS PORT NUM_PAGES PAGE_SIZE`` prints where it listens and
runs until its standard input ends.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dflash_ops.paging import PagedPool
from services.config import LinkArgs
from services.ranks import RankLinks, RankStage
from verifier.engine import VerifierEngine
from verifier.grammars import GrammarPool
from verifier.rank_group import RankGroup
from verifier.ranks import RankEngine, RankLeader
from verifier.target import TargetModel

CPU = torch.device("cpu")
HOST = "127.0.0.1"
SUM_TIMEOUT_S = 60.0


def share(path: str, group: RankGroup, num_pages: int, page_size: int) -> tuple:
    """A rank's share of a target, and its KV pool."""
    target = TargetModel(path, torch.float32, CPU, group)
    sizes = (target.num_layers, num_pages, page_size, target.num_kv_heads, target.head_dim)
    return target, PagedPool(*sizes, torch.float32, CPU)


class SplitVerifier:
    """Rank 0's engine here, and the processes of the other ranks."""

    def __init__(self, engine: VerifierEngine, others: list[subprocess.Popen[str]]) -> None:
        self.engine = engine
        self.others = others


@contextmanager
def split_verifier(
    path: Path, features: Tensor, num_pages: int, page_size: int, grammars: GrammarPool
) -> Iterator[SplitVerifier]:
    """A target on two ranks for as long as a fixture lasts; a process can be in one such group at a time."""
    group = RankGroup(0, 2, CPU, SUM_TIMEOUT_S)
    port = group.open(HOST)
    arguments = [str(path), "1", "2", str(port), str(num_pages), str(page_size)]
    other = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    links = RankLinks([])
    try:
        group.join(HOST, port)
        assert other.stdout is not None
        links = RankLinks([other.stdout.readline().strip()])
        target, pool = share(str(path), group, num_pages, page_size)
        ranks = RankLeader(links.tell)
        engine = VerifierEngine(target, pool, features, [0], grammars=grammars, ranks=ranks)
        yield SplitVerifier(engine, [other])
    finally:
        links.close()
        other.kill()
        other.communicate()
        group.close()


def main() -> None:
    path, rank, num_ranks, port, num_pages, page_size = sys.argv[1:]
    torch.set_num_threads(1)
    group = RankGroup(int(rank), int(num_ranks), CPU, SUM_TIMEOUT_S)
    group.join(HOST, int(port))
    engine = RankEngine(*share(path, group, int(num_pages), int(page_size)))
    stage = RankStage(engine.handle, LinkArgs(), 1)
    print(stage.address, flush=True)
    sys.stdin.read()
    stage.stop()


if __name__ == "__main__":
    main()
