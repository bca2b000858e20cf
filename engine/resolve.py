"""What a step's tokens do to its requests: confirm guesses, append, publish blocks, stop, tell.

The scheduler alone calls this, and removes who is finished. No torch, no Ray, no clock.
"""

from collections import Counter
from collections.abc import Sequence

from engine.contract import Chunk, KVCache, Sampled, StepPlan
from engine.request import FinishReason, Output, Request, StepOutput


class Resolver:
    """`notes` counts the draft_tokens that were computed, and the accepted_draft_tokens among them."""

    def __init__(self, kv: KVCache, notes: Counter[str]) -> None:
        self._kv = kv
        self._notes = notes

    def resolve(self, plan: StepPlan, sampled: Sampled) -> StepOutput:
        """What each request is given. What a step computed for an earlier life of a request is dropped."""
        output = StepOutput()
        self._resolve_decodes(plan, sampled.tokens, output)
        first = len(plan.decodes)
        for chunk in plan.chunks:
            last = first + chunk.num_sampled
            if chunk.life == chunk.request.life:
                output.others += self._take(chunk, sampled.tokens[first:last], sampled)
            first = last
        return output

    def _resolve_decodes(self, plan: StepPlan, tokens: Sequence[int], output: StepOutput) -> None:
        """For most requests this loop is the whole cost of a step's end."""
        size, ids, given = self._kv.block_size, output.ids, output.tokens
        for request, life, token in zip(plan.decodes, plan.lives, tokens, strict=False):
            if life != request.life:
                continue
            known = request.tokens
            length = len(known)
            if length - request.published >= size:
                self._kv.publish(request, length)
            request.promised -= 1
            known.append(token)
            if token in request.stops or length + 1 >= request.full_len:
                output.others.append(_ended(request, Output(request.id, (token,), cached_tokens=request.cached)))
            else:
                ids.append(request.id)
                given.append(token)

    def _take(self, chunk: Chunk, tokens: Sequence[int], sampled: Sampled) -> list[Output]:
        """Any chunk. A guess is right if it is the token that was sampled in its place: then nothing has changed."""
        request = chunk.request
        right = _agreeing(chunk.draft, tokens)
        valid = chunk.end - len(chunk.draft) + right
        _keep_prompt_logprobs(chunk, sampled)
        outputs = []
        if chunk.samples:
            request.promised -= 1
            request.computed -= len(chunk.draft) - right
            outputs = [self._append(request, _until_stop(request, tokens[: right + 1]), sampled)]
            self._draft(request, len(chunk.draft), right)
        self._kv.publish(request, min(valid, len(request.tokens)))
        return outputs

    def _append(self, request: Request, tokens: Sequence[int], sampled: Sampled) -> Output:
        logprobs = sampled.logprobs.get(request.id)
        output = Output(
            request.id,
            tuple(tokens),
            logprobs=None if logprobs is None else logprobs[: len(tokens)],
            prompt_logprobs=None if request.num_output else request.prompt_logprobs,
            cached_tokens=request.cached,
        )
        request.tokens += tokens
        return _ended(request, output)

    def _draft(self, request: Request, drafted: int, right: int) -> None:
        """Guess on, unless a step in flight samples the token that the guess would have to follow."""
        if drafted:
            self._notes.update(draft_tokens=drafted, accepted_draft_tokens=right)
        request.drafter.learn(drafted, right, right + 1)
        if not request.promised:
            request.draft = request.drafter.propose(request.tokens, request.full_len - len(request.tokens) - 1)


def _agreeing(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """How many guesses from the first on are what was sampled."""
    for count, (guess, token) in enumerate(zip(draft, sampled, strict=False)):
        if guess != token:
            return count
    return len(draft)


def _until_stop(request: Request, tokens: Sequence[int]) -> Sequence[int]:
    """Up to the first that ends the request, and never more than max_tokens allows."""
    tokens = tokens[: request.params.max_tokens - request.num_output]
    for count, token in enumerate(tokens, 1):
        if token in request.stops:
            return tokens[:count]
    return tokens


def _ended(request: Request, output: Output) -> Output:
    """With the reason, if the last of its tokens has ended the request."""
    if output.tokens and output.tokens[-1] in request.stops:
        return output._replace(finish_reason=FinishReason.STOP, stop_token=output.tokens[-1])
    if request.num_output >= request.params.max_tokens:
        return output._replace(finish_reason=FinishReason.LENGTH)
    return output


def _keep_prompt_logprobs(chunk: Chunk, sampled: Sampled) -> None:
    """By position, so that a prompt that is computed again after an eviction is not scored twice."""
    request = chunk.request
    if request.params.prompt_logprobs is None:
        return
    if request.prompt_logprobs is None:
        request.prompt_logprobs = [None] * request.prompt_len
    for position, logprob in enumerate(sampled.prompt_logprobs.get(request.id, ()), chunk.start + 1):
        request.prompt_logprobs[position] = logprob
