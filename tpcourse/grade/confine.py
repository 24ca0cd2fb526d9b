"""What a graded rank may do: compute, read Python's own files, and talk to its parent. Nothing else.

The kernel enforces it, so Python code cannot talk itself out of it: Landlock rules for files, a seccomp
filter for system calls, limits on memory and processor time, and no capabilities. Linux only; `protections`
says what a machine offers.
"""

import contextlib
import ctypes
import os
import platform
import resource
import struct
import sys

import torch

COURSE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # the package, which holds the answers
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
READ_FILE, READ_DIR, EXECUTE, WRITE_FILE = 1 << 2, 1 << 3, 1 << 0, 1 << 1
CLONE_THREAD = 0x10000
EPERM, ALLOW, DENY = 1, 0x7FFF0000, 0x00050000

# System calls by (x86-64 number, arm64 number): new processes and programs, sockets, other processes' memory,
# signals and limits, memory and queues shared between processes, file attributes, locks and watches (not
# covered by Landlock), the kernel's own doors.
FORBIDDEN = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "io_uring_setup": (425, 425),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "flock": (73, 32), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "bpf": (321, 280),
    "perf_event_open": (298, 241), "add_key": (248, 217), "keyctl": (250, 219), "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265), "inotify_init": (253, None), "inotify_init1": (294, 26),
    "fanotify_init": (300, 262), "shmat": (30, 196), "shmctl": (31, 195), "semop": (65, 193),
    "semtimedop": (220, 192), "semctl": (66, 191), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187),
}  # fmt: skip
# Of fcntl: F_GETLK to F_SETLKW, F_SETOWN, F_SETSIG, F_SETOWN_EX, F_OFD_GETLK to F_OFD_SETLKW, F_SETLEASE and
# F_NOTIFY; of ioctl: FIOSETOWN and SIOCSPGRP. The owner of a descriptor gets signals that its holder chooses.
COMMANDS = {(72, 25): (5, 6, 7, 8, 10, 15, 36, 37, 38, 1024, 1026), (16, 29): (0x8901, 0x8902)}
CLONE, CLONE3, KILL, TGKILL, PRLIMIT = (56, 220), (435, 435), (62, 129), (234, 131), (302, 261)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def protections() -> list[str]:
    """The names of those of "files" and "calls" that this machine can enforce, in that order."""
    if sys.platform != "linux":
        return []
    found = ["files"] if _libc().syscall(CREATE_RULESET, None, 0, 1) > 0 else []
    if platform.machine() in ARCHITECTURES and os.path.exists("/proc/sys/kernel/seccomp"):
        found.append("calls")
    return found


def confine(memory_bytes: int, cpu_seconds: int) -> None:
    """Give up, for good, whatever a graded rank does not need.

    ``memory_bytes`` is how much address space the process may add to what it has now. Where the machine
    lacks a protection the others still hold.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    if sys.platform != "linux":
        return
    with open("/proc/self/statm") as statm:
        limit = int(statm.read().split()[0]) * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    libc = _libc()
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    have = protections()
    if "files" in have:
        _landlock(libc)
    _drop_capabilities(libc)
    if "calls" in have:
        _seccomp(libc)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Also for root: without capabilities and with no way to gain any, root is a user like others."""
    libc.capset(struct.pack("<Ii", 0x20080522, 0), bytes(24))


def _landlock(libc: ctypes.CDLL) -> None:
    """Reading: Python, its packages but this one, and the system's libraries. Writing: nowhere but
    /dev/null.
    """
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    ruleset = struct.pack("<QQQ", files, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = libc.syscall(CREATE_RULESET, ruleset, len(ruleset), 0)
    _check(rules, "landlock_create_ruleset")
    roots = {
        sys.prefix,
        sys.base_prefix,
        os.path.dirname(os.path.dirname(torch.__file__)),
        "/usr",
        "/lib",
        "/lib64",
        "/etc/ld.so.cache",
        "/dev/urandom",
        "/proc/cpuinfo",
        "/sys/devices/system/cpu",
    }
    rights = [(path, READ_DIR) for path in roots] + [("/dev/null", READ_FILE | WRITE_FILE)]
    rights += [(path, READ_FILE | READ_DIR | EXECUTE) for root in roots for path in without(root, COURSE)]
    for path, access in rights:
        with contextlib.suppress(FileNotFoundError):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            access = access if os.path.isdir(path) else access & ~READ_DIR
            if access:
                _check(
                    libc.syscall(ADD_RULE, rules, 1, struct.pack("<Qi", access, place), 0),
                    f"landlock_add_rule for {path}",
                )
            os.close(place)
    _check(libc.syscall(RESTRICT_SELF, rules, 0), "landlock_restrict_self")
    os.close(rules)


def without(root: str, hidden: str) -> list[str]:
    """``root``, or what is in it when ``hidden`` is: paths that together hold everything below root but
    ``hidden``.
    """
    if hidden == root:
        return []
    if not hidden.startswith(os.path.join(root, "")):
        return [root]
    return [path for name in os.listdir(root) for path in without(os.path.join(root, name), hidden)]


def _seccomp(libc: ctypes.CDLL) -> None:
    """Refuse FORBIDDEN with EPERM; threads may start, processes may not; signals and limits reach only this
    process.
    """
    column, architecture = ARCHITECTURES[platform.machine()]
    # offsets in struct seccomp_data: nr 0, arch 4, args 16, 24, ...
    load = lambda offset: _step(0x20, offset)  # noqa: E731
    refuse = _step(0x06, DENY | EPERM)
    program = [
        load(4),
        _step(0x15, architecture, 1, 0),
        refuse,
        load(0),
        _step(0x35, 0x40000000, 0, 1),
        refuse,
    ]
    for number in (numbers[column] for numbers in FORBIDDEN.values() if numbers[column] is not None):
        program += [_step(0x15, number, 0, 1), refuse]
    no_such_call = _step(
        0x06, DENY | 38
    )  # the C library then falls back from clone3 to clone, whose flags can be seen
    program += [_step(0x15, CLONE3[column], 0, 1), no_such_call]
    program += [_step(0x15, CLONE[column], 0, 3), load(16), _step(0x45, CLONE_THREAD, 1, 0), refuse, load(0)]
    for numbers, allowed in ((KILL, [os.getpid()]), (TGKILL, [os.getpid()]), (PRLIMIT, [0, os.getpid()])):
        tests = [_step(0x15, pid, len(allowed) - i, 0) for i, pid in enumerate(allowed)]
        program += [_step(0x15, numbers[column], 0, len(tests) + 2), load(16), *tests, refuse, load(0)]
    for numbers, commands in COMMANDS.items():
        tests = [step for command in commands for step in (_step(0x15, command, 0, 1), refuse)]
        program += [_step(0x15, numbers[column], 0, len(tests) + 2), load(24), *tests, load(0)]
    program.append(_step(0x06, ALLOW))
    code = ctypes.create_string_buffer(b"".join(program))
    header = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code))
    _check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0), "seccomp")


def _step(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, jump_true, jump_false, k)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
