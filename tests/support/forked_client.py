"""Forks a process with a connected client: the child gets no candidates, once with a reason. Fails by its exit code."""

import os

from draftbridge.candidates import CandidateClient, SequenceStep
from draftbridge.v1 import model_pb2
from tests.support.candidate_bridge import served
from tests.support.scripted_bridge import VOCABULARY, ScriptedBridge
from tests.support.tiny import tokenizer_json
from tests.support.waiting import eventually


def main() -> None:
    """Runs both processes."""
    model = model_pb2.Model(name="engine", context_length=64, vocabulary_size=VOCABULARY)
    with served(ScriptedBridge(wrong=0.0)) as address:
        client = CandidateClient(address, model, tokenizer_json("byte_level"))
        eventually(lambda: bool(client.step([SequenceStep(1, [5, 6, 7], max_candidates=4)], deadline=10.0)))
        with client._changed:  # another thread may hold the lock at the fork
            child = os.fork()
        if child == 0:
            status = 1
            try:
                found = [client.step([SequenceStep(1, [5, 6, 7], max_candidates=4)], deadline=10.0) for _ in range(3)]
                if not (any(found) or client.connected or client.connect(1.0)):
                    client.close()
                    status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert client.connected and client.step([SequenceStep(1, [5, 6, 7, 8], max_candidates=4)], deadline=10.0)
        client.close()


if __name__ == "__main__":
    main()
