"""What this machine has for an offload, asked before the first step."""

import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

_LEAST_FREE_BYTES = 64 * 2**20
_HOST_SHARE = 0.5  # of the free memory; the rest is for data loaders and the page cache
_NETWORK = (
    "afs beegfs ceph cifs fuse.ceph fuse.glusterfs fuse.s3fs fuse.sshfs glusterfs gpfs lustre ncpfs"
    " nfs nfs4 orangefs pvfs2 smb3 smbfs wekafs"
)


def check_directory(directory: str | None) -> str:
    """The directory for the file, if it can be used.

    Args:
        directory: the user's; None: that of temporary files.

    Raises:
        ValueError: it is missing, read-only, relative under a distributed launch, or on a file
            system that is full or on another machine; or the system cannot do it.
    """
    if not hasattr(os, "preadv"):
        raise ValueError("offload='disk' needs os.preadv, which this system lacks; use 'host'")
    path = tempfile.gettempdir() if directory is None else directory
    if not os.path.isabs(path) and _world_size() > 1:
        raise ValueError(
            f"offload directory={path!r} is relative, and the ranks of a distributed run may have "
            "other working directories; give an absolute path"
        )
    hint = "give an existing local directory that you may write to"
    if not os.path.isdir(path):  # "" is none, and no other word for the working directory
        raise ValueError(f"offload directory={path!r} is no directory; {hint}")
    path = os.path.abspath(path)
    if not os.access(path, os.W_OK | os.X_OK) or _is_read_only(path):
        raise ValueError(f"offload directory={path!r} is read-only; {hint}")
    if (kind := file_system(path)) in _NETWORK.split():
        raise ValueError(
            f"offload directory={path!r} is on a network file system ({kind}), which is too slow "
            f"and may hang a training; {hint}"
        )
    free = shutil.disk_usage(path).free
    if free < _LEAST_FREE_BYTES:
        raise ValueError(f"offload directory={path!r} is full ({free} bytes are free); {hint}")
    return path


def _is_read_only(path: str) -> bool:
    """Whether the file system is mounted so; root may pass the other check."""
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def file_system(path: str, mounts: str = "/proc/self/mountinfo") -> str | None:
    """The kind of file system that `path` is on, where the system tells."""
    try:
        lines = Path(mounts).read_text().splitlines()
    except OSError:
        return None
    found: tuple[int, str | None] = (-1, None)
    for line in lines:
        own, _, rest = line.partition(" - ")
        point = own.split()[4].replace("\\040", " ")
        inside = os.path.commonpath([os.path.realpath(path), point]) == point
        if inside and len(point) >= found[0]:  # a later mount hides an earlier one
            found = len(point), rest.split()[0]
    return found[1]


def host_budget(max_host_bytes: int | None) -> int:
    """The pinned memory that this process may take, in bytes.

    Raises:
        ValueError: it is more than the machine has.
    """
    total, free = memory_of_machine()
    if max_host_bytes is None:
        return int(free * _HOST_SHARE) // local_ranks()
    if total and max_host_bytes > total:
        raise ValueError(
            f"offload max_host_bytes={max_host_bytes} is more than the {total} bytes of memory "
            "that this machine (or its control group) has; give less, or None for a share of what "
            "is free"
        )
    return max_host_bytes


def memory_of_machine(
    meminfo: str = "/proc/meminfo", group: str = "/sys/fs/cgroup"
) -> tuple[int, int]:
    """All memory and the free part, in bytes, of the machine or of our control group, whichever is
    less; zeros where the system does not tell."""
    try:
        lines = Path(meminfo).read_text().splitlines()
    except OSError:
        return 0, 0
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total, free = values["MemTotal"], values.get("MemAvailable", values["MemFree"])
    try:
        limit = int(Path(group, "memory.max").read_text())
        used = int(Path(group, "memory.current").read_text())
    except (OSError, ValueError):  # no limit: "max"
        return total, free
    return min(total, limit), max(min(free, limit - used), 0)


def local_ranks() -> int:
    """How many processes of this run share this node's memory."""
    if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun says it
        return max(int(os.environ["LOCAL_WORLD_SIZE"]), 1)
    return min(_world_size(), max(torch.accelerator.device_count(), 1))


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
