"""A first signal asks for the end, a second one is the end."""

import signal

import pytest

from grlab.train.signals import StopSignal


@pytest.fixture
def stop():
    stop = StopSignal()
    yield stop
    stop.restore()


def test_the_second_signal_ends_the_run(stop):
    signal.raise_signal(signal.SIGINT)
    assert stop.requested
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_after_the_word_of_another_process_is_the_first_one(stop):
    """Slurm signals all processes of a run, and their word of it may be the faster."""
    stop.follow()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
