"""When to look for messages, and who counts as lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.pulse import BEAT, LEAST, LONGEST, NEAR, PATIENCE, Peers, Silences

silence = st.floats(0, 100)


@given(st.lists(silence, max_size=8), silence)
def test_naps_are_short_and_end_before_a_message_is_expected(before: list[float], quiet: float) -> None:
    silences = Silences()
    for seconds in before:
        silences.ended(seconds)
    usual = min([0.0, *before][-4:])
    nap = silences.nap(quiet)
    assert nap == 0 or LEAST <= nap <= LONGEST
    assert nap > 0 or abs(quiet - usual) <= max(NEAR, LEAST)
    if nap and quiet < usual:
        assert quiet + nap <= usual or nap == LEAST
    if not nap:
        assert silences.nap(usual + 2 * NEAR) > 0


def test_polls_are_dense_only_around_the_usual_silence() -> None:
    silences = Silences()
    for _ in range(4):
        silences.ended(4e-3)
    assert silences.nap(0.0) > 3e-3
    assert silences.nap(3.7e-3) == silences.nap(4.3e-3) == 0
    assert silences.nap(5e-3) > 0
    silences.ended(1e-3)
    assert silences.nap(1e-3) == 0


@given(st.lists(st.floats(0.001, 0.9 * BEAT), min_size=1, max_size=60), st.floats(0, 1e4))
def test_a_silent_peer_is_lost_and_one_that_speaks_is_not(steps: list[float], start: float) -> None:
    peers, now, lost = Peers(), start, []
    peers.watch([1, 2], now)
    for step in steps:
        now += step
        peers.heard(2, now)
        mute, gone = peers.beat(now)
        assert set(mute) <= {1, 2}
        lost += gone
    assert lost == ([1] if sum(steps) > PATIENCE + 1e-6 else []) or abs(sum(steps) - PATIENCE) < 1e-3


def test_time_in_which_this_rank_stood_still_does_not_count() -> None:
    peers = Peers()
    peers.watch([1], 0.0)
    assert peers.beat(10 * PATIENCE) == ([1], [])
    assert peers.beat(10 * PATIENCE + 0.5) == ([], [])
    peers.watch([], 0.0)
    assert peers.beat(1e6) == ([], [])
