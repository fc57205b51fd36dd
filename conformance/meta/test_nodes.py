"""One engine over several machines: which of them `serve` is, whom it waits for, whose calls it counts."""

import signal
import socket
import time

import pytest
from torch.distributed import TCPStore

from conformance.meta.looking import free, stops
from conformance.meta.test_runner_serve import helper_of, is_gone, lines_until, serve  # noqa: F401 - a fixture
from shim.errors import OpshimError
from shim.health import CALLS, IS_SELECTED, Counters, standings, summary
from shim.vllm_plugin import nodes
from shim.vllm_plugin.serve import Options


def open_store(port=0):
    """What rank 0 of an engine keeps as long as it lives."""
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def count(folder, calls):
    mine = Counters()
    mine.open(folder)
    slot = mine.slot("moe_sum", "native:jit")
    mine.values[slot + CALLS], mine.values[slot + IS_SELECTED] = calls, 1


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), None),
        (("-n", "2"), nodes.Node(0, 2, "127.0.0.1", 29501, False)),
        (("--nnodes=3", "-r2", "--headless", "--master-addr", "a", "--master-port=7"), nodes.Node(2, 3, "a", 7, True)),
        (("--nnodes", "2", "--node-rank", "1", "-dp", "2", "-dpe"), nodes.Node(1, 2, "127.0.0.1", 29501, False)),
        (("--nnodes", "2", "--node-rank", "1", "-dp", "2"), "needs a server per node: --data-parallel-external-lb"),
        (("--headless",), "only others go without a server: --nnodes 2 --node-rank 1 --master-addr ADDRESS"),
        (("--headless", "--nnodes", "2"), "node 0 serves, only others .* --node-rank 1"),
        (("--headless", "-dp", "2", "--nnodes", "2", "-r", "1"), "an engine of --data-parallel-size 2 has no leader"),
        (("--nnodes", "2", "--node-rank", "1"), "--node-rank 1 needs --headless"),
        (("--nnodes", "2", "--node-rank", "2", "--headless"), "from 0 to 1 with --nnodes 2, got 2"),
    ],
)
def test_a_node_is_known_by_its_options(options, told):
    if isinstance(told, str):
        with pytest.raises(OpshimError, match=told):
            nodes.of(Options(options))
    else:
        assert nodes.of(Options(options)) == told


def test_the_preflight_tells_which_node_it_is(look):
    follower = ("-tp", "2", "--nnodes", "2", "--node-rank", "1", "--headless", "--master-addr", "10.0.0.1")
    told = look(*follower)[1]
    free(told)
    assert told["nodes"][0].text == "node 1 of 2, joins node 0 at 10.0.0.1:29501"
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = str(other.getsockname()[1])
        stops(look("--nnodes", "2", "-tp", "2", "--master-port", port)[1], "nodes", f"port {port}: Address already in use")
    stops(look("--headless")[1], "nodes", "node 0 serves")
    assert "nodes" not in look()[1]


def test_node_0_counts_the_calls_of_all_nodes(tmp_path, monkeypatch):
    store = open_store()
    monkeypatch.setattr(nodes, "PAUSE", 0.05)
    folders = [tmp_path / f"node{rank}" for rank in range(3)]
    for rank, folder in enumerate(folders):
        count(folder, 10**rank)
        count(folder, 10**rank)  # of another process
    first, second, third = (nodes.Node(rank, 3, "127.0.0.1", store.port, rank > 0) for rank in range(3))
    with nodes.Guest(first, folders[0]), nodes.Guest(second, folders[1]), nodes.Guest(third, folders[2]):
        wait_for(lambda: [row.calls for row in summary(folders[0])] == [222])
    assert [one.selected for one in standings(folders[0])] == [6]
    assert [row.calls for row in summary(folders[1])] == [20]


def test_a_leader_is_gone_only_when_it_is_silent_for_long(tmp_path, monkeypatch):
    for name, value in (("PAUSE", 0.05), ("SILENCE", 3.0)):
        monkeypatch.setattr(nodes, name, value)
    store = open_store()
    port = store.port
    with nodes.Guest(nodes.Node(1, 2, "127.0.0.1", port, True), tmp_path) as guest:
        wait_for(lambda: guest.heard)
        assert not guest.is_ready(0) and not guest.trouble
        count(tmp_path, 1)
        assert guest.is_ready(0)
        del store
        time.sleep(0.5)  # several tries
        assert not guest.trouble
        wait_for(lambda: guest.trouble)
        assert guest.trouble == f"node 0 at 127.0.0.1:{port} is gone"
        again = open_store(port)
        wait_for(lambda: not guest.trouble)
        del again


def test_a_leader_that_is_stopped_for_a_while_is_waited_for(tmp_path, monkeypatch):
    """It takes connections, as its kernel does, and answers nothing; also where nothing but a stranger ever listened."""
    for name, value in (("PAUSE", 0.05), ("SILENCE", 0.3), ("PATIENCE", 0.5)):
        monkeypatch.setattr(nodes, name, value)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        guest = nodes.Guest(nodes.Node(1, 2, "127.0.0.1", stopped.getsockname()[1], True), tmp_path)
        with guest:
            time.sleep(0.5)
            assert not guest.is_ready(0) and not guest.trouble  # nobody has led it yet
            guest.heard = time.monotonic() - 60
            assert not guest.trouble
        assert guest.heard < time.monotonic() - 60  # the visit lasts
    assert "is gone" in guest.trouble


def test_a_node_is_there_once(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "PAUSE", 0.05)
    store = open_store()
    folders = [tmp_path / name for name in ("node0", "node1", "again")]
    for folder, calls in zip(folders, (1, 7, 500)):
        count(folder, calls)
    leader, first = (nodes.Node(rank, 2, "127.0.0.1", store.port, rank > 0) for rank in range(2))
    with nodes.Guest(leader, folders[0]), nodes.Guest(first, folders[1]) as node:
        wait_for(lambda: [row.calls for row in summary(folders[0])] == [8])
        with nodes.Guest(first, folders[2]) as again:
            wait_for(lambda: again.trouble)
        told = f"{node.name} has joined node 0 at 127.0.0.1:{store.port} as node 1 of 2 already"
        assert again.trouble == f"{told}; if it has ended, start node 0 anew"
        assert not node.trouble and [row.calls for row in summary(folders[0])] == [8]


def test_a_host_that_is_no_name_breaks_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "PAUSE", 0.01)
    with nodes.Guest(nodes.Node(1, 2, "a..b", 9, True), tmp_path) as guest:
        time.sleep(0.2)
        assert guest._thread.is_alive() and not guest.trouble


def test_nodes_of_different_options_do_not_join(tmp_path, monkeypatch):
    """vLLM lets them, and a request above the shorter length is never answered. One name or another is the same."""
    monkeypatch.setattr(nodes, "PAUSE", 0.05)
    store = open_store()
    given = ["--nnodes", "2", "--master-port", str(store.port), "--port", "1"]
    other = ["--headless", "--node-rank", "1"]
    short, same, leader = (
        nodes.of(Options([*given, *options]), "1a2b")
        for options in (
            [*other, "--max-model-len", "64", "--dtype=half"],
            [*other, "--dtype=float16", "--kv-cache-dtype=auto"],
            ["--api-server-count", "2", "--dtype=half"],
        )
    )
    with nodes.Guest(leader, tmp_path):
        wait_for(lambda: store.check(["opshim/options"]))
        with nodes.Guest(same, tmp_path) as guest:
            wait_for(lambda: guest.heard)
            assert not guest.trouble
        store.delete_key("opshim/node1/process")
        with nodes.Guest(short, tmp_path) as guest:
            wait_for(lambda: guest.heard)
    mine = "--dtype float16 model 1a2b"
    told = f"was given {mine}, and node 1 of 2 --max-model-len 64 {mine}: give all nodes the same"
    assert guest.trouble == f"node 0 at 127.0.0.1:{store.port} {told}"


def test_a_model_is_known_by_its_configuration_and_weights(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"ab")
    before = nodes.contents({"layers": 2}, str(tmp_path))
    assert before == nodes.contents({"layers": 2}, str(tmp_path))
    assert before != nodes.contents({"layers": 3}, str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    assert before != nodes.contents({"layers": 2}, str(tmp_path))


def test_a_leader_that_was_never_there_is_waited_for(tmp_path, monkeypatch):
    for name, value in (("PAUSE", 0.01), ("SILENCE", 0.05)):
        monkeypatch.setattr(nodes, name, value)
    with nodes.Guest(nodes.Node(1, 2, "127.0.0.1", 9, True), tmp_path) as guest:
        time.sleep(0.5)
        assert not guest.trouble and not guest.is_ready(0)


def headless(port):
    return ["--headless", "--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]


def test_a_headless_node_waits_for_its_leader_and_needs_no_port(serve):  # noqa: F811
    store = open_store()
    process, _ = serve("joins", *headless(store.port))
    told = lines_until(process.stdout, "has joined")
    assert told[-2] == f"opshim: node 1 of 2 waits for node 0 at 127.0.0.1:{store.port}, which serves\n"
    assert f"opshim: node 1 of 2 has joined node 0 at 127.0.0.1:{store.port} after" in told[-1]
    assert "--port" not in told[-3] and not any(line.startswith("  port") for line in told)
    helper = helper_of(process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and is_gone(helper)
    assert out.endswith("no op was called\nopshim: stopped by SIGINT\n")


def test_a_headless_node_ends_with_its_leader(serve):  # noqa: F811
    store = open_store()
    where = f"node 0 at 127.0.0.1:{store.port}"
    process, _ = serve("starts", *headless(store.port))
    helper = helper_of(process)
    while not store.check(["opshim/node1"]):
        time.sleep(0.05)
    del store
    _, log = process.communicate(timeout=60)
    assert process.returncode == 1 and is_gone(helper)
    assert log.splitlines()[-1] == f"opshim: vLLM was stopped before it was ready: {where} is gone"
