"""Stand-ins that verify: a memory that holds token ids where K and V would be, and reads every position back."""

from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b

from engine.contract import Chunk, Move, Route, Sampled, StepPlan
from engine.request import Request, SamplingParams
from engine.speculate import Drafter

EOS = 7
VOCAB = 64


def next_token(tokens: Sequence[int]) -> int:
    """What the pretend model says after these tokens; every earlier token matters."""
    digest = blake2b(bytes(token % 256 for token in tokens), digest_size=2).digest()
    return int.from_bytes(digest) % VOCAB


def expected_output(prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """What an undisturbed run gives."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


class Guesses:
    """Drafts for the pretend model: guess i of a request is right unless i falls on a multiple of `wrong`."""

    def __init__(self, most: int, wrong: int) -> None:
        self._most = most
        self._wrong = wrong

    def drafter(self, most: int | None) -> Drafter:
        return _Guesser(self._most if most is None else min(most, self._most), self._wrong)


class _Guesser:
    """Rests for three tokens whenever a draft was wrong from the start, so that it goes on and off."""

    def __init__(self, most: int, wrong: int) -> None:
        self._most, self._wrong = most, wrong
        self._rest = self._made = 0

    @property
    def most(self) -> int:
        return 0 if self._rest else self._most

    def propose(self, tokens: Sequence[int], room: int) -> Sequence[int]:
        known = list(tokens)
        for _ in range(min(self.most, room)):
            self._made += 1
            known.append(next_token(known) if self._made % self._wrong else VOCAB - 1)
        return known[len(tokens) :]

    def learn(self, drafted: int, accepted: int, sampled: int) -> None:
        self._rest = 3 if drafted and not accepted else max(0, self._rest - sampled)


class LateLane:
    """Runs jobs in the order of submission, and none before the result of one of them is asked for."""

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()

    def submit(self, job: Callable[[], Sampled]) -> Callable[[], Sampled]:
        results: list[Sampled] = []
        self._jobs.append(lambda: results.append(job()))

        def result() -> Sampled:
            while not results:
                self._jobs.popleft()()
            return results[0]

        return result


class TokenMemory:
    """An executor whose model sees only what was written to the blocks: lost or foreign KV gives other tokens.

    What a chunk may know is taken down when it is submitted; a token that is still to be sampled then is filled in when
    it runs, late and in order.
    """

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int = 0) -> None:
        self._memory: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._host: list[list[int | None]] = [[None] * block_size for _ in range(host_blocks)]
        self._block_size = block_size
        self._lane = LateLane()
        self._sampled: dict[Request, int] = {}
        self.steps: list[list[tuple[str, int, int]]] = []
        self.moves: list[Move] = []
        self.drafted: list[tuple[str, int]] = []

    def prepare(self, params: SamplingParams) -> None: ...

    def submit(self, plan: StepPlan) -> Callable[[], Sampled]:
        chunks, moves = list(plan), plan.moves
        self.steps.append([(chunk.request.id, chunk.start, chunk.length) for chunk in chunks])
        self.drafted += [(chunk.request.id, len(chunk.draft)) for chunk in chunks if chunk.draft]
        self.moves += moves
        self._check_owners(chunks)
        rows = [_Row(chunk) for chunk in chunks]

        def compute() -> Sampled:
            for move in moves:
                self._copy(move)
            for row in rows:
                self._write(row)
            return Sampled([token for row in rows for token in self._sample(row)])

        return self._lane.submit(compute)

    def _copy(self, move: Move) -> None:
        source, target = (self._memory, self._host) if move.route is Route.DOWN else (self._host, self._memory)
        target[move.target] = list(source[move.source])

    def _write(self, row: "_Row") -> None:
        if row.end > len(row.tokens):
            row.tokens.append(self._sampled[row.request])
        assert row.end <= len(row.tokens), f"{row.request.id} computes what nobody knows"
        for position in range(row.start, row.end):
            block = row.blocks[position // self._block_size]
            self._memory[block][position % self._block_size] = row.tokens[position]

    def _sample(self, row: "_Row") -> list[int]:
        if not row.num_sampled:
            return []
        seen = self._read(row)
        sampled = [next_token(seen[: row.end - back]) for back in reversed(range(row.num_sampled))]
        self._sampled[row.request] = sampled[-1]
        return sampled

    def _read(self, row: "_Row") -> list[int]:
        tokens = []
        for position in range(row.end):
            block = row.blocks[position // self._block_size]
            token = self._memory[block][position % self._block_size]
            assert token == row.tokens[position], f"position {position} of {row.request.id} reads {token}"
            tokens.append(token)
        return tokens

    def _check_owners(self, chunks: Sequence[Chunk]) -> None:
        """No two chunks write the same block, and nobody writes block 0."""
        written: set[int] = set()
        for chunk in chunks:
            first, last = chunk.start // self._block_size, (chunk.end - 1) // self._block_size
            blocks = set(chunk.request.blocks[first : last + 1])
            assert 0 not in blocks, "block 0 was handed out"
            assert not blocks & written, "two requests write one block"
            written |= blocks


class _Row:
    """What is known of a chunk when it is submitted."""

    def __init__(self, chunk: Chunk) -> None:
        self.request = chunk.request
        self.start, self.end, self.num_sampled = chunk.start, chunk.end, chunk.num_sampled
        self.tokens = [*chunk.request.tokens, *chunk.draft]
        self.blocks = list(chunk.request.blocks)
