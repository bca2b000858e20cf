"""Drafts: guesses of a request's next tokens, made without a second model, for one step to confirm together.

What followed the last few tokens before is guessed to follow them again (prompt lookup decoding; Saxena, 2023). A
guess changes no token: it counts only where it equals what is sampled in its place.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

LOOK_BACK = 4  # earlier occurrences that are compared: the most recent ones are the likeliest to go on alike
SHORTEST_REST, LONGEST_REST = 16, 256  # tokens


class Drafter(Protocol):
    """Guesses for one request."""

    @property
    def most(self) -> int:
        """How many tokens it wants to guess next; 0: none for now."""
        ...

    def propose(self, tokens: Sequence[int], room: int) -> Sequence[int]:
        """At most `most` and at most `room` guesses of what follows `tokens`, which only ever grow."""
        ...

    def learn(self, drafted: int, accepted: int, sampled: int) -> None:
        """A step confirmed `accepted` of `drafted` guesses, and gave `sampled` tokens."""
        ...


class Drafts(Protocol):
    def drafter(self, most: int | None) -> Drafter:
        """For a request that wants at most so many guesses a step; None: as many as is usual here."""
        ...


class NoDrafter:
    """Guesses nothing."""

    most = 0

    def propose(self, tokens: Sequence[int], room: int) -> Sequence[int]:
        return ()

    def learn(self, drafted: int, accepted: int, sampled: int) -> None: ...


NO_DRAFTS: Drafter = NoDrafter()


class NoDrafts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["none"] = "none"

    def drafter(self, most: int | None) -> Drafter:
        return NO_DRAFTS


class NGramDrafts(BaseModel):
    """At most `max_draft_tokens` guesses, from places where the last `min_match` to `max_match` tokens stood before.

    `adaptive`: a request whose guesses come true gets more of them, one whose guesses fail fewer, and for a while none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["ngram"] = "ngram"
    max_draft_tokens: int = Field(4, ge=1, le=64)
    min_match: int = Field(2, ge=1)
    max_match: int = Field(4, ge=1)
    adaptive: bool = True

    @model_validator(mode="after")
    def _a_range_of_lengths(self) -> "NGramDrafts":
        if self.min_match > self.max_match:
            raise ValueError(f"min_match ({self.min_match}) must be at most max_match ({self.max_match})")
        return self

    def drafter(self, most: int | None) -> Drafter:
        most = self.max_draft_tokens if most is None else min(most, self.max_draft_tokens)
        if most == 0:
            return NO_DRAFTS
        pace = AdaptivePace(most) if self.adaptive else SteadyPace(most)
        return NGramDrafter(NGramIndex(self.min_match, self.max_match), pace)


DraftConfig = Annotated[NoDrafts | NGramDrafts, Field(discriminator="kind")]


class NGramDrafter:
    def __init__(self, index: "NGramIndex", pace: "Pace") -> None:
        self._index = index
        self._pace = pace

    @property
    def most(self) -> int:
        return self._pace.most

    def propose(self, tokens: Sequence[int], room: int) -> Sequence[int]:
        """Where the place found is so near the end that the tokens run out, the guesses themselves are read on."""
        count = min(self.most, room)
        start = self._index.find(tokens) if count > 0 else None
        if start is None:
            return ()
        guesses = list(tokens[start : start + count])
        for place in range(len(guesses), count):
            guesses.append(guesses[place - (len(tokens) - start)])
        return guesses

    def learn(self, drafted: int, accepted: int, sampled: int) -> None:
        self._pace.learn(drafted, accepted, sampled)


class NGramIndex:
    """Where each run of `shortest` tokens stood before. Grows with the tokens: each is looked at once."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._latest: dict[tuple[int, ...], int] = {}  # run → the position behind its latest occurrence
        self._earlier: list[int] = []  # by position: the same for the occurrence before, 0 for none

    def find(self, tokens: Sequence[int]) -> int | None:
        """The position behind the longest earlier run that equals the last tokens; of equals the most recent."""
        self._grow(tokens)
        place = self._latest.get(tuple(tokens[-self._shortest :]), 0)
        best, best_length = None, 0
        for _ in range(LOOK_BACK):
            if place == 0:
                break
            length = self._match(tokens, place)
            if length > best_length:
                best, best_length = place, length
            place = self._earlier[place]
        return best

    def _grow(self, tokens: Sequence[int]) -> None:
        """Up to the run that ends one before the last token: of a later one nobody knows yet how it goes on."""
        shortest, latest, earlier = self._shortest, self._latest, self._earlier
        for place in range(len(earlier), len(tokens)):
            if place < shortest:
                earlier.append(0)
                continue
            run = tuple(tokens[place - shortest : place])
            earlier.append(latest.get(run, 0))
            latest[run] = place

    def _match(self, tokens: Sequence[int], place: int) -> int:
        length = self._shortest
        while length < min(self._longest, place) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


class Pace(Protocol):
    """How many guesses the next draft may have."""

    @property
    def most(self) -> int: ...

    def learn(self, drafted: int, accepted: int, sampled: int) -> None: ...


class SteadyPace:
    def __init__(self, most: int) -> None:
        self.most = most

    def learn(self, drafted: int, accepted: int, sampled: int) -> None: ...


class AdaptivePace:
    """Doubles when all guesses were right, else one more than were right. Two drafts all wrong in a row: a rest.

    A rest doubles with each failure that follows one, and a single right guess forgets them all.
    """

    def __init__(self, most: int) -> None:
        self._limit = most
        self._length = most
        self._failures = 0
        self._next_rest = SHORTEST_REST
        self._resting = 0

    @property
    def most(self) -> int:
        return 0 if self._resting else self._length

    def learn(self, drafted: int, accepted: int, sampled: int) -> None:
        if not drafted:
            self._resting = max(0, self._resting - sampled)
        elif accepted:
            self._failures, self._next_rest = 0, SHORTEST_REST
            grown = 2 * self._length if accepted == drafted else accepted + 1
            self._length = min(self._limit, grown)
        else:
            self._fail()

    def _fail(self) -> None:
        self._failures += 1
        self._length = 1
        if self._failures >= 2:
            self._resting = self._next_rest
            self._next_rest = min(LONGEST_REST, 2 * self._next_rest)
