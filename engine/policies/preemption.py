"""Policy `preemption`: one token budget for all, running requests first, evict the newest when memory is short.

    waiting ──admit──▶ running ──EOS, stop, length──▶ finished
       ▲                  │
       └──────evict───────┘      output kept, KV dropped, front of the queue

The source of the algorithm is vLLM V1's unified scheduler. A prompt longer than what is left of the budget is cut
there and goes on in the next step: chunked prefill needs no code of its own.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.contract import Step


class Preemption(BaseModel):
    """First come, first served under `max_num_batched_tokens` a step and `max_num_seqs` running requests.

    `long_prefill_token_threshold` caps one request's tokens in a step while others are about; 0 is off.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["preemption"] = "preemption"
    max_num_batched_tokens: int = Field(512, ge=1)
    max_num_seqs: int = Field(64, ge=1)
    long_prefill_token_threshold: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _a_token_for_everyone(self) -> "Preemption":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token a step"
            )
        return self

    def plan(self, step: Step) -> None:
        self._continue_running(step)
        if not step.evicted:
            self._admit_waiting(step)

    def _continue_running(self, step: Step) -> None:
        """In admission order; the victim is always the last, so an evicted requester ends the pass by itself."""
        index = 0
        while index < len(step.running) and (limit := self._limit(step)):
            if step.run(step.running[index], limit):
                index += 1
            else:
                step.evict(step.running[-1])

    def _admit_waiting(self, step: Step) -> None:
        """The whole sequence must fit, not only its first chunk: it would soon evict those that run."""
        while step.waiting and len(step.running) < self.max_num_seqs and (limit := self._limit(step)):
            request = step.waiting[0]
            if not step.kv.fits(request) or not step.run(request, limit):
                break

    def _limit(self, step: Step) -> int:
        left = self.max_num_batched_tokens - step.tokens
        if self.long_prefill_token_threshold and len(step.running) + len(step.waiting) > 1:
            left = min(left, self.long_prefill_token_threshold)
        return left
