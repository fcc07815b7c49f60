"""Tests of servers, streams, the sandbox, the store and the command."""
