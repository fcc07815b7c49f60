"""The DraftBridge client; `draftbridge.v1` holds the messages and stubs of the gRPC contract.

>>> from draftbridge import Client
>>> with Client("localhost:50050") as client:
...     print(client.generate("The capital of France is", max_tokens=8).text)
"""

from draftbridge.client import AsyncClient, Client, Event, Generation
from draftbridge.errors import CallError

__all__ = ["AsyncClient", "CallError", "Client", "Event", "Generation"]
