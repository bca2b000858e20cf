"""What a load test reads out of a stream: first token, gaps, the end; and that it notices a broken one."""

from collections.abc import Iterator
from itertools import count

import pytest

from loadtests.own_words import text
from loadtests.peers import mixed, rate, report, uniform
from loadtests.quality import agreement, perplexity, pieces
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


def test_a_decode_rate_counts_what_comes_after_the_last_first_token() -> None:
    result = {"seconds": 3.0, "ttft": [0.5, 1.0], "tpot": []}
    assert rate("decode, batch 2", uniform(2, 4, 11), result) == 20 / 2.0
    assert rate("prefill, 8 tokens", uniform(1, 9, 1), result) == 3.0
    assert rate("mixed", uniform(2, 4, 6), result) == 4.0


def test_ratios_are_to_the_best_other_engine_of_the_same_round(capsys: pytest.CaptureFixture[str]) -> None:
    def run(seconds: float) -> dict[str, object]:
        return {"seconds": seconds, "ttft": [0.0], "tpot": [0.1]}

    results = {"sluice": [run(1.0), run(2.0)], "slow": [run(4.0), run(4.0)], "fast": [run(2.0), run(8.0)]}
    report("decode, batch 1", uniform(1, 4, 9), results)
    assert "2.00 of the best peer (2.00 to 2.00)" in capsys.readouterr().out


def test_the_text_is_long_enough_to_measure_on_and_in_whole_words() -> None:
    words = text().split()
    assert len(words) > 12_000 and "scheduler" in words


def test_pieces_hold_every_token_once() -> None:
    assert pieces(range(10), 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert perplexity({"logprob": -20.0, "scored": 10}) == pytest.approx(7.389, abs=1e-3)
    assert agreement([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == "1 of 2 answers equal, 3 of 4 tokens before a change"
