"""The DraftBridge client; `draftbridge.v1` holds the messages and stubs of the gRPC contract.

>>> from draftbridge import Client
>>> with Client("localhost:50050") as client:
...     print(client.generate("The capital of France is", max_tokens=8).text)
"""

from draftbridge.client import AsyncClient, Client
from draftbridge.errors import CallError
from draftbridge.guests.transformers import assist
from draftbridge.messages import Event, Generation
from draftbridge.security import Credentials

__all__ = ["AsyncClient", "CallError", "Client", "Credentials", "Event", "Generation", "assist"]
