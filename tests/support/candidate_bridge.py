"""The part of a bridge that talks to guests, for tests of their side: it keeps what it receives."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from draftbridge.v1 import candidate_pb2, candidate_pb2_grpc


class CandidateBridge(candidate_pb2_grpc.CandidateServiceServicer):
    """Answers steps as a subclass does in `_answer`, which returns None for no answer.

    `wants_tokenizer`: it asks for the tokenizer, unless it has one. `lost`: it ends its streams after the next message.
    """

    wants_tokenizer = True

    def __init__(self) -> None:
        self.openings: list[candidate_pb2.ProposeOpen] = []
        self.steps: list[candidate_pb2.ProposeStep] = []
        self.tokenizer = b""
        self.held: dict[int, list[int]] = {}
        self.lost = threading.Event()

    @property
    def opening(self) -> candidate_pb2.ProposeOpen:
        """Returns the last one."""
        return self.openings[-1]

    def Propose(  # noqa: N802
        self, requests: Iterator[candidate_pb2.ProposeRequest], context: grpc.ServicerContext
    ) -> Iterator[candidate_pb2.ProposeResponse]:
        self.held.clear()
        for request in requests:
            match request.WhichOneof("kind"):
                case "open":
                    self.openings.append(request.open)
                    wants = self.wants_tokenizer and not self.tokenizer
                    yield candidate_pb2.ProposeResponse(opened=candidate_pb2.ProposeOpened(wants_tokenizer=wants))
                case "tokenizer":
                    self.tokenizer += request.tokenizer.chunk
                    if request.tokenizer.last:
                        yield candidate_pb2.ProposeResponse(opened=candidate_pb2.ProposeOpened())
                case _:
                    self.steps.append(request.step)
                    if answer := self._answer(request.step):
                        yield candidate_pb2.ProposeResponse(candidates=answer)
            if self.lost.is_set():
                return

    def _answer(self, step: candidate_pb2.ProposeStep) -> candidate_pb2.ProposeCandidates | None:
        """Returns the answer to a step."""
        raise NotImplementedError  # subclasses differ in this


@contextmanager
def served(bridge: CandidateBridge, address: str = "127.0.0.1:0") -> Iterator[str]:
    """Serves a bridge, and yields its address."""
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    candidate_pb2_grpc.add_CandidateServiceServicer_to_server(bridge, server)
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()
