"""Which collectives a rank has entered and waits in, by torch's flight recorder. Its names are
private; they are the same in 2.11 to 2.15."""

from __future__ import annotations

import json

import torch.distributed as dist


def known_collectives() -> dict[str, object]:
    """What this process has entered, by torch's flight recorder, which TORCH_FR_BUFFER_SIZE > 0
    turns on; of a group as torch names it, where its n-th collective has number n.

    `entered`: the last number of each group. `waits`: what has not ended, as `operation`
    ("all_reduce"), `number`, `group`, `about` (what the group is for) and the `ranks` of the group.
    Gloo's sends and receives are in no record.
    """
    from torch._C import _distributed_c10d as c10d

    world = dist.distributed_c10d._world
    ranks = {world.pg_names[group]: dist.get_process_group_ranks(group) for group in world.pg_map}
    entered: dict[str, int] = {}
    waits: list[dict[str, object]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # the host's, and the GPU's
        dump = getattr(c10d, name, None)
        entries = json.loads(dump(True, False)).get("entries", []) if dump else []
        for entry in entries:
            group, about = entry["process_group"]
            if entry["is_p2p"]:
                continue
            number = entry["collective_seq_id"]
            entered[group] = max(number, entered.get(group, 0))
            if entry["retired"] or entry["state"] == "completed":  # gloo's states never change
                continue
            operation = entry["profiling_name"].rpartition(":")[2]
            waits.append(
                {
                    "operation": operation,
                    "number": number,
                    "group": group,
                    "about": about,
                    "ranks": ranks.get(group, []),
                }
            )
    # a GPU has many on their way: the oldest of each group is the one that is waited for
    oldest = {wait["group"]: wait for wait in reversed(waits)}
    return {"entered": entered, "waits": list(oldest.values())}
