"""One driver thread, several client threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from coordinator_fakes import Bench, make_limits, make_request
from toy_target import half_right, random_drafts

from dflash_wire.errors import EngineUnavailableError
from dflash_wire.records import StepPlan


@contextmanager
def driven(bench: Bench) -> Iterator[None]:
    thread = threading.Thread(target=bench.coordinator.run_forever)
    thread.start()
    try:
        yield
    finally:
        bench.coordinator.close()
        thread.join(30)
        assert not thread.is_alive()


def test_concurrent_submits_and_cancels() -> None:
    limits = make_limits(num_pages=40, max_context=100, max_step_positions=48)
    bench = Bench(limits, random_drafts, "static:8")
    num_threads, num_each = 4, 15

    def client(index: int) -> None:
        for i in range(num_each):
            request_id = f"t{index}-{i}"
            bench.submit(make_request(request_id, 1 + 3 * i % 20, 25, seed=100 * index + i))
            if i % 5 == 4:
                bench.coordinator.cancel(request_id)

    threads = [threading.Thread(target=client, args=(t,)) for t in range(num_threads)]
    with driven(bench):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        kept = [r for r in bench.requests if int(r.split("-")[1]) % 5 != 4]
        assert bench.sink.wait_for(lambda: all(bench.sink.has_ended(r) for r in kept))
    bench.check_protocol()
    for request_id in kept:
        bench.check_finished(request_id)
    assert len(kept) == num_threads * (num_each - 3)
    bench.check_empty()


def test_idle_driver_wakes_for_each_request() -> None:
    bench = Bench(drafter=half_right)
    with driven(bench):
        for i in range(5):
            bench.submit(make_request(f"r{i}", seed=i))
            assert bench.sink.wait_for(lambda r=f"r{i}": bench.sink.has_ended(r))
    bench.check_all_finished()


def test_cancel_of_the_only_request_frees_its_pages_without_another_submit() -> None:
    bench = Bench(make_limits(num_pages=64), policy="off")
    in_step, may_go_on = threading.Event(), threading.Event()

    def hold(plan: StepPlan) -> None:
        in_step.set()
        assert may_go_on.wait(30)

    bench.ring.on_run = hold
    with driven(bench):
        bench.submit(make_request("r", 5, 200))
        assert in_step.wait(30)
        bench.coordinator.cancel("r")
        may_go_on.set()
    assert bench.sink.chunks == {}
    assert len(bench.ring.plans) == 1
    bench.check_empty()


def test_close_during_a_step_ends_the_request_with_an_error() -> None:
    bench = Bench(policy="off")
    bench.ring.on_run = lambda plan: bench.coordinator.close()
    bench.submit(make_request("r", 5, 200))
    bench.coordinator.run_forever()
    error = bench.sink.last("r").error
    assert error is not None and error["code"] == EngineUnavailableError.code
    assert len(bench.sink.tokens("r")) == 1
    bench.check_empty()
