"""Tests the arithmetic of `benchmarks.guests`, and the proxy that delays a connection."""

import argparse
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from benchmarks import guest_steps
from benchmarks.delay import DelayProxy
from benchmarks.guest_steps import speed
from benchmarks.guests import ALONE, Sample, speeds, step_times
from benchmarks.vllm_ways import OURS, PLAIN, RECORD, WAYS
from draftbridge.candidates import CandidateCounts, SequenceStep


def test_speeds_are_of_all_tokens_of_a_group() -> None:
    samples = [
        Sample("qa", ALONE, 1, 10, 1.0, True),
        Sample("qa", OURS, 1, 10, 0.5, True),
        Sample("rag", ALONE, 1, 10, 3.0, True),
        Sample("rag", OURS, 1, 10, 0.5, False),
        Sample("qa", OURS, 8, 10, 0.5, True),
    ]
    found = {
        (category, way, parallel): (speed, ratio, same)
        for category, way, parallel, speed, ratio, same in speeds(samples)
    }
    assert found["qa", OURS, 1] == (20.0, 2.0, 1.0)
    assert found["all", ALONE, 1] == (5.0, 1.0, 1.0)
    assert found["all", OURS, 1] == (20.0, 4.0, 0.5)
    assert found["qa", OURS, 8][0] == 20.0 and found["qa", OURS, 8][1] != found["qa", OURS, 8][1]  # nothing to compare


def test_step_times_are_by_way_and_rows() -> None:
    records = [(WAYS.index(OURS), 8, 3, nanoseconds * 1000) for nanoseconds in range(1, 101)]
    records.append((WAYS.index(PLAIN), 1, 0, 5))
    plain, ours = step_times(b"".join(RECORD.pack(*one) for one in records))
    assert (plain.way, plain.rows, plain.step_count) == (PLAIN, 1, 1)
    assert (ours.way, ours.rows, ours.step_count, ours.candidate_count) == (OURS, 8, 100, 300)
    assert ours.median_ms == pytest.approx(0.0505) and ours.p95_ms == pytest.approx(0.096)


def test_the_speed_of_a_guest_is_relative_to_forwards_alone() -> None:
    assert speed(0, [0.0, 0.0], 20.0) == 1.0
    assert speed(0, [20.0, 20.0], 20.0) == 0.5
    assert speed(6, [4.0, 6.0], 20.0) == pytest.approx(8 / (50 / 20))


def test_the_proxy_delays_holds_back_and_ends_connections() -> None:
    def echo(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(100):
                connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        served = pool.submit(echo, server)
        proxy = DelayProxy(f"127.0.0.1:{server.getsockname()[1]}", 0.0)
        with proxy.running() as address:
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port))) as client:

                def round_trip() -> float:
                    began = time.monotonic()
                    client.sendall(b"x")
                    assert client.recv(100) == b"x"
                    return time.monotonic() - began

                round_trip()
                proxy.set_delay(0.05)
                assert round_trip() >= 0.1
                proxy.set_delay(None)
                client.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    round_trip()
                client.settimeout(60)
                proxy.set_delay(0.0)
                assert client.recv(100) == b"x"
            served.result(60)


def test_answers_that_come_between_two_steps_are_late_ones() -> None:
    class Late:
        counts = CandidateCounts()

        def step(self, sequences: list[SequenceStep], *, ended: Sequence[int] = (), deadline: float) -> dict:
            self.counts.late_count += bool(sequences)  # as when the answer arrives after it
            return {}

    options = argparse.Namespace(prompt=4, warm=3, steps=6, forward_ms=0.0, max_candidates=None)
    found = guest_steps.measure(Late(), list(range(40)), 1, 2.0, options)  # type: ignore[arg-type]
    assert found["missed"] == 1.0


def test_the_speed_counts_what_only_some_of_the_sequences_gained() -> None:
    class OfTheFirst:
        counts = CandidateCounts()

        def step(self, sequences: list[SequenceStep], *, ended: Sequence[int] = (), deadline: float) -> dict:
            assert all(one.max_candidates == 3 for one in sequences)
            return {one.sequence_id: SimpleNamespace(token_ids=(len(one.token_ids),)) for one in sequences[:1]}

    options = argparse.Namespace(prompt=4, warm=0, steps=5, forward_ms=2.0, max_candidates=3)
    found = guest_steps.measure(OfTheFirst(), list(range(400)), 2, 2.0, options)  # type: ignore[arg-type]
    assert found["accepted per forward"] == 0.5
    assert found["speed"] == pytest.approx(1.5, rel=0.05)
