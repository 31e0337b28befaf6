"""What is asked of an engine, checked without ranks: whatever can be refused is refused before any is started."""

from pathlib import Path
from typing import Any

from tpverify import native
from tpverify.config import DEVICES, MAX_NODES, MAX_TOKENS, MlaGeometry, check_choice, check_int
from tpverify.errors import ArgumentError, PoolFull
from tpverify.model.checkpoint import find_checkpoint, resolve
from tpverify.model.drafter import find_drafter
from tpverify.runtime.device import for_decoder
from tpverify.runtime.generation import Generation, GenerationOptions, encode
from tpverify.tree import AutoBudget


class EngineSetup:
    """A model's files and an engine's limits: see Engine. Raises ArgumentError.

    device: where ranks can be; device_reason: why "auto" is "cpu", if the model or the installation is why.
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
    ) -> None:
        native.host()  # a TPVERIFY_NATIVE that cannot be met
        check_choice("device", device, DEVICES)
        self.directory = resolve(model)
        self.config, _ = find_checkpoint(self.directory)
        self.drafter = find_drafter(self.directory, self.config)
        heads = self.config.num_attention_heads
        self.geometry = MlaGeometry(heads, self.config.kv_lora_rank, self.config.qk_rope_head_dim)
        self.tp = check_int("tp", tp, 1, 1024)
        if heads % self.tp:
            raise ArgumentError("tp", f"a divisor of the model's {heads} heads", self.tp)
        self.device, self.device_reason = for_decoder(device, self.geometry, self.config.v_head_dim, self.tp)
        self.max_batch = check_int("max_batch", max_batch, 1, 4096)
        self.num_slots = check_int("num_slots", num_slots, 2, MAX_TOKENS // self.max_batch)
        self.prefill_chunk = check_int("prefill_chunk", prefill_chunk, 1, MAX_NODES)
        self.auto = AutoBudget()

    @property
    def depth(self) -> int:
        """Drafted tokens below a root, at most."""
        return self.drafter.block_size - 1 if self.drafter else 0

    def prepare(self, prompts: dict[str, Any], options: GenerationOptions) -> list[Generation]:
        """Generations that can run to their ends. Prompts by the name that an error gives them.

        Raises ArgumentError, and PoolFull for a prompt that can never fit.
        """
        if options.strategy != "autoregressive" and self.drafter is None:
            raise ArgumentError("strategy", "'autoregressive': this checkpoint has no drafter", repr(options.strategy))
        vocab_size = self.config.vocab_size
        stops = options.stops(vocab_size) + [[token] for token in self.config.eos_tokens]
        positions = self.config.max_position_embeddings - self.depth
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
            generation = Generation(tokens, options, stops, self.auto, self.prefill_chunk, vocab_size, self.depth)
            if generation.slots_needed > self.num_slots - 1:
                raise PoolFull(
                    f"{name}: may need {generation.slots_needed} slots, the pool has {self.num_slots - 1}: "
                    "raise num_slots"
                )
            generations.append(generation)
        return generations
