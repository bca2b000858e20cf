"""What policy `preemption` does on purpose otherwise than a recorded schedule, told from the step itself."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one step: tokens per request, and who was evicted, in that order."""

    scheduled: dict[str, int]
    evicted: list[str]


@dataclass(frozen=True, slots=True)
class Before:
    """How things stood before a step: who ran, in order of admission, and each request's length in tokens.

    `since_admission` counts the tokens scheduled since a request was last admitted. `planned` is the furthest position
    that was ever planned for it and `reached` the furthest that was computed: an undone chunk lies between the two.
    """

    block_size: int
    budget: int
    running: list[str]
    lengths: dict[str, int]
    since_admission: dict[str, int]
    planned: dict[str, int]
    reached: dict[str, int]


def explain(before: Before, theirs: Outcome, ours: Outcome) -> str | None:
    """Why ours differs, if it is on purpose."""
    return next((reason for rule in RULES if (reason := rule(before, theirs, ours))), None)


def pass_goes_on(before: Before, theirs: Outcome, ours: Outcome) -> str | None:
    """A request evicts itself. Theirs stops there with tokens to spare; ours serves those who stand behind it, too."""
    if not theirs.evicted or theirs.evicted[-1] not in before.running:
        return None
    last = before.running.index(theirs.evicted[-1])
    behind = set(before.running[last + 1 :])
    extra = ours.scheduled.keys() - theirs.scheduled.keys()
    same_until_then = (
        ours.evicted[: len(theirs.evicted)] == theirs.evicted
        and not theirs.scheduled.keys() & behind
        and all(ours.scheduled.get(name) == tokens or name in ours.evicted for name, tokens in theirs.scheduled.items())
    )
    if same_until_then and extra and extra <= behind and sum(theirs.scheduled.values()) < before.budget:
        return f"{before.running[last]} evicts itself, which ends their pass; ours goes on with {_names(extra)}"
    return None


def nobody_in_vain(before: Before, theirs: Outcome, ours: Outcome) -> str | None:
    """All who may be evicted are not enough for the one who asks. Theirs evicts them and it; ours evicts nobody."""
    if ours.evicted or len(theirs.evicted) < 2:
        return None
    *others, asking = theirs.evicted
    refused = asking in before.running and asking not in ours.scheduled
    in_vain = not set(theirs.evicted) & theirs.scheduled.keys()
    if refused and in_vain and sum(ours.scheduled.values()) < before.budget:
        return f"evicting {_names(others)} makes no room for {asking}; ours sees that first and evicts nobody"
    return None


def found_what_never_ran(before: Before, theirs: Outcome, ours: Outcome) -> str | None:
    """Theirs skips blocks that it published when planned, though the chunk that should fill them was undone."""
    if theirs.evicted != ours.evicted:
        return None
    for name in theirs.scheduled.keys() & ours.scheduled.keys():
        skipped = before.lengths[name] - before.since_admission.get(name, 0) - theirs.scheduled[name]
        computed, planned = before.reached.get(name, 0), before.planned.get(name, 0)
        undone = skipped % before.block_size == 0 and computed < skipped <= planned
        if undone and theirs.scheduled[name] < ours.scheduled[name]:
            return (
                f"theirs finds {skipped} tokens of {name} in the cache, of which {computed} were ever computed; "
                f"ours publishes a block after its step has run"
            )
    return None


Rule = Callable[[Before, Outcome, Outcome], str | None]
RULES: tuple[Rule, ...] = (pass_goes_on, nobody_in_vain, found_what_never_ran)


def _names(names: set[str] | list[str]) -> str:
    return ", ".join(sorted(names))
