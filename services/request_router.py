"""Serve's request router for coordinators: asks a ``GroupPicker`` where a request should go.

Serve pickles this module by value into every process that has a handle, so it keeps no state of its own.
"""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from typing import Any, NamedTuple

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from gateway.routing.group_picker import GroupPicker, RoutingRules
from gateway.routing.prefix_names import split_names
from services.group_report import GroupReport

SILENCE_S = 2.0
"""So long a replica that did not answer is asked after all others."""


class _Expected(NamedTuple):
    """Where a request was counted, and as what."""

    replica_id: ReplicaID
    call_id: str


class EngineGroupRouter(RequestRouter):
    """Routes by known prefixes and outstanding tokens.

    Calls say what they bring in two keyword arguments (see ``RouteHints``); a call without them goes to the
    least loaded group. All replicas are ranked for every request, so one that is full or does not answer only
    makes Serve take the next; Serve probes and retries as with its own routers.
    """

    # Planning a step holds the interpreter's lock, so a busy coordinator answers late, not never.
    queue_len_response_deadline_s = 0.5

    def initialize_state(self, **rules: Any) -> None:
        """Called once by Serve with ``request_router_kwargs``: the fields of ``RoutingRules``."""
        self._picker: GroupPicker[ReplicaID] = GroupPicker(RoutingRules(**rules))
        self._reports: dict[ReplicaID, GroupReport] = {}
        self._routed: ContextVar[PendingRequest | None] = ContextVar("routed", default=None)
        """The request that this task routes."""
        self._expected: dict[asyncio.Future[Any], _Expected] = {}
        """Where requests that are being routed will probably go: they are counted there already."""
        self._silent_until: dict[ReplicaID, float] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in which replicas exist and what they report."""
        super().update_replicas(replicas)
        now = time.monotonic()
        reports = {r.replica_id: GroupReport.from_stats(r.routing_stats) for r in replicas}
        self._picker.keep(reports)
        for replica_id, report in reports.items():
            if report != self._reports.get(replica_id):
                names = split_names(report.prefix_names)
                self._picker.report(replica_id, report.num_outstanding_tokens, names, now)
        self._reports = reports
        self._silent_until = {r: t for r, t in self._silent_until.items() if r in reports}

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica as soon as a call or a probe finds it dead."""
        super().on_replica_actor_died(replica_id)
        self._picker.forget(replica_id)
        self._reports.pop(replica_id, None)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return all candidates, each a rank of its own, best first."""
        if pending_request is None:
            return [candidate_replicas]
        self._routed.set(pending_request)
        pending_request.routing_context.should_backoff = True  # once all ranks were tried
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        names = split_names(pending_request.kwargs.get("prefix", b""))
        self._withdraw(pending_request.future)
        now = time.monotonic()
        ranked = self._picker.rank(list(replicas), names, now)
        ranked.sort(key=lambda replica_id: now < self._silent_until.get(replica_id, 0.0))
        if ranked and not pending_request.future.done():
            self._count(pending_request, ranked[0])
        return [[replicas[replica_id]] for replica_id in ranked]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """As Serve's; a call cancelled just when it has got its replica is never sent, and never ends."""
        try:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except asyncio.CancelledError:
            future = pending_request.future  # a retry has made a new one
            if not future.cancelled():
                call_id = pending_request.metadata.internal_request_id
                self._picker.end(future.result().replica_id, call_id)
            raise

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: Any = None
    ) -> None:
        """Give the replica to the request that it was chosen for.

        Serve's own version finds that request by an id which all calls of one HTTP request share, and so
        loses all but one of several that are routed together. The task that chose knows better.
        """
        pending = self._routed.get()
        if pending is None or pending.future.done():
            return
        expected = self._expected.get(pending.future)
        if expected is None or replica.replica_id != expected.replica_id:
            if expected and self.replica_queue_len_cache.get(expected.replica_id) is None:
                self._silent_until[expected.replica_id] = time.monotonic() + SILENCE_S
            self._withdraw(pending.future)
            self._count(pending, replica.replica_id)
        self._expected.pop(pending.future, None)  # from here on Serve says when it ends
        self._record_queue_wait_time(pending)
        pending.future.set_result(replica)
        self._remove_pending_request_from_indices(pending)

    def _count(self, pending: PendingRequest, replica_id: ReplicaID) -> None:
        """Count a request where it will probably go.

        Serve may have to ask the replica before it sends, and the rest of a burst must not choose the same
        one meanwhile. Should the client leave just then, the request is withdrawn: no report need come that
        would set the number right, for reports of an idle group do not change.
        """
        work = pending.kwargs.get("work")
        if work is not None:
            names = split_names(pending.kwargs.get("prefix", b""))
            call_id = pending.metadata.internal_request_id
            self._picker.begin(replica_id, call_id, work, names, time.monotonic())
            self._expected[pending.future] = _Expected(replica_id, call_id)
            pending.future.remove_done_callback(self._withdraw)
            pending.future.add_done_callback(self._withdraw)

    def _withdraw(self, future: asyncio.Future[Any]) -> None:
        """The request of this future goes elsewhere, or nowhere."""
        expected = self._expected.pop(future, None)
        if expected is not None:
            self._picker.end(expected.replica_id, expected.call_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A call has ended, was refused or could not be sent."""
        self._picker.end(replica_id, internal_request_id)
