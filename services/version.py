"""The version, in one place: the package's metadata."""

from importlib.metadata import version

VERSION = version("draftbridge")
