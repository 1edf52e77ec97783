import pytest

from grlab.report import stats


def test_interval_is_the_one_worked_by_hand():
    # Differences -1, -2, -3: mean -2, standard deviation 1, t(0.975, 2) = 4.302653, half width 4.302653 / sqrt(3).
    p = stats.paired({0: 1.0, 1: 1.0, 2: 1.0}, {0: 2.0, 1: 3.0, 2: 4.0})
    assert p.mean == pytest.approx(-2)
    assert p.interval == pytest.approx((-2 - 2.484138, -2 + 2.484138), abs=1e-5)
    assert not p.resolved and p.verdict == "not resolved"


def test_pairing_removes_what_the_seeds_share():
    row, base = {0: 1.00, 1: 5.01, 2: 8.99}, {0: 1.10, 1: 5.10, 2: 9.10}
    assert stats.paired(row, base).verdict == "lower"
    assert stats.paired(base, row).verdict == "higher"
    # The same numbers at other seeds are no longer resolved.
    assert stats.paired({0: 5.01, 1: 8.99, 2: 1.00}, base).verdict == "not resolved"


def test_only_shared_seeds_are_paired():
    p = stats.paired({0: 1.0, 1: 2.0, 7: 100.0}, {0: 0.5, 1: 1.5, 9: 3.0})
    assert p.by_seed == {0: 0.5, 1: 0.5}
    assert stats.paired({0: 1.0}, {1: 1.0}) is None


def test_one_seed_has_a_difference_and_no_interval():
    p = stats.paired({4: 1.0}, {4: 3.0})
    assert (p.mean, p.interval, p.resolved, p.verdict) == (-2.0, None, False, "one seed")


def test_equal_rows_are_not_resolved():
    assert stats.paired({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}).verdict == "not resolved"


def test_mean_std_and_ratio():
    assert stats.mean_std({0: 1.0, 1: 2.0, 2: 3.0}) == (2.0, 1.0)  # the sample's: n - 1
    assert stats.mean_std({0: 4.0}) == (4.0, None)
    assert stats.mean_std({}) == (None, None)
    assert stats.median_ratio({0: 1.0, 1: 30.0, 2: 3.0}, {0: 2.0, 1: 10.0, 2: 4.0}) == 0.75
    assert stats.median_ratio({}, {0: 1.0}) is None
