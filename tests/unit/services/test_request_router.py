"""The router inside Serve's own routing loop, with replicas that only answer how full they are."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID

from gateway.routing.prefix_names import prefix_names
from services.config import AppArgs
from services.group_report import GroupReport
from services.request_router import EngineGroupRouter
from services.scaling import router_config

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

DEPLOYMENT = DeploymentID("Coordinator", "router-test")
LONG = list(range(800))


class FakeReplica:
    """As much of a ``RunningReplica`` as a router touches before it sends."""

    def __init__(self, name: str, num_ongoing: int = 0, max_ongoing: int = 100) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.max_ongoing_requests = max_ongoing
        self.num_ongoing = num_ongoing
        self.num_probes = 0
        self.is_silent = False
        self.routing_stats: dict[str, Any] = {}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.num_probes += 1
        if self.is_silent:
            await asyncio.Event().wait()
        return self.num_ongoing


def report(replica: FakeReplica, outstanding: int, token_ids: list[int] | None = None) -> None:
    names = prefix_names(token_ids or [], "", 16)
    replica.routing_stats = GroupReport(outstanding, names).to_stats()


def call(token_ids: list[int], work: int | None = 300, internal_id: str = "one") -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id=internal_id)
    hints = {} if work is None else {"work": work, "prefix": prefix_names(token_ids, "", 16)}
    return PendingRequest(args=[b"frame"], kwargs=hints, metadata=metadata)


def run(
    scenario: Callable[[EngineGroupRouter], Awaitable[None]], *replicas: FakeReplica, **options: Any
) -> None:
    async def main() -> None:
        router = EngineGroupRouter(
            deployment_id=DEPLOYMENT,
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
            initial_backoff_s=0.01,
        )
        router.initialize_state(**router_config(AppArgs()).request_router_kwargs)
        router.update_replicas(list(replicas))
        async with asyncio.timeout(10):
            await scenario(router)

    asyncio.run(main())


async def route(router: EngineGroupRouter, pending: PendingRequest) -> str:
    return str((await router._choose_replica_for_request(pending)).replica_id.unique_id)


def test_calls_that_share_an_id_are_all_routed() -> None:
    """A body with several prompts: Serve gives all its calls the HTTP request's id."""

    async def scenario(router: EngineGroupRouter) -> None:
        calls = [call([i] * 40) for i in range(12)]
        chosen = await asyncio.gather(*(route(router, pending) for pending in calls))
        spread = Counter(chosen)
        assert spread == {"a": 6, "b": 6}

    run(scenario, FakeReplica("a"), FakeReplica("b"))


def test_follow_ups_return_and_strangers_go_where_less_is_to_do() -> None:
    async def scenario(router: EngineGroupRouter) -> None:
        first = await route(router, call(LONG))
        for i in range(5):
            assert await route(router, call([*LONG, *range(i, i + 50)], work=10)) == first
        assert await route(router, call(list(range(3000, 3100)))) != first

    run(scenario, FakeReplica("a"), FakeReplica("b"))


def test_reports_of_other_gateways_count() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")

    async def scenario(router: EngineGroupRouter) -> None:
        report(a, 700, LONG)
        router.update_replicas([a, b])
        assert await route(router, call([7] * 100)) == "b"
        assert await route(router, call(LONG)) == "a"
        report(a, 9000, LONG)
        router.update_replicas([a, b])
        assert await route(router, call(LONG)) == "b"

    run(scenario, a, b)


def test_a_full_group_is_passed_over_and_waited_for_when_all_are_full() -> None:
    a, b = FakeReplica("a", max_ongoing=1), FakeReplica("b", num_ongoing=1, max_ongoing=1)

    async def scenario(router: EngineGroupRouter) -> None:
        report(b, 0, LONG)
        router.update_replicas([a, b])
        assert await route(router, call(LONG)) == "a"
        a.num_ongoing = 1
        router.on_new_queue_len_info(a.replica_id, 1)
        waiting = asyncio.create_task(route(router, call(LONG)))
        while b.num_probes < 5:
            await asyncio.sleep(0)
        for _ in range(500):
            await asyncio.sleep(0)
        assert b.num_probes < 20  # it backs off between two rounds
        assert not waiting.done()
        b.num_ongoing = 0
        assert await waiting == "b"

    run(scenario, a, b)


def test_a_group_that_died_is_forgotten() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")

    async def scenario(router: EngineGroupRouter) -> None:
        first = await route(router, call(LONG))
        dead, alive = (a, b) if first == "a" else (b, a)
        router.on_replica_actor_died(dead.replica_id)
        assert await route(router, call(LONG)) == alive.replica_id.unique_id
        router.on_request_completed(dead.replica_id, "one")

    run(scenario, a, b)


def test_ended_calls_are_no_load() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")

    async def scenario(router: EngineGroupRouter) -> None:
        for i in range(6):
            chosen = await route(router, call([i] * 40, work=1000, internal_id=str(i)))
            if chosen == "a":
                router.on_request_completed(a.replica_id, str(i))
        assert router._picker.load_of(a.replica_id).outstanding_tokens == 0
        assert await route(router, call([], work=None)) == "a"  # a call that says nothing of itself

    run(scenario, a, b)


def test_a_client_that_leaves_while_its_request_is_routed_leaves_no_load() -> None:
    """Nothing would take it away again: an idle group's reports do not change."""
    a, b = FakeReplica("a", num_ongoing=1, max_ongoing=1), FakeReplica("b", 1, 1)

    async def scenario(router: EngineGroupRouter) -> None:
        waiting = asyncio.create_task(route(router, call(LONG)))
        while a.num_probes + b.num_probes < 4:  # Serve's own first look, and one round
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        a.num_ongoing = b.num_ongoing = 0
        for replica in (a, b):
            router.on_new_queue_len_info(replica.replica_id, 0)
            load = router._picker.load_of(replica.replica_id)
            assert (load.outstanding_tokens, load.num_calls) == (0, 0)
        assert {await route(router, call([])) for _ in range(2)} == {"a", "b"}
        assert router._expected == {}

    run(scenario, a, b)


def test_a_client_that_leaves_when_its_request_is_routed_leaves_no_load() -> None:
    a = FakeReplica("a")

    async def scenario(router: EngineGroupRouter) -> None:
        pending = call(LONG)
        waiting = asyncio.create_task(route(router, pending))
        pending.future.add_done_callback(lambda _: waiting.cancel())
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled() and not pending.future.cancelled()
        load = router._picker.load_of(a.replica_id)
        assert (load.outstanding_tokens, load.num_calls) == (0, 0)

    run(scenario, a)


def test_a_group_that_does_not_answer_delays_few() -> None:
    """It has nothing to do, so every request would ask it first, and wait for that in vain."""
    a, b = FakeReplica("a"), FakeReplica("b")
    a.is_silent = True

    async def scenario(router: EngineGroupRouter) -> None:
        router.queue_len_response_deadline_s = router.max_queue_len_response_deadline_s = 0.01
        for i in range(6):
            assert await route(router, call([i] * 40)) == "b"
        assert (
            a.num_probes == 2
        )  # Serve's own when it heard of the replica, and the first request's
        a.is_silent = False
        router._silent_until = dict.fromkeys(router._silent_until, 0.0)  # as time does
        assert await route(router, call([9] * 40)) == "a"

    run(scenario, a, b)
