"""GPU decoder ranks without Ray: as many as one likes in a process, on any device, and what drives them."""

import sysconfig
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpverify.kv.log import KvLog, Replica
from tpverify.runtime.generation import Generation, GenerationOptions, GenerationResult
from tpverify.runtime.gpu_decoder_worker import GpuDecoderWorker
from tpverify.runtime.messages import ContentDigest, Decode, HiddenDigest, HiddenStates, Ping
from tpverify.runtime.setup import EngineSetup

STDLIB = Path(sysconfig.get_paths()["stdlib"])
HELD_OUT = ["calendar.py", "configparser.py", "pprint.py", "sched.py", "timeit.py", "traceback.py"]
PATIENCE_S = 60


def held_out(length: int) -> list[bytes]:
    """Prompts from modules that the model was not trained on."""
    return [(STDLIB / name).read_bytes()[800 : 800 + length] for name in HELD_OUT]


class Meeting:
    """All-gather among the threads of `size` ranks."""

    def __init__(self, size: int, graphs: bool = False) -> None:
        self.size, self.barrier, self.parts = size, threading.Barrier(size), [torch.empty(0)] * size
        self.graphs = graphs

    def rank(self, rank: int) -> "Member":
        return Member(self, rank)


class Member:
    """The communicator of one of them: a GpuComm that shares its device with the others."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size, self.capturable = meeting, rank, meeting.size, meeting.graphs

    def allgather_into(self, x: Tensor, out: Tensor) -> None:
        self.wait()
        self.meeting.parts[self.rank] = x
        self.meeting.barrier.wait(PATIENCE_S)
        out.copy_(torch.stack(self.meeting.parts))
        self.wait()
        self.meeting.barrier.wait(PATIENCE_S)

    def wait(self, stream: Any = None) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Ranks:
    """tp workers, each with its replica of one log, that take every message together."""

    def __init__(
        self, tp: int = 1, device: str = "cpu", graphs: bool = False, num_slots: int = 4096, max_batch: int = 8
    ) -> None:
        """graphs: capture the steps, of one rank alone."""
        self.setup = EngineSetup("tiny", tp, device="cpu", num_slots=num_slots, max_batch=max_batch)
        self.options = {
            "checkpoint": str(self.setup.directory),
            "num_slots": num_slots,
            "max_batch": max_batch,
            "drafter": True,
        }
        meeting, self.moves = Meeting(tp, graphs), 0
        self.log, self.replicas = KvLog(num_slots), [Replica(num_slots) for _ in range(tp)]
        self.workers = self._together(
            tp,
            lambda rank: GpuDecoderWorker(meeting.rank(rank), device, self.options),  # type: ignore[arg-type]
        )

    def step(self, work: Any) -> list[Any]:
        """What each rank answers."""
        first, entries = self.log.pending()

        def answer(rank: int) -> Any:
            replica, worker = self.replicas[rank], self.workers[rank]
            replica.apply(first, entries)
            for src, dst in replica.take_moves():
                worker.kept.move(src, dst, replica)
            if isinstance(work, ContentDigest):
                return worker.kept.answer(work, replica)
            return None if isinstance(work, Ping) else worker.handle(work, [], replica)[0]

        answers = self._together(len(self.workers), answer)
        self.log.acknowledge()
        return answers

    def generate(
        self, prompts: list[bytes], prefill_chunk: int = 256, cache: bool = False, defrag: bool = False, **options: Any
    ) -> list[GenerationResult]:
        """As Engine.generate, with all prompts in one batch. Digests of all ranks are equal, or it fails.

        cache: begin with cached prefixes, and leave some. defrag: after each step, whatever can move moves.
        """
        self.setup.prefill_chunk = prefill_chunk
        named = {f"prompt[{index}]": prompt for index, prompt in enumerate(prompts)}
        generations = self.setup.prepare(named, GenerationOptions(**options))
        for generation in generations:
            seq = self.log.open(generation.prompt if cache else None)
            generation.begin(seq, self.log.length(seq))
        while active := [generation for generation in generations if generation.finish_reason is None]:
            decoded, *others = self.step(Decode([generation.request(self.log) for generation in active]))
            assert others == [None] * len(others)
            for generation, answer in zip(active, decoded.requests, strict=True):
                generation.take(answer, self.log)
                generation.grow(answer)
            if defrag:
                self.moves += self.log.defrag(4096).moves
        return [self._result(generation, cache) for generation in generations]

    def hidden_states(self, tokens: list[int]) -> np.ndarray:
        """As Engine.hidden_states."""
        (generation,) = self.setup.prepare({"tokens": tokens}, GenerationOptions(1, "autoregressive"))
        generation.seq = self.log.open()
        while generation.finish_reason is None:
            decoded, *_ = self.step(Decode([generation.request(self.log)]))
            generation.take(decoded.requests[0], self.log)
        self.step(Ping())
        work = HiddenStates(generation.seq, len(tokens))
        _, (frame,) = self.workers[0].handle(work, [], self.replicas[0])
        self.log.close(generation.seq)
        return np.frombuffer(frame, np.float32).reshape(len(tokens), -1)

    def _result(self, generation: Generation, cache: bool) -> GenerationResult:
        count = len(generation.prompt) + len(generation.tokens) - 1
        hidden = set(self.step(HiddenDigest(generation.seq, count)))
        content = set(self.step(ContentDigest(generation.seq)))
        assert len(hidden) == len(content) == 1
        committed = generation.committed(self.log.length(generation.seq))
        self.log.close(generation.seq, committed if cache else None)
        return generation.result(hidden.pop())

    @staticmethod
    def _together(count: int, body: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(body, range(count)))


def same(a: GenerationResult, b: GenerationResult) -> bool:
    return (a.tokens, a.accept_lengths, a.stats["hidden_digest"]) == (
        b.tokens,
        b.accept_lengths,
        b.stats["hidden_digest"],
    )
