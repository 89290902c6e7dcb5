"""When a worker waits awake for its next step."""

from __future__ import annotations

from workers.cadence import Cadence


def test_it_stays_awake_after_a_short_pause_and_for_no_longer() -> None:
    cadence = Cadence(0.010)
    assert not cadence.stays_awake(5.0)
    cadence.ran(5.000, 5.005)
    assert not cadence.stays_awake(5.006)  # one inference says nothing about the next
    cadence.ran(5.012, 5.017)
    assert cadence.stays_awake(5.018)
    assert cadence.stays_awake(5.0269)
    assert not cadence.stays_awake(5.0271)


def test_steps_far_apart_let_it_sleep() -> None:
    cadence = Cadence(0.010)
    for count in range(5):
        cadence.ran(count * 0.1, count * 0.1 + 0.05)
        assert not cadence.stays_awake(count * 0.1 + 0.051)
    cadence.ran(0.455, 0.46)  # closely behind the last one
    assert cadence.stays_awake(0.461)


def test_pauses_too_short_to_fall_asleep_in_let_it_sleep() -> None:
    cadence = Cadence(0.010)
    for count in range(5):
        cadence.ran(count * 0.010, count * 0.010 + 0.008)
        assert not cadence.stays_awake(count * 0.010 + 0.0081)


def test_switched_off_it_always_sleeps() -> None:
    cadence = Cadence(0.0)
    for count in range(5):
        cadence.ran(count * 1e-3, count * 1e-3 + 9e-4)
        assert not cadence.stays_awake(count * 1e-3 + 9e-4)
