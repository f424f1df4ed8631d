"""Serve's request router for coordinators: asks a ``GroupPicker`` where a request should go.

Serve pickles this module by value into every process that has a handle, so it keeps no state of its own.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from gateway.routing.group_picker import GroupPicker, RoutingRules
from gateway.routing.prefix_names import split_names
from services.group_report import GroupReport


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
        self._routed: ContextVar[PendingRequest] = ContextVar("request that this task routes")

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
        ranked = self._picker.rank(list(replicas), names, time.monotonic())
        return [[replicas[replica_id]] for replica_id in ranked]

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: Any = None
    ) -> None:
        """Give the replica to the request that it was chosen for.

        Serve's own version finds that request by an id which all calls of one HTTP request share, and so
        loses all but one of several that are routed together. The task that chose knows better.
        """
        pending = self._routed.get()
        if pending.future.done():
            return
        work = pending.kwargs.get("work")
        if work is not None:
            # Now and not when it has been sent: the next request of a burst must see it.
            names = split_names(pending.kwargs.get("prefix", b""))
            call_id = pending.metadata.internal_request_id
            self._picker.begin(replica.replica_id, call_id, work, names, time.monotonic())
        self._record_queue_wait_time(pending)
        pending.future.set_result(replica)
        self._remove_pending_request_from_indices(pending)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A call has ended, was refused or could not be sent."""
        self._picker.end(replica_id, internal_request_id)
