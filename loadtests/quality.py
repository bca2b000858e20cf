"""What fewer bits cost: perplexity on the project's own words, and golden outputs, for each way to keep the weights."""

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from engine.catalogue import resolve
from engine.config import EngineConfig
from loadtests.own_words import text
from loadtests.workers import module, start

KINDS = {"float32": ("--dtype", "float32"), "16 bits": (), "int8": ("--quantization", "int8")}
QUESTIONS = (
    "The capital of France is",
    "Once upon a time, there was a little",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "The three primary colours are",
)
NEW = 24


def pieces(ids: Sequence[int], length: int) -> list[list[int]]:
    return [list(ids[start : start + length]) for start in range(0, len(ids) - 1, length)]


def perplexity(result: dict[str, Any]) -> float:
    return math.exp(-float(result["logprob"]) / int(result["scored"]))


def agreement(outputs: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> str:
    """How many answers are equal, and how many tokens before the first that is not."""
    equal = sum(one == other for one, other in zip(outputs, expected, strict=True))
    common = [
        next((place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
        for one, other in zip(outputs, expected, strict=True)
    ]
    return f"{equal} of {len(outputs)} answers equal, {sum(common)} of {sum(map(len, expected))} tokens before a change"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--length", type=int, default=512, help="tokens of each piece of the text")
    parser.add_argument("--most", type=int, help="of the text's tokens; default: all")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object at the end")
    options = parser.parse_args()
    defaults = EngineConfig()
    tokenizer = Tokenizer.from_file(str(resolve(defaults.model, defaults.model_cache) / "tokenizer.json"))
    ids = list(tokenizer.encode(text(), add_special_tokens=False).ids)[: options.most]
    asked = [list(tokenizer.encode(question, add_special_tokens=False).ids) for question in QUESTIONS]
    print(f"{len(ids)} tokens of our own words, in pieces of {options.length}", flush=True)
    results: dict[str, Any] = {}
    for kind, flags in KINDS.items():
        worker = start(kind, module("engine.bench", "--threads", str(options.threads), *flags))
        worker.wait_until_ready()
        scored = worker.run({"score": pieces(ids, options.length)})
        answers = worker.run({"prompts": asked, "outputs": [NEW] * len(asked)})["ids"]
        worker.stop()
        results[kind] = {"perplexity": perplexity(scored), "answers": answers}
        first = results["float32"]
        change = results[kind]["perplexity"] / first["perplexity"] - 1
        same = agreement(answers, first["answers"])
        print(f"{kind:8} perplexity {results[kind]['perplexity']:.4f} ({change:+.3%})   {same}", flush=True)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
