"""Ray as the runtime uses it: the cluster that is there, or a private one, and a place for the ranks of a group."""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from tpverify.errors import ClusterError

# Every node carries one unit of a resource named after its address. Asking for Ray's smallest share of it ties the
# ranks to the driver's node, where sockets reach them, without taking CPUs from anybody.
NODE_SHARE = 0.0001
CONNECT_S = 10.0
OBJECT_STORE_BYTES = 128 << 20  # only RayTransport uses it
SOCKET_PATH_BYTES = 107  # what a Unix socket's address holds

_lock = threading.Lock()
_users = 0
_connection = ExitStack()


@contextmanager
def session() -> Iterator[None]:
    """A connection to Ray: the one the process has, else $RAY_ADDRESS, else a new local cluster without dashboard.

    Sessions share it; the last one ends what the first one started, and nothing else. Raises ClusterError.
    """
    global _users
    with _lock:
        if _users == 0:
            _connect()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _connection.close()


def _connect() -> None:
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    with ExitStack() as undo:
        try:
            if address:
                _require_listener(address)
                undo.callback(ray.shutdown)
                ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
            else:
                undo.enter_context(_private_token())
                undo.callback(ray.shutdown)
                ray.init(
                    "local",
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _node_ip_address="127.0.0.1",
                )
        except Exception as failure:  # for a node that does not come up Ray raises just that
            hint = ": set a shorter TMPDIR" if "AF_UNIX path length" in str(failure) else ""
            raise ClusterError(f"cannot reach Ray at {address or 'a new local cluster'}: {failure}{hint}") from failure
        _connection.push(undo.pop_all())


def _require_listener(address: str) -> None:
    """Raise OSError if nobody listens at host:port; Ray itself would try for minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


@contextmanager
def _private_token() -> Iterator[None]:
    """Token authentication with a token of our own, unless RAY_AUTH_MODE already says what to do.

    Ray listens on every interface, and by default its local clusters use a world-readable token in the home directory.
    Ours is a file in memory, readable through this process by its own user alone: it ends with the process, however
    that ends. Ray reads its settings when imported, so it has to be told to read them again: with the variables alone
    the cluster would ask for a token that this process does not send.
    """
    if "RAY_AUTH_MODE" in os.environ:
        yield
        return
    with os.fdopen(os.memfd_create("tpverify-token"), "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(secrets.token_hex(32))
        file.flush()
        settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"/proc/{os.getpid()}/fd/{file.fileno()}"}
        before = {name: os.environ.get(name) for name in settings}
        _reread(settings)
        try:
            yield
        finally:
            _reread(before)


def _reread(environment: dict[str, Any]) -> None:
    for name, value in environment.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def check_socket_path(path: str) -> None:
    """Raise ClusterError if no socket can have this path."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise ClusterError(f"socket path {path} is longer than {SOCKET_PATH_BYTES} bytes: set a shorter TMPDIR")


class Node(NamedTuple):
    """A node's address and what it has in all, in use or not."""

    address: str
    cpus: float
    gpus: int


def nodes() -> dict[str, Node]:
    """The cluster's living nodes by node id."""
    return {
        node["NodeID"]: Node(
            node["NodeManagerAddress"], node["Resources"].get("CPU", 0.0), int(node["Resources"].get("GPU", 0))
        )
        for node in ray.nodes()
        if node["Alive"]
    }


def this_node() -> Node:
    """The node of this process. Raises ClusterError for a driver outside the cluster (Ray Client)."""
    if ray.util.client.ray.is_connected():
        raise ClusterError("the driver must run on the ranks' node, not behind ray://: start it with `ray job submit`")
    return nodes()[ray.get_runtime_context().get_node_id()]


@contextmanager
def placement(size: int, gpus: float, deadline_s: float) -> Iterator[PlacementGroup]:
    """One bundle a rank, all on this node, each with `gpus` GPUs. Raises ClusterError if they cannot be had in time."""
    here = this_node()
    asked = f"{size} ranks with {gpus:g} GPU each on the driver's node {here.address}"
    if size * gpus > here.gpus:
        raise ClusterError(f"asked for {asked}; {inventory()}")
    bundle = {f"node:{here.address}": NODE_SHARE} | ({"GPU": gpus} if gpus else {})
    group = placement_group([bundle] * size, strategy="STRICT_PACK")
    try:
        end = time.monotonic() + deadline_s
        while not group.wait(1):  # short waits, between which Ctrl-C gets through
            if time.monotonic() > end:
                free = ray.available_resources().get("GPU", 0)
                raise ClusterError(
                    f"asked for {asked}, not free within {deadline_s:g} s; {inventory()}; GPUs free: {free:g}"
                )
        yield group
    finally:
        remove_placement_group(group)


def inventory() -> str:
    """What the cluster has, for error texts."""
    return "the cluster has " + ", ".join(f"{n.gpus} GPUs and {n.cpus:g} CPUs on {n.address}" for n in nodes().values())
