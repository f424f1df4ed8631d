"""The compiled kernel: the numbers of torch's operators, the same bits however tokens are packed, and no harm
where it cannot be had."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attention_rows import random_rows, tree
from torch import Tensor

from dflash_ops import compiled_attention, kernel_build
from dflash_ops.attention import attend_packed, plan_attention
from dflash_ops.compiled_attention import RowKernel, row_kernel
from dflash_ops.kernel_build import ROW_ATTENTION, find_compiler, kept_library, load_library
from dflash_ops.paging import PagedPool, PoolLayout
from dflash_ops.visibility import AttentionRow, Reach, Visible
from dflash_wire.errors import FatalError
from verifier import acceptance

pytestmark = pytest.mark.unit

SCALE = 0.3
NUM_PAGES = 120
SHAPES = [(48, 2, 2, 16), (16, 1, 4, 4), (64, 2, 1, 16), (128, 1, 8, 7), (32, 2, 3, 5)]
SHAPES += [(80, 1, 1, 16), (128, 2, 8, 16)]  # of 5 vectors, summed one by one; of 8, in pairs
NATIVE = 0
CASES = [(*shape, NATIVE) for shape in SHAPES]
CASES += [(*shape, lanes) for shape in SHAPES[:2] for lanes in (4, 8, 16)]
CASE_NAMES = ("head_dim", "groups", "heads_per_kv", "page_size", "lanes")
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def make_pool(head_dim: int, num_kv_heads: int, page_size: int) -> PagedPool:
    device = torch.device("cpu")
    pool = PagedPool(2, NUM_PAGES, page_size, num_kv_heads, head_dim, torch.float32, device)
    pool.data.normal_(generator=torch.Generator().manual_seed(1))
    return pool


def kernel_for(pool: PagedPool, heads_per_kv: int, folder: Path, lanes: int = NATIVE) -> RowKernel:
    """The kernel as other processors would have it, where a number of lanes is given."""
    with pytest.MonkeyPatch.context() as patch:
        if lanes != NATIVE:
            patch.setenv("CC", f"{os.environ.get('CC', 'cc')} -DLANES={lanes}")
        kernel = row_kernel(pool, heads_per_kv, folder / str(lanes))
    assert kernel is not None
    return kernel


def tokens(rows: list[AttentionRow], pool: PagedPool, heads_per_kv: int) -> tuple[Tensor, Tensor]:
    """Queries, which lie beside keys as in a layer, and keys with values."""
    count = sum(row.width for row in rows)
    groups, dim = pool.data.shape[3], pool.data.shape[4]
    generator = torch.Generator().manual_seed(count)
    beside = torch.randn(count, groups * (heads_per_kv + 1), dim, generator=generator)
    return beside[:, : groups * heads_per_kv], torch.randn(
        count, 2, groups, dim, generator=generator
    )


@needs_compiler
@pytest.mark.parametrize(CASE_NAMES, CASES)
def test_as_torchs_operators(
    head_dim: int, groups: int, heads_per_kv: int, page_size: int, lanes: int, folder: Path
) -> None:
    pool = make_pool(head_dim, groups, page_size)
    kernel = kernel_for(pool, heads_per_kv, folder, lanes)
    for seed in range(25):
        rows = random_rows(random.Random(seed), NUM_PAGES, page_size)
        query, own = tokens(rows, pool, heads_per_kv)
        plans = [plan_attention(rows, heads_per_kv, pool, form=used) for used in (None, kernel)]
        assert plans[1].compiled is not None and not plans[1].groups
        expected, got = (attend_packed(query, own, plan, 1, SCALE) for plan in plans)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)
        assert plans[1].step_kv[0] is own


@needs_compiler
@pytest.mark.parametrize("context", [0, 3, 16, 45])
@pytest.mark.parametrize(CASE_NAMES, CASES)
def test_bits_of_a_token_depend_on_its_keys_alone(
    head_dim: int,
    groups: int,
    heads_per_kv: int,
    page_size: int,
    lanes: int,
    context: int,
    folder: Path,
) -> None:
    """A chain of 21 tokens: alone in one row, one by one behind pages, and as a path of a tree in company."""
    pool = make_pool(head_dim, groups, page_size)
    kernel = kernel_for(pool, heads_per_kv, folder, lanes)
    length = 21
    pages = list(range(-(-(context + length) // page_size)))
    row = AttentionRow(0, length, pages, context, Visible.CAUSAL)
    query, own = tokens([row], pool, heads_per_kv)
    planned = plan_attention([row], heads_per_kv, pool, form=kernel)
    whole = attend_packed(query, own, planned, 0, SCALE)
    behind = pool.slots(pages, context, context + length)
    pool.write(behind, torch.stack([own, own]))
    for i in range(length):
        one = AttentionRow(0, 1, pages, context + i, Visible.CAUSAL)
        alone = plan_attention([one], heads_per_kv, pool, form=kernel)
        again = attend_packed(query[i : i + 1], own[i : i + 1], alone, 0, SCALE)
        assert torch.equal(again[0], whole[i]), i

    # Every second node of a tree is the chain's next token; the others hang beside it.
    mask = torch.eye(2 * length, dtype=torch.bool)
    for node in range(1, 2 * length):
        parent = node - 1 if node % 2 else node - 2
        mask[node] |= mask[parent]
    nodes = AttentionRow(3, 2 * length, pages, context, mask, [n // 2 for n in range(2 * length)])
    company = AttentionRow(0, 3, [50, 51], 5, Visible.CAUSAL)
    queries, owns = tokens([company, nodes], pool, heads_per_kv)
    queries[3::2], owns[3::2] = query, own
    planned = plan_attention([company, nodes], heads_per_kv, pool, form=kernel)
    assert torch.equal(attend_packed(queries, owns, planned, 0, SCALE)[3::2], whole)


@needs_compiler
def test_what_it_cannot_do_is_left_to_the_operators(folder: Path) -> None:
    pool = make_pool(48, 2, 16)
    kernel = kernel_for(pool, 2, folder)
    row = AttentionRow(0, 2, [0, 1], 20, Visible.CAUSAL)
    unread = AttentionRow(0, 2, [0, 1], 20, Visible.CAUSAL, num_unread=3)
    assert plan_attention([row], 2, pool, [Reach(window=4)] * 2, kernel).compiled is None
    assert plan_attention([unread], 2, pool, form=kernel).compiled is None
    assert row_kernel(make_pool(24, 2, 16), 2, folder) is None
    cpu = torch.device("cpu")
    assert row_kernel(PagedPool(1, 4, 16, 2, 48, torch.bfloat16, cpu), 2, folder) is None
    by_page = PagedPool(1, 4, 16, 2, 48, torch.float32, cpu, PoolLayout.BY_PAGE)
    assert row_kernel(by_page, 2, folder) is None


@needs_compiler
@pytest.mark.parametrize("pages", [[0], [0, NUM_PAGES], [-1, 0]])
def test_pages_that_are_not_there_are_refused(pages: list[int], folder: Path) -> None:
    pool = make_pool(48, 2, 16)
    row = AttentionRow(0, 2, pages, 20, Visible.CAUSAL)
    with pytest.raises(FatalError, match="pages"):
        plan_attention([row], 2, pool, form=kernel_for(pool, 2, folder))


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Libraries are looked for anew."""
    compiled_attention._compiled.cache_clear()
    yield
    compiled_attention._compiled.cache_clear()


def test_without_a_compiler_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forgetful: None
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler --flag")
    assert find_compiler() is None
    assert row_kernel(make_pool(48, 2, 16), 2, tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_without_a_home_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    assert row_kernel(make_pool(48, 2, 16), 2, Path("~no-such-user/kernels")) is None
    assert "~no-such-user/kernels" in caplog.text


@needs_compiler
def test_a_folder_that_cannot_be_made_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.joinpath("file").touch()
    assert load_library(ROW_ATTENTION, tmp_path / "file" / "kernels", {"DIM": 16}) is None
    assert "row_attention.c is not compiled" in caplog.text


@needs_compiler
def test_a_folder_of_others_is_not_trusted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert kept_library(ROW_ATTENTION, tmp_path) is None
    assert load_library(ROW_ATTENTION, tmp_path, {"DIM": 16}) is not None
    assert kept_library(ROW_ATTENTION, tmp_path) is not None
    tmp_path.chmod(0o777)
    assert load_library(ROW_ATTENTION, tmp_path, {"DIM": 16}) is None
    assert "others than this user may write" in caplog.text
    assert kept_library(ROW_ATTENTION, tmp_path) is None, "what is not loaded counts for nothing"


@needs_compiler
def test_what_is_kept_is_what_is_loaded(tmp_path: Path) -> None:
    assert kept_library(ROW_ATTENTION, tmp_path / "none") is None
    assert not (tmp_path / "none").exists()
    assert load_library(ROW_ATTENTION, tmp_path, {"DIM": 16}) is not None
    (library,) = tmp_path.iterdir()
    damaged = tmp_path / "damaged"
    damaged.mkdir(mode=0o700)
    (damaged / library.name).write_bytes(library.read_bytes()[:-1])
    assert kept_library(ROW_ATTENTION, damaged) is None


def test_no_command_line_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "'cc")
    assert load_library(ROW_ATTENTION, tmp_path, {"DIM": 16}) is None
    assert kept_library(ROW_ATTENTION, tmp_path) is None
    assert "No closing quotation" in caplog.text


@needs_compiler
def test_a_compiler_that_fails_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("int x = ;", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        assert load_library(broken, tmp_path / "made", {}) is None
    assert "broken.c is not compiled" in caplog.text and "error" in caplog.text
    monkeypatch.setattr(kernel_build, "TIMEOUT_S", 0.0)
    assert load_library(ROW_ATTENTION, tmp_path / "other", {"DIM": 16}) is None


@needs_compiler
def test_it_is_built_once_and_anew_when_damaged(tmp_path: Path) -> None:
    assert load_library(ROW_ATTENTION, tmp_path, {"DIM": 16}) is not None
    (library,) = tmp_path.iterdir()
    before = library.stat().st_mtime_ns
    assert load_library(ROW_ATTENTION, tmp_path, {"DIM": 16}) is not None
    assert library.stat().st_mtime_ns == before
    copied = shutil.copytree(tmp_path, tmp_path.with_name("damaged"))
    copy = copied / library.name
    whole = copy.read_bytes()
    # A loader that meets a page beyond a file's end gets a signal, and no error.
    for kept in (b"", whole[:8192], whole[:-1], b"\0" * len(whole)):
        copy.unlink()  # it is loaded, and a file that is must not be written to
        copy.write_bytes(kept)
        loaded = load_library(ROW_ATTENTION, copied, {"DIM": 16})
        assert loaded is not None and copy.read_bytes()[:8192] == whole[:8192]


@needs_compiler
def test_a_library_without_the_function_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    forgetful: None,
) -> None:
    monkeypatch.setenv("CC", "cc -fvisibility=hidden")
    assert row_kernel(make_pool(48, 2, 16), 2, tmp_path) is None
    assert "attention is not compiled" in caplog.text


def test_masks_of_trees_are_paths() -> None:
    """What the kernel takes for granted: along a mask's row, ancestors stand in their order."""
    chance = random.Random(3)
    parents = [chance.randint(0, j) for j in range(19)]
    served = acceptance.ancestor_mask(parents), acceptance.depths(parents)
    for mask, depths in (tree(20, chance), served):
        for node, seen in enumerate(mask):
            path = torch.nonzero(seen)[:, 0].tolist()
            assert [depths[i] for i in path] == list(range(depths[node] + 1))
            assert path[-1] == node
