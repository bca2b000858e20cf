"""transformers as the judge: greedy tokens must be its own up to the first near-tie in its logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

NEAR_TIE = 1e-4


@dataclass(frozen=True, slots=True)
class Verdict:
    """`compared` tokens were equal; `near_tie` tells whether the comparison ended at one."""

    compared: int
    near_tie: bool


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def judge(model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> Verdict:
    """One forward pass over prompt and output: each output token must be the best after what stands before it.

    Raises AssertionError at the first token that is not, unless the two best are closer than 1e-4.
    """
    logits_TV = model(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    best = logits_TV.topk(2, dim=-1)
    for index, token in enumerate(output):
        gap = float(best.values[index, 0] - best.values[index, 1])
        if gap < NEAR_TIE:
            return Verdict(index, near_tie=True)
        wanted = int(best.indices[index, 0])
        assert token == wanted, f"token {index} is {token}, transformers says {wanted} (ahead by {gap:.3g})"
    return Verdict(len(output), near_tie=False)
