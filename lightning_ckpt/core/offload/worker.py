"""A thread that writes and reads, and that nobody has to wait for.

One thread of the standard library does the jobs in order; whoever needs one that the thread has not
begun with does it itself, so nobody waits for a thread that hangs behind others' work, or that a
fork has left behind.
"""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_LOOK_SECONDS = 1.0  # how often someone who waits looks whether the thread is still there


class Job:
    """Something to do, once, by whoever comes first."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action
        self._ticket = [True]  # taken by `pop`, which no two threads can do
        self._ended = threading.Event()
        self.error: BaseException | None = None

    def _claim(self) -> bool:
        try:
            return self._ticket.pop()
        except IndexError:
            return False

    def run(self) -> None:
        """Do it, unless somebody does or did."""
        if not self._claim():
            return
        assert self._action is not None
        try:
            self._action()
        except BaseException as error:
            self.error = error
        finally:
            self._action = None  # and what it holds: a source, or a buffer
            self._ended.set()

    def cancel(self) -> bool:
        """Do not do it, unless somebody began; whether that was in time."""
        is_in_time = self._claim()
        if is_in_time:
            self._action = None
            self._ended.set()
        return is_in_time

    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, worker: "Worker") -> None:
        """Do it here, or wait for whoever does, and raise what went wrong."""
        self.run()
        while not self._ended.wait(_LOOK_SECONDS):
            if not worker.is_alive():
                raise RuntimeError("the thread that copies offloaded tensors has ended in a copy")
        if self.error is not None:
            raise self.error


class Worker:
    """A thread that does jobs, until its owner is gone."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # Not at exit: the thread must not keep the process from ending, and a file that is closed
        # under it could be another one by then.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def add(self, job: Job) -> None:
        if not self.is_alive():
            self._thread = threading.Thread(
                target=_work, args=(self._jobs,), name="lightning_ckpt offload", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()


def _work(jobs: "SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # or it would stay here until the next one comes
