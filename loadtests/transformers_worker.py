"""transformers' generate as a worker for measurements: one padded batch per workload. Same lines as `engine.bench`."""

import argparse
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask [R, longest], padded on the left as generate wants it."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


@torch.inference_mode()
def run(model: Any, workload: dict[str, Any]) -> dict[str, Any]:
    """The batch runs until its longest output is done; only the tokens that were asked for count."""
    ids, mask = padded(workload["prompts"])
    most = max(workload["outputs"])
    seconds = []
    for new in sorted({1, most}):  # a token each, to know when the first was there
        start = time.perf_counter()
        lengths = {"min_new_tokens": new, "max_new_tokens": new}
        model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
        seconds.append(time.perf_counter() - start)
    first, whole = [seconds[0]] * len(ids), seconds[-1]
    return {"seconds": whole, "tokens": sum(workload["outputs"]), "ttft": first, "tpot": [], "steps": most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a model folder")
    parser.add_argument("--threads", type=int, default=None, help="default: all cores")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
