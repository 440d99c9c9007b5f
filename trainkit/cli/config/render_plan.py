"""The page that `plan` prints: sizes, memory by rank as bars, time, disk, objections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trainkit.base.errors import Problem
from trainkit.cli.tables import marked
from trainkit.jobs.schema import EngineSource, Job
from trainkit.plan.duration import Duration
from trainkit.plan.host import HostMemory
from trainkit.plan.memory import Memory, RankMemory
from trainkit.plan.objection import Objection
from trainkit.plan.planner import Plan
from trainkit.plan.storage import GIB, Storage

# columns of the longest bar; of what stands beside it
BAR = 48
BESIDE = 42
ROWS = 8  # bars at most
LEGEND = 3  # entries of the legend side by side
GAP = 3  # blanks between them
HEADINGS = 8  # columns that the page's headings take
# part of RankMemory: (name, letter without colours, colour)
PARTS = {
    "parameter_bytes": ("weights", "W", "blue"),
    "gathered_bytes": ("gathered copies", "C", "cyan"),
    "gradient_bytes": ("gradients", "G", "magenta"),
    "optimizer_bytes": ("optimizer", "O", "yellow"),
    "activation_bytes": ("activations", "A", "green"),
    "logit_bytes": ("logits", "L", "red"),
    "buffer_bytes": ("buffers", "B", "bright_blue"),
    "staging_bytes": ("copies of the state", "S", "bright_yellow"),
    "reserve_bytes": ("assumed reserve", "r", "bright_black"),
}


def print_page(
    console: Console,
    job: Job,
    plan: Plan,
    command: str,
    *,
    refused: Sequence[Problem] = (),
    engine: EngineSource | None = None,
) -> None:
    """Print a plan for people.

    Args:
        console: where to.
        job: the job.
        plan: its plan.
        command: the command that runs tasks here, such as "invoke".
        refused: why this version does not launch the job, though it can be planned.
        engine: where an engine comes from that is not trainkit's own.
    """
    page = Table.grid(padding=(0, 2))
    page.add_column(no_wrap=True, style="bold")
    page.add_column(overflow="fold")
    if engine is not None:
        page.add_row("engine", _engine(engine))
    for heading, content in _rows(console, job, plan):
        page.add_row(heading, content)
    console.print(f"[bold]{plan.job}[/]  {escape(job.description)}".rstrip())
    console.print(page)
    _print_list(console, "note", plan.notes, "yellow")
    _print_list(console, "objection", plan.objections, "red")
    _print_list(console, "not known yet:", plan.not_known, "yellow")
    if plan.objections:
        count = len(plan.objections)
        console.print(f"[red]not feasible[/]: {count} objection{'s' if count > 1 else ''}")
        return
    if plan.not_known:
        verdict = "[yellow]not known yet[/] whether it is feasible"
    else:
        verdict = "[green]feasible[/]"
    if not refused:
        console.print(f"{verdict}: {command} train {plan.job}")
    else:
        console.print(f"{verdict}, but {command} train {plan.job} refuses it:")
        for problem in refused:
            hint = f" ({problem.hint})" if problem.hint else ""
            console.print(f"[red]refused[/] {escape(problem.message + hint)}")


def _engine(engine: EngineSource) -> str:
    text = f"{engine.name}: {engine.source}"
    if engine.revision:
        text += f" at {engine.revision}"
    if engine.container:
        text += f", container {engine.container}"
    return escape(text)


def _rows(console: Console, job: Job, plan: Plan) -> Iterator[tuple[str, RenderableType]]:
    yield "size", _size(job, plan)
    yield "ranks", _ranks(job, plan)
    yield "batch", _batch(job, plan)
    if plan.memory:
        yield "memory", _memory(console, plan.memory)
    if plan.host_memory:
        yield "node", _node(plan.host_memory)
    if plan.between:
        yield from _rows_between(*plan.between)
    else:
        yield "time", _time(job, plan)
    if plan.storage:
        yield "disk", _disk(plan.storage, plan.duration)
    if plan.epochs:
        tokens = f"{_count(plan.epochs.dataset_tokens)} tokens"
        if plan.epochs.estimated:
            tokens = f"about {tokens}"
        yield "data", f"{plan.epochs.epochs:,.2f} epochs of {escape(job.dataset.name)}, {tokens}"
    yield from (("reads", escape(line)) for line in read_lines(plan))
    if plan.measured:
        yield "measured", _measured(plan)


def read_lines(plan: Plan) -> Iterator[str]:
    """What is read in which steps, a line for each dataset; none where `data` says it all."""
    for read in plan.reads:
        steps = f"steps {read.first_step:,} to {read.last_step:,}"
        source = "" if read.source == read.dataset else f" of {read.source}"
        line = f"{steps}: {read.dataset}{source}"
        if read.share is None or read.tokens is None:
            yield f"{line}, weighed by sizes that were not looked at yet"
            continue
        epochs = "" if read.epochs is None else f", {read.epochs:,.2f} epochs"
        yield f"{line}, {read.share:.1%}, {_count(read.tokens)} tokens{epochs}"


def _rows_between(few: Plan, many: Plan) -> Iterator[tuple[str, str]]:
    """Where the vocabulary is not known: what both ends of it come to."""
    assert few.memory and many.memory
    sizes = [gib(plan.memory.fullest.total_bytes) for plan in (few, many) if plan.memory]
    device = few.memory.device_bytes
    yield (
        "memory",
        " to ".join(sizes) + " on the fullest rank" + (f" of {gib(device)}" if device else ""),
    )
    if few.days is not None and many.days is not None:
        yield "time", f"{_span(few.days * 86400)} to {_span(many.days * 86400)} in all"
    if few.checkpoint_bytes and many.checkpoint_bytes:
        yield "disk", f"{gib(few.checkpoint_bytes)} to {gib(many.checkpoint_bytes)} a checkpoint"


def _count(number: float) -> str:
    """1.23 billion."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:,.2f} {word}"
    return f"{number:,.0f}"


def _span(seconds: float) -> str:
    """A time in the unit that a person would use."""
    for size, word in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {word}"
    return f"{seconds:,.1f} s" if seconds >= 0.1 else f"{seconds * 1000:,.1f} ms"


def gib(size: float) -> str:
    """Bytes in GiB, or in the smaller unit that fits them."""
    for unit, word in ((GIB, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {word}"
    return f"{size / 1024:,.1f} KiB"


def _size(job: Job, plan: Plan) -> str:
    model = job.model
    shape = (
        f"{model.family}, {model.num_layers} layers of {model.hidden_size:,},"
        f" {model.num_attention_heads} heads, {model.seq_length:,} tokens a sample"
    )
    if model.moe:
        shape += f", {model.moe.num_experts} experts of which a token takes {model.moe.router_topk}"
    if plan.between:
        few, many = plan.between
        return (
            f"{_count(few.parameters or 0)} to {_count(many.parameters or 0)} parameters: {shape},"
            f" vocabulary not known, {few.vocab_size:,} to {many.vocab_size:,} ids"
        )
    assert plan.parameters is not None
    count = f"{_count(plan.parameters)} parameters"
    if plan.active_parameters:
        count += f", {_count(plan.active_parameters)} of them active"
    text = f"{count}: {shape}, vocabulary {plan.vocab_size:,}"
    if plan.padded_vocab_size != plan.vocab_size:
        text += f" (padded to {plan.padded_vocab_size:,})"
    return text


def _ranks(job: Job, plan: Plan) -> str:
    layout = plan.layout
    device = job.cluster.device
    nodes = (
        f"{job.nodes} node{'s' if job.nodes > 1 else ''} x {job.ranks_per_node}"
        f" {device.label or device.name}"
    )
    context = f"context {layout.context}, " if layout.context > 1 else ""
    split = (
        f"tensor {layout.tensor}, {context}pipeline {layout.pipeline}, data {layout.data}, ZeRO"
        f" {job.parallelism.zero_stage}"
    )
    if job.model.moe:
        split += f", experts {layout.expert}"
        if layout.expert_tensor > 1:
            split += f" x {layout.expert_tensor}"
    if layout.virtual > 1:
        split += f", {layout.virtual} chunks per stage"
    if layout.pipeline > 1:
        split += f"; layers by stage: {run_lengths(layout.layers_by_stage)}"
    return (
        f"{plan.world_size} = {nodes} of {escape(job.cluster.name)}, engine {plan.engine}: {split}"
    )


def run_lengths(entries: Sequence[int | str]) -> str:
    """8 x2, 7 x4."""
    groups: list[tuple[int | str, int]] = []
    for entry in entries:
        if groups and groups[-1][0] == entry:
            groups[-1] = (entry, groups[-1][1] + 1)
        else:
            groups.append((entry, 1))
    return ", ".join(f"{entry} x{times}" if times > 1 else str(entry) for entry, times in groups)


def _batch(job: Job, plan: Plan) -> str:
    tokens = plan.global_batch_size * job.model.seq_length
    micro = job.training.micro_batch_size
    text = (
        f"{plan.global_batch_size:,} samples = {tokens:,} tokens:"
        f" {plan.gradient_accumulation_steps:,} micro-batches of {micro} a rank"
    )
    if job.training.rampup_batch_size:
        text += (
            f", growing from {job.training.rampup_batch_size[0]} over"
            f" {job.training.rampup_batch_size[2]:,} samples"
        )
    if plan.layout.pipeline > 1:
        return f"{text}; {plan.layout.bubble_fraction:.1%} of a step is pipeline bubble"
    return text


def _memory(console: Console, memory: Memory) -> RenderableType:
    """The fullest rank, a bar per stage, what the parts are."""
    fullest = memory.fullest
    device = memory.device_bytes
    verdict = {
        True: "[green]fits[/]",
        False: "[red]does not fit[/]",
        None: "the device's memory is not known",
    }[memory.fits]
    size = gib(fullest.total_bytes)
    if device:
        size += f" of {gib(device)}"
    parts: list[RenderableType] = [
        marked(f"{size} on the fullest rank: {verdict}"),
        _memory_bars(console, memory),
        _memory_legend(console, fullest),
    ]
    if memory.band_bytes is not None:
        between = " to ".join(gib(size) for size in memory.band_bytes)
        if memory.band:
            text = f"published runs of this engine took {between} for a plan of this size"
        else:
            text = f"{between}, as the reserve is nothing or twice what is assumed"
        parts.append(Text(text))
    return Group(*parts)


def _memory_bars(console: Console, memory: Memory) -> Table:
    """A bar per stage, or per group of stages that look alike."""
    bars = Table.grid(padding=(0, 1))
    bars.add_column(no_wrap=True)
    bars.add_column(no_wrap=True, justify="right")
    bars.add_column(no_wrap=True)
    device = memory.device_bytes
    scale = max(device or 0, memory.fullest.total_bytes)
    width = min(BAR, max(8, console.width - BESIDE))
    for first, last, rank in _bars(memory):
        name = f"stages {first} to {last}"
        if len(memory.stages) == 1:
            name = "every rank"
        elif first == last:
            name = f"stage {first}"
        bars.add_row(name, gib(rank.total_bytes), _bar(console, rank, scale, device, width))
    return bars


def _memory_legend(console: Console, rank: RankMemory) -> Table:
    """The parts of a rank's memory with their sizes, as many side by side as fit."""
    shown = [
        Text(f"{_mark(console, part)} {PARTS[part][0]} {gib(size)}", style=PARTS[part][2])
        for part, size in rank.parts.items()
        if size
    ]
    widest = max(entry.cell_len for entry in shown) + GAP
    # a narrow terminal has fewer side by side: no figure is cut
    beside = max(1, min(LEGEND, (console.width - HEADINGS + GAP) // widest))
    legend = Table.grid(padding=(0, GAP))
    for _ in range(beside):
        legend.add_column(no_wrap=True)
    for first in range(0, len(shown), beside):
        legend.add_row(*shown[first : first + beside])
    return legend


def _node(host: HostMemory) -> str:
    """Main memory of the fullest node."""
    text = f"{gib(host.needed_bytes)} of main memory for its ranks"
    if host.available_bytes is None:
        return f"{text}; what a node has is unknown (clusters.X.memory_bytes)"
    verdict = "[green]fits[/]" if host.fits else "[red]does not fit[/]"
    available = f"{gib(host.available_bytes)} available ({escape(host.source or '')})"
    return f"{text}, {available}: {verdict}"


def _bars(memory: Memory) -> list[tuple[int, int, RankMemory]]:
    """(first stage, last stage, the fullest of them): neighbours that look alike together, at
    most ROWS bars."""
    groups: list[list[RankMemory]] = []
    for rank in memory.stages:
        if groups and gib(groups[-1][0].total_bytes) == gib(rank.total_bytes):
            groups[-1].append(rank)
        else:
            groups.append([rank])
    if len(groups) > ROWS:  # the first, the last, and the others in equal parts
        inner = groups[1:-1]
        each = -(-(len(groups) - 2) // (ROWS - 2))
        parts = [
            [rank for group in inner[i : i + each] for rank in group]
            for i in range(0, len(inner), each)
        ]
        groups = [groups[0], *parts, groups[-1]]
    return [
        (group[0].stage, group[-1].stage, max(group, key=lambda rank: rank.total_bytes))
        for group in groups
    ]


def _mark(console: Console, part: str) -> str:
    return "█" if console.color_system else PARTS[part][1]


def _bar(console: Console, rank: RankMemory, scale: int, device: int | None, width: int) -> Text:
    """The parts of a rank side by side in so many columns, dots for what stays free, and a line
    where the device ends."""
    bar = Text()
    drawn = 0
    reached = 0
    for part, size in rank.parts.items():
        reached += size
        columns = round(reached / scale * width) - drawn
        bar.append(_mark(console, part) * columns, style=PARTS[part][2])
        drawn += columns
    if device is None:
        return bar
    end = round(device / scale * width)
    bar.append("·" * max(0, end - drawn), style="bright_black")
    if drawn <= end:
        return bar + Text("|")
    return bar[:end] + Text("|", style="bold red") + bar[end:]


def _time(job: Job, plan: Plan) -> str:
    text = f"{_count(plan.tokens)} tokens in {job.training.train_iters:,} steps"
    duration = plan.duration
    if not plan.layout.fills_world:
        return f"{text}. No step has a time: the layout does not fill {plan.layout.world} ranks"
    if duration is None:
        return f"{text}. Speed unknown for this device; the first run will measure it"
    speed = duration.speed
    step = _span(duration.step_seconds)
    if speed.mfu:
        step += f" at {speed.mfu:.1%} MFU"
    lines = [
        f"{text} of {step}, {speed.tokens_per_second:,.0f} tokens/s",
        f"[bright_black]{escape(speed.source)}[/]",
        _whole(job, duration),
    ]
    if duration.failures is not None and duration.failures >= 0.05:
        lines.append(f"Failures to expect: {duration.failures:,.1f}")
    if duration.requeues:
        lines.append(f"Requeues at the time limit: {duration.requeues:,}")
    return "\n".join(lines)


def _whole(job: Job, duration: Duration) -> str:
    """The time of the whole run, and its parts."""
    parts = duration.parts
    shown = {
        "steps": parts.steps,
        f"{duration.evaluations:,} evaluations": parts.evaluations,
        "checkpoints": parts.saves or 0.0,
        "starts": parts.starts,
        "steps repeated after failures": parts.repeated,
    }
    listed = ", ".join(f"{word} {_span(seconds)}" for word, seconds in shown.items() if seconds)
    text = f"{_span(duration.days * 86400)} in all"
    if duration.days_interval:
        low, high = (_span(days * 86400) for days in duration.days_interval)
        text += f" ({low} to {high}, four times of five)"
    text += f": {listed}"
    if job.cluster.device_type != "cpu":
        devices = "GPU" if job.cluster.device_type == "cuda" else "device"
        text += f" ({duration.device_hours:,.0f} {devices}-hours"
        if duration.device_hours_interval:
            text += ", {:,.0f} to {:,.0f}".format(*duration.device_hours_interval)
        text += ")"
    if parts.saves is None:
        text += "\nCheckpoints are not in it: their file system has no write_gib_per_second"
    if job.cluster.launcher_traits.batch:
        return f"{text}; time in a queue is not in it"
    return text


def _disk(storage: Storage, duration: Duration | None) -> str:
    text = f"{gib(storage.checkpoint_bytes)} a checkpoint"
    if storage.write_seconds is not None:
        text += f", written in {_span(storage.write_seconds)}"
    text += (
        f"; {storage.checkpoints:,} over the run, {storage.on_disk:,} at once ="
        f" {gib(storage.on_disk_bytes)}"
    )
    if storage.capacity_bytes is not None:
        text += f" of {gib(storage.capacity_bytes)}"
        if storage.filesystem:
            text += f" ({escape(storage.filesystem)})"
        else:
            text += " free here"
    if (
        duration
        and duration.checkpoint_seconds
        and duration.checkpoint_steps
        and duration.checkpoint_seconds < duration.days * 86400
    ):
        every = f"{duration.checkpoint_steps:,} steps ({_span(duration.checkpoint_seconds)})"
        text += (
            f"\nBest checkpoint interval: {every}; {duration.lost_fraction:.2%} of the time lost"
        )
    return text


def _measured(plan: Plan) -> str:
    """What the last run took, and by how much its plan was wrong."""
    measured = plan.measured
    assert measured is not None
    values: dict[str, str] = {}
    if measured.tokens_per_second:
        values["tokens_per_second"] = f"{measured.tokens_per_second:,.0f} tokens/s"
    if measured.peak_bytes:
        values["peak_bytes"] = f"{gib(measured.peak_bytes)} at most"
    if measured.checkpoint_bytes:
        values["checkpoint_bytes"] = f"checkpoint {gib(measured.checkpoint_bytes)}"
    shown = []
    for name, value in values.items():
        error = measured.errors[name]
        shown.append(value if error is None else f"{value} (plan {error:+.1%})")
    run = f"run {measured.run}"
    if not measured.same_layout:
        run += ", another layout"
    return f"{run}: {', '.join(shown)}"


def _print_list(console: Console, word: str, entries: Sequence[Objection], style: str) -> None:
    for entry in entries:
        console.print(f"[{style}]{word}[/] {entry.key}: {escape(entry.message)}")
