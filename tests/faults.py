"""Faults to seed into scheduler, cache and policies: what each makes wrong, and which tests have to notice."""

from dataclasses import dataclass

BLOCKS = "engine/cache/blocks.py"
PAGED = "engine/cache/paged.py"
PREFIX = "engine/cache/prefix.py"
SCHEDULER = "engine/scheduler.py"
PREEMPTION = "engine/policies/preemption.py"
RETRACT = "engine/policies/retract.py"
STATIC = "engine/policies/static.py"
EVENTS = "engine/cache/events.py"
HOST = "engine/cache/host.py"
REQUEST = "engine/request.py"
RESOLVE = "engine/resolve.py"
SPECULATE = "engine/speculate.py"

PREEMPTION_TESTS = ("tests/test_policy_preemption.py", "tests/test_conformance.py")
CACHE_TESTS = ("tests/test_cache.py", "tests/test_cache_events.py", "tests/test_host_tier.py")
STEP_TESTS = ("tests/test_drafts.py", "tests/test_overlap.py", "tests/test_scheduler.py")
TESTS = {
    BLOCKS: CACHE_TESTS,
    PAGED: CACHE_TESTS,
    PREFIX: CACHE_TESTS,
    EVENTS: CACHE_TESTS,
    HOST: (*CACHE_TESTS, "tests/test_scheduler.py"),
    REQUEST: STEP_TESTS,
    RESOLVE: STEP_TESTS,
    SPECULATE: ("tests/test_speculate.py",),
    SCHEDULER: (*PREEMPTION_TESTS, "tests/test_policy_retract.py", "tests/test_host_tier.py", *STEP_TESTS),
    PREEMPTION: PREEMPTION_TESTS,
    RETRACT: ("tests/test_policy_retract.py",),
    STATIC: ("tests/test_policy_static.py",),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """`before` stands once in `file`, and `after` in its place is wrong because of `reason`."""

    reason: str
    file: str
    before: str
    after: str


FAULTS = (
    Fault("block 0 is handed out", BLOCKS, "range(num_blocks - 1, 0, -1)", "range(num_blocks - 1, -1, -1)"),
    Fault("a sequence loses its first block first", BLOCKS, "in reversed(blocks):", "in blocks:"),
    Fault("the youngest cached block is reused", BLOCKS, "next(iter(self._cached))", "next(reversed(self._cached))"),
    Fault(
        "cached blocks are reused while others are free",
        BLOCKS,
        "self._free.pop() if self._free else self._reuse_oldest()",
        "self._reuse_oldest() if self._cached else self._free.pop()",
    ),
    Fault("a reused block stays findable", BLOCKS, "self._findable[block] = 0", "self._findable[block] = 1"),
    Fault("a second holder is not counted", BLOCKS, "self._references[block] += 1", "self._references[block] = 1"),
    Fault("the index keeps what is gone", BLOCKS, "        self._forget(block)\n", ""),
    Fault("all of a prompt is taken from the cache", PAGED, "(len(request.tokens) - 1) //", "len(request.tokens) //"),
    Fault("a hit counts as free, too", PAGED, "- len(prefix.blocks) + revived", "- len(prefix.blocks)"),
    Fault(
        "a shared block counts as gained",
        PAGED,
        "(block) == count for block, count in holders",
        "(block) >= count for block, count in holders",
    ),
    Fault("a hit after an eviction is reported", PAGED, "if not request.evictions:", "if request.tokens:"),
    Fault("a prompt to be scored reads the cache", PAGED, "prompt_logprobs is not None:", "prompt_logprobs == -1:"),
    Fault(
        "half a block is published",
        PAGED,
        "// self.block_size, computed // self.block_size",
        "// self.block_size, min(self.blocks_for(computed), len(request.tokens) // self.block_size)",
    ),
    Fault(
        "the check overlooks references",
        PAGED,
        "(block) == count for block, count in held",
        "(block) > 0 for block, count in held",
    ),
    Fault("a hash ignores what stands before", PREFIX, "parent = block_hash(parent, ", "parent = block_hash(b'', "),
    Fault("a hit leaps over a gap", PREFIX, "                break\n", "                continue\n"),
    Fault("equal content is findable twice", PREFIX, "if digest in self._block_of:", "if block in self._hash_of:"),
    Fault("an evicted request joins at the end", SCHEDULER, "self.waiting.appendleft(", "self.waiting.append("),
    Fault("tokens of a victim are lost to the budget", SCHEDULER, "self.tokens -= chunk.length", "pass"),
    Fault(
        "blocks are published when planned",
        SCHEDULER,
        "        self.tokens += granted\n",
        "        self.tokens += granted\n        self.kv.publish(request, end)\n",
    ),
    Fault(
        "a resumed request counts as decoding",
        SCHEDULER,
        "request.admitted_len = len(request.tokens)",
        "request.admitted_len = request.prompt_len",
    ),
    Fault("a chunk in the middle samples", SCHEDULER, "granted, end >= due,", "granted, True,"),
    Fault("finished requests keep their blocks", SCHEDULER, "            self.kv.release(request)\n", ""),
    Fault("a failure is not reported", SCHEDULER, "            self._failures.append(", "            print("),
    Fault(
        "the testing device evicts in the middle of a prompt",
        SCHEDULER,
        "len(request.tokens) > request.admitted_len",
        "len(request.tokens) >= request.admitted_len",
    ),
    Fault("requests join in a step that evicted", PREEMPTION, "if not step.evicted:", "if step.running is not None:"),
    Fault("all are evicted in vain", PREEMPTION, "if wanted > step.kv.room +", "if wanted > 10**9 +"),
    Fault(
        "a self-eviction ends the pass",
        PREEMPTION,
        "                passed += 1\n",
        "                passed += 1\n                if not queue[passed - 1].blocks: return\n",
    ),
    Fault("the oldest is evicted", PREEMPTION, "step.running.index(request) : -1]", "step.running.index(request)]"),
    Fault("among equals the earliest is evicted", PREEMPTION, "step.now), other.arrival", "step.now), -other.arrival"),
    Fault(
        "an evicted request loses its place among equals",
        PREEMPTION,
        "key=lambda request: self._value(request, step.now))",
        "key=lambda request: (self._value(request, step.now), request.arrival))",
    ),
    Fault("waiting makes less urgent", PREEMPTION, "return request.priority - (", "return request.priority + ("),
    Fault("one too many passes the head", PREEMPTION, ">= self._config.max_bypass", "> self._config.max_bypass"),
    Fault("an evicted head is passed", PREEMPTION, "if head.evictions:", "if head.evictions > 99:"),
    Fault("larger ones pass the head", PREEMPTION, "if len(request.tokens) < len(head.tokens) and", "if"),
    Fault("the watermark blocks an idle engine", PREEMPTION, " if step.running else 0", ""),
    Fault("the first chunk is enough to be admitted", PREEMPTION, "len(request.tokens)) + spare", "1) + spare"),
    Fault("a lone prompt is capped", PREEMPTION, "len(step.waiting) > 1:", "len(step.waiting) > 0:"),
    Fault("an equal test of kv space admits", RETRACT, "self._kv - wanted,", "self._kv - wanted + 1,"),
    Fault("the guess holds for those who ignore EOS", RETRACT, "1.0 if r.params.ignore_eos", "ratio if r.id"),
    Fault(
        "a cut prompt reserves its output",
        RETRACT,
        "(self._future(request) if request.promised else 0)",
        "self._future(request)",
    ),
    Fault("a revived prefix stays free", RETRACT, "taken = (room - self._step.kv.room) * size", "taken = length"),
    Fault("a blocked chunk is passed", RETRACT, "            self._kv = 0\n", "            self._kv -= 0\n"),
    Fault("a chunk ends inside a block", RETRACT, "// size * size - start", "- start"),
    Fault("newcomers come before a cut prompt", RETRACT, "adder.go_on(request)", "request.id"),
    Fault("the longest output is taken back", RETRACT, "(request.num_output, -req", "(-request.num_output, -req"),
    Fault(
        "the shortest prompt is taken back", RETRACT, "-request.prompt_len, -request", "request.prompt_len, -request"
    ),
    Fault("the earliest is taken back", RETRACT, "prompt_len, -request.arrival", "prompt_len, request.arrival"),
    Fault("the shield comes too late", RETRACT, "request.evictions < shielded", "request.evictions <= shielded"),
    Fault(
        "the guess falls after a retraction",
        RETRACT,
        "max(self.value, min(used / allowed",
        "max(0.0, min(used / allowed",
    ),
    Fault("the guess does not hold", RETRACT, "        self._hold = self._headroom\n", ""),
    Fault("a waiting queue is taken for idleness", RETRACT, "bool(step.waiting)", "False"),
    Fault("a long queue looks prefixes up", RETRACT, "<= MOST_CACHE_AWARE", "<= 10 * MOST_CACHE_AWARE"),
    Fault("decodes wait for ever", RETRACT, "            self._prefills_in_a_row += 1\n", ""),
    Fault("adaptive chunks shrink without end", RETRACT, "max(SCALES[0], self._scale * 0.75)", "self._scale * 0.75"),
    Fault(
        "output is not reserved up front",
        STATIC,
        "request.prompt_len + request.params.max_tokens",
        "request.prompt_len",
    ),
    Fault("busy rows count as idle", STATIC, "sum(not request.blocks", "sum(bool(request.blocks)"),
    Fault(
        "who does not fit stops the engine",
        STATIC,
        "                step.evict(queue[passed])\n",
        "                break\n",
    ),
    Fault("all salts are one", PREFIX, '"salt": request.cache_salt', '"salt": ""'),
    Fault("keys run into each other", PREFIX, 'len(part).to_bytes(8, "little") + part', "part"),
    Fault("a salt is what an adapter is", PREFIX, "for part in (domain.encode(), ", "for part in ("),
    Fault("a flush leaves blocks findable", PAGED, "        self._index.clear()\n", ""),
    Fault("a flush leaves the host tier as it was", PAGED, "        self._host.clear()\n", ""),
    Fault("what leaves the device is not told", PAGED, "        self._events.removed(Tier.DEVICE, digest)\n", ""),
    Fault("what leaves the device is lost", PAGED, "        self._host.keep(digest, block)\n", ""),
    Fault(
        "a block that came up is not findable",
        PAGED,
        "            self._make_findable(digest, block)\n        return",
        "        return",
    ),
    Fault(
        "blocks below count as blocks on the device",
        PAGED,
        "- len(prefix.blocks) + revived",
        "- len(prefix.blocks) - len(prefix.host) + revived",
    ),
    Fault(
        "stored and removed in one step is told twice",
        EVENTS,
        "        del undone[address]\n",
        "        del undone[address]\n        done[address] = None\n",
    ),
    Fault("a flush is told before what it undoes", EVENTS, "        self._stored.clear()\n", ""),
    Fault(
        "the most recently used leaves the host tier",
        HOST,
        "for digest in self._block_of:",
        "for digest in reversed(self._block_of):",
    ),
    Fault("use does not keep a block below", HOST, "self._block_of[digest] = self._block_of.pop(digest)", "pass"),
    Fault(
        "a block goes down twice",
        HOST,
        "if digest in self._block_of:\n            self",
        "if digest == b'':\n            self",
    ),
    Fault(
        "a block on its way up is pushed out",
        HOST,
        "self._block_of.pop(digest) for digest in digests",
        "self._block_of[digest] for digest in digests",
    ),
    Fault("copies up are forgotten", HOST, "            self._moves.append(Move(Route.UP, source, target))\n", ""),
    Fault("copies come twice", HOST, "moves, self._moves = self._moves, []", "moves = self._moves"),
    Fault(
        "copies of a step that came to nothing are lost",
        SCHEDULER,
        "        if not step.tokens:\n",
        "        if not step.tokens and not self.kv.take_moves():\n",
    ),
    Fault(
        "an evicted request keeps its guess",
        SCHEDULER,
        "        request.promised = 0\n        request.draft = ()\n",
        "        request.promised = 0\n",
    ),
    Fault(
        "an eviction begins no new life",
        SCHEDULER,
        "        request.evictions += 1\n        request.life += 1\n",
        "        request.evictions += 1\n",
    ),
    Fault(
        "an end begins no new life",
        SCHEDULER,
        "            del self._requests[request.id]\n            request.life += 1\n",
        "            del self._requests[request.id]\n",
    ),
    Fault("a certain end is computed beyond", SCHEDULER, " or due < request.full_len)", " or due < 9**9)"),
    Fault("guesses take what others need", SCHEDULER, "self.kv.room - len(self.running) >=", "self.kv.room >="),
    Fault("a withdrawn decode stays in the step", SCHEDULER, "            self.decodes.remove(request)\n", ""),
    Fault(
        "a decode ignores the token budget",
        SCHEDULER,
        "            if self.tokens >= end:\n",
        "            if self.tokens > end + 99:\n",
    ),
    Fault("a request that drafts is planned before its token is known", REQUEST, " or self.drafter.most)", ")"),
    Fault("the last token is computed, too", REQUEST, "length >= self.full_len", "length > self.full_len"),
    Fault("a wrong guess is delivered", RESOLVE, "tokens[: right + 1]", "tokens"),
    Fault("wrong guesses stay computed", RESOLVE, "            request.computed -= len(chunk.draft) - right\n", ""),
    Fault(
        "one right guess makes all right",
        RESOLVE,
        "            return count\n    return len(draft)",
        "            return count and len(draft)\n    return len(draft)",
    ),
    Fault("blocks of wrong guesses are published", RESOLVE, "min(valid, len(request.tokens))", "chunk.end"),
    Fault(
        "tokens behind a stop are delivered",
        RESOLVE,
        "            return tokens[:count]\n",
        "            return tokens\n",
    ),
    Fault(
        "guesses go beyond max_tokens",
        RESOLVE,
        "    tokens = tokens[: request.params.max_tokens - request.num_output]\n",
        "",
    ),
    Fault(
        "what an earlier life computed counts",
        RESOLVE,
        "            if life != request.life:\n",
        "            if False:\n",
    ),
    Fault("a chunk of an earlier life counts", RESOLVE, "if chunk.life == chunk.request.life:", "if True:"),
    Fault(
        "full blocks of decodes are not published",
        RESOLVE,
        "                self._kv.publish(request, length)\n",
        "                pass\n",
    ),
    Fault("a stop token of a decode is overlooked", RESOLVE, "token in request.stops or length + 1", "length + 1"),
    Fault(
        "guesses follow a token that nobody knows", RESOLVE, "        if not request.promised:\n", "        if True:\n"
    ),
    Fault("the shortest match wins", SPECULATE, "if length > best_length:", "if length < (best_length or 99):"),
    Fault("the oldest of equal matches wins", SPECULATE, "if length > best_length:", "if length >= best_length:"),
    Fault("a draft is longer than there is room", SPECULATE, "min(self.most, room)", "self.most"),
    Fault(
        "a run is indexed before it is known how it goes on",
        SPECULATE,
        "range(len(earlier), len(tokens))",
        "range(len(earlier), len(tokens) + 1)",
    ),
    Fault("a failure is never forgiven", SPECULATE, "self._failures, self._next_rest = 0, SHORTEST_REST", "pass"),
    Fault("a rest never ends", SPECULATE, "max(0, self._resting - sampled)", "self._resting"),
)
