"""One sequence being generated: what goes into its next step, and what comes out of it."""

from collections.abc import Sequence as Listlike
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpverify.config import MAX_NODES, check_choice, check_number, set_ints
from tpverify.errors import ArgumentError, describe
from tpverify.kv.log import KvLog
from tpverify.runtime.messages import DecodedRequest, DecodeRequest
from tpverify.tree import AutoBudget, DraftTree, build_ddtree_topk

STRATEGIES = ("ddtree", "chain", "autoregressive")
BYTES = 256  # a vocabulary of this size is the bytes themselves


@dataclass(frozen=True)
class GenerationResult:
    """tokens: what was generated, without the stop sequence or the model's end-of-text token that ended it. text: those
    bytes as UTF-8; None if tokens are not bytes.

    accept_lengths: tau of each verify step, the root counted. stats: finish_reason ("length" or "stop"), prompt_tokens,
    cached_tokens (of the prompt, those whose rows an earlier sequence left), steps, prompt_steps, seconds by stage,
    hidden_digest (of the final hidden states at all positions that chose a token).
    """

    tokens: list[int]
    text: str | None
    accept_lengths: list[int]
    stats: dict[str, Any]


@dataclass(frozen=True)
class GenerationOptions:
    """How to generate, the same for all prompts of a call: see Engine.generate. Raises ArgumentError."""

    max_new_tokens: int = 128
    strategy: str = "ddtree"
    budget: int | str = 32
    temperature: float = 0.0
    seed: int = 0
    stop: Any = None

    def __post_init__(self) -> None:
        set_ints(self, "", (("max_new_tokens", 1, 2**31 - 1), ("seed", 0, 2**64 - 1)))
        check_choice("strategy", self.strategy, STRATEGIES)
        if not isinstance(self.budget, str) or self.budget != "auto":
            set_ints(self, "", (("budget", 0, MAX_NODES - 1),))
        temperature = check_number("temperature", self.temperature, "a number from 0 (greedy) to 1e6", 0.0, 1e6)
        object.__setattr__(self, "temperature", temperature)

    def stops(self, vocab_size: int) -> list[list[int]]:
        """The stop sequences as tokens."""
        stops = [] if self.stop is None else [self.stop] if isinstance(self.stop, (str, bytes)) else self.stop
        if not isinstance(stops, (list, tuple)):
            raise ArgumentError("stop", "a str, bytes or a list of these", describe(self.stop))
        return [encode("stop", stop, vocab_size) for stop in stops]


def encode(name: str, text: Any, vocab_size: int) -> list[int]:
    """Token ids of a str (as UTF-8) or bytes for a byte-level model, or of a list of token ids for any."""
    if isinstance(text, str):
        try:
            text = text.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(name, "text that UTF-8 can encode", repr(text[error.start : error.end])) from None
    if isinstance(text, bytes) and vocab_size != BYTES:
        raise ArgumentError(
            name, f"token ids: this model of {vocab_size} tokens has no byte vocabulary", type(text).__name__
        )
    if not isinstance(text, (bytes, Listlike, np.ndarray)) or isinstance(text, np.ndarray) and text.ndim != 1:
        raise ArgumentError(name, "a str, bytes or a list of token ids", describe(text))
    tokens = list(text)
    if not tokens:
        raise ArgumentError(name, "at least one token", "none")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_size:
            raise ArgumentError(name, f"token ids from 0 to {vocab_size - 1}", describe(token))
    return [int(token) for token in tokens]


@dataclass
class Generation:
    """A sequence from its prompt to its last token. `seq` is its number in the log once it is admitted.

    depth: drafted tokens below a root, at most. stops: sequences that end it, the model's end of text among them.
    """

    prompt: list[int]
    options: GenerationOptions
    stops: list[list[int]]
    auto: AutoBudget
    prefill_chunk: int
    vocab_size: int
    depth: int
    seq: int = -1
    cached_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    prompt_steps: int = 0
    finish_reason: str | None = None
    emitted: int = 0
    _prefilled: int = 0
    _tree: DraftTree | None = None
    _verified: int = 0  # nodes of the tree that the last step verified, 0 after a prompt's chunk

    @property
    def budget(self) -> int:
        """Drafted nodes of the next tree."""
        return self.auto.budget if self.options.budget == "auto" else int(self.options.budget)

    @property
    def slots_needed(self) -> int:
        """Pool slots that the sequence can come to hold at once."""
        if self.options.strategy == "autoregressive":
            return len(self.prompt) + self.options.max_new_tokens
        width = self.depth if self.options.strategy == "chain" else self.budget_limit
        return len(self.prompt) + self.options.max_new_tokens + self.depth + 1 + width

    @property
    def budget_limit(self) -> int:
        return self.auto.candidates[-1] if self.options.budget == "auto" else int(self.options.budget)

    @property
    def next_nodes(self) -> int:
        """Nodes of the next step's tree."""
        if self._prefilled < len(self.prompt):
            return min(self.prefill_chunk, len(self.prompt) - self._prefilled)
        assert self._tree is not None
        return len(self._tree)

    def begin(self, seq: int, cached_tokens: int) -> None:
        """As sequence `seq`, which has the rows of so many of the prompt's tokens already."""
        self.seq, self.cached_tokens, self._prefilled = seq, cached_tokens, cached_tokens

    def committed(self, length: int) -> list[int]:
        """Tokens of the first `length` committed positions, or as many as the result has: a tree's accepted path may
        reach beyond where the text is cut."""
        return (self.prompt + self.tokens)[:length]

    def request(self, log: KvLog) -> DecodeRequest:
        """What the next step decodes; reserves the tree's slots in the log."""
        prompt = self._prefilled < len(self.prompt)
        if prompt:
            tree = DraftTree.chain(self.prompt[self._prefilled : self._prefilled + self.prefill_chunk])
        else:
            assert self._tree is not None
            tree = self._tree
        self._tree = tree
        log.draft(self.seq, len(tree))
        return DecodeRequest(
            self.seq,
            tree.tokens.astype("<i8").tobytes(),
            tree.parents.astype("<i4").tobytes(),
            prompt,
            self.options.temperature,
            self.options.seed,
            self._candidates(),
        )

    def _candidates(self) -> int:
        """Tokens a depth that the next tree may choose from."""
        if self.options.strategy == "autoregressive":
            return 0
        return 1 if self.options.strategy == "chain" else max(1, min(self.budget_limit, self.vocab_size))

    def take(self, answer: DecodedRequest, log: KvLog) -> None:
        """Commit the accepted path, take over its tokens and the bonus, and say whether that ends the sequence."""
        tree, path = self._tree, np.frombuffer(answer.path, "<i4")
        assert tree is not None
        log.commit(self.seq, path)
        if self._prefilled < len(self.prompt):
            self._prefilled += len(path)
            self.prompt_steps += 1
            if self._prefilled < len(self.prompt):
                return
        else:
            self._verified = len(tree)
            self.accept_lengths.append(len(path))
            self.tokens += tree.tokens[path[1:]].tolist()
        self.tokens.append(answer.bonus)
        self._cut()

    def _cut(self) -> None:
        """End at the first stop sequence or at max_new_tokens, wherever in the accepted path that is."""
        tokens = self.tokens
        for end in range(self.emitted + 1, min(len(tokens), self.options.max_new_tokens) + 1):
            for stop in self.stops:
                if tokens[max(0, end - len(stop)) : end] == stop:
                    self.finish_reason = "stop"
                    del tokens[end - len(stop) :]
                    self.emitted = len(tokens)
                    return
        if len(tokens) >= self.options.max_new_tokens:
            self.finish_reason = "length"
            del tokens[self.options.max_new_tokens :]
            self.emitted = len(tokens)
            return
        held = max(map(len, self.stops), default=1) - 1  # these may turn out to begin a stop sequence
        self.emitted = max(self.emitted, len(tokens) - held)

    def grow(self, answer: DecodedRequest) -> None:
        """Build the next tree below the bonus token from the drafter's proposal."""
        if self._prefilled < len(self.prompt) or self.finish_reason is not None:
            return
        width = self._candidates()
        logprobs = np.frombuffer(answer.logprobs, "<f4").reshape(-1, width or 1)
        token_ids = np.frombuffer(answer.token_ids, "<i8").reshape(-1, width or 1)
        if self.options.strategy == "ddtree":
            self._tree = build_ddtree_topk(
                logprobs, token_ids, root_token=answer.bonus, budget=self.budget, vocab_size=self.vocab_size
            )
        else:
            self._tree = DraftTree.chain([answer.bonus, *token_ids[:, 0]])

    def account(self, seconds: dict[str, float], step_seconds: float) -> None:
        """Where the time of a step that this sequence was in went; what the step says about its budget."""
        for stage, value in seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + value
        if self.options.budget == "auto" and self._verified:
            self.auto.update(self._verified, step_seconds, self.accept_lengths[-1])

    def result(self, hidden_digest: str) -> GenerationResult:
        text = bytes(self.tokens).decode(errors="replace") if self.vocab_size == BYTES else None
        stats = {
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(self.prompt),
            "cached_tokens": self.cached_tokens,
            "steps": len(self.accept_lengths),
            "prompt_steps": self.prompt_steps,
            "seconds": dict(self.seconds),
            "hidden_digest": hidden_digest,
        }
        return GenerationResult(self.tokens, text, self.accept_lengths, stats)
