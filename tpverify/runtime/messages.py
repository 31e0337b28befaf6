"""What travels between the coordinator and the ranks: msgpack of these structs, then raw frames of bulk data.

A decode step is one Step to every rank and one Reply from each. Decoding checks types and tags, so that a malformed
message is an error text and never code: nothing here is pickled.
"""

from typing import Any

import msgspec

from tpverify.kv.log import Entry
from tpverify.kv.snapshot import Snapshot

Frame = bytes | bytearray | memoryview


class _Work(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What a step asks of a rank, after it has applied the step's log entries."""


class Configure(_Work, frozen=True):
    """Start afresh: empty tables over num_slots, and a worker of `kind` (see rank.WORKERS) on ranks 0..tp-1.

    rendezvous: path where those ranks meet to build their communicator. options: the worker's own. generation: how
    often processes of the group have been started; communicators that ranks keep from an earlier one have lost a rank.
    """

    tp: int
    num_slots: int
    kind: str
    options: dict[str, Any]
    rendezvous: str
    generation: int = 0


class Join(_Work, frozen=True):
    """Build the communicator of ranks 0..tp-1 anew, since some of them are. A rank without tables starts as `configure`
    says, with those of the snapshot, and waits for its rows; the others keep theirs. Workers whose graphs hold a
    communicator of NCCL's are built anew around them.
    """

    configure: Configure
    snapshot: Snapshot


class Refill(_Work, frozen=True):
    """All that rank `source` keeps in these slots, given as runs (see extents.pack), to the target ranks."""

    slots: bytes
    source: int
    targets: list[int]


class Preflight(_Work, frozen=True):
    """Join all tp ranks by NCCL, gather a pattern, leave again. rendezvous: as in Configure.

    Result: what pynccl.preflight found, or {"hung": text}.
    """

    tp: int
    rendezvous: str


class Write(_Work, frozen=True):
    """Latents of committed positions start..start+count-1. Frame: [layers, count, row_dim], pool dtype."""

    seq: int
    start: int
    count: int


class TreeRequest(msgspec.Struct, array_like=True, frozen=True):
    """One sequence's tree of n nodes: ancestor words uint64 [n, ceil(n/64)] and depths int32 [n], little-endian."""

    seq: int
    n: int
    words: bytes
    depths: bytes


class Attend(_Work, frozen=True):
    """Verify attention over all requests, N nodes in all, one after another.

    Frames: tree latents [layers, N, row_dim], the rank's own heads of q [layers, N, heads/tp, row_dim].
    Reply of rank 0: out [layers, N, heads, kv_lora_rank], lse float32 [layers, N, heads]. Result: seconds by stage.
    """

    requests: list[TreeRequest]
    softmax_scale: float


class DecodeRequest(msgspec.Struct, array_like=True, frozen=True):
    """One sequence's tokens of a decode step: int64 tokens [n] and int32 parents [n], little-endian, as in DraftTree.

    A prompt's chunk is a chain that is committed as it is (prompt = True); a draft tree is walked by the target's
    choices: argmax at temperature 0, else a draw keyed by (seed, position). candidates: tokens a depth to draft after
    it; 0 for a sequence that is never drafted for.
    """

    seq: int
    tokens: bytes
    parents: bytes
    prompt: bool
    temperature: float
    seed: int
    candidates: int


class Decode(_Work, frozen=True):
    """One forward pass over all requests' trees. Result of rank 0: Decoded; of the others: None."""

    requests: list[DecodeRequest]


class DecodedRequest(msgspec.Struct, array_like=True, frozen=True):
    """path: int32 accepted nodes, the root first. bonus: the target's token after them. The drafter's proposal for what
    follows the bonus: float32 logprobs [depth, candidates], int64 token_ids of the same shape, empty without a
    draft."""

    path: bytes
    bonus: int
    logprobs: bytes
    token_ids: bytes


class Decoded(msgspec.Struct, array_like=True, frozen=True):
    """requests as in the Decode; seconds of rank 0 by stage: verify, accept, draft."""

    requests: list[DecodedRequest]
    seconds: dict[str, float]


class HiddenDigest(_Work, frozen=True):
    """Hash of the final hidden states of a sequence's first `count` positions. Result: 16 hex digits."""

    seq: int
    count: int


class HiddenStates(_Work, frozen=True):
    """Final hidden states of a sequence's first `count` positions. Frame of rank 0: float32 [count, hidden]."""

    seq: int
    count: int


class ContentDigest(_Work, frozen=True):
    """Hash of what ranks hold alike at a sequence's committed positions, in their order. Result: 16 hex digits."""

    seq: int


class RowHashes(_Work, frozen=True):
    """Hash of what ranks hold alike in each of n slots, given as runs (see extents.pack). Result: uint64 [n],
    little-endian."""

    slots: bytes


class Ping(_Work, frozen=True):
    """Nothing but the log entries. The reply returns the frames as they came."""


Work = (
    Configure
    | Join
    | Refill
    | Preflight
    | Write
    | Attend
    | Decode
    | HiddenDigest
    | HiddenStates
    | ContentDigest
    | RowHashes
    | Ping
)


class Step(msgspec.Struct, array_like=True, frozen=True):
    """number counts a coordinator's steps; entries are log entries log_first, log_first + 1, ..."""

    number: int
    log_first: int
    entries: list[Entry]
    work: Work


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """digest: the rank's tables after the entries ("" before the first Configure). error: None, or why the step failed.

    result: msgpack of whatever the work returns. seconds: where the rank's time went, by stage.
    moved: digest of the rows that the entries moved, "" if none.
    interrupted: the step failed for want of a peer. Its entries are applied and its rows moved; the work can be done
    again when there is one.
    A message that could not be decoded is answered with number -1.
    """

    number: int
    rank: int
    digest: str
    error: str | None
    result: bytes
    seconds: dict[str, float]
    moved: str = ""
    interrupted: bool = False


encode = msgspec.msgpack.Encoder().encode
decode_step = msgspec.msgpack.Decoder(Step).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
