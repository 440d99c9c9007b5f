"""How long messages take: each formula against its bytes, counted by hand."""

from __future__ import annotations

import pytest

from trainkit.plan.time.network import Links

# powers of two apart, so that a wrong factor cannot be taken for another term
LINKS = Links(
    link=1e-9,
    network=16e-9,
    link_latency=1e-6,
    network_latency=4e-6,
    hop=2e-6,
    domain=8,
    world=64,
)
SIZE = 2.0**20


def test_an_exchange_inside_a_domain() -> None:
    """Each of four ranks sends three quarters of its bytes."""
    assert LINKS.exchange(SIZE, 4, 1) == pytest.approx(SIZE * 3 / 4 * 1e-9 + 1e-6)


@pytest.mark.parametrize(("count", "stride", "near"), [(16, 1, 8), (64, 1, 8), (16, 4, 2)])
def test_an_exchange_between_domains(count: int, stride: int, near: int) -> None:
    """What goes to ranks of other domains passes the rank's own share of the network; what stays
    is sent meanwhile."""
    far = SIZE * (count - near) / count
    assert LINKS.exchange(SIZE, count, stride) == pytest.approx(far * 16e-9 + 4e-6)


def test_an_exchange_waits_for_the_slower_of_both() -> None:
    fast = Links(1e-9, 1e-12, 1e-6, 4e-6, 2e-6, 8, 64)
    near = SIZE * 7 / 16 * 1e-9 + 1e-6
    assert fast.exchange(SIZE, 16, 1) == pytest.approx(near + 4e-6)


def test_one_rank_sends_nothing() -> None:
    assert LINKS.exchange(SIZE, 1, 1) == LINKS.gather(SIZE, 1, 1) == LINKS.all_reduce(SIZE, 1, 1)
    assert LINKS.exchange(SIZE, 1, 1) == 0.0


def test_rings() -> None:
    """All-reduce carries twice what all-gather does; every message of that goes n - 1 hops."""
    ring = SIZE * 3 / 4 * 1e-9
    latency = 3 * 1e-6  # log2(2 x 4)
    assert LINKS.all_reduce(SIZE, 4, 1) == pytest.approx(2 * ring + latency)
    hops = 5 * 3 * 2e-6
    assert LINKS.gather(SIZE, 4, 1, messages=5) == pytest.approx(ring + latency + hops)


def test_a_ring_between_domains() -> None:
    """The eight ranks of each domain hand it on over all of their network."""
    volume = 2 * SIZE * 15 / 16
    latency = 4 * 1e-6 + 2 * 4e-6  # log2(2 x 8), log2(2 x 16 / 8)
    assert LINKS.all_reduce(SIZE, 16, 1) == pytest.approx(volume * 16e-9 / 8 + latency)
