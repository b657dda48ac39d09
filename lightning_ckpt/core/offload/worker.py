"""A thread that writes and reads, and that nobody has to wait for.

One thread of the standard library does the jobs in order; whoever needs one that the thread has not
begun with does it itself, so nobody waits for a thread that hangs behind others' work.

Note: [Forks]
A process that is forked in here (a data loader's worker) has copies of all objects, but none of the
threads, and their locks as they were. The file is one for both, and its stretches are the other's
to use again: what is written there by one of them may lie where the other has put something new. So
a fork does nothing for the other one: it has a file, a thread and locks of its own, what had not
left stays, and what lies in the other's file is an error.
"""

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class Job:
    """Something to do, once, by whoever comes first. If that is interrupted (Ctrl-C), the next one
    who comes does it from its beginning."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._is_done = False
        self.error: Exception | None = None

    def run(self) -> None:
        """Do it, unless somebody did; wait for whoever does.

        Raises:
            RuntimeError: it is that of a process that forked this one (Note: [Forks]).
        """
        if self._is_done:
            return
        check_process(self._process)
        with self._lock:
            if self._is_done:
                return
            try:
                self._action()
            except Exception as error:
                self.error = error
            self._is_done = True

    def has_ended(self) -> bool:
        return self._is_done

    def wait(self) -> None:
        """Do it here, or wait for whoever does, and raise what went wrong."""
        self.run()
        if self.error is not None:
            raise self.error


def check_process(process: int) -> None:
    """Refuse what belongs to another process (Note: [Forks]).

    Args:
        process: its id.

    Raises:
        RuntimeError: it is not this one.
    """
    if process != os.getpid():
        raise RuntimeError(
            "a tensor was offloaded before this process was forked, and lies in a file of the "
            "other process, which may have written there since; call the model in this process, "
            "and backward after that"
        )


class Worker:
    """A thread that does jobs, until its owner is gone.

    Args:
        at_end: what the thread does then.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._at_end = at_end

    def add(self, job: Job) -> None:
        if self._thread is None:
            # Who is told when this is gone is the thread (Note: [Interrupts]).
            end = weakref.ref(self, self._jobs.put)
            self._thread = threading.Thread(
                target=_work,
                args=(self._jobs, end, self._at_end),
                name="lightning_ckpt offload",
                daemon=True,  # it must not keep the process from ending
            )
            self._thread.start()
        self._jobs.put(job)


def _work(jobs: "SimpleQueue[Any]", end: object, at_end: Callable[[], None]) -> None:
    while (job := jobs.get()) is not end:
        job.run()
        del job  # or it, and its error, would stay here until the next one comes
    at_end()
