"""An engine group that loses an executor: what its health check does, and what its ring tells."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import ray

from dflash_wire.errors import ConfigError, EngineUnavailableError, ExecutorsReplacedError
from dflash_wire.ports import EngineLimits
from services import engine_group
from services.config import AppArgs
from services.engine_group import EngineGroup
from services.executor_set import Addresses
from services.links import Inbound
from services.spec import EngineSpec, make_spec

pytestmark = pytest.mark.unit

LIMITS = EngineLimits(8, 4, 16, 2, 32, 1)


class Actor:
    """Stands where a handle does."""

    def __init__(self) -> None:
        self.answer: Any = True
        self.ping = self

    async def remote(self) -> bool:
        if isinstance(self.answer, Exception):
            raise self.answer
        return bool(self.answer)


class Executors:
    """Stands where an ``ExecutorSet`` does; the class remembers all that there were."""

    made: ClassVar[list[Executors]] = []
    pairing: Exception | None = None
    inbound: Inbound

    def __init__(self, args: AppArgs, spec: EngineSpec) -> None:
        self.actor = Actor()
        self.is_closed = False
        self.made.append(self)

    def pair(self) -> tuple[EngineLimits, Addresses]:
        if self.pairing is not None:
            raise self.pairing
        return LIMITS, Addresses([], [self.inbound.address])

    def connect(self, addresses: Addresses, ring_addresses: list[str]) -> None:
        assert len(ring_addresses) == 1

    def actors(self) -> list[tuple[str, Any]]:
        return [("verifier", self.actor)]

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineGroup]:
    monkeypatch.setattr(engine_group, "ExecutorSet", Executors)
    monkeypatch.setattr(Executors, "made", [])
    monkeypatch.setattr(Executors, "inbound", Inbound("ipc", 1.0), raising=False)
    args = AppArgs()
    made = EngineGroup(args, make_spec(args))
    yield made
    made.close()
    Executors.inbound.close()


async def check_until_settled(group: EngineGroup) -> None:
    """Health checks until no replacement is under way."""
    await group.check()
    while group.is_being_replaced:
        await asyncio.sleep(0)
        await group.check()


def test_a_healthy_group_is_left_alone(group: EngineGroup) -> None:
    asyncio.run(check_until_settled(group))
    assert len(Executors.made) == 1


@pytest.mark.parametrize("answer", [ray.exceptions.RayActorError(), False])
def test_all_executors_are_replaced_when_one_is_lost(group: EngineGroup, answer: Any) -> None:
    """Gone, or alive and not able to take steps."""
    Executors.made[0].actor.answer = answer
    asyncio.run(check_until_settled(group))
    assert [one.is_closed for one in Executors.made] == [True, False]
    with pytest.raises(ExecutorsReplacedError):
        group.rings[0].receive(1)
    asyncio.run(check_until_settled(group))
    assert len(Executors.made) == 2


def test_what_cannot_be_replaced_is_an_error(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then Serve replaces the replica."""
    Executors.made[0].actor.answer = False
    monkeypatch.setattr(Executors, "pairing", ConfigError("the folder is gone"))
    with pytest.raises(EngineUnavailableError, match=r"could not be replaced .*folder is gone"):
        asyncio.run(check_until_settled(group))
    with pytest.raises(EngineUnavailableError, match="could not be replaced"):
        group.rings[0].receive(1)
