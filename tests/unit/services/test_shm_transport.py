"""Shared-memory segments: allocated, mapped elsewhere, and gone afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dflash_wire.errors import ConfigError
from services import shm_transport
from services.shm_transport import (
    PREFIX,
    SharedMemoryTransport,
    allocate_shared,
    release_name,
    segment_folder,
    sweep_segments,
)

pytestmark = pytest.mark.unit

TRANSPORT = SharedMemoryTransport()
PEER = """
import sys
from dflash_wire.errors import ConfigError
from services import shm_transport
import torch
name = sys.argv[1]
metadata = shm_transport.ShmMetadata([((3, 4), torch.float32)], "cpu", [name])
receive = shm_transport.SharedMemoryTransport().recv_multiple_tensors
(mapped,) = receive("id", metadata, None)
print("mapped", flush=True)
assert sys.stdin.readline() == "changed\\n"  # the file's name is gone by now
assert receive("id", metadata, None)[0] is mapped
print(mapped.sum().item(), flush=True)
mapped[0, 0] = 100.0
"""


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    yield
    for file in files_of_mine():
        file.unlink()
    shm_transport._mapped.clear()
    shm_transport._owned.clear()


def files_of_mine() -> list[Path]:
    return list(segment_folder().glob(f"{PREFIX}{os.getpid()}-*"))


def metadata_of(*tensors: torch.Tensor) -> shm_transport.ShmMetadata:
    return TRANSPORT.extract_tensor_transport_metadata("id", list(tensors))


def test_allocated_tensors_are_zero_and_have_a_file() -> None:
    tensor = allocate_shared((3, 5), torch.float32)
    assert tensor.shape == (3, 5)
    assert torch.equal(tensor, torch.zeros(3, 5))
    (file,) = files_of_mine()
    assert file.stat().st_size >= 3 * 5 * 4
    assert file.stat().st_mode & 0o077 == 0, "other users must not read features"


def test_receiver_gets_an_alias() -> None:
    tensor = allocate_shared((2, 3), torch.bfloat16)
    metadata = metadata_of(tensor)
    (mapped,) = TRANSPORT.recv_multiple_tensors("id", metadata, None)  # type: ignore[arg-type]
    assert mapped.data_ptr() != tensor.data_ptr()
    tensor[1, 2] = 7.0
    assert mapped[1, 2] == 7.0
    (again,) = TRANSPORT.recv_multiple_tensors("id", metadata, None)  # type: ignore[arg-type]
    assert again is mapped


def test_receiver_copies_into_its_buffers() -> None:
    tensor = allocate_shared((2, 3), torch.float32)
    tensor.fill_(3.0)
    buffer = torch.empty(2, 3)
    received = TRANSPORT.recv_multiple_tensors(
        "id",
        metadata_of(tensor),
        None,  # type: ignore[arg-type]
        [buffer],
    )
    assert received[0] is buffer
    tensor.fill_(4.0)
    assert torch.equal(buffer, torch.full((2, 3), 3.0)), "a pulled buffer is a copy"


def test_only_shared_tensors_can_be_sent() -> None:
    with pytest.raises(ValueError, match="allocate_shared"):
        metadata_of(torch.zeros(3))


def test_name_goes_and_memory_stays() -> None:
    tensor = allocate_shared((4,), torch.float32)
    (mapped,) = TRANSPORT.recv_multiple_tensors("id", metadata_of(tensor), None)  # type: ignore[arg-type]
    release_name(tensor)
    assert files_of_mine() == []
    tensor[0] = 5.0
    assert mapped[0] == 5.0
    release_name(tensor)
    release_name(torch.zeros(4))  # not ours: nothing happens


def test_garbage_collection_removes_the_file() -> None:
    tensor = allocate_shared((4,), torch.float32)
    metadata = metadata_of(tensor)
    TRANSPORT.garbage_collect("id", metadata, [tensor])
    assert files_of_mine() == []
    with pytest.raises(ValueError):
        metadata_of(tensor)


def test_a_second_process_maps_the_segment() -> None:
    tensor = allocate_shared((3, 4), torch.float32)
    (name,) = metadata_of(tensor).names
    root = Path(__file__).resolve().parents[3]
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, name],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'proto'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with peer:
        assert peer.stdin is not None and peer.stdout is not None
        assert peer.stdout.readline() == "mapped\n"
        release_name(tensor)
        tensor.fill_(2.0)
        peer.stdin.write("changed\n")
        peer.stdin.flush()
        assert peer.stdout.readline() == "24.0\n"
    assert peer.returncode == 0
    assert tensor[0, 0] == 100.0
    assert files_of_mine() == []


def test_sweep_removes_segments_of_dead_processes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_transport, "segment_folder", lambda: tmp_path)
    process = subprocess.Popen(["true"])
    process.wait()
    dead = tmp_path / f"{PREFIX}{process.pid}-{uuid.uuid4().hex[:12]}"
    kept = [
        tmp_path / f"{PREFIX}{os.getpid()}-abc",
        tmp_path / f"{PREFIX}1-abc",  # alive, perhaps another user's
        tmp_path / f"{PREFIX}unknown",
        tmp_path / f"other-{process.pid}-abc",
    ]
    for file in [dead, *kept]:
        file.touch()
    sweep_segments()
    assert not dead.exists()
    assert all(file.exists() for file in kept)
    dead.touch()
    allocate_shared((2,), torch.float32)
    assert not dead.exists(), "leftovers go at the next start"


def test_a_pool_that_does_not_fit_says_so_and_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shm_transport, "segment_folder", lambda: tmp_path)
    monkeypatch.setattr(shm_transport.os, "posix_fallocate", is_full)
    with pytest.raises(ConfigError, match="no room"):
        shm_transport.allocate_shared((4, 4), torch.float32)
    assert list(tmp_path.iterdir()) == []
