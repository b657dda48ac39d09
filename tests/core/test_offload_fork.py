"""A process that is forked while tensors are offloaded: it waits for nobody, and writes and reads
nothing of the other one's (Note: [Forks] of the worker)."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import MlpBlock, Stack

from lightning_ckpt import OffloadConfig, apply_partial_checkpoint
from lightning_ckpt.core.offload.worker import Job, Worker

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


def test_a_fork_copies_for_itself(tmp_path: Path) -> None:
    """The thread is not there in the child: whoever needs a copy makes it."""
    model = Stack(MlpBlock, 4)
    config = OffloadConfig("disk", directory=str(tmp_path), min_bytes=0, keep_last=0)
    with apply_partial_checkpoint(model, offload=config):
        model(torch.ones(2, 8)).sum().backward()
        child = os.fork()
        if child == 0:
            try:
                model(torch.ones(2, 8)).sum().backward()
                os._exit(0)
            finally:
                os._exit(1)
        end = time.monotonic() + 60
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
            time.sleep(0.01)
        if ended[0] == 0:
            os.kill(child, signal.SIGKILL)
        assert ended == (child, 0)


@pytest.mark.parametrize("is_begun", [True, False], ids=["begun", "queued"])
def test_a_fork_does_no_job_of_the_other_process(is_begun: bool) -> None:
    """Nor does it wait for a thread that is not there. The other process may use the same stretch
    of the file for something else by then."""
    gate, begun, worker = threading.Event(), threading.Event(), Worker(lambda: None)
    first, second = Job(lambda: begun.set() or (gate.wait(60) and None)), Job(lambda: None)
    worker.add(first)
    worker.add(second)
    assert begun.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a hang ends it
        try:
            (first if is_begun else second).wait()
        except RuntimeError as error:
            os._exit("before this process was forked" not in str(error))
        finally:
            os._exit(2)
    gate.set()
    assert os.waitpid(child, 0) == (child, 0)


def test_a_fork_while_the_thread_looks_at_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the lock for a moment, and never lets go of it in the child."""
    job = Job(lambda: None)
    job.run()
    job._lock.acquire()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    job.wait()


# --- in a process of its own: threads of torch that other tests have left may hang in a fork

SCRIPT = Path(__file__).with_name("forking.py")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What went wrong in each part of the script."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(SCRIPT)]
    directory = str(tmp_path_factory.mktemp("files"))
    done = subprocess.run([*command, directory], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert os.listdir(directory) == []
    return dict(json.loads(done.stdout))


def test_a_fork_writes_to_a_file_of_its_own(said: dict[str, Any]) -> None:
    """Both processes send what they have after the fork, and ask for it when both have. What was
    sent before is the one's that sent it."""
    assert said["files"] == ""


def test_what_was_under_way_stays_in_a_fork(said: dict[str, Any]) -> None:
    """The graph that needs it is there twice, and so is the tensor."""
    assert said["under_way"] == ""


def test_what_is_saved_again_in_a_fork_leaves_again(said: dict[str, Any]) -> None:
    """A mask, say, that a graph of the other process holds as well."""
    assert said["away"] == ""


def test_a_fork_while_another_thread_is_in_the_engine(said: dict[str, Any]) -> None:
    """It holds the lock, and never lets go of it in the child."""
    assert said["held"] == ""


def test_forks_beside_a_training_whose_thread_writes(said: dict[str, Any]) -> None:
    """At any moment: some end at once, some drop the engine, some offload a step of their own."""
    assert said["many"] == ""
