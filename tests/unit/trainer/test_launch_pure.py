"""The launcher's rules, without processes and sockets."""

import dataclasses
import datetime
import json
import pathlib
import signal
import string
import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.names import Env, ExitCode, RankOrder
from megatronapp_trainer.errors import MessageError, RefusedError, UsageError
from megatronapp_trainer.launch.config import address
from megatronapp_trainer.launch.config.interface import WorkerAddress
from megatronapp_trainer.launch.config.requirements import PreflightRequirements
from megatronapp_trainer.launch.config.settings import LauncherSettings
from megatronapp_trainer.launch.ranks import outcome
from megatronapp_trainer.launch.ranks.environment import rank_environment
from megatronapp_trainer.launch.ranks.failure_cause import Event, FailureState, RankEnd, judge
from megatronapp_trainer.launch.ranks.outcome import LauncherOutcome
from megatronapp_trainer.launch.rendezvous import messages
from megatronapp_trainer.launch.rendezvous.briefing import Briefing
from megatronapp_trainer.launch.rendezvous.messages import EndNotice, ExpectedGang, JoinRequest, StopNotice
from megatronapp_trainer.launch.rendezvous.rank_table import RankTable, build_table

TOKEN = "ab" * 32
PLACE = WorkerAddress(address="10.0.0.2", listen_address="10.0.0.2")
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def join(index: int = 1, **changes: Any) -> JoinRequest:
    fields: dict[str, Any] = {
        "uid": "u",
        "attempt": 2,
        "index": index,
        "address": f"10.0.0.{index + 1}",
        "node": f"node-{index}",
        "num_ranks": 2,
        "port": 29500 + index,
    }
    return JoinRequest(**{**fields, **changes})


EXPECTED = ExpectedGang(uid="u", attempt=2, proc_per_node=(2, 2, 2))


# --- settings ---------------------------------------------------------------------------------------------------------


def environment(**changes: str | None) -> dict[str, str]:
    full: dict[str, str | None] = {
        "MEGATRONAPP_JOB": "demo",
        "MEGATRONAPP_JOB_UID": "u",
        "MEGATRONAPP_ATTEMPT": "0",
        "MEGATRONAPP_WORKER_INDEX": "1",
        "MEGATRONAPP_NUM_WORKERS": "2",
        "MEGATRONAPP_PROC_PER_NODE": "2,3",
        "MEGATRONAPP_COORDINATOR": "worker-0.demo:29400",
        "MEGATRONAPP_SECRET_FILE": "/secret",
        "MEGATRONAPP_SHM_PREFIX": "p",
        "MEGATRONAPP_RUN_DIR": "/run/demo",
        **{f"MEGATRONAPP_{name}": value for name, value in changes.items()},
    }
    return {name: value for name, value in full.items() if value is not None}


def test_settings_are_read_from_the_environment() -> None:
    settings = LauncherSettings.from_environment(environment(HUB_URL="http://h:1"), host_name="box")
    assert settings.num_workers == 2
    assert settings.num_ranks == 3
    assert settings.node == "box"
    assert settings.coordinator is not None
    assert (settings.coordinator.host, settings.coordinator.port) == ("worker-0.demo", 29400)
    assert settings.shm_dir == pathlib.Path("/dev/shm")
    assert settings.hub_url == "http://h:1"


def test_a_lone_worker_needs_no_coordinator() -> None:
    assert LauncherSettings.from_environment(environment(PROC_PER_NODE="3x2"), host_name="box").proc_per_node == (3, 3)
    alone = environment(NUM_WORKERS="1", PROC_PER_NODE="4", WORKER_INDEX="0", COORDINATOR=None, SECRET_FILE=None)
    assert LauncherSettings.from_environment(alone, host_name="box").coordinator is None
    with pytest.raises(UsageError, match="MEGATRONAPP_SECRET_FILE is not set"):
        LauncherSettings.from_environment({**alone, Env.STATUS_PORT: "19401"}, host_name="box")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ('{"enabled": false, "gpus": 8}', None),
        ('{"enabled": true, "timeoutSeconds": 7}', PreflightRequirements(timeout_s=7)),
        (
            '{"gpus": 0, "shmBytes": 5, "rdma": true, "hca": "mlx5"}',
            PreflightRequirements(gpus=0, shm_bytes=5, rdma=True, hca="mlx5"),
        ),
        ('{"rdma": {"enabled": false}, "hca": null}', PreflightRequirements()),
    ],
)
def test_preflight_settings_are_parsed(text: str | None, expected: PreflightRequirements | None) -> None:
    assert LauncherSettings.from_environment(environment(PREFLIGHT=text), host_name="box").preflight == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"JOB": None}, "MEGATRONAPP_JOB is not set"),
        ({"SECRET_FILE": None}, "MEGATRONAPP_SECRET_FILE is not set"),
        ({"ATTEMPT": "-1"}, "MEGATRONAPP_ATTEMPT is '-1'; it must be an integer"),
        ({"ATTEMPT": "two"}, "must be an integer"),
        ({"WORKER_INDEX": "2"}, "MEGATRONAPP_WORKER_INDEX is 2, but the gang has 2 workers"),
        ({"NUM_WORKERS": "3"}, r"MEGATRONAPP_NUM_WORKERS is 3, but .* \(2,3\) names 2"),
        ({"PROC_PER_NODE": "2,0"}, "write the ranks of each worker as 4,4"),
        ({"PROC_PER_NODE": "2;3"}, "write the ranks of each worker"),
        ({"PROC_PER_NODE": "2x0"}, "write the ranks of each worker"),
        ({"PROC_PER_NODE": "2x3"}, r"MEGATRONAPP_NUM_WORKERS is 2, but .* \(2x3\) names 3"),
        ({"COORDINATOR": "worker-0"}, "write it as host:port"),
        ({"COORDINATOR": "worker-0:99999"}, "write it as host:port"),
        ({"COORDINATOR": "[::1]:29400"}, "IPv6 is not supported"),
        ({"RANK_ORDER": "rack"}, "MEGATRONAPP_RANK_ORDER is 'rack'; write one of index, ip, topology"),
        ({"STATUS_PORT": "0"}, "MEGATRONAPP_STATUS_PORT is '0'; write a port"),
        ({"PREFLIGHT": "{"}, "MEGATRONAPP_PREFLIGHT is not JSON"),
        ({"PREFLIGHT": "[]"}, "MEGATRONAPP_PREFLIGHT is not an object"),
        ({"PREFLIGHT": '{"gpus": "8"}'}, "gpus is '8'; it must be an integer"),
    ],
)
def test_wrong_settings_name_the_variable(changes: dict[str, str | None], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LauncherSettings.from_environment(environment(**changes), host_name="box")


@pytest.mark.parametrize(
    ("text", "message"), [("::1", "IPv6"), ("worker-0", "not an IPv4 address"), ("1.2.3", "not an IPv4")]
)
def test_an_own_address_must_be_ipv4(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        address.own_address(text, "unused")
    assert address.own_address("127.0.0.9", "unused") == "127.0.0.9"


# --- rank table and environment ---------------------------------------------------------------------------------------


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=20), seed=st.randoms())
def test_ranks_are_numbered_in_worker_order(counts: list[int], seed: Any) -> None:
    joins = [join(index, num_ranks=count, address="10.0.0.1") for index, count in enumerate(counts)]
    seed.shuffle(joins)
    table = build_table(joins)
    assert [rank for worker in table.workers for rank in worker.ranks] == list(range(sum(counts)))
    assert [len(worker.ranks) for worker in table.workers] == counts
    assert [worker.index for worker in table.workers] == list(range(len(counts)))
    assert table.world_size == sum(counts)
    assert (table.master_address, table.master_port) == ("10.0.0.1", 29500)


def test_the_table_survives_json_and_a_changed_table_is_refused() -> None:
    table = build_table([join(1), join(0)])
    document = json.loads(json.dumps(table.to_json()))
    assert set(document) == {"attempt", "digest", "masterAddr", "masterPort", "workers"}
    assert set(document["workers"][0]) == {"index", "address", "node", "ranks"}
    assert RankTable.from_json(document) == table
    document["masterPort"] += 1
    with pytest.raises(ValueError, match="digest"):
        RankTable.from_json(document)


@given(
    places=st.lists(
        st.tuples(st.ip_addresses(v=4), st.sampled_from(["", "a", "a,1", "a,2", "b,1", "a-b,1"]), st.integers(1, 4)),
        min_size=1,
        max_size=12,
    ),
    order=st.sampled_from(RankOrder),
    seed=st.randoms(),
)
def test_ranks_follow_the_configured_order(places: list[Any], order: RankOrder, seed: Any) -> None:
    joins = [
        join(index, address=str(found), topology=labels, num_ranks=count)
        for index, (found, labels, count) in enumerate(places)
    ]
    keys = {
        RankOrder.INDEX: lambda request: (request.index,),
        RankOrder.IP: lambda request: ([int(part) for part in request.address.split(".")], request.index),
        RankOrder.TOPOLOGY: lambda request: (request.topology.split(","), request.index),
    }
    expected = sorted(joins, key=keys[order])
    seed.shuffle(joins)
    table = build_table(joins, order)
    assert [worker.index for worker in table.workers] == [request.index for request in expected]
    assert [rank for worker in table.workers for rank in worker.ranks] == list(range(table.world_size))
    assert (table.master_address, table.master_port) == (expected[0].address, expected[0].port)
    for place, request in enumerate(expected):
        assert len(table.worker(request.index).ranks) == request.num_ranks
        assert table.node_rank(request.index) == place


def test_a_rank_knows_its_place_in_another_order() -> None:
    joins = [join(0, num_ranks=2, topology="rack-b"), join(1, num_ranks=1, topology="rack-a")]
    table = build_table(joins, RankOrder.TOPOLOGY)
    place = WorkerAddress(address="10.0.0.1", interface="ib0", listen_address="")
    made = rank_environment({"GLOO_SOCKET_IFNAME": "lo"}, table, worker=0, local_rank=1, place=place)
    assert (made["RANK"], made["WORLD_SIZE"], made["NPROC_PER_NODE"]) == ("2", "3", "2")
    assert (made["NODE_RANK"], made["GROUP_RANK"], made["NNODES"]) == ("1", "1", "2")
    assert made["NODE_IPS"] == "10.0.0.2,10.0.0.1"
    assert made["MEGATRON_NODE_IPS"] == "10.0.0.2,10.0.0.1,10.0.0.1"
    assert (made["MASTER_ADDR"], made["MASTER_PORT"]) == ("10.0.0.2", "29501")
    assert (made["GLOO_SOCKET_IFNAME"], made["NCCL_SOCKET_IFNAME"]) == ("lo", "=ib0")


@pytest.mark.parametrize(("workers", "in_environment"), [(400, True), (2048, False)])
def test_a_rank_starts_however_large_its_gang_is(workers: int, in_environment: bool) -> None:
    """Linux refuses a program with a variable of more than 128 KiB."""
    address = "10.128.{}.{}"
    joins = [join(index, num_ranks=8, address=address.format(*divmod(index, 256))) for index in range(workers)]
    table = build_table(joins)
    base = {"PATH": "/usr/bin:/bin", "MEGATRON_NODE_IPS": "from elsewhere"}
    made = rank_environment(base, table, worker=0, local_rank=0, place=PLACE)
    assert made["WORLD_SIZE"] == str(workers * 8)
    assert ("MEGATRON_NODE_IPS" in made) is in_environment
    assert len(made["NODE_IPS"].split(",")) == workers
    subprocess.run(["true"], env=made, check=True)


def test_a_table_without_us_or_of_another_attempt_is_not_believed() -> None:
    own, other = join(1), join(0)
    briefing = Briefing.of([own, other], RankOrder.INDEX, report=True)
    assert Briefing.from_json(json.loads(json.dumps(briefing.to_json())), own) == briefing
    for changed in (join(1, attempt=3), join(2), join(1, address="10.9.9.9"), join(1, num_ranks=3)):
        with pytest.raises(MessageError, match="a rank table that cannot be used"):
            Briefing.from_json(briefing.to_json(), changed)
    with pytest.raises(MessageError, match="in place of the rank table"):
        Briefing.from_json({"type": "progress"}, own)


def test_rank_environment() -> None:
    table = build_table([join(0, num_ranks=2), join(1, num_ranks=3)])
    base = {Env.JOB: "demo", Env.NODE_NAME: "", Env.WORKER_INDEX: "4", "RANK": "77", "GLOO_SOCKET_IFNAME": "lo"}
    made = rank_environment(base, table, worker=1, local_rank=2, place=PLACE)
    assert made["RANK"] == "4"
    assert made["LOCAL_RANK"] == "2"
    assert made["WORLD_SIZE"] == "5"
    assert made["LOCAL_WORLD_SIZE"] == "3"
    assert made["GROUP_RANK"] == "1"
    assert (made["MASTER_ADDR"], made["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert made["OMP_NUM_THREADS"] == made["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert made["GLOO_SOCKET_IFNAME"] == "lo"
    assert made[Env.JOB] == "demo"
    assert (made[Env.NODE_NAME], made[Env.WORKER_INDEX]) == ("node-1", "1")  # a spare has the index of its place
    assert (
        rank_environment({"OMP_NUM_THREADS": "4"}, table, worker=0, local_rank=0, place=PLACE)["OMP_NUM_THREADS"] == "4"
    )


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message", "final"),
    [
        ({"uid": "other"}, "this is job u, not other", False),
        ({"attempt": 1}, "attempt 1 joins attempt 2, late", True),
        ({"attempt": 3}, "attempt 3 joins attempt 2, early", False),
        ({"index": 3}, "index 3 in a gang of 3", True),
        ({"index": 0}, "worker 0 is already here", True),
        ({"num_ranks": 4}, "worker 1 brings 4 ranks, not 2", True),
        ({"address": "fe80::1"}, "not one of IPv4", True),
    ],
)
def test_refused_joins_state_the_reason(changes: dict[str, Any], message: str, final: bool) -> None:
    with pytest.raises(RefusedError, match=message) as caught:
        messages.check_join(join(**{"index": 1, **changes}), EXPECTED, {0})
    assert caught.value.final is final


def test_who_belongs_here_may_join() -> None:
    messages.check_join(join(1), EXPECTED, {0, 2})


def sessions(worker_token: str = TOKEN) -> tuple[messages.ChannelCipher, messages.ChannelCipher]:
    nonces = {"coordinator_nonce": messages.new_nonce(), "worker_nonce": messages.new_nonce()}
    coordinator = messages.ChannelCipher(TOKEN, side="coordinator", **nonces)
    return coordinator, messages.ChannelCipher(worker_token, side="worker", **nonces)


def test_only_a_sealed_refusal_is_final() -> None:
    coordinator, worker = sessions()
    document = messages.refusal_to_json(RefusedError("no", final=True))
    for line, final in ((messages.encode(document), False), (coordinator.seal(document), True)):
        with pytest.raises(RefusedError, match="no") as caught:
            worker.open(line)
        assert caught.value.final is final


def test_sealed_lines_pass_both_ways_and_never_show_the_secret() -> None:
    coordinator, worker = sessions()
    for number in range(3):
        line = worker.seal({"number": number})
        assert TOKEN.encode() not in line
        assert coordinator.open(line) == {"number": number}
        assert worker.open(coordinator.seal({"answer": number})) == {"answer": number}


def test_lines_of_another_key_repeated_reflected_or_changed_are_noticed() -> None:
    coordinator, worker = sessions()
    line = worker.seal({"a": 1})
    with pytest.raises(MessageError, match="wrong secret"):
        worker.open(line)
    with pytest.raises(MessageError, match="wrong secret"):
        coordinator.open(line.replace(b"1", b"2", 1))
    coordinator.open(line)
    with pytest.raises(MessageError, match="wrong secret"):
        coordinator.open(line)
    stranger = sessions("cd" * 32)[1]
    with pytest.raises(MessageError, match="wrong secret"):
        sessions()[0].open(stranger.seal({}))


@given(line=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_any_bytes_are_refused_as_messages(line: bytes) -> None:
    coordinator, _ = sessions()
    with pytest.raises((MessageError, RefusedError)):
        coordinator.open(line)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)
)


@given(document=st.dictionaries(st.sampled_from([*messages.join_to_json(join()), "code", "message"]), json_values))
def test_any_object_is_a_message_or_a_message_error(document: dict[str, Any]) -> None:
    for parse in (messages.join_from_json, messages.notice_from_json):
        try:
            parse(document)
        except MessageError:
            continue


@given(
    notice=st.builds(
        EndNotice,
        worker=st.integers(0, 99),
        code=st.integers(0, 255),
        rank=st.none() | st.integers(0, 999),
        message=st.text(max_size=30),
        early=st.booleans(),
    )
)
def test_messages_survive_json(notice: EndNotice) -> None:
    for received in (notice, StopNotice(worker=notice.worker)):
        assert messages.notice_from_json(json.loads(json.dumps(messages.notice_to_json(received)))) == received
    assert messages.join_from_json(json.loads(json.dumps(messages.join_to_json(join())))) == join()


def test_greetings_of_others_are_noticed() -> None:
    nonce = messages.new_nonce()
    assert messages.parse_greeting(messages.greeting(nonce)) == nonce
    for line in (b"GET / HTTP/1.1\r\n", b'{"protocol": 2, "nonce": "00"}', b"[1]", b'{"protocol": 1, "nonce": 5}'):
        with pytest.raises(MessageError):
            messages.parse_greeting(line)


# --- evidence ---------------------------------------------------------------------------------------------------------


def end(rank: int, code: int = 0, **changes: Any) -> RankEnd:
    return RankEnd(rank=rank, local_rank=rank, code=code, **changes)


LOST = end(1, ExitCode.PEER_LOST)
NAMED = EndNotice(worker=1, code=1, rank=3, message="rank 3 on worker 1 ended with signal 9")
EARLY = EndNotice(worker=1, code=75, early=True)
ELSEWHERE_LOST = EndNotice(worker=2, code=ExitCode.PEER_LOST)


@pytest.mark.parametrize(
    ("events", "stop_requested", "standing", "reason"),
    [
        pytest.param([], False, FailureState.FINE, None, id="nothing yet"),
        pytest.param([end(0), end(1, 75)], False, FailureState.FINE, None, id="orderly ends"),
        pytest.param([end(0), end(1, 65), end(2, 66)], False, FailureState.CERTAIN, end(1, 65), id="first own failure"),
        pytest.param([LOST], False, FailureState.SUSPICIOUS, LOST, id="a lost peer"),
        pytest.param([LOST, end(2, 1)], False, FailureState.CERTAIN, end(2, 1), id="culprit after its victim"),
        pytest.param([LOST, NAMED], False, FailureState.CERTAIN, NAMED, id="culprit on another worker"),
        pytest.param([NAMED, end(2, 1)], False, FailureState.CERTAIN, NAMED, id="what came first"),
        pytest.param([ELSEWHERE_LOST], False, FailureState.SUSPICIOUS, ELSEWHERE_LOST, id="victim elsewhere"),
        pytest.param([EndNotice(worker=1, code=0)], False, FailureState.FINE, None, id="complete elsewhere"),
        pytest.param([EndNotice(worker=1, code=75)], False, FailureState.FINE, None, id="preempted elsewhere"),
        pytest.param(
            [LOST, end(0, signal=9, killed_by_us=True)], False, FailureState.SUSPICIOUS, LOST, id="our own kill"
        ),
        pytest.param([end(0, signal=15)], True, FailureState.ENDING, None, id="stopped early, as asked"),
        pytest.param([end(0, signal=15)], False, FailureState.CERTAIN, end(0, signal=15), id="SIGTERM from a stranger"),
        pytest.param([end(0, signal=11)], True, FailureState.CERTAIN, end(0, signal=11), id="crash while stopping"),
        pytest.param(
            [LOST, end(0, signal=15)], True, FailureState.ENDING, None, id="lost one that was stopped early here"
        ),
        pytest.param([LOST, EARLY], True, FailureState.ENDING, None, id="lost one that was stopped early elsewhere"),
        pytest.param(
            [EARLY, end(1, 67)], True, FailureState.CERTAIN, end(1, 67), id="own failure beside an early stop"
        ),
        pytest.param(
            [LOST, end(0, signal=9, killed_by_us=True)], True, FailureState.SUSPICIOUS, LOST, id="loss while stopping"
        ),
    ],
)
def test_judgement(events: list[Event], stop_requested: bool, standing: FailureState, reason: Event | None) -> None:
    judgement = judge(events, stop_requested=stop_requested)
    assert judgement.standing is standing
    assert judgement.reason == reason


def lines(rank: int) -> str:
    return f"last line of rank {rank}"


def test_outcome_of_orderly_ends() -> None:
    assert outcome.complete([end(0), end(1)]).code is ExitCode.OK
    assert outcome.complete([end(0, 75), end(1, 75)]).code is ExitCode.PREEMPTED
    early = outcome.complete([end(0, signal=15), end(1, signal=9, killed_by_us=True)])
    assert early.code is ExitCode.PREEMPTED
    assert "before a rank could answer" in early.message
    victims = outcome.complete([end(0, ExitCode.PEER_LOST), end(1, signal=9, killed_by_us=True)])
    assert (victims.code, victims.early) == (ExitCode.PREEMPTED, True)
    assert outcome.notice_of(victims, 0).early


@pytest.mark.parametrize("code", [*sorted(set(ExitCode) - {0, 69, 70, 75}), 7, 128, 201, 202])
def test_codes_of_ranks_are_passed_on(code: int) -> None:
    found = outcome.failed(end(3, code), lines)
    assert (found.code, found.rank, found.signal, found.message) == (code, 3, None, lines(3))


def test_a_superseded_rank_has_a_reason_of_its_own() -> None:
    found = outcome.failed(end(3, ExitCode.SUPERSEDED), lines)
    assert (found.code, found.reason, found.rank) == (ExitCode.SUPERSEDED, "Superseded", 3)


def test_ends_by_signals_are_own_failures() -> None:
    for code in (129, 139, 192):
        assert outcome.failed(end(3, code), lines).code is ExitCode.OWN_FAILURE
    killed = outcome.failed(end(3, signal=signal.SIGKILL), lines)
    assert (killed.code, killed.signal, killed.reason) == (ExitCode.OWN_FAILURE, 9, "RankKilled")


def test_lost_peers_name_the_culprit_where_it_is_known() -> None:
    assert outcome.failed(NAMED, lines) == LauncherOutcome(
        code=ExitCode.PEER_LOST, reason="PeerLost", message=NAMED.message
    )
    unnamed = outcome.failed(LOST, lines)
    assert unnamed.code is ExitCode.PEER_LOST
    assert unnamed.message == "rank 1 lost a peer that no launcher has identified:\nlast line of rank 1"


def test_the_notice_has_rank_worker_and_last_line() -> None:
    failed = LauncherOutcome(code=ExitCode.DATA, reason="RankFailed", message="a\nb", rank=5, local_rank=1)
    killed = dataclasses.replace(failed, code=ExitCode.OWN_FAILURE, signal=9)
    assert outcome.notice_of(killed, 2).message == "rank 5 on worker 2 ended with signal 9"
    expected = EndNotice(worker=2, code=65, rank=5, message="rank 5 on worker 2 ended with exit code 65: b")
    assert outcome.notice_of(failed, 2) == dataclasses.replace(expected, reason="RankFailed", log="a\nb")


@given(message=st.one_of(st.text(max_size=5000), st.text(alphabet='\x00\U0001f600"\\é', min_size=400, max_size=3000)))
def test_record_fits_and_keeps_the_end(message: str) -> None:
    record = LauncherOutcome(
        code=ExitCode.OWN_FAILURE, reason="RankFailed", message=message, rank=7, local_rank=3, signal=9
    )
    text = outcome.to_json(record, attempt=4, worker=1, now=NOW)
    assert len(text.encode()) <= outcome.MAX_BYTES
    document = json.loads(text)
    assert message.endswith(document["message"])
    assert document["message"] or not message
    del document["message"]
    assert document == {
        "attempt": 4,
        "worker": 1,
        "code": 1,
        "reason": "RankFailed",
        "rank": 7,
        "localRank": 3,
        "signal": 9,
        "finishedAt": "2026-01-02T03:04:05.000+00:00",
    }


def test_tail_gives_the_last_lines_in_clean_text(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "rank-0.log"
    assert outcome.tail(log) == ""
    log.write_bytes(
        b"x" * 9000 + b"\n\n" + b"".join(b"line %d\n" % i for i in range(30)) + b"\x1b[31mbad \xff end\x07\n"
    )
    found = outcome.tail(log).splitlines()
    assert len(found) == outcome.TAIL_LINES
    assert found[-2] == "line 29"
    assert found[-1] == "[31mbad \N{REPLACEMENT CHARACTER} end"
    assert not set("".join(found)) - set(string.printable) - {"\N{REPLACEMENT CHARACTER}"}
