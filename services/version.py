"""The version of DraftBridge, read from the metadata of the installed package."""

from importlib.metadata import version

VERSION = version("draftbridge")
