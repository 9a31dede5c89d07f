"""System calls that sandboxed code may not make, as a seccomp filter. Pure.

Refused are calls that build namespaces or mounts, look into other processes, or reach parts of the kernel that ordinary
programs do not need; and sockets of families outside network namespaces, such as those between a virtual machine and
its host. Kernel-owned shared memory (System V, memfd, message queues) is refused too, because RLIMIT_AS counts only
mapped memory.
"""

from __future__ import annotations

import errno
import struct

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
AT_NUMBER, AT_ARCH, AT_FIRST = 0, 4, 16
"""Offsets of a call's number, its architecture and the low half of its first argument in seccomp_data
(linux/seccomp.h); both architectures are little-endian."""

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
"""Calls of the x32 ABI have their own numbers and are all refused."""
NAMESPACES = 0x7E020080
"""CLONE_NEW*: user, pid, net, ipc, uts, mount, cgroup, time."""
FAMILIES = (1, 2, 10)
"""Allowed sockets: unix, IPv4 and IPv6; the latter lead nowhere in an empty network namespace."""

# name -> numbers on x86_64 and aarch64 (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h)
REFUSED_CALLS: dict[str, tuple[int, int]] = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    # memory that outlives its mapping; the limit counts mapped memory only
    "shmget": (29, 194),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
}
CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)


def filter_program(machine: str) -> bytes:
    """The filter for a machine of ARCH as the kernel reads it: consecutive struct sock_filter."""
    index = list(ARCH).index(machine)
    code: list[tuple[int, int, int, int]] = [
        (LOAD, 0, 0, AT_ARCH),
        (JUMP_EQUAL, 1, 0, ARCH[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, AT_NUMBER),
    ]
    if machine == "x86_64":
        code += [(JUMP_AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    for numbers in REFUSED_CALLS.values():
        code += [(JUMP_EQUAL, 0, 1, numbers[index]), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    # its flags are in memory, which a filter cannot read; the C library then falls back to clone
    code += [(JUMP_EQUAL, 0, 1, CLONE3[index]), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    code += [
        (JUMP_EQUAL, 0, 4, CLONE[index]),
        (LOAD, 0, 0, AT_FIRST),
        (JUMP_BITS, 0, 1, NAMESPACES),
        (RETURN, 0, 0, ERRNO | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    families = [(JUMP_EQUAL, len(FAMILIES) - number, 0, family) for number, family in enumerate(FAMILIES)]
    code += [
        (JUMP_EQUAL, 0, 2 + len(FAMILIES), SOCKET[index]),
        (LOAD, 0, 0, AT_FIRST),
        *families,
        (RETURN, 0, 0, ERRNO | errno.EAFNOSUPPORT),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
