"""The limit on the open files of a process, of which each connection is one."""

import logging

try:
    import resource
except ImportError:  # not on Windows, which has no such limit
    resource = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)


def raise_limit() -> int | None:
    """Raises the soft limit to the hard one, and returns it; None if there is no limit.

    The usual soft limit of 1024 is for programs that use `select`. With it, a thousand idle clients would keep all
    others out, and gRPC does not report that to anybody.
    """
    if resource is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # some systems report a hard limit that they do not allow
            _log.debug("the limit of open files stays at %d", soft)
    return None if soft == resource.RLIM_INFINITY else soft
