"""Makes tests/data/schedules_sample.json: scenarios worked out by hand, and some that our own scheduler has recorded.

`python -m tests.record_schedules` writes the file anew; do that when a schedule changes on purpose.
"""

import json
import random
from pathlib import Path
from typing import Any

from loadtests.conformance import SCHEDULES, Replay

FILE = Path(__file__).parent / "data" / "schedules_sample.json"

Steps = list[tuple[dict[str, int], list[str]]]


def request(name: str, arrival_step: int, prompt_len: int, max_tokens: int, priority: int = 0) -> dict[str, Any]:
    return {
        "id": name,
        "arrival_step": arrival_step,
        "prompt_len": prompt_len,
        "max_tokens": max_tokens,
        "priority": priority,
    }


def scenario(name: str, requests: list[dict[str, Any]], steps: Steps, **options: Any) -> dict[str, Any]:
    """`options` name what differs from 10 usable blocks of 16, 8 seats, a budget of 200, and fcfs without a cache."""
    usable = options.pop("usable_blocks", 10)
    return {
        "name": name,
        "block_size": 16,
        "num_blocks": usable + 1,
        "usable_blocks": usable,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 200,
        "long_prefill_token_threshold": 0,
        "order": "fcfs",
        "prefix_cache": False,
        **options,
        "requests": requests,
        "steps": [{"scheduled": scheduled, "evicted": evicted} for scheduled, evicted in steps],
    }


BY_HAND = [
    scenario(
        "one budget for all",  # 64 tokens: decodes 1, prompts are cut where the budget ends
        [request("a", 0, 40, 3), request("b", 1, 100, 2), request("c", 1, 50, 1)],
        [({"a": 40}, []), ({"a": 1, "b": 63}, []), ({"a": 1, "b": 37, "c": 26}, []), ({"b": 1, "c": 24}, [])],
        max_num_batched_tokens=64,
        usable_blocks=20,
    ),
    scenario(
        "the newest is evicted",  # both hold 5 of 10 blocks, a needs a sixth; b fits again when a is done
        [request("a", 0, 80, 4), request("b", 0, 80, 4)],
        [
            ({"a": 80, "b": 80}, []),
            ({"a": 1}, ["b"]),
            ({"a": 1}, []),
            ({"a": 1}, []),
            ({"b": 81}, []),
            ({"b": 1}, []),
            ({"b": 1}, []),
        ],
    ),
    scenario(
        "a scheduled victim is withdrawn",  # low has its token already when high needs a third block
        [request("low", 0, 32, 4, 5), request("high", 1, 32, 3, 0)],
        [
            ({"low": 32}, []),
            ({"low": 1, "high": 32}, []),
            ({"high": 1}, ["low"]),
            ({"high": 1}, []),
            ({"low": 34}, []),
            ({"low": 1}, []),
        ],
        order="priority",
        usable_blocks=5,
    ),
    scenario(
        "long prompts share",  # at most 400 tokens each, until only one request is left
        [request(name, 0, 800, 1) for name in "abc"],
        [({"a": 400, "b": 400, "c": 224}, []), ({"a": 400, "b": 400, "c": 224}, []), ({"c": 352}, [])],
        max_num_batched_tokens=1024,
        long_prefill_token_threshold=400,
        usable_blocks=200,
    ),
    scenario(
        "theirs: a self-eviction ends the pass",  # x is the least urgent; b stands behind it and does not run
        [request("a", 0, 20, 9, 1), request("x", 0, 31, 9, 3), request("b", 1, 20, 9, 1)],
        [({"a": 20, "x": 31}, []), ({"a": 1, "x": 1, "b": 20}, []), ({"a": 1}, ["x"])],
        order="priority",
        usable_blocks=6,
    ),
    scenario(
        "theirs: all are evicted in vain",  # long wants two blocks and small gives one; then long goes itself
        [request("a", 0, 32, 9), request("long", 0, 96, 9), request("small", 1, 10, 9)],
        [({"a": 32, "long": 32}, []), ({"a": 1, "long": 32, "small": 10}, []), ({"a": 1}, ["small", "long"])],
        long_prefill_token_threshold=32,
        usable_blocks=8,
    ),
    scenario(
        "theirs: a block is found that was never computed",  # low has 96 tokens; its next 32 are planned and undone
        [request("low", 0, 144, 2, 5), request("high", 1, 16, 2, 0)],
        [({"low": 64}, []), ({"low": 32, "high": 16}, []), ({"high": 1}, ["low"]), ({"low": 32}, [])],
        max_num_batched_tokens=64,
        long_prefill_token_threshold=32,
        order="priority",
        prefix_cache=True,
        usable_blocks=9,
    ),
]


def recorded(seed: int) -> dict[str, Any]:
    """A small random scenario on a tight pool, with the steps that our scheduler takes."""
    dice = random.Random(seed)
    requests = [
        request(f"r{i}", i * dice.randint(0, 2), dice.randint(5, 70), dice.randint(1, 14), dice.randint(0, 3))
        for i in range(6)
    ]
    made = scenario(
        f"recorded {seed}",
        requests,
        [],
        usable_blocks=dice.choice([6, 8, 12]),
        max_num_seqs=dice.choice([2, 4, 8]),
        max_num_batched_tokens=dice.choice([16, 32, 64]),
        long_prefill_token_threshold=dice.choice([0, 24]),
        order=dice.choice(["fcfs", "priority"]),
        prefix_cache=dice.choice([True, False]),
    )
    replay = Replay(SCHEDULES.validate_python([made])[0])
    while not replay.done:
        outcome, _ = replay.step()
        made["steps"].append({"scheduled": outcome.scheduled, "evicted": outcome.evicted})
    return made


def text() -> str:
    """One scenario a line."""
    lines = [json.dumps(made, separators=(",", ":")) for made in [*BY_HAND, *map(recorded, range(8))]]
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(text())
