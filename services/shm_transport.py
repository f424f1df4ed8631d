"""A one-sided tensor transport for Ray Direct Transport over shared memory, for CPU tensors.

It behaves like CUDA_IPC: the receiver gets an *alias* of the sender's memory, so the CPU path and the
one-GPU path of the feature pool are the same code. Only tensors made by ``allocate_shared`` can be
sent. Segments are files in shared memory whose name carries the owner's process id: they are removed
as soon as the peer has mapped them, and leftovers of killed processes are swept at the next start.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ray.experimental import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
    register_tensor_transport,
)
from torch import Tensor

from dflash_wire.errors import ConfigError

TRANSPORT = "SHM"
PREFIX = "dflash-features-"

# Per process: what this process may send (by data pointer), and what it has mapped (by file name).
_owned: dict[int, str] = {}
_mapped: dict[str, Tensor] = {}


def segment_folder() -> Path:
    """Memory-backed where the system has it."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


def sweep_segments() -> None:
    """Remove segments whose owner is no longer alive."""
    for path in segment_folder().glob(f"{PREFIX}*"):
        owner = path.name.removeprefix(PREFIX).split("-")[0]
        if owner.isdigit() and not _is_alive(int(owner)):
            path.unlink(missing_ok=True)


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _map(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    flat = torch.from_file(
        str(segment_folder() / name), shared=True, size=math.prod(shape), dtype=dtype
    )
    return flat.view(shape)


def _reserve(name: str, num_bytes: int) -> None:
    """Create the segment's file with all its memory, so that a full disk shows now and clearly."""
    path = segment_folder() / name
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, num_bytes)
        else:
            os.ftruncate(file, num_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(
            f"{segment_folder()} has no room for the {num_bytes / 2**20:.0f} MiB feature pool; "
            f"enlarge it or lower engine.max_step_positions ({error})"
        ) from error
    finally:
        os.close(file)


def allocate_shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a zeroed CPU tensor that this process can send; it owns the segment.

    Raises:
        ConfigError: shared memory is full.
    """
    sweep_segments()
    name = f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}"
    _reserve(name, math.prod(shape) * dtype.itemsize)
    tensor = _map(name, shape, dtype)
    tensor.zero_()
    _owned[tensor.data_ptr()] = name
    return tensor


def release_name(tensor: Tensor) -> None:
    """Remove the segment's file once the peer has mapped it; the memory lives on in both."""
    name = _owned.get(tensor.data_ptr())
    if name is not None:
        (segment_folder() / name).unlink(missing_ok=True)


@dataclass
class ShmMetadata(TensorTransportMetadata):
    """Names of the segments, one per tensor."""

    names: list[str] = field(default_factory=list)


class SharedMemoryTransport(TensorTransportManager):
    """Ray's side of the transport. Stateless; the maps above belong to the process."""

    def tensor_transport_backend(self) -> str:
        """Name under which Ray knows this transport."""
        return TRANSPORT

    @staticmethod
    def is_one_sided() -> bool:
        """The receiver maps the sender's memory alone."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """Nothing blocks, so Ray need not kill an actor after a failure."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Every actor on the node can map a segment."""
        return True

    def extract_tensor_transport_metadata(
        self, obj_id: str, rdt_object: list[Tensor]
    ) -> ShmMetadata:
        """Describe tensors made by ``allocate_shared``.

        Raises:
            ValueError: a tensor lives elsewhere.
        """
        names = []
        for tensor in rdt_object:
            name = _owned.get(tensor.data_ptr())
            if name is None:
                raise ValueError("only tensors made by allocate_shared can be sent over SHM")
            names.append(name)
        return ShmMetadata(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
            tensor_device="cpu",
            names=names,
        )

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        """No communicator is needed."""
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Map the segments (once per process); copy into ``target_buffers`` when given."""
        assert isinstance(tensor_transport_metadata, ShmMetadata)
        tensors = []
        pairs = zip(
            tensor_transport_metadata.names, tensor_transport_metadata.tensor_meta, strict=True
        )
        for name, (shape, dtype) in pairs:
            assert isinstance(dtype, torch.dtype)
            if name not in _mapped:
                _mapped[name] = _map(name, tuple(shape), dtype)
            tensors.append(_mapped[name])
        if not target_buffers:
            return tensors
        for buffer, tensor in zip(target_buffers, tensors, strict=True):
            buffer.copy_(tensor)
        return list(target_buffers)

    def send_multiple_tensors(
        self,
        tensors: list[Tensor],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        """Never called: the transport is one-sided."""
        raise NotImplementedError("SHM is one-sided")

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: TensorTransportMetadata, tensors: list[Tensor]
    ) -> None:
        """Remove the files of segments that nobody can ask for any more."""
        for tensor in tensors:
            release_name(tensor)
            _owned.pop(tensor.data_ptr(), None)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Nothing is ever in progress."""


def register_shm_transport() -> None:
    """Register in this process; call in every actor's ``__init__`` that sends or receives.

    Ray ships actor classes by value, so a registration at import time would not run in the actor.
    """
    with contextlib.suppress(ValueError):  # registered before in this process
        register_tensor_transport(TRANSPORT, ["cpu"], SharedMemoryTransport, torch.Tensor)
