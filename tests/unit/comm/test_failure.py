"""The one error that is made of what happened on every rank."""

from dataclasses import replace

import pytest

from plait.comm.failure import Outcome, RankReport, build_failure
from plait.comm.trace import Noted
from plait.errors import ConfigError, ShardingError, TransportError, TransportTimeout

SUM = "all_reduce [4x8] float32 over tp (mlp)"
GATHER = "all_gather [4x8] float32 over tp (mlp)"


def report(rank: int, outcome: Outcome, **fields: object) -> RankReport:
    noted = (Noted("tp", 0, 6, GATHER), Noted("tp", 0, 7, SUM))
    return replace(RankReport(rank, outcome, who=f"rank {rank} (tp={rank})", noted=noted), **fields)


def raised(rank: int, error: Exception) -> RankReport:
    return replace(
        RankReport.of_error(rank, error), who=f"rank {rank} (tp={rank})", noted=report(rank, Outcome.RAISED).noted
    )


def timed_out(rank: int) -> RankReport:
    return raised(rank, TransportTimeout(f"rank {rank} timed out"))


def test_the_same_error_of_all_ranks_is_said_once_and_keeps_its_hint():
    error = build_failure([raised(rank, ConfigError("no such file", hint="look")) for rank in range(4)])
    assert type(error) is ConfigError
    assert (error.message, error.hint) == ("no such file", "look")


def test_an_error_of_some_ranks_names_them_and_keeps_its_type():
    error = build_failure([timed_out(0), raised(1, ShardingError("odd", hint="even")), report(2, Outcome.ABSENT)])
    assert type(error) is ShardingError
    assert (error.message, error.hint) == ("rank 1 (tp=1): odd", "even")


def test_different_errors_on_purpose_are_listed_under_their_ranks():
    error = build_failure([raised(0, ConfigError("a")), raised(1, ConfigError("b")), raised(2, ConfigError("a"))])
    assert error.message == "rank 0 (tp=0), rank 2 (tp=2): a\nrank 1 (tp=1): b"


def test_a_crash_shows_every_rank_with_its_last_collective_and_the_culprit_first():
    error = build_failure([timed_out(0), raised(1, ValueError("boom")), report(2, Outcome.ABSENT, noted=())])
    assert type(error) is TransportError
    heading, *rows = error.message.splitlines()
    assert heading == "rank 1 (tp=1) raised ValueError: boom"
    assert [row.split(" (")[0] for row in rows if row.startswith("  rank")] == ["  rank 1", "  rank 0", "  rank 2"]
    assert rows.count(f"      last collective #7 on tp: {SUM}") == 2
    assert "ValueError: boom" in error.message.partition("--- rank 1")[2]


def test_a_death_is_a_cause_before_those_who_noticed():
    error = build_failure([timed_out(0), report(1, Outcome.DIED, detail="killed by SIGKILL")])
    assert type(error) is TransportError
    assert error.message.startswith("rank 1 (tp=1) died: killed by SIGKILL\n")


@pytest.mark.parametrize("outcome", [Outcome.ABSENT, Outcome.RETURNED])
def test_ranks_that_did_not_join_are_named_with_the_collective_that_missed_them(outcome):
    error = build_failure([timed_out(0), report(1, outcome, noted=report(1, outcome).noted[:1]), timed_out(2)])
    assert type(error) is TransportTimeout
    assert error.message.startswith(
        f"rank 1 (tp=1) did not come: rank 0 (tp=0), rank 2 (tp=2) waited in #7 on tp: {SUM}\n"
    )


def test_ranks_that_went_on_are_not_blamed_beside_one_that_is_gone():
    error = build_failure([timed_out(0), report(1, Outcome.ABSENT), report(2, Outcome.WENT_ON, detail="for 3 s")])
    assert error.message.startswith("rank 1 (tp=1) did not come: rank 0 (tp=0) waited in #7")
    error = build_failure([timed_out(0), report(1, Outcome.WENT_ON, detail="for 3 s")])
    assert error.message.startswith("rank 1 (tp=1) did not come: rank 0 (tp=0) waited in #7")


def test_a_rank_that_only_noticed_shows_no_traceback():
    with pytest.raises(TransportTimeout) as caught:
        raise TransportTimeout("timed out")
    noticed = raised(0, caught.value)
    died = build_failure([noticed, report(1, Outcome.DIED, detail="killed by SIGKILL")])
    assert "Traceback" not in died.message
    assert "TransportTimeout: timed out" in died.message
    assert "Traceback" in build_failure([noticed]).message, "nothing else says where it was"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer", TransportError),
        ("[.../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv", TransportTimeout),
    ],
)
def test_what_torch_raises_by_itself_when_a_peer_is_lost_is_no_cause(text, kind):
    error = build_failure([raised(0, RuntimeError(text)), report(1, Outcome.ABSENT)])
    assert type(error) is kind
    assert error.message.startswith("rank 1 (tp=1) ")


def test_ranks_that_all_say_nothing_are_named_with_the_time_they_were_given():
    error = build_failure([report(rank, Outcome.ABSENT, detail="no answer within 120.0 s") for rank in range(2)])
    assert type(error) is TransportTimeout
    assert error.message.startswith("rank 0 (tp=0), rank 1 (tp=1) did not come: no answer within 120.0 s\n")


def test_a_connection_that_closed_is_not_called_a_timeout():
    error = build_failure([raised(0, TransportError("closed")), report(1, Outcome.ABSENT)])
    assert type(error) is TransportError
    assert error.message.startswith("rank 1 (tp=1) went away")


def test_ranks_that_issued_another_collective_are_reported_before_everything_else():
    other = (Noted("tp", 0, 6, GATHER), Noted("tp", 0, 7, GATHER))
    error = build_failure([timed_out(0), replace(timed_out(1), noted=other), timed_out(2)])
    heading, first, *_ = error.message.splitlines()
    assert heading.startswith("ranks issued different collectives: #7 on tp")
    assert first.startswith("  rank 1")


def test_the_order_of_collectives_is_compared_not_only_the_last():
    swapped = (Noted("tp", 0, 6, SUM), Noted("tp", 0, 7, GATHER), Noted("tp", 0, 8, SUM))
    in_order = (Noted("tp", 0, 6, GATHER), Noted("tp", 0, 7, SUM), Noted("tp", 0, 8, SUM))
    error = build_failure([replace(timed_out(0), noted=in_order), replace(timed_out(1), noted=swapped)])
    assert error.message.startswith("ranks issued different collectives: #6 on tp")


def test_groups_of_one_axis_are_not_compared_with_each_other():
    first, second = Noted("dp", 0, 3, "all_reduce [10]"), Noted("dp", 1, 3, "all_reduce [11]")
    error = build_failure([replace(timed_out(0), noted=(first,)), replace(timed_out(1), noted=(second,))])
    assert type(error) is TransportTimeout
    assert error.message.startswith("rank 0 (tp=0), rank 1 (tp=1) failed")


def test_one_traceback_is_shown_once_for_all_ranks_that_have_it():
    boom = ValueError("boom")
    error = build_failure([raised(0, boom), raised(1, boom)])
    assert error.message.count("ValueError: boom\n") == 3  # heading and two rows
    assert "--- rank 0 (tp=0), rank 1 (tp=1)\n" in error.message
