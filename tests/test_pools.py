"""deployments.pools and deployments.merge: which pool serves, and what becomes of it."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from deployments.http import create_app
from deployments.merge import merge
from deployments.pools import LeastInFlight, Pool, Pools
from deployments.served import ServedModel
from engine.errors import EngineUnavailable, RequestError
from tests.fakes_http import ScriptedEngine
from tests.http_client import Api, client, ok, problem

pytest_plugins = ["tests.http_fixtures"]
pytestmark = pytest.mark.anyio


def two_engines() -> dict[str, ScriptedEngine]:
    engines = {"stable": ScriptedEngine(), "canary": ScriptedEngine()}
    engines["canary"].policy = "retract"
    return engines


async def described(engines: dict[str, ScriptedEngine]) -> list[Pool]:
    pools = [Pool(name, engine) for name, engine in engines.items()]
    await asyncio.wait([pool.ask() for pool in pools])
    return pools


@pytest.mark.parametrize(
    ("hint", "name"),
    [("stable", "stable"), ("canary", "canary"), ("preemption", "stable"), ("retract", "canary")],
)
async def test_a_hint_names_a_pool_or_its_policy(hint: str, name: str) -> None:
    pools = await described(two_engines())
    assert {LeastInFlight().choose(pools, hint).name for _ in range(3)} == {name}


async def test_an_unknown_hint_is_refused_with_the_known_ones() -> None:
    pools = await described(two_engines())
    with pytest.raises(RequestError, match="auto, stable, canary") as caught:
        LeastInFlight().choose(pools, "nope")
    assert caught.value.param == "policy"


async def test_equal_pools_take_turns() -> None:
    choice, pools = LeastInFlight(), await described(two_engines())
    assert [choice.choose(pools, "auto").name for _ in range(4)] == ["stable", "canary", "stable", "canary"]


async def test_the_pool_with_fewer_requests_in_flight_is_taken() -> None:
    choice, pools = LeastInFlight(), await described(two_engines())
    pools[0].in_flight = 1
    assert {choice.choose(pools, "auto").name for _ in range(3)} == {"canary"}


async def test_requests_in_flight_are_counted_until_they_end(served: ServedModel) -> None:
    engines = two_engines()
    engines["stable"].hold_after = 0
    async with client(create_app(served, engines)) as http:
        api = Api(http)
        held = asyncio.create_task(api.complete(policy="stable"))
        await engines["stable"].holding.wait()
        for _ in range(3):
            ok(await api.complete(max_tokens=1))
        assert (len(engines["stable"].submissions), len(engines["canary"].submissions)) == (1, 3)
        held.cancel()
        await asyncio.wait([held])
        engines["stable"].hold_after = None
        for _ in range(2):
            ok(await api.complete(max_tokens=1))
        assert (len(engines["stable"].submissions), len(engines["canary"].submissions)) == (2, 4)


async def test_only_ready_pools_are_chosen() -> None:
    engines = two_engines()
    engines["stable"].unavailable = EngineUnavailable("loading")
    pools = Pools(engines, LeastInFlight())
    assert {(await pools.choose("auto")).name for _ in range(3)} == {"canary"}
    with pytest.raises(EngineUnavailable):
        await pools.choose("stable")


async def test_a_pool_that_proves_unavailable_is_left_until_it_describes_itself_again(served: ServedModel) -> None:
    engines = two_engines()
    async with client(create_app(served, engines)) as http:
        api = Api(http)
        ok(await api.complete(policy="stable"))
        engines["stable"].unavailable = EngineUnavailable("dead")
        problem(await api.complete(policy="stable"), 503)
        for _ in range(3):
            ok(await api.complete())
        engines["stable"].unavailable = None
        ok(await http.get("/health"))
        ok(await api.complete(policy="stable"))


async def test_an_unready_pool_does_not_delay_requests_to_others() -> None:
    engines = two_engines()
    never = asyncio.Event()

    async def silent() -> None:
        await never.wait()

    pools = Pools(engines, LeastInFlight())
    await pools.any_ready()
    pool = await pools.choose("stable")
    pool.ready = False
    engines["stable"].describe = silent  # type: ignore[method-assign,assignment]
    asking = pool.ask()
    assert (await pools.choose("auto")).name == "canary"
    assert not asking.done()
    asking.cancel()


async def letters(text: str, closed: list[str], fail: bool = False) -> AsyncGenerator[str, None]:
    try:
        for letter in text:
            await asyncio.sleep(0)
            yield letter
        if fail:
            raise ValueError(text)
    finally:
        closed.append(text)


@pytest.mark.parametrize("texts", [["abc"], ["abc", "d", "", "ef"]])
async def test_merging_keeps_every_item_and_each_order(texts: list[str]) -> None:
    closed: list[str] = []
    merged = [letter async for letter in merge([letters(text, closed) for text in texts])]
    assert sorted(merged) == sorted("".join(texts))
    for text in texts:
        assert [letter for letter in merged if letter in text] == list(text)
    assert sorted(closed) == sorted(texts)


async def test_closing_a_merge_closes_its_sources() -> None:
    closed: list[str] = []
    merged = merge([letters("abc", closed), letters("def", closed)])
    await anext(merged)
    await merged.aclose()
    assert sorted(closed) == ["abc", "def"]


async def test_closing_a_merge_interrupts_sources_that_wait() -> None:
    async def silence() -> AsyncGenerator[str, None]:
        await asyncio.Event().wait()
        yield ""

    merged = merge([letters("a", []), silence()])
    await anext(merged)
    await merged.aclose()


async def test_a_failing_source_ends_the_merge_and_closes_the_others() -> None:
    closed: list[str] = []
    with pytest.raises(ValueError, match="a"):
        async for _ in merge([letters("abcdefgh", closed), letters("a", closed, fail=True)]):
            pass
    assert sorted(closed) == ["a", "abcdefgh"]
