"""What the engine samples follows the model's distribution, with and without drafts: 20,000 tokens, chi-squared.

The model is a fake that believes the same of every next token, so that the true distribution is known.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cache.paged import PagedKV
from engine.cache.prefix import NoPrefix
from engine.copies import NoHost
from engine.core import EngineCore
from engine.engine import Completion
from engine.grammar import NoGrammars
from engine.inputs import InputBuilder
from engine.intake import Limits
from engine.lanes import Inline
from engine.model import Tokens
from engine.policies import Preemption
from engine.request import SamplingParams
from engine.runner import Device, ModelRunner
from engine.sampler import sample
from engine.scheduler import Scheduler
from engine.speculate import DraftConfig, NGramDrafts, NoDrafts
from engine.timing import StepTimer

VOCAB = 12
REQUESTS, EACH = 40, 500
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 1.2
CRITICAL = {11: 31.3, 10: 29.6, 9: 27.9, 8: 26.1, 7: 24.3, 6: 22.5, 5: 20.5, 4: 18.5}  # one in a thousand


class SameEverywhere:
    """Believes LOGITS, whatever came before."""

    def forward(self, tokens: Tokens, rows_R: Tensor, attend: Any) -> Tensor:
        return LOGITS.expand(len(rows_R), -1).clone()


def sampled(drafts: DraftConfig, **options: float) -> tuple[list[int], int]:
    """20,000 tokens, and how many of them were guessed."""
    timer = StepTimer(lambda: 0.0)
    kv = PagedKV(REQUESTS * (EACH // 16 + 3), 16, NoPrefix())
    nothing: Any = None
    inputs = InputBuilder(REQUESTS, kv.blocks_for(EACH + 20), 16, torch.device("cpu"))
    runner = ModelRunner(SameEverywhere(), Device(nothing, NoHost(), Inline(), sample, NoGrammars()), inputs, (), timer)
    scheduler = Scheduler(Preemption(max_num_seqs=64).build(), kv, drafts=drafts)
    core = EngineCore(scheduler, runner, Limits(EACH + 20, kv.capacity, VOCAB), timer)
    completions = {f"r{number}": Completion() for number in range(REQUESTS)}
    for number, name in enumerate(completions):
        params = SamplingParams(max_tokens=EACH, temperature=0.9, seed=number, **options)  # type: ignore[arg-type]
        core.add(name, [number % VOCAB], params)
    while core.has_work:
        for output in core.step():
            completions[output.request_id].add(output)
    tokens = [token for completion in completions.values() for token in completion.tokens]
    return tokens, core.stats().notes.get("accepted_draft_tokens", 0)


def expected(top_p: float) -> Tensor:
    probability = torch.softmax(LOGITS.double() / 0.9, dim=-1)
    best, order = probability.sort(descending=True)
    kept = int((best.cumsum(-1) < top_p).sum()) + 1
    left = torch.zeros(VOCAB, dtype=torch.float64).index_put((order[:kept],), best[:kept])
    return left / left.sum()


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_twenty_thousand_tokens_follow_the_distribution_and_drafts_change_none(top_p: float) -> None:
    plain, _ = sampled(NoDrafts(), top_p=top_p)
    drafted, accepted = sampled(NGramDrafts(min_match=1, adaptive=False), top_p=top_p)
    assert drafted == plain and len(plain) == REQUESTS * EACH
    assert accepted > 2000, "nothing was guessed right: the comparison says nothing"
    wanted = expected(top_p) * len(plain)
    seen = torch.bincount(torch.tensor(plain), minlength=VOCAB).double()
    possible = wanted > 0
    assert not seen[~possible].any(), "a token that top-p leaves out was sampled"
    chi_squared = ((seen - wanted)[possible] ** 2 / wanted[possible]).sum()
    assert chi_squared < CRITICAL[int(possible.sum()) - 1]
