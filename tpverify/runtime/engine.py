"""Lossless generation: draft trees, one verify step for all sequences at once, commit, again."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tpverify.config import MAX_NODES, check_int
from tpverify.errors import ArgumentError, PoolFull
from tpverify.model.checkpoint import ModelConfig, load_config, resolve
from tpverify.model.drafter import DrafterConfig
from tpverify.runtime.coordinator import Coordinator
from tpverify.runtime.generation import Generation, GenerationOptions, GenerationResult, encode
from tpverify.runtime.messages import Decode, Decoded, HiddenDigest
from tpverify.runtime.ranks import RankGroup
from tpverify.tree import AutoBudget

STAGES = ("draft", "build", "verify", "accept", "commit", "transport")


class Engine:
    """A model over `tp` ranks. A context manager; not for several threads.

    model: "tiny", the shipped byte-level model, or the directory of a checkpoint in DeepSeek-V3's layout (dense layers,
    safetensors; a drafter/ folder beside it makes "ddtree" and "chain" possible). num_slots: tokens that the KV pool
    can hold, the trees being verified included. max_batch: sequences a step; further prompts wait. prefill_chunk:
    prompt tokens a step. group: ranks to use instead of starting some; closing the engine leaves them running.

    Raises ArgumentError (bad input, tp that does not divide the heads), ClusterError (no place for the ranks) and
    RankFailure (a rank died, hung or diverged; everything has been released then).
    """

    def __init__(
        self,
        model: str | Path = "tiny",
        tp: int = 8,
        *,
        device: str = "auto",
        num_slots: int = 16384,
        max_batch: int = 8,
        prefill_chunk: int = 256,
        deadline_s: float = 60.0,
        group: RankGroup | None = None,
    ) -> None:
        directory = resolve(model)
        self.config: ModelConfig = load_config(directory)
        self.drafter = DrafterConfig.read(directory)
        self.tp, self.num_slots, self.max_batch, self.prefill_chunk = tp, num_slots, max_batch, prefill_chunk
        check_int("tp", tp, 1, 1024)
        if self.config.num_attention_heads % tp:
            raise ArgumentError("tp", f"a divisor of the model's {self.config.num_attention_heads} heads", tp)
        check_int("num_slots", num_slots, 2, 2**31 - 1)
        check_int("max_batch", max_batch, 1, 4096)
        check_int("prefill_chunk", prefill_chunk, 1, MAX_NODES)
        self._auto = AutoBudget()
        self._owned = group is None
        self._group = group or RankGroup(tp, device, deadline_s)
        options = {
            "checkpoint": str(directory.resolve()),
            "num_slots": num_slots,
            "max_batch": max_batch,
            "drafter": self.drafter is not None,
        }
        try:
            self._coordinator = Coordinator(self._group, "decoder", options, num_slots=num_slots, tp=tp)
        except BaseException:
            self.close()
            raise
        self._log = self._coordinator.log

    def generate(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 128,
        strategy: str = "ddtree",
        budget: int | str = 32,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Any = None,
    ) -> Any:
        """Generate after a prompt: str, bytes or a list of token ids; a list of these gives a list of results.

        strategy: "ddtree" verifies a tree of `budget` drafted tokens a step ("auto": what proves fastest), "chain" the
        drafter's likeliest token at each depth, "autoregressive" one token. All give the same tokens and hidden states.
        temperature: 0 takes the target's most probable token; above, each position has its own draw from (seed,
        position). stop: str, bytes or a list of these; generation ends before the first that appears.
        Returns GenerationResult. Raises ArgumentError, PoolFull (a prompt that can never fit) and RankFailure.
        """
        single = isinstance(prompt, (str, bytes)) or _is_token_list(prompt)
        options = GenerationOptions(max_new_tokens, strategy, budget, temperature, seed, stop)
        generations = self._prepare({"prompt": prompt} if single else _named(prompt), options)
        results = dict(result for ended in self._run(generations) for result in ended)
        return results[0] if single else [results[index] for index in range(len(generations))]

    def stream(self, prompt: Any, **options: Any) -> Iterator[list[int] | GenerationResult]:
        """`generate`, with its options, for one prompt: yields the new tokens after each step, and the result at the
        end."""
        (generation,) = self._prepare({"prompt": prompt}, GenerationOptions(**options))
        shown = 0
        for ended in self._run([generation]):
            if generation.emitted > shown:
                yield generation.tokens[shown : generation.emitted]
                shown = generation.emitted
            for _, result in ended:
                yield result

    def _prepare(self, prompts: dict[str, Any], options: GenerationOptions) -> list[Generation]:
        """Everything is checked here, before anything runs. Prompts by the name that an error gives them."""
        if options.strategy != "autoregressive" and self.drafter is None:
            raise ArgumentError("strategy", "'autoregressive': this checkpoint has no drafter", repr(options.strategy))
        vocab_size = self.config.vocab_size
        stops = options.stops(vocab_size)
        positions = self.config.max_position_embeddings - self._depth
        longest = positions - options.max_new_tokens
        if longest < 1:
            raise ArgumentError("max_new_tokens", f"at most {positions - 1} with this model", options.max_new_tokens)
        generations = []
        for name, prompt in prompts.items():
            tokens = encode(name, prompt, vocab_size)
            if len(tokens) > longest:
                raise ArgumentError(
                    name, f"at most {longest} tokens before {options.max_new_tokens} new ones", len(tokens)
                )
            generation = Generation(tokens, options, stops, self._auto, self.prefill_chunk, vocab_size)
            needed = generation.slots_needed(self._depth)
            if needed > self.num_slots - 1:
                raise PoolFull(f"{name}: may need {needed} slots, the pool has {self.num_slots - 1}: raise num_slots")
            generations.append(generation)
        return generations

    @property
    def _depth(self) -> int:
        """Drafted tokens below a root, at most."""
        return self.drafter.block_size - 1 if self.drafter else 0

    def _run(self, generations: list[Generation]) -> Iterator[list[tuple[int, GenerationResult]]]:
        """Step all admitted sequences together until all are done; yields after each step those that ended, with
        index."""
        waiting = list(enumerate(generations))
        active: dict[int, Generation] = {}
        try:
            while waiting or active:
                self._admit(waiting, active)
                self._step(list(active.values()))
                done = [index for index, generation in active.items() if generation.finish_reason is not None]
                ended = []
                for index in done:
                    ended.append((index, active[index].result(self._hidden_digest(active[index]))))
                    self._log.close(active.pop(index).seq)
                yield ended
        finally:  # an error, or a stream that its reader left
            if not self._group.closed:
                for generation in active.values():
                    self._log.close(generation.seq)

    def _admit(self, waiting: list[tuple[int, Generation]], active: dict[int, Generation]) -> None:
        """Start prompts in order while there is a place in the batch and room for the most that each can come to
        hold."""
        held = sum(generation.slots_needed(self._depth) for generation in active.values())
        while waiting and len(active) < self.max_batch:
            index, generation = waiting[0]
            held += generation.slots_needed(self._depth)
            if active and held > self.num_slots - 1:
                return
            generation.seq = self._log.open()
            active[index] = generation
            del waiting[0]

    def _step(self, generations: list[Generation]) -> None:
        start = time.perf_counter()
        work = Decode([generation.request(self._log) for generation in generations])
        sent = time.perf_counter()
        reply = self._coordinator.step(work)[0].reply
        answered = time.perf_counter()
        decoded = msgspec.msgpack.decode(reply.result, type=Decoded)
        for generation, answer in zip(generations, decoded.requests, strict=True):
            generation.take(answer, self._log)
        committed = time.perf_counter()
        for generation, answer in zip(generations, decoded.requests, strict=True):
            generation.grow(answer)
        built = time.perf_counter()

        transport = answered - sent - sum(decoded.seconds.values())
        commit = sent - start + committed - answered
        seconds = decoded.seconds | {"build": built - committed, "commit": commit, "transport": transport}
        for generation in generations:
            generation.account(seconds, built - start)

    def _hidden_digest(self, generation: Generation) -> str:
        """The same on every rank, or one of them has gone astray."""
        count = len(generation.prompt) + max(len(generation.tokens), 1) - 1
        answers = self._coordinator.step(HiddenDigest(generation.seq, count))
        digests = [msgspec.msgpack.decode(answer.reply.result, type=str) for answer in answers]
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                cause = f"hidden states differ from rank 0's: {digest}, {digests[0]}"
                raise self._group.fail(rank, self._coordinator.steps, cause)
        return digests[0]

    def stats(self) -> dict[str, Any]:
        """Of the KV pool (see KvLog.stats), and `steps` sent to the ranks so far."""
        return self._log.stats() | {"steps": self._coordinator.steps}

    def close(self) -> None:
        """End the engine, and its ranks unless they were lent to it. Can be called again."""
        if self._owned:
            self._group.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_token_list(prompt: Any) -> bool:
    return isinstance(prompt, np.ndarray) or (
        isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], (int, np.integer))
    )


def _named(prompts: Any) -> dict[str, Any]:
    if not isinstance(prompts, (list, tuple)) or not prompts:
        raise ArgumentError("prompt", "a str, bytes, a list of token ids, or a list of these", repr(prompts)[:80])
    return {f"prompt[{index}]": prompt for index, prompt in enumerate(prompts)}
