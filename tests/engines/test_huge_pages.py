import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from services.engines.huge_pages import large_allocations, use_huge_pages

MB = 1 << 20


def test_only_large_anonymous_memory_is_named():
    lines = [
        "5600000000-5604000000 rw-p 00000000 00:00 0                          [heap]",
        "7f0000001000-7f0004001000 rw-p 00000000 00:00 0 ",
        "7f1000000000-7f1001ff0000 rw-p 00000000 00:00 0 ",
        "7f2000000000-7f2008000000 r--p 00000000 00:00 0 ",
        "7f3000000000-7f3008000000 rw-p 00000000 fd:00 1234                   /models/some file.gguf",
        "7f4000000000-7f4008000000 rw-s 00000000 00:01 99                     /dev/zero (deleted)",
        "7f5000000000-7f5008000000 rw-p 00000000 00:00 0                      [stack]",
    ]
    assert list(large_allocations(lines)) == [
        (0x5600000000, 0x5604000000),
        (0x7F0000200000, 0x7F0004000000),
    ]


def test_memory_keeps_its_content_and_lies_in_huge_pages():
    region = mmap.mmap(-1, 64 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    content = np.frombuffer(region, np.uint8)
    written = np.random.default_rng(0).integers(0, 256, content.size, np.uint8)
    content[:] = written
    moved = use_huge_pages()
    assert np.array_equal(content, written)
    skip_unless_the_kernel_collapses(128 * MB)
    assert moved >= 32 * MB
    assert huge_bytes_at(content.ctypes.data) >= 60 * MB


def test_a_part_that_was_never_written_does_not_keep_the_rest_from_moving():
    """The kernel may report a model's weights and an unused cache as one mapping."""
    skip_unless_the_kernel_collapses(256 * MB)
    region = mmap.mmap(-1, 256 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    content = np.frombuffer(region, np.uint8)
    content[128 * MB :] = 7
    use_huge_pages()
    assert huge_bytes_at(content.ctypes.data) >= 64 * MB
    assert (content[128 * MB :] == 7).all() and not content[: 128 * MB].any()


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert use_huge_pages() == 0


def skip_unless_the_kernel_collapses(free_bytes):
    """Asks the kernel to move memory to huge pages, without the code under test; some kernels and sandboxes cannot.

    Nor can any if free memory lies in pieces: each huge page needs 2 MiB in one piece.
    """
    blocks = [list(map(int, line.split()[4:])) for line in Path("/proc/buddyinfo").read_text().splitlines()]
    whole = sum((count << order) * mmap.PAGESIZE for row in blocks for order, count in enumerate(row) if order >= 9)
    if whole < free_bytes:
        pytest.skip(f"only {whole / MB:.0f} MB of free memory lie in pieces of 2 MiB")
    with mmap.mmap(-1, 8 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
        region.write(b"x" * (8 * MB))
        try:
            region.madvise(25, 0, 8 * MB)  # MADV_COLLAPSE
        except OSError:
            pytest.skip("Linux before 6.1, a sandbox, or a kernel without huge pages: it refuses any such request")


def huge_bytes_at(address):
    """Returns how many bytes of the mapping that holds an address are in huge pages."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(edge, 16) for edge in mapping.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return int(re.search(r"AnonHugePages:\s*(\d+) kB", mapping)[1]) << 10
    raise AssertionError("the address is not mapped")
