"""What a load test reads out of a stream: first token, gaps, the end; and that it notices a broken one."""

from collections.abc import Iterator
from itertools import count

import pytest

from loadtests.peers import mixed, uniform
from loadtests.sse import StreamError, events, follow

ROLE = 'data: {"choices": [{"delta": {"role": "assistant"}}], "usage": null}'
TEXT = 'data: {"choices": [{"delta": {"content": "a"}}], "usage": null}'
USAGE = 'data: {"choices": [], "usage": {"completion_tokens": 3}}'
DONE = "data: [DONE]"


def ticks() -> Iterator[int]:
    return count(10)


def test_the_first_text_and_the_gaps_behind_it_are_timed() -> None:
    clock = ticks()
    timeline = follow([ROLE, "", TEXT, ": ping", TEXT, TEXT, USAGE, DONE], sent=4.0, clock=lambda: float(next(clock)))
    assert timeline.ttft_s == 6.0
    assert timeline.gaps_s == [1.0, 1.0]
    assert timeline.e2e_s == 8.0
    assert timeline.completion_tokens == 3


def test_an_error_event_is_a_failure() -> None:
    with pytest.raises(StreamError, match="engine died"):
        list(events([TEXT, 'data: {"error": {"message": "engine died"}}', DONE]))


def test_a_stream_that_just_ends_is_a_failure() -> None:
    with pytest.raises(StreamError, match=r"before \[DONE\]"):
        list(events([TEXT]))


def test_workloads_are_the_same_every_time_and_within_their_bounds() -> None:
    assert uniform(8, 16, 64) == uniform(8, 16, 64)
    workload = mixed(32, 512, 256)
    assert workload == mixed(32, 512, 256)
    assert all(32 <= len(prompt) <= 512 for prompt in workload["prompts"])
    assert all(16 <= output <= 256 for output in workload["outputs"])
