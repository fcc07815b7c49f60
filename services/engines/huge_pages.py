"""Moves a model's weights to huge pages.

A pass reads all weights, and with pages of 4 KiB the processor spends part of that time looking up where each page
lies. Linux gives out huge pages only to programs that ask for them unless it is configured otherwise, and the libraries
that allocate our weights do not ask.
"""

import ctypes
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_log = logging.getLogger(__name__)

_MAPS = Path("/proc/self/maps")
# Smaller allocations matter little, and are moved less cheaply.
_MIN_BYTES = 32 << 20
# The size of a huge page on x86. Elsewhere it may be larger, and the kernel skips what is not aligned.
_PAGE = 2 << 20
# From linux/mman.h: moves what is there to huge pages at once. Since Linux 6.1; earlier kernels refuse it.
_MADV_COLLAPSE = 25


def use_huge_pages() -> int:
    """Moves this process's large anonymous allocations to huge pages, as far as the system allows it.

    Takes one or two seconds for each GB. Returns how many bytes were moved: 0 on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # The kernel refuses a part that was never written, and all after it in the same call. It also reports neighbouring
    # allocations, such as weights and a cache, as one. So each call moves only a small part.
    moved = 0
    for start, end in large_allocations(_MAPS.read_text().splitlines()):
        for part in range(start, end, _MIN_BYTES):
            size = min(_MIN_BYTES, end - part)
            moved += size if madvise(part, size, _MADV_COLLAPSE) == 0 else 0
    _log.debug("moved %d MB to huge pages", moved >> 20)
    return moved


def large_allocations(maps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yields start and end address, aligned to huge pages, of the large anonymous mappings in lines of proc's maps."""
    for line in maps:
        addresses, access, _, _, inode, *name = line.split(maxsplit=5)
        if access != "rw-p" or inode != "0" or (name and name[0].strip() != "[heap]"):
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        start, end = -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
        if end - start >= _MIN_BYTES:
            yield start, end
