"""Whether a grammar can be borne, found out in a process of its own before a request is taken."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import select
import subprocess
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from dflash_wire.errors import EngineUnavailableError, OverloadedError
from services.grammar_wire import LENGTH, write_frame
from services.model_files import end_token_ids

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 60.0
"""Wall time; the worker's own limit is CPU time, and much shorter."""
MOST_WAITING = 64
MOST_KNOWN = 1024
TOO_MUCH = "it takes too long to compile, or too much memory; make it simpler"


class GrammarChecker:
    """Asks a worker process, one grammar at a time, and remembers what it said.

    The worker starts with the first grammar and ends with this process. One that dies over a grammar has
    given its answer: the next grammar gets a new one.

    Owner: the gateway. ``check`` belongs to its event loop; everything else happens in one thread.

    Args:
        path: the target's folder.
        vocab_size: of the target.
    """

    def __init__(self, path: str, vocab_size: int) -> None:
        self._path = path
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._worker: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._num_waiting = 0

    async def check(self, text: str) -> str | None:
        """Return what is wrong with a grammar; None if nothing is.

        Raises:
            OverloadedError: too many grammars wait.
            EngineUnavailableError: there is no worker, or it is too busy.
        """
        name = hashlib.sha256(text.encode()).digest()
        if name in self._known:
            self._known.move_to_end(name)
            return self._known[name]
        if self._num_waiting >= MOST_WAITING:
            raise OverloadedError("too many new grammars wait to be compiled; try again later")
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._thread, self._find, name, text)
        finally:
            self._num_waiting -= 1
        self._known[name] = found
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return found

    def close(self) -> None:
        """End the worker."""
        self._thread.shutdown(cancel_futures=True)
        self._end()

    def _find(self, name: bytes, text: str) -> str | None:
        if name in self._known:  # somebody asked the same meanwhile
            return self._known[name]
        if self._worker is not None and self._worker.poll() is not None:
            self._end()  # by nobody's grammar
        worker = self._worker if self._worker is not None else self._start()
        assert worker.stdin is not None
        body = text.encode()
        try:
            write_frame(worker.stdin, body)
            answer = self._read(worker, ANSWER_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            self._end()
            raise EngineUnavailableError("grammars cannot be compiled now; try again") from error
        if answer is None:
            self._end()
            logger.warning("a grammar of %d bytes ended its worker", len(body))
            return TOO_MUCH
        return answer.decode() or None

    def _start(self) -> subprocess.Popen[bytes]:
        ends = map(str, end_token_ids(self._path))
        # The interpreter's own paths: a Serve replica gets some of them from Ray.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "services.grammar_worker", self._path]
        self._worker = subprocess.Popen(
            [*command, str(self._vocab_size), *ends],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        try:
            ready = self._read(self._worker, START_TIMEOUT_S)
        except TimeoutError:
            ready = None
        if ready is None:
            self._end()
            raise EngineUnavailableError("grammars cannot be compiled; the server's log says why")
        return self._worker

    def _read(self, worker: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
        """Return the worker's next answer; None if it has died.

        Raises:
            TimeoutError: there is none.
        """
        assert worker.stdout is not None
        deadline = time.monotonic() + timeout_s
        descriptor = worker.stdout.fileno()
        data = b""
        while len(data) < LENGTH.size or len(data) < LENGTH.size + LENGTH.unpack_from(data)[0]:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise TimeoutError
            piece = os.read(descriptor, 65536)
            if not piece:
                return None
            data += piece
        return data[LENGTH.size :]

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.kill()
        for pipe in (worker.stdin, worker.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    logger.debug("the worker's pipe was broken")
        worker.wait()
