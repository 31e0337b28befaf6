"""Lossless generation: draft trees, one verify step for all sequences at once, commit, again."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tpverify.config import check_type
from tpverify.errors import ArgumentError, describe
from tpverify.kv.log import KvLog
from tpverify.runtime.admission import Admission, Call
from tpverify.runtime.coordinator import Coordinator
from tpverify.runtime.device import for_decoder
from tpverify.runtime.generation import Generation, GenerationOptions, GenerationResult
from tpverify.runtime.messages import Decode, Decoded, HiddenDigest, HiddenStates
from tpverify.runtime.ranks import RankGroup
from tpverify.runtime.recovery import checked_restarts
from tpverify.runtime.setup import EngineSetup

STAGES = ("draft", "build", "verify", "accept", "commit", "transport")


class Engine:
    """A model over `tp` ranks. A context manager.

    Several streams and threads may use one engine: their steps take turns, and its slots are shared out among all. A
    prompt for which there is no room waits, in order of arrival, for sequences to end, at most deadline_s; not where
    all that could end is for the waiting thread itself to step, or for others that wait with it.

    model: "tiny", the shipped byte-level model, or the directory of a checkpoint in DeepSeek-V3's layout (dense layers,
    safetensors; a drafter/ folder beside it makes "ddtree" and "chain" possible). device: "auto" takes GPUs where every
    rank can have one and the kernel takes the model; stats() says which it was, and why not GPUs. oversubscribe: ranks
    share GPUs, to compare numbers of ranks. num_slots: tokens that the KV pool can hold, the trees being verified
    included. max_batch: sequences a step; further prompts wait. prefill_chunk: prompt tokens a step. prefix_cache: keep
    what sequences have committed, while nobody needs the slots, for prompts that begin with the same tokens. On CPUs
    that changes no bit; on GPUs rows round as the step that computed them did, which may have had another shape. group:
    ranks to use instead of starting some, wherever they are; closing the engine leaves them running. max_restarts: how
    many ranks that die, or hang past deadline_s, are replaced while another rank is left to take their rows from. What
    is generated does not change by a token; a warning and stats() tell.

    Raises ArgumentError (bad input, a checkpoint that lacks a tensor, tp that does not divide the heads), before any
    rank is started; ClusterError (no place for the ranks, or an engine that has ended); RankFailure (a rank died or
    hung and was not replaced, or diverged; everything has been released then).
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
        prefix_cache: bool = True,
        deadline_s: float = 60.0,
        max_restarts: int = 3,
        oversubscribe: bool = False,
        group: RankGroup | None = None,
    ) -> None:
        setup = EngineSetup(
            model, tp, device=device, num_slots=num_slots, max_batch=max_batch, prefill_chunk=prefill_chunk
        )
        self.setup, self.config, self.drafter, self.tp = setup, setup.config, setup.drafter, setup.tp
        self._turn = threading.RLock()  # a signal's handler may close the engine within a step of its own thread
        check_type("prefix_cache", prefix_cache, bool, "a bool")
        max_restarts = checked_restarts(max_restarts)
        self._prefix_cache = prefix_cache
        self._owned = group is None
        check_type("group", group, (RankGroup, type(None)), "a RankGroup or None")
        if group is None:
            group = RankGroup(setup.tp, setup.device, deadline_s, oversubscribe=oversubscribe)
            self._device_reason = setup.device_reason or group.device_reason
        else:
            for_decoder(group.device, setup.geometry, setup.config.v_head_dim, setup.tp)
            self._device_reason = group.device_reason
        self._group = group
        options = {
            "checkpoint": str(setup.directory.resolve()),
            "num_slots": setup.num_slots,
            "max_batch": setup.max_batch,
            "drafter": setup.drafter is not None,
        }
        kind = "gpu_decoder" if group.device == "cuda" else "decoder"
        try:
            self._coordinator = Coordinator(
                self._group, kind, options, num_slots=setup.num_slots, tp=setup.tp, max_restarts=max_restarts
            )
        except BaseException:
            if self._owned:
                self._group.close()
            raise
        self._admission = Admission(self._coordinator, self._turn, setup.max_batch, group.deadline_s)

    @property
    def _log(self) -> KvLog:
        return self._coordinator.log

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
        The model's end-of-text token (eos_token_id in its config.json) ends generation like a stop sequence.
        Returns GenerationResult. Raises ArgumentError; PoolFull for a prompt that can never fit, or for which other
        calls under way have left no room in time; RankFailure.
        """
        single = isinstance(prompt, (str, bytes)) or _is_token_list(prompt)
        options = GenerationOptions(max_new_tokens, strategy, budget, temperature, seed, stop)
        generations = self.setup.prepare({"prompt": prompt} if single else _named(prompt), options)
        results = dict(result for ended in self._run(generations) for result in ended)
        return results[0] if single else [results[index] for index in range(len(generations))]

    def stream(self, prompt: Any, **options: Any) -> Iterator[list[int] | GenerationResult]:
        """`generate`, with its options, for one prompt: yields the new tokens after each step, and the result at the
        end."""
        (generation,) = self.setup.prepare({"prompt": prompt}, GenerationOptions(**options))
        shown = 0
        for ended in self._run([generation]):
            if generation.emitted > shown:
                yield generation.tokens[shown : generation.emitted]
                shown = generation.emitted
            for _, result in ended:
                yield result

    def hidden_states(self, tokens: Any) -> np.ndarray:
        """Final hidden states float32 [n, hidden] of a text of n tokens, which the model's head reads: what the ranks
        themselves compute for it, chunk by chunk. tokens: as a prompt. Raises as generate."""
        (generation,) = self.setup.prepare({"tokens": tokens}, GenerationOptions(1, "autoregressive"))
        call = Call([(0, generation)], caching=False)
        try:
            with self._turn:
                self._admission.admit(call)
                while generation.finish_reason is None:
                    self._step([generation])
                work = HiddenStates(generation.seq, len(generation.prompt))
                (frame,) = self._coordinator.step(work)[0].frames
        finally:
            self._admission.leave(call)
        return np.frombuffer(frame, "<f4").reshape(len(generation.prompt), -1)

    def _run(self, generations: list[Generation]) -> Iterator[list[tuple[int, GenerationResult]]]:
        """Step all admitted sequences together until all are done; yields after each step those that ended, with
        index."""
        call = Call(list(enumerate(generations)), self._prefix_cache)
        try:
            while call.waiting or call.active:
                with self._turn:
                    ended = self._advance(call)
                yield ended
        finally:  # an error, or a stream that its reader left: at any moment, in the middle of another's step too
            self._admission.leave(call)

    def _advance(self, call: Call) -> list[tuple[int, GenerationResult]]:
        self._admission.admit(call)
        self._step(list(call.active.values()))
        ended = []
        for index in [index for index, generation in call.active.items() if generation.finish_reason is not None]:
            ended.append((index, call.active[index].result(self._hidden_digest(call.active[index]))))
            self._admission.close(call, index)
        return ended

    def _step(self, generations: list[Generation]) -> None:
        start, recovering = time.perf_counter(), self._coordinator.recovering
        nodes = sum(generation.next_nodes for generation in generations)
        self._coordinator.reserve(lambda: self._log.make_room(nodes))
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

        recovering = self._coordinator.recovering - recovering
        transport = answered - sent - recovering - sum(decoded.seconds.values())
        commit = sent - start + committed - answered
        seconds = decoded.seconds | {"build": built - committed, "commit": commit, "transport": transport}
        for generation in generations:
            generation.account(seconds, built - start - recovering)

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
        """Of the KV pool (see KvLog.stats), `steps` sent to the ranks so far, their device, why it is no GPU, and
        `recoveries`: of each, the step, ranks lost and why, seconds by part (see recovery.Recovered)."""
        with self._turn:
            if self._coordinator.live:
                self._admission.close_left()
            where = {"device": self._group.device, "device_reason": self._device_reason}
            return self._coordinator.stats() | where

    def close(self) -> None:
        """End the engine, and its ranks unless they were lent to it. Can be called again. Another thread's step is
        waited for; its call raises ClusterError then."""
        self._coordinator.close()  # no further step begins
        if self._owned:
            with self._turn:
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
        raise ArgumentError("prompt", "a str, bytes, a list of token ids, or a list of these", describe(prompts))
    return {f"prompt[{index}]": prompt for index, prompt in enumerate(prompts)}
