"""How long messages take. A group of ranks is `count` ranks, `stride` apart; ranks of a domain
talk over its links, others over the network, of which each device has its share."""

from __future__ import annotations

import math

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.plan.time.setup import Hardware


@dataclass(frozen=True)
class Links:
    """What is reached: seconds a byte and seconds a message."""

    link: float
    network: float
    link_latency: float
    network_latency: float
    hop: float
    domain: int
    world: int

    def inside(self, count: int, stride: int) -> int:
        """Ranks of such a group in one domain."""
        return max(1, min(count, self.domain // stride))

    def straddles(self, count: int, stride: int) -> bool:
        """Whether some groups lie across two domains, since no number of them fills one."""
        width = count * stride
        return width < self.domain < self.world and self.domain % width > 0

    def collective(self, volume: float, count: int, stride: int) -> float:
        """A ring that carries `volume` bytes past each rank: 2 (n - 1) / n of the buffer for
        all-reduce, (n - 1) / n for reduce-scatter and all-gather (Thakur et al. 2005).

        The k ranks in one domain hand the ring on over all of their shares of the network at
        once, since the ring leaves a node as often as it has network cards (NCCL's channels).

        Args:
            volume: bytes that pass each rank.
            count: ranks of the group.
            stride: between its ranks.
        """
        if count <= 1:
            return 0.0
        near = self.inside(count, stride)
        latency = self.link_latency * math.log2(2 * near)
        slowest = self.link
        if self.straddles(count, stride):  # only those at both ends of a domain use its network
            slowest = max(slowest, self.network * min(1.0, 2 * stride / self.domain))
            latency += self.network_latency
        if near < count:
            slowest = max(self.network / near, self.link if near > 1 else 0.0)
            latency += self.network_latency * math.log2(2 * count / near)
        return volume * slowest + latency

    def all_reduce(self, size: float, count: int, stride: int) -> float:
        """Of `size` bytes."""
        return self.collective(2 * size * (count - 1) / count, count, stride)

    def gather(self, size: float, count: int, stride: int, messages: float = 1.0) -> float:
        """All-gather to, or reduce-scatter from, `size` bytes on each rank. NCCL has only rings
        for them, not trees: every message goes past all ranks, one hop after the other.

        Args:
            size: bytes.
            count: ranks of the group.
            stride: between its ranks.
            messages: that carry the bytes.
        """
        if count <= 1:
            return 0.0
        hops = messages * (count - 1) * self.hop
        return hops + self.collective(size * (count - 1) / count, count, stride)

    def exchange(self, size: float, count: int, stride: int) -> float:
        """All-to-all of `size` bytes from each rank: what leaves the domain goes over a device's
        own share of the network."""
        if count <= 1:
            return 0.0
        near = self.inside(count, stride)
        far = size * (count - near) / count
        time = size * (near - 1) / count * self.link + self.link_latency
        if far:
            time = max(time, far * self.network) + self.network_latency
        return time

    def send(self, size: float) -> float:
        """From a rank to another of its domain."""
        return size * self.link + self.link_latency

    def send_far(self, size: float, busy: float) -> float:
        """From each of the ranks of a node that are `busy`, as a part of them, to another."""
        return size * self.network * busy + self.network_latency


def links_of(machine: Hardware, world: int, fitted: dict[str, float]) -> Links:
    """What is reached of a machine's links."""
    reached = fitted["network"] if machine.remote_memory else fitted["sockets"]
    return Links(
        link=1 / (machine.link * fitted["link"]),
        network=1 / (machine.network * reached),
        link_latency=fitted["link_latency"],
        network_latency=fitted["network_latency"],
        hop=fitted["hop"],
        domain=machine.domain,
        world=world,
    )
