"""Signals that end the suite: taken where nobody else has a use for them, and given back."""

import signal
from collections.abc import Iterator

import pytest

from fixtures.endings import ENDING, give_back, take_signals

pytestmark = pytest.mark.selftest


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = {signum: signal.signal(signum, signal.SIG_DFL) for signum in ENDING}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_they_are_taken_and_given_back() -> None:
    taken = take_signals()
    assert set(taken) == {signal.SIGTERM, signal.SIGHUP}
    with pytest.raises(KeyboardInterrupt, match="signal 1"):
        signal.raise_signal(signal.SIGHUP)
    give_back(taken)
    assert [signal.getsignal(signum) for signum in ENDING] == [signal.SIG_DFL] * 2


def test_one_that_is_ignored_stays_ignored() -> None:
    """As ``nohup`` asks for: the terminal may close, and the run goes on."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    taken = take_signals()
    assert taken == [signal.SIGTERM]
    give_back(taken)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
