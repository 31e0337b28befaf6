"""In nccl4py's place, and CUDA's, under a communicator of ours."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpverify import pynccl


class LibraryError(Exception):
    pass


def stand_in(monkeypatch: pytest.MonkeyPatch, communicator: Callable[[], Any], done: Callable[[], bool]) -> None:
    """communicator: makes nccl4py's Communicator. done: whether an event on the stream has come."""
    core = SimpleNamespace(
        Communicator=communicator,
        UniqueId=SimpleNamespace(from_bytes=bytes),
        NCCLConfig=dict,
        NcclInvalid=LibraryError,
        get_unique_id=lambda: bytes(128),
    )
    bindings = SimpleNamespace(Result=lambda name: SimpleNamespace(name=name), NCCLError=LibraryError)
    monkeypatch.setattr(pynccl, "_nccl", lambda: core)
    monkeypatch.setattr(pynccl, "_bindings", lambda: bindings)
    monkeypatch.setattr(pynccl, "_keep_log", lambda: None)
    stream = SimpleNamespace(cuda_stream=0, record_event=lambda: SimpleNamespace(query=done))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
