"""Learning of landed steps while the next one is in flight.

What the block scheduler learns from a step, and the choice of the widths to come, take a sixteenth of a short
step. Nobody needs either before the next plan, and while the executors work the driver has nothing to do:
so they are done then, off the token path.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from gateway.coordinator.block_scheduler.records import StepOutcome
from gateway.coordinator.block_scheduler.scheduler import BlockScheduler

logger = logging.getLogger(__name__)

Lesson = Callable[[], StepOutcome] | int
"""Puts together what a step gave; or the id of a sequence that has ended."""


class Learning:
    """Hands lessons to the block scheduler, in order.

    Owner: the coordinator; its driver thread alone calls it, but for ``close``. Between ``start`` and
    ``settled`` the scheduler belongs to the learning thread; else to the driver. Without a thread, ``start``
    itself learns: a coordinator is then a function of its inputs, as tests want it.

    Args:
        scheduler: learns.
    """

    def __init__(self, scheduler: BlockScheduler) -> None:
        self.scheduler = scheduler
        self._lessons: list[Lesson] = []
        self._handed_over: SimpleQueue[list[Lesson] | None] = SimpleQueue()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._thread: threading.Thread | None = None

    def start_thread(self, begin: Callable[[], None] | None = None) -> None:
        """Learn in a thread from now on, which calls ``begin`` first. Mutates."""
        self._thread = threading.Thread(
            target=self._run, args=(begin,), name="learning", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Let the thread end."""
        self._handed_over.put(None)

    def add(self, lesson: Lesson) -> None:
        """Note what is to be learned. Mutates."""
        self._lessons.append(lesson)

    def start(self) -> None:
        """A step has been sent: learn what was noted before it comes back. Mutates."""
        if not self._lessons:
            return
        lessons, self._lessons = self._lessons, []
        if self._thread is None or not self._thread.is_alive():
            self._learn(lessons)
        else:
            self._is_idle.wait()
            self._is_idle.clear()
            self._handed_over.put(lessons)

    def settled(self) -> BlockScheduler:
        """Wait until all that ``start`` handed over is learned; the scheduler is the driver's again."""
        self._is_idle.wait()
        return self.scheduler

    def _run(self, begin: Callable[[], None] | None) -> None:
        if begin is not None:
            begin()
        while (lessons := self._handed_over.get()) is not None:
            try:
                self._learn(lessons)
            finally:
                self._is_idle.set()

    def _learn(self, lessons: list[Lesson]) -> None:
        """An error of the scheduler's own may cost nobody his answer."""
        for lesson in lessons:
            try:
                if isinstance(lesson, int):
                    self.scheduler.forget(lesson)
                else:
                    self.scheduler.observe(lesson())
            except Exception:
                logger.exception("the block scheduler cannot learn from a step")
        try:
            self.scheduler.prepare()
        except Exception:
            logger.exception("the block scheduler cannot prepare a choice")
