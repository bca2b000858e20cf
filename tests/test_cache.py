"""The paged KV cache, a rule per test: counts, order of reuse, the prefix index, and a model to compare with."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.blocks import BlockPool
from engine.cache.paged import PagedKV
from engine.cache.prefix import HashedPrefix, NoPrefix, block_hash, extend_hashes, root_hash
from engine.request import Request

ROOT = root_hash({})


def request(tokens: Sequence[int], name: str = "r") -> Request:
    return Request(name, list(tokens), len(tokens))


def admitted(kv: PagedKV, tokens: Sequence[int], name: str = "r") -> Request:
    """Holds all its blocks, and a step has computed them."""
    made = request(tokens, name)
    granted = kv.reserve(made, len(tokens))
    assert granted, "no room"
    made.computed += granted
    kv.publish(made, made.computed)
    return made


def cache(usable: int, block_size: int = 16) -> PagedKV:
    return PagedKV(usable + 1, block_size, HashedPrefix())


# The pool


def pool(usable: int, forgotten: list[int] | None = None) -> BlockPool:
    log: list[int] = [] if forgotten is None else forgotten
    return BlockPool(usable + 1, log.append)


def test_block_zero_is_never_handed_out() -> None:
    assert sorted(pool(5).take(5)) == [1, 2, 3, 4, 5]


def test_a_block_that_nobody_can_find_is_reused_first_and_the_last_dropped_before_others() -> None:
    blocks = pool(5)
    a, b, _ = blocks.take(3)
    blocks.drop([a])
    blocks.drop([b])
    assert blocks.take(3) == [b, a, 4]


def test_findable_blocks_are_reused_last_and_the_oldest_of_them_first() -> None:
    blocks = pool(4)
    for block in (taken := blocks.take(3)):
        blocks.mark_findable(block)
    for block in (taken[1], taken[0], taken[2]):
        blocks.drop([block])
    assert blocks.num_cached == 3
    assert blocks.take(4) == [4, taken[1], taken[0], taken[2]]


def test_of_one_sequence_the_deepest_block_is_reused_first() -> None:
    blocks = pool(3)
    for block in (taken := blocks.take(3)):
        blocks.mark_findable(block)
    blocks.drop(taken)
    assert blocks.take(3) == taken[::-1]


def test_a_reused_block_is_forgotten_at_that_moment_and_no_other() -> None:
    forgotten: list[int] = []
    blocks = pool(3, forgotten)
    for block in (taken := blocks.take(2)):
        blocks.mark_findable(block)
    blocks.drop(taken)
    blocks.take(1)
    assert forgotten == []
    blocks.take(1)
    assert forgotten == [taken[1]]


def test_a_held_block_is_out_of_reach_until_its_last_holder_drops_it() -> None:
    blocks = pool(2)
    (shared,) = blocks.take(1)
    blocks.mark_findable(shared)
    blocks.hold([shared])
    assert blocks.references(shared) == 2
    blocks.drop([shared])
    assert blocks.available == 1 and blocks.is_referenced(shared)
    blocks.drop([shared])
    assert blocks.available == 2 and not blocks.is_referenced(shared)


def test_a_hit_revives_a_block_that_nobody_held_and_makes_it_the_youngest() -> None:
    blocks = pool(3)
    for block in (taken := blocks.take(3)):
        blocks.mark_findable(block)
    blocks.drop(taken)
    blocks.hold([taken[2]])
    assert blocks.available == 2
    blocks.drop([taken[2]])
    assert blocks.take(3) == [taken[1], taken[0], taken[2]]


def test_a_reused_block_is_an_ordinary_one_again() -> None:
    blocks = pool(1)
    (block,) = blocks.take(1)
    blocks.mark_findable(block)
    blocks.drop([block])
    blocks.drop(blocks.take(1))
    assert blocks.num_cached == 0 and blocks.available == 1
    blocks.check()


def test_misuse_of_the_pool_is_noticed() -> None:
    blocks = pool(2)
    with pytest.raises(AssertionError):
        blocks.take(3)
    (block,) = blocks.take(1)
    blocks.drop([block])
    with pytest.raises(AssertionError, match=f"block {block} dropped twice"):
        blocks.drop([block])
    with pytest.raises(AssertionError):
        pool(2).mark_findable(1)
    with pytest.raises(AssertionError, match="block 0"):
        pool(0)


# Conservation


def test_the_check_finds_a_holder_that_nobody_knows() -> None:
    kv = cache(4)
    admitted(kv, range(20))
    with pytest.raises(AssertionError, match="leaked"):
        kv.check([])


def test_the_check_finds_a_reference_that_nobody_holds() -> None:
    """The blocks are all accounted for; one of them is counted once too often and would never be free again."""
    kv = cache(4)
    first = admitted(kv, range(20))
    second = admitted(kv, range(20))
    kv.check([first, second])
    with pytest.raises(AssertionError, match="references leaked"):
        kv.check([second, replace(first, blocks=first.blocks[1:], capacity=16, computed=0)])


def test_the_check_finds_a_request_that_holds_a_block_twice_or_computes_beyond_its_blocks() -> None:
    kv = cache(4)
    holder = admitted(kv, range(20))
    with pytest.raises(AssertionError, match="twice"):
        kv.check([replace(holder, blocks=[*holder.blocks, holder.blocks[0]])])
    with pytest.raises(AssertionError):
        kv.check([replace(holder, computed=33)])


def test_the_check_finds_a_block_in_two_places() -> None:
    blocks = pool(3)
    (taken,) = blocks.take(1)
    blocks._free.append(taken)
    with pytest.raises(AssertionError):
        blocks.check()


def test_all_is_free_when_idle() -> None:
    kv = cache(6)
    holders = [admitted(kv, range(start, start + 20)) for start in (0, 100, 200)]
    for holder in holders:
        kv.release(holder)
    kv.check([])
    assert (kv.used_blocks, kv.room) == (0, 6)


# Reserving


def test_a_request_gets_the_blocks_of_its_positions_and_no_more() -> None:
    kv = cache(10)
    holder = request(range(60))
    assert [kv.reserve(holder, limit) for limit in (1, 16, 17)] == [1, 16, 17]
    assert len(holder.blocks) == 2
    assert kv.reserve(holder, 100) == 60
    assert len(holder.blocks) == 4


def test_growth_takes_a_block_only_at_the_end_of_one() -> None:
    kv = cache(10)
    holder = admitted(kv, range(55))
    for added, blocks in ((4, 4), (5, 4), (1, 5)):
        holder.tokens += [0] * added
        assert kv.missing(holder, len(holder.tokens)) == blocks - len(holder.blocks)
        holder.computed += kv.reserve(holder, added)
        assert len(holder.blocks) == blocks


def test_blocks_reserved_ahead_are_used_before_new_ones() -> None:
    kv = cache(4)
    holder = request(range(64))
    kv.reserve(holder, 64)
    assert kv.reserve(holder, 16) == 16
    assert kv.room == 0 and kv.missing(holder, 16) == 0


def test_a_refused_reservation_changes_nothing() -> None:
    kv = cache(4)
    holder = admitted(kv, range(40))
    newcomer = request(range(100, 140))
    holder.tokens += [0] * 40
    assert kv.reserve(newcomer, 40) == 0
    assert kv.reserve(holder, 40) == 0
    assert (newcomer.blocks, newcomer.computed, len(holder.blocks), kv.room) == ([], 0, 3, 1)
    kv.check([holder])


def test_a_refusal_with_a_cached_prefix_leaves_its_references_alone() -> None:
    """9 blocks are wanted. 6 are hits, 3 of them in use; 3 + 3 must be taken, and 5 are there."""
    kv = cache(9)
    long = admitted(kv, range(96))
    holder = admitted(kv, range(49))
    kv.release(long)
    newcomer = request(range(144))
    assert (kv.room, kv.missing(newcomer, 144)) == (5, 6)
    assert kv.reserve(newcomer, 144) == 0
    assert newcomer.blocks == []
    kv.check([holder])
    assert kv.reserve(request(range(128)), 128) == 32


def test_a_refusal_leaves_the_order_of_reuse_alone() -> None:
    """`old` was dropped first and is reused first, also after somebody asked for its blocks in vain."""
    kv = cache(4)
    for start in (0, 100):
        kv.release(admitted(kv, range(start, start + 32)))
    in_vain = request([*range(32), *range(500, 564)])
    assert kv.cached(in_vain) == 32
    assert kv.reserve(in_vain, 96) == 0
    admitted(kv, range(200, 232))
    assert kv.cached(request(range(33))) == 0
    assert kv.cached(request(range(100, 133))) == 32


def test_the_prefix_is_held_before_the_rest_is_judged() -> None:
    """2 blocks in all, both cached: 48 tokens need them as hits and a third; it must not be one of the two."""
    kv = cache(2)
    kv.release(admitted(kv, range(32)))
    newcomer = request(range(48))
    assert kv.missing(newcomer, 48) == 3
    assert kv.reserve(newcomer, 48) == 0
    assert kv.cached(newcomer) == 32


def test_a_hit_keeps_its_block_and_another_is_reused_for_the_rest() -> None:
    kv = cache(2)
    kv.release(admitted(kv, range(32)))
    newcomer = admitted(kv, [*range(16), 77])
    assert newcomer.cached == 16
    assert kv.cached(request(range(33))) == 16


def test_the_order_of_reuse_over_several_lives() -> None:
    """55 tokens take 1-4; 53 that share 48 take 5 beside 1-3. Next come private, then unused, then cached blocks."""
    kv = cache(10)
    first = admitted(kv, range(55), "first")
    second = admitted(kv, [*range(48), *range(100, 105)], "second")
    assert (first.blocks, second.blocks, kv.room) == ([1, 2, 3, 4], [1, 2, 3, 5], 5)
    kv.release(first)
    kv.release(second)
    assert admitted(kv, range(200, 360)).blocks == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]


def test_freed_counts_what_nobody_else_holds() -> None:
    kv = cache(10)
    first = admitted(kv, range(55))
    second = admitted(kv, [*range(48), *range(100, 105)])
    assert (kv.freed([first]), kv.freed([second]), kv.freed([first, second]), kv.freed([])) == (1, 1, 5, 0)


# The prefix index


def test_only_full_blocks_that_were_computed_are_found() -> None:
    kv = cache(10)
    holder = request(range(64))
    kv.reserve(holder, 64)
    for computed, found in ((15, 0), (16, 16), (47, 32), (48, 48)):
        kv.publish(holder, computed)
        assert kv.cached(request(range(65))) == found


def test_the_last_position_is_never_taken_from_the_cache() -> None:
    kv = cache(10)
    admitted(kv, range(48))
    assert [kv.cached(request(range(length))) for length in (16, 17, 48, 49)] == [0, 16, 32, 48]


def test_a_hit_ends_at_the_first_difference() -> None:
    kv = cache(10)
    admitted(kv, range(64))
    other = list(range(65))
    other[20] = 99
    assert kv.cached(request(other)) == 16


def test_a_hit_does_not_leap_over_a_block_that_is_gone() -> None:
    index = HashedPrefix()
    for digest, block in ((b"first", 1), (b"second", 2), (b"third", 3)):
        index.add(digest, block)
    index.forget(2)
    assert index.find([b"first", b"second", b"third"]) == [1]


def test_blocks_of_output_are_found_like_those_of_a_prompt() -> None:
    kv = cache(10)
    holder = admitted(kv, range(20))
    holder.tokens += range(20, 40)
    holder.computed += kv.reserve(holder, 20)
    kv.publish(holder, holder.computed)
    assert kv.cached(request(range(40))) == 32


def test_a_request_that_holds_blocks_has_no_hit_to_come() -> None:
    kv = cache(10)
    holder = admitted(kv, range(48))
    assert kv.cached(holder) == 0


def test_equal_content_is_findable_once_and_the_copy_is_private() -> None:
    """Both compute the same 32 tokens at the same time; the second pair of blocks is free, not cached, in the end."""
    kv = cache(10)
    pair = [request(range(40)), request(range(40))]
    for twin in pair:
        kv.reserve(twin, 40)
        twin.computed = 40
    for twin in pair:
        kv.publish(twin, 40)
    assert not set(pair[0].blocks) & set(pair[1].blocks)
    later = admitted(kv, range(40))
    assert later.blocks[:2] == pair[0].blocks[:2]
    for holder in (*pair, later):
        kv.release(holder)
    assert kv._pool.num_cached == 2


def test_a_prompt_to_be_scored_reads_no_prefix_but_leaves_one() -> None:
    kv = cache(10)
    first = request(range(40))
    first.params = replace(first.params, prompt_logprobs=0)
    assert kv.reserve(first, 40) == 40
    kv.publish(first, 40)
    second = request(range(40))
    second.params = first.params
    assert (kv.cached(second), kv.reserve(second, 40)) == (0, 40)
    assert kv.cached(request(range(40))) == 32


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    kv = cache(10)
    holder = admitted(kv, range(40))
    assert holder.cached == 0
    kv.release(holder)
    holder.evictions = 1
    assert kv.reserve(holder, 40) == 8
    assert holder.cached == 0


def test_without_an_index_nothing_is_kept() -> None:
    kv = PagedKV(5, 16, NoPrefix())
    kv.release(admitted(kv, range(48)))
    assert (kv.cached(request(range(48))), kv._pool.num_cached, kv.room) == (0, 0, 4)


# Hashes


def test_a_hash_depends_on_every_token_and_on_their_order() -> None:
    tokens = list(range(16))
    changed = [[*tokens[:i], 99, *tokens[i + 1 :]] for i in range(16)]
    hashes = {block_hash(ROOT, block) for block in (tokens, tokens[::-1], *changed)}
    assert len(hashes) == 18


def test_equal_tokens_behind_different_parents_have_different_hashes() -> None:
    parents = [ROOT, block_hash(ROOT, [1] * 16), block_hash(ROOT, [2] * 16)]
    assert len({block_hash(parent, [3] * 16) for parent in parents}) == 3


def test_the_chain_carries_a_difference_to_every_later_block() -> None:
    one: list[bytes] = []
    other: list[bytes] = []
    extend_hashes(one, ROOT, range(64), 16)
    extend_hashes(other, ROOT, [99, *range(1, 64)], 16)
    assert len(one) == len(other) == 4 and not set(one) & set(other)


def test_hashes_are_of_a_domain_of_their_own() -> None:
    """No digest of the tokens alone, and a first block never equals a later one."""
    tokens = [7] * 16
    plain = blake2b(b"".join(token.to_bytes(4, "little") for token in tokens), digest_size=16).digest()
    chain: list[bytes] = []
    extend_hashes(chain, ROOT, tokens * 3, 16)
    assert len({plain, ROOT, *chain}) == 5


@pytest.mark.parametrize("pair", [([1, 2], [258, 0]), ([0, 1], [1, 0]), ([65536], [1]), ([0], [0, 0])])
def test_token_ids_do_not_run_into_each_other(pair: tuple[list[int], list[int]]) -> None:
    assert block_hash(ROOT, pair[0]) != block_hash(ROOT, pair[1])


def test_hashes_grow_with_the_tokens_as_if_made_at_once() -> None:
    grown: list[bytes] = []
    for length in (5, 16, 20, 47, 48, 70):
        extend_hashes(grown, grown[-1] if grown else ROOT, range(length), 16)
        assert len(grown) == length // 16
    at_once: list[bytes] = []
    extend_hashes(at_once, ROOT, range(70), 16)
    assert grown == at_once


# Against a model

SIZE = 2
USABLE = 7
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=SIZE * USABLE)
Content = tuple[int, ...]


class Cache(RuleBasedStateMachine):
    """Requests come, grow, compute and go. The model knows what was written to each block and what is findable."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = cache(USABLE, SIZE)
        self.live: list[Request] = []
        self.published: dict[Request, int] = {}
        self.written: dict[int, Content] = {}
        self.findable: dict[Content, int] = {}

    @rule(tokens=TOKENS, limit=st.integers(1, SIZE * USABLE))
    def admit(self, tokens: list[int], limit: int) -> None:
        newcomer = request(tokens)
        hits = self.hits(tokens)
        granted = min(limit, len(tokens) - len(hits) * SIZE)
        wanted = -(-(len(hits) * SIZE + granted) // SIZE) - sum(block in self.held for block in hits)
        fits = wanted <= USABLE - len(self.held)
        assert self.kv.cached(newcomer) == len(hits) * SIZE
        assert self.kv.missing(newcomer, len(hits) * SIZE + granted) == wanted
        assert self.kv.reserve(newcomer, limit) == (granted if fits else 0)
        assert newcomer.blocks[: len(hits)] == (hits if fits else [])
        if fits:
            self.taken(newcomer.blocks[len(hits) :])
            self.live.append(newcomer)
            self.published[newcomer] = len(hits)
            newcomer.computed += granted

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=5), limit=st.integers(1, 8))
    def grow(self, data: st.DataObject, more: list[int], limit: int) -> None:
        holder = data.draw(st.sampled_from(self.live))
        holder.tokens += more
        before = list(holder.blocks)
        granted = min(limit, len(holder.tokens) - holder.computed)
        wanted = max(0, -(-(holder.computed + granted) // SIZE) - len(before))
        fits = wanted <= USABLE - len(self.held)
        assert self.kv.reserve(holder, limit) == (granted if fits else 0)
        assert holder.blocks[: len(before)] == before
        assert len(holder.blocks) == len(before) + (wanted if fits else 0)
        if fits:
            self.taken(holder.blocks[len(before) :])
            holder.computed += granted

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.live))
        self.kv.publish(holder, holder.computed)
        for i in range(self.published[holder], holder.computed // SIZE):
            block, content = holder.blocks[i], tuple(holder.tokens[: (i + 1) * SIZE])
            assert block not in self.written, "a shared block was written"
            self.written[block] = content
            self.findable.setdefault(content, block)
        self.published[holder] = holder.computed // SIZE

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.live))
        alone = {block for block in holder.blocks if sum(block in other.blocks for other in self.live) == 1}
        assert self.kv.freed([holder]) == len(alone)
        self.live.remove(holder)
        del self.published[holder]
        self.kv.release(holder)
        assert (holder.blocks, holder.computed, holder.published) == ([], 0, 0)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.kv.check(self.live)
        assert self.kv.room == USABLE - len(self.held)

    @invariant()
    def a_hit_holds_what_was_asked_for(self) -> None:
        for holder in self.live:
            for i in range(self.published[holder]):
                assert self.written[holder.blocks[i]] == tuple(holder.tokens[: (i + 1) * SIZE])

    @property
    def held(self) -> set[int]:
        return {block for holder in self.live for block in holder.blocks}

    def hits(self, tokens: list[int]) -> list[int]:
        found: list[int] = []
        for end in range(SIZE, len(tokens), SIZE):
            block = self.findable.get(tuple(tokens[:end]))
            if block is None:
                break
            found.append(block)
        return found

    def taken(self, blocks: list[int]) -> None:
        """Newly handed out: what they held is gone, and nobody may find it."""
        for block in blocks:
            content = self.written.pop(block, None)
            if content is not None and self.findable.get(content) == block:
                del self.findable[content]


Cache.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAgainstAModel = Cache.TestCase
