"""Policy `static`: request-level batching, the baseline. A batch is formed, and runs until its last member is done.

    waiting ──a whole batch, when nothing runs──▶ running ──▶ finished, but its row idles until the batch ends

Nobody joins. Members are counted as padded to the longest prompt, and KV as reserved for prompt and max_tokens up
front. What that wastes is noted, not simulated: the forward pass computes real tokens only.
"""

from typing import Literal

from pydantic import Field

from engine.contract import Step
from engine.policies.base import UNBOUNDED, PolicyBase
from engine.request import Request


class Static(PolicyBase):
    """Batches of up to `max_num_seqs` requests, in order of arrival."""

    kind: Literal["static"] = "static"
    max_num_seqs: int = Field(16, ge=1)

    def build(self) -> "StaticPolicy":
        return StaticPolicy(self)


class StaticPolicy:
    """Notes: padded_tokens of prompt_tokens, idle_row_steps of row_steps, unused_kv_blocks of reserved_kv_blocks."""

    kind = "static"

    def __init__(self, config: Static) -> None:
        self.max_num_seqs = config.max_num_seqs
        self._batch: tuple[Request, ...] = ()

    def plan(self, step: Step) -> None:
        if not step.running:
            self._note_unused(step)
            self._form_batch(step)
        else:
            self._decode(step)
        step.note("row_steps", len(self._batch))
        step.note("idle_row_steps", sum(not request.blocks for request in self._batch))

    def _form_batch(self, step: Step) -> None:
        """As many as fit with all the output they may ask for; at least one, which intake has promised to fit."""
        left = step.kv.usable_blocks
        batch: list[Request] = []
        for request in sorted(step.waiting, key=lambda request: request.arrival):
            left -= _reserved(step, request)
            if len(batch) == self.max_num_seqs or left < 0:
                break
            batch.append(request)
        for request in batch:
            step.run(request, request.pending)
        self._batch = tuple(request for request in batch if request.blocks)
        longest = max((len(request.tokens) for request in batch), default=0)
        step.note("prompt_tokens", sum(len(request.tokens) for request in batch))
        step.note("padded_tokens", sum(longest - len(request.tokens) for request in batch))

    def _decode(self, step: Step) -> None:
        """A batch fits with all its output; requests that another policy admitted may not, and start anew."""
        queue, passed = tuple(step.running), 0
        while passed < len(queue):
            passed += step.run_all(queue[passed:], UNBOUNDED, UNBOUNDED)
            if passed < len(queue):
                step.evict(queue[passed])
                passed += 1

    def _note_unused(self, step: Step) -> None:
        reserved = sum(_reserved(step, request) for request in self._batch)
        used = sum(-(-len(request.tokens) // step.kv.block_size) for request in self._batch)
        step.note("reserved_kv_blocks", reserved)
        step.note("unused_kv_blocks", reserved - used)
        self._batch = ()


def _reserved(step: Step, request: Request) -> int:
    return -(-(request.prompt_len + request.params.max_tokens) // step.kv.block_size)
