"""What a router is told of an engine's prefix cache, a rule per test; and what keeps the caches of tenants apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.events import Address, CacheEvents, EventLog, Tier
from engine.cache.host import HostMemory
from engine.cache.paged import PagedKV
from engine.cache.prefix import HashedPrefix, root_hash
from engine.policies import Preemption
from engine.request import Request, SamplingParams
from tests.fakes import expected_output
from tests.harness import Harness
from tests.scenarios import prompt


def hashes(tokens: list[int], salt: str = "", **namespace: str) -> list[bytes]:
    request = Request("r", tokens, len(tokens), cache_salt=salt)
    return list(HashedPrefix(namespace).hashes(request, 16))


def on_device(digests: list[bytes]) -> tuple[Address, ...]:
    return tuple(Address(Tier.DEVICE, digest) for digest in digests)


@pytest.mark.parametrize("blocks", [2, 3, 10])
def test_blocks_stored_in_a_step_are_told_once_after_it_ran(blocks: int) -> None:
    engine = Harness(Preemption(max_num_batched_tokens=512), prefix=True)
    start = prompt(1, 16 * blocks)
    engine.add("a", start, max_tokens=3, ignore_eos=True)
    engine.run()
    assert engine.events == [CacheEvents(on_device(hashes(start))), CacheEvents(), CacheEvents()]


def test_blocks_that_are_reused_are_told_as_removed() -> None:
    """The pool has 4 blocks: 3 for a, whose 2 full ones stay; b takes all 4 and fills 3."""
    engine = Harness(num_blocks=5, prefix=True)
    engine.add("a", prompt(1, 33), max_tokens=1)
    engine.run()
    engine.events.clear()
    engine.add("b", prompt(2, 63), max_tokens=1)
    engine.run()
    (events,) = engine.events
    assert set(events.removed) == set(on_device(hashes(prompt(1, 32))))
    assert set(events.stored) == set(on_device(hashes(prompt(2, 48))))


def test_a_flushed_cache_is_told_as_cleared_and_finds_nothing() -> None:
    engine = Harness(prefix=True, host_blocks=4)
    engine.add("a", prompt(1, 40), max_tokens=1)
    engine.run()
    engine.core.clear_prefix_cache()
    engine.add("again", prompt(1, 40), max_tokens=1)
    engine.run()
    assert engine.events[-1] == CacheEvents(on_device(hashes(prompt(1, 40))), cleared=True)
    assert engine.last["again"].cached_tokens == 0


def test_a_flush_in_the_middle_of_a_request_changes_no_token() -> None:
    engine = Harness(prefix=True)
    engine.add("a", prompt(1, 40), max_tokens=40, ignore_eos=True)
    for _ in range(20):
        engine.step()
    engine.core.clear_prefix_cache()
    engine.run()
    assert engine.tokens["a"] == expected_output(prompt(1, 40), 40, ignore_eos=True)


def test_the_host_tier_tells_of_what_it_holds() -> None:
    events = EventLog()
    kv = PagedKV(3, 16, HashedPrefix(), HostMemory(1, events), events)
    for start in (0, 1000, 2000):
        request = Request("r", list(range(start, start + 17)), 17)
        kv.reserve(request, 17)
        kv.publish(request, 17)
        kv.release(request)
    first, second, third = (hashes(list(range(start, start + 16)))[0] for start in (0, 1000, 2000))
    told = events.take()
    assert told.stored == (Address(Tier.HOST, second), Address(Tier.DEVICE, third))
    assert first not in {address.digest for address in told.stored + told.removed}  # came and went: no change
    assert not told.removed


STEPS = st.lists(st.tuples(st.sampled_from(["stored", "removed", "cleared", "take"]), st.integers(0, 3)), max_size=30)


@given(STEPS)
def test_a_listener_that_applies_each_message_knows_what_is_there(steps: list[tuple[str, int]]) -> None:
    log, there, known = EventLog(), set[int](), set[bytes]()
    for verb, number in [*steps, ("take", 0)]:
        if verb == "stored" and number not in there:
            there.add(number)
            log.stored(Tier.DEVICE, bytes([number]))
        elif verb == "removed" and number in there:
            there.discard(number)
            log.removed(Tier.DEVICE, bytes([number]))
        elif verb == "cleared":
            there.clear()
            log.cleared()
        elif verb == "take":
            told = log.take()
            assert not set(told.stored) & set(told.removed)
            known = set() if told.cleared else known
            known = known - {address.digest for address in told.removed} | {address.digest for address in told.stored}
            assert known == {bytes([one]) for one in there}


# Isolation


def test_only_requests_of_the_same_salt_share_kv() -> None:
    engine = Harness(prefix=True, num_blocks=65)
    start = prompt(1, 64)
    hits = []
    for number, salt in enumerate(("a", "b", "", "a", "")):
        engine.core.add(f"r{number}", start, SamplingParams(max_tokens=4, temperature=0.0), cache_salt=salt)
        engine.tokens[f"r{number}"] = []
        engine.run()
        hits.append(engine.last[f"r{number}"].cached_tokens)
        assert engine.tokens[f"r{number}"] == expected_output(start, 4)
    assert hits == [0, 0, 0, 48, 48]


def test_every_block_of_a_salted_request_has_a_hash_of_its_own() -> None:
    plain, salted, other = (hashes(prompt(1, 64), salt) for salt in ("", "x", "y"))
    assert len({*plain, *salted, *other}) == 12


def test_a_salt_is_not_an_adapter_and_lengths_keep_fields_apart() -> None:
    keys: list[dict[str, str]] = [
        {},
        {"salt": ""},
        {"salt": "x"},
        {"adapter": "x"},
        {"model": "x"},
        {"tenant": "x"},
        {"salt": "x", "adapter": ""},
        {"salt": "", "adapter": "x"},
        {"salt": "xa", "adapter": "y"},
        {"salt": "x", "adapter": "ay"},
        {"saltx": ""},
    ]
    assert len({root_hash(one) for one in keys}) == len(keys)


def test_a_salt_does_not_run_into_the_tokens() -> None:
    first = hashes([2, *range(15)], "1")
    assert first != hashes(list(range(16)), "12") and first != hashes([2, *range(15)], "12")


def test_engines_of_different_models_share_no_hash() -> None:
    assert hashes(prompt(1, 16), model="a") != hashes(prompt(1, 16), model="b")


def test_a_salt_may_be_any_text_a_client_can_send() -> None:
    salts = ["\ud800", "\udfff", "é", "e\u0301", "\0", "a" * 256]
    found = [hashes(prompt(1, 16), salt)[0] for salt in salts]
    assert len(set(found)) == len(salts)


def test_the_hash_of_a_block_has_128_bits() -> None:
    """Sixty prompts would soon collide on a few bits; on this many they never do."""
    found = [digest for number in range(60) for digest in hashes([number] * 33)]
    assert len(set(found)) == 120 and {len(digest) for digest in found} == {16}
