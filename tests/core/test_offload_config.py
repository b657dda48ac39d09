"""What a user may say, and what a machine must have."""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import Stack

from lightning_ckpt import apply_partial_checkpoint
from lightning_ckpt.core.offload import machine, read_offload
from lightning_ckpt.core.offload.config import OffloadConfig


@pytest.mark.parametrize("word", [True, "host", OffloadConfig(), {"target": "host"}, {}])
def test_words_for_the_host(word: Any) -> None:
    assert read_offload(word) == OffloadConfig("host")


def test_other_words() -> None:
    assert read_offload(False) is None
    assert read_offload("disk") == OffloadConfig("disk")
    values = {"target": "disk", "prefetch": 3, "scope": "all"}
    assert read_offload(values) == OffloadConfig("disk", "all", prefetch=3)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"target": "hots"}, ValueError),
        ({"target": None}, ValueError),
        ({"scope": "input"}, ValueError),
        ({"scope": []}, ValueError),
        ({"keep_last": -1}, ValueError),
        ({"prefetch": -2}, ValueError),
        ({"min_bytes": -1}, ValueError),
        ({"max_host_bytes": 0}, ValueError),
        ({"keep_last": 1.5}, TypeError),
        ({"prefetch": True}, TypeError),
        ({"min_bytes": "1"}, TypeError),
        ({"directory": 3}, TypeError),
        ({"directory": "/tmp"}, ValueError),  # and the target is the host
    ],
    ids=str,
)
def test_impossible_values(values: dict[str, Any], error: type[Exception]) -> None:
    (name, value), *_ = values.items()
    for make in (lambda: OffloadConfig(**values), lambda: read_offload(values)):
        with pytest.raises(error, match=name) as caught:
            make()
        assert repr(value) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_bytes_are_no_words() -> None:
    with pytest.raises(TypeError, match="min_bytes must be a whole number of bytes, got '1MiB'"):
        OffloadConfig("disk", min_bytes="1MiB")  # type: ignore[arg-type]


def test_an_unknown_key_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"'prefech'.*prefetch"):
        read_offload({"prefech": 1})


@pytest.mark.parametrize("value", ["yes", "gpu", 1, None, ["host"]], ids=repr)
def test_unknown_words(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="'disk'"):
        read_offload(value)


# --- directories


def refused(directory: str, match: str) -> None:
    model = Stack()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=match) as caught:
        apply_partial_checkpoint(model, offload=OffloadConfig("disk", directory=directory))
    assert repr(directory) in str(caught.value)
    assert [type(module) for module in model.modules()] == kinds


def test_a_system_without_the_call_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv")
    with pytest.raises(ValueError, match=r"needs os\.preadv"):
        machine.check_directory(None)


def test_a_directory_that_is_missing_or_a_file(tmp_path: Path) -> None:
    refused(str(tmp_path / "missing"), "is no directory")
    (tmp_path / "file").touch()
    refused(str(tmp_path / "file"), "is no directory")
    refused("", "is no directory")


def test_a_directory_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files can be made in it by who may write to it and enter it."""
    for missing in (os.W_OK, os.X_OK):
        monkeypatch.setattr(os, "access", lambda path, mode, m=missing: not mode & m)
        refused(str(tmp_path), "is read-only")


def test_a_file_system_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write to any directory, but not there."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    refused(str(tmp_path), "is read-only")


def test_a_file_system_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    refused(str(tmp_path), r"is full \(4096 bytes are free\)")


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs", "cifs"])
def test_a_network_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(machine, "file_system", lambda path: kind)
    refused(str(tmp_path), f"on a network file system .{kind}.")


def test_the_kind_of_a_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "40 22 0:35 / /data rw shared:2 - nfs4 server:/x rw\n"
        "41 40 8:2 / /data/with\\040space rw - xfs /dev/sdb1 rw\n"
        "42 22 0:36 / /data2 rw - tmpfs tmpfs rw\n"
        "43 22 0:37 / /data2 rw - btrfs /dev/sdc rw\n"
    )
    kinds = ["/x", "/data", "/data/y", "/data/with space/z", "/data2", "/database"]
    assert [machine.file_system(path, str(mounts)) for path in kinds] == [
        "ext4",
        "nfs4",
        "nfs4",
        "xfs",
        "btrfs",
        "ext4",
    ]
    assert machine.file_system("/", str(tmp_path / "none")) is None
    (tmp_path / "link").symlink_to("/data")
    assert machine.file_system(str(tmp_path / "link" / "y"), str(mounts)) == "nfs4"


def test_a_relative_directory_under_a_distributed_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert machine.check_directory("here") == str(tmp_path / "here")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused("here", "absolute path")
    assert machine.check_directory(str(tmp_path)) == str(tmp_path)


def test_without_a_word_files_lie_where_temporary_files_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.tempfile, "tempdir", str(tmp_path))
    assert machine.check_directory(None) == str(tmp_path)


# --- memory of the host


def test_more_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    with pytest.raises(
        ValueError, match=r"max_host_bytes=1152921504606846976 is more than .*give less"
    ):
        apply_partial_checkpoint(model, offload=OffloadConfig(max_host_bytes=2**60))


@pytest.fixture
def group(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text(
        "MemTotal:       1000 kB\nMemFree:         300 kB\nMemAvailable:    600 kB\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("max", "1", (1000 * 1024, 600 * 1024)),
        (None, None, (1000 * 1024, 600 * 1024)),
        (str(500 * 1024), str(400 * 1024), (500 * 1024, 100 * 1024)),
        (str(500 * 1024), str(501 * 1024), (500 * 1024, 0)),
        (str(9000 * 1024), str(400 * 1024), (1000 * 1024, 600 * 1024)),
    ],
)
def test_memory_is_that_of_the_control_group(
    group: Path, limit: str | None, used: str | None, expected: tuple[int, int]
) -> None:
    if limit is not None and used is not None:
        (group / "memory.max").write_text(limit + "\n")
        (group / "memory.current").write_text(used + "\n")
    assert machine.memory_of_machine(str(group / "meminfo"), str(group)) == expected


def test_the_budget_is_shared_by_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_of_machine", lambda: (1000, 800))
    assert machine.host_budget(None) == 400
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    assert machine.host_budget(None) == 400
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.host_budget(None) == 100
    assert machine.host_budget(7) == 7
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 8)
    assert machine.host_budget(None) == 50
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert machine.host_budget(None) == 200
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 5)
    assert machine.host_budget(None) == 80


def test_a_system_that_does_not_tell_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's word is taken then; without one nothing is pinned."""
    monkeypatch.setattr(
        machine, "memory_of_machine", partial(machine.memory_of_machine, str(tmp_path / "none"))
    )
    assert machine.host_budget(7) == 7
    assert machine.host_budget(None) == 0


def test_a_system_that_tells_only_what_is_free(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree:  300 kB\n")
    told = machine.memory_of_machine(str(tmp_path / "meminfo"), str(tmp_path))
    assert told == (1000 * 1024, 300 * 1024)
