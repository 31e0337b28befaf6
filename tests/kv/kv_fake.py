"""Ranks with a pool of tags instead of rows, the messages to them, and ways to damage those.

A position's tag is a hash of all tokens up to it, so what a rank must read at a position is known without any table.
"""

import msgspec
import numpy as np

from tpverify.kv.digest import mix64
from tpverify.kv.log import Entry, Fenced, Move, Replica
from tpverify.kv.snapshot import Snapshot

LAYERS = 2
FAULTS = ["answer lost", "twice", "late repeat", "altered", "altered", "crash before", "crash during", "crash after"]


class Message(msgspec.Struct, array_like=True):
    """number of the step; the log's entries from `first`; tags to write: (sequence, start or -1 for the tree, tags)."""

    number: int
    first: int
    entries: list[Entry]
    writes: list[tuple[int, int, list[int]]]


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode


class FakeRank:
    """pool: int64 [LAYERS, num_slots] of tags. A step that it has done is answered from memory."""

    def __init__(self, num_slots, replica=None):
        self.replica = Replica(num_slots) if replica is None else replica
        self.pool = np.full((LAYERS, num_slots), -1, np.int64)
        self.joined = self.done = 0  # the first and the last step that it has done

    def handle(self, wire):
        message = decode(wire)
        self.replica.apply(message.first, message.entries)
        for src, dst in self.replica.take_moves():
            self.copy(src, dst)
        if message.number > self.done:
            self.write(message.writes)
            self.done = message.number
        return self.replica.digest()

    def copy(self, src, dst):
        self.pool[:, dst] = self.pool[:, src]

    def write(self, writes):
        for seq, start, tags in writes:
            slots = self.replica.prefix_slots(seq)[start:][: len(tags)] if start >= 0 else self.replica.tree_slots(seq)
            self.pool[:, slots] = rows(tags)


class Sequence:
    def __init__(self, tokens=(), tags=()):
        self.tokens, self.tags = list(tokens), list(tags)
        self.tree = None  # parents, tokens, tags

    def extend(self, tokens):
        for token in tokens:
            self.tokens.append(token)
            self.tags.append(tag(self.tags[-1] if self.tags else 0, token))


def tag(before, token):
    return mix64(before ^ (token + 1)) >> 1


def rows(tags):
    """int64 [LAYERS, n]: a layer's row differs from another's."""
    return np.array(tags, np.int64).reshape(1, -1) ^ np.arange(LAYERS).reshape(-1, 1)


def deliver(rng, rank, wire, fault, sent, digest, snapshot):
    """Send a step, with a fault or None. Whether the rank's answer is the digest expected; nothing else that it says
    counts. sent: the steps before."""
    repeats = [old for old in sent if decode(old).number > rank.joined]
    try:
        if fault == "late repeat" and repeats:
            rank.handle(rng.choice(repeats))
        if fault == "crash before":
            return False
        if fault == "crash during":
            message = decode(wire)
            rank.handle(encode(Message(0, message.first, message.entries[: len(message.entries) // 2], [])))
            return False
        if fault == "altered":
            return deliver_altered(rng, rank, wire, digest, snapshot)
        answers = [rank.handle(wire) for _ in range(1 + (fault in ("twice", "answer lost")))]
        if fault == "late repeat" and repeats:
            rank.handle(rng.choice(repeats))
        assert answers[-1] == digest, "a rank that nothing was done to differs"
        return fault != "crash after"
    except Fenced:
        assert fault in ("altered", "crash during"), "a rank that nothing was done to is fenced"
        return False


def deliver_altered(rng, rank, wire, digest, snapshot):
    """It never passes: the rank is fenced, fails, or has another digest; or its tables are the same all the same."""
    try:
        answer = rank.handle(alter(rng, wire))
    except (ValueError, msgspec.MsgspecError):  # the work does not fit either
        return False
    if answer == digest:  # entries in another order may mean the same
        there = Snapshot.of(rank.replica._tables, 0)
        assert sorted(there.sequences) == sorted(snapshot.sequences), "one digest for two tables"
        assert there.cached == snapshot.cached and there.quarantined == snapshot.quarantined
    return False


def alter(rng, wire):
    """The message with one entry lost, changed or doubled, two exchanged, or the log said to begin elsewhere."""
    message = decode(wire)
    entries = message.entries
    if not entries:
        message.first += 1
        return encode(message)
    at = rng.randrange(len(entries))
    how = rng.choice(["lost", "doubled", "exchanged", "changed", "gap"])
    if how == "lost":
        del entries[at]
    elif how == "doubled":
        entries.insert(at, entries[at])
    elif how == "exchanged":
        other = rng.randrange(len(entries))
        entries[at], entries[other] = entries[other], entries[at]
    elif how == "gap":
        message.first += 1
    else:
        entries[at] = _changed(rng, entries[at])
    return encode(message)


def _changed(rng, entry):
    fields = list(msgspec.structs.astuple(entry))
    at = rng.randrange(len(fields))
    value = fields[at]
    if isinstance(value, int):
        fields[at] = value + rng.choice([-1, 1])
    elif value:
        numbers = np.frombuffer(value, "<i4").copy()
        numbers[rng.randrange(len(numbers))] += rng.choice([-1, 1])
        if isinstance(entry, Move) and rng.random() < 0.5 and len(numbers) > 3:
            numbers = numbers.reshape(-1, 3)[::-1].ravel()
        fields[at] = numbers.tobytes()
    return type(entry)(*fields)
