"""Every layout of a job on its nodes, ranked by the time model; memory and the engine's rules
are constraints, and what is left out is counted by reason. Where a job has
none as it is: the nearest numbers of nodes and global batches for which it has one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from trainkit.base.lazy_dataclasses import dataclass, field, replace
from trainkit.jobs.schema import Job
from trainkit.plan.checks import BATCH, PP, SCHEDULE, TP, VIRTUAL, ZERO, checks
from trainkit.plan.grid_checks import EP, ETP, REPLICAS
from trainkit.plan.layout import layout_of, padded_vocab_size
from trainkit.plan.measured import Measured
from trainkit.plan.memory import fits
from trainkit.plan.objection import Change, Value, try_change
from trainkit.plan.planner import Plan, PreparedData, make_plan
from trainkit.plan.rules import Rules
from trainkit.plan.suggestions import MICRO, RECOMPUTE, SEQUENCE
from trainkit.plan.time.of_job import estimate_step, ranking_step

FACTOR = 4  # times more or fewer nodes that are looked at
BATCHES = 4  # that are tried


def data_degrees(job: Job, rules: Rules) -> Iterator[int]:
    """Data-parallel sizes of the job's ranks, as far as arithmetic goes: tensor parallelism
    within a node, stages that the engine can fill."""
    layers = job.model.num_layers
    for tensor in range(1, job.ranks_per_node + 1):
        for pipeline in range(1, layers + 1):
            sharing = tensor * pipeline * job.parallelism.context_parallel_size
            data, rest = divmod(job.world_size, sharing)
            if not rest and (rules.uneven_stages or layers % pipeline == 0):
                yield data


def ways_out(job: Job, rules: Rules, possible: Callable[[Job], bool]) -> list[Change]:
    """Changes after each of which some layout can be: fewer nodes, more, another batch.

    Args:
        job: that has none.
        rules: of its engine.
        possible: whether a job has a layout.
    """
    nodes = job.nodes
    most = min(job.cluster.max_nodes or FACTOR * nodes, FACTOR * nodes)
    below = min(nodes - 1, most)
    found = [
        _first(job, rules, ({"nodes": number} for number in numbers), possible)
        for numbers in (range(below, below // FACTOR, -1), range(nodes + 1, most + 1))
    ]
    batch = job.global_batch_size
    sizes = {near for data in data_degrees(job, rules) for near in _multiples(batch, data)}
    nearest = sorted(sizes - {batch}, key=lambda size: (abs(size - batch), size))[:BATCHES]
    found.append(_first(job, rules, ({BATCH: size} for size in nearest), possible))
    return [change for change in found if change]


def _multiples(number: int, of: int) -> set[int]:
    """The nearest below and above."""
    below = number // of * of
    return {below, below + of} - {0}


def _first(
    job: Job, rules: Rules, changes: Iterator[Change], possible: Callable[[Job], bool]
) -> Change | None:
    """The first change after which a layout can be; what arithmetic rules out is not tried."""
    plain = job.training.model_copy(update={"gradient_accumulation_steps": None})
    plain = plain.model_copy(update={"global_batch_size": job.global_batch_size})
    for change in changes:
        tried = try_change(job.model_copy(update={"training": plain}), change)
        if tried is None:
            continue
        batch = tried.global_batch_size
        if any(batch % data == 0 for data in data_degrees(tried, rules)) and possible(tried):
            return change
    return None


MOST_VIRTUAL = 12  # chunks of a stage: more have not been published
MOST_MICRO = 64
DIVIDE = {"batch-not-divisible", "too-many-nodes"}  # objections that other numbers remove


@dataclass(frozen=True)
class Ranked:
    """A layout that the job could have.

    Args:
        job: with that layout.
        change: what is set, by paths of the job.
        seconds: of a step by the time model, or in units of its own where the device is unknown.
        tokens_per_second: by which layouts are ranked, since nodes and batches may differ.
        terms: of the step.
        plan: of that job; None for those that lost.
    """

    job: Job
    change: dict[str, Value]
    seconds: float
    tokens_per_second: float
    terms: dict[str, float]
    plan: Plan | None = None


@dataclass(frozen=True)
class Search:
    """What a search found.

    Args:
        ranked: the fastest layouts that can be, fastest first.
        asked: the job's own layout; None where it is refused.
        refused: how many layouts were left out, by the code of the first objection.
        nearest: of each reason, the fastest layout that it refused, in words.
        considered: all of them.
        known: the device is known: without it the order is that of a usual GPU, and no time is
            given.
        ways_out: where none can be: numbers of nodes and batches for which there is one.
        calibrated_by: the run that corrected all times, if there is one.
    """

    ranked: tuple[Ranked, ...]
    asked: Ranked | None
    refused: Counter[str] = field(default_factory=Counter)
    nearest: dict[str, str] = field(default_factory=dict)
    considered: int = 0
    known: bool = True
    calibrated_by: str | None = None
    ways_out: tuple[Change, ...] = ()


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    return [part for part in range(1, number + 1) if number % part == 0]


def _schedules(job: Job, pipeline: int, rules: Rules) -> Iterator[dict[str, Value]]:
    """Plain 1F1B, interleaved ones, the zero-bubble one."""
    plain: dict[str, Value] = {SCHEDULE: "1f1b"}
    yield plain
    if pipeline == 1:
        return
    if rules.virtual_stages:
        for virtual in range(2, min(MOST_VIRTUAL, job.model.num_layers // pipeline) + 1):
            yield {**plain, VIRTUAL: virtual}
    if rules.zero_bubble:
        yield {SCHEDULE: "zbv"}


def _micro_batches(job: Job, data: int) -> list[int]:
    """Powers of two up to a rank's share of the batch, and the job's own."""
    share = max(1, job.global_batch_size // data)
    sizes = {1 << power for power in range(MOST_MICRO.bit_length()) if 1 << power <= share}
    return sorted(sizes | {job.training.micro_batch_size})


def layouts(job: Job, rules: Rules) -> Iterator[dict[str, Value]]:
    """Every layout of the job's ranks: degrees that divide them, all that the engine has of
    schedules, ZeRO stages and recomputation; tensor parallelism stays within a node, and context
    parallelism as it is."""
    world = job.world_size // job.parallelism.context_parallel_size
    for tensor in divisors(world):
        if tensor > job.ranks_per_node:
            break
        for pipeline in divisors(world // tensor):
            if pipeline > job.model.num_layers:
                break
            degrees: dict[str, Value] = {TP: tensor, PP: pipeline}
            sizes = _micro_batches(job, world // tensor // pipeline)
            for schedule in _schedules(job, pipeline, rules):
                for zero in rules.zero_stages:
                    for micro in sizes:
                        yield {**degrees, **schedule, ZERO: zero, MICRO: micro}


def expert_layouts(job: Job, tensor: int, stage: int) -> list[dict[str, Value]]:
    """Ways to lay experts on the ranks of a stage, each on one of them or split as layers are;
    where the fewest hold all experts of a layer first.

    Args:
        job: of a model with experts.
        tensor: ranks that layers are split over.
        stage: ranks of a stage.
    """
    assert job.model.moe is not None
    found: list[dict[str, Value]] = [
        {EP: expert, ETP: split}
        for expert in divisors(job.model.moe.num_experts)
        for split in sorted({1, tensor})
        if stage % (expert * split) == 0
    ]
    return sorted(found, key=lambda each: int(each[EP]) * int(each[ETP]))


def _changed(job: Job, change: dict[str, Value]) -> Job:
    """The job with a layout, not validated: thousands are tried, and the few that are shown are
    made again through the schema."""
    plain: dict[str, Value | None] = {
        VIRTUAL: None,
        "training.global_batch_size": job.global_batch_size,
        "training.gradient_accumulation_steps": None,
    }
    return _with(job, {**plain, **change})


def _with(job: Job, change: Mapping[str, Value | None]) -> Job:
    """The job with these values, not validated."""
    tables: dict[str, dict[str, Value | None]] = {"parallelism": {}, "training": {}}
    for path, value in change.items():
        table, _, key = path.partition(".")
        tables[table][key] = value
    return job.model_copy(
        update={
            "parallelism": job.parallelism.model_copy(update=tables["parallelism"]),
            "training": job.training.model_copy(update=tables["training"]),
        }
    )


def _variants(change: dict[str, Value]) -> Iterator[dict[str, Value]]:
    """With and without sequence parallelism, and with each kind of recomputation."""
    for again in ("none", "selective", "full"):
        yield {**change, RECOMPUTE: again, SEQUENCE: False}
        if change[TP] != 1:
            yield {**change, RECOMPUTE: again, SEQUENCE: True}


class Searcher:
    """Searches the layouts of one job.

    Args:
        job: the job; its global batch stays the same.
        rules: of its engine.
        vocab: ids, without padding.
        tokenizer_size: ids of the prepared tokenizer; None: not prepared.
        cores: of a node whose ranks are on CPUs; None: not known.
        measured: a run of the job, of any layout, that corrects all times.
    """

    def __init__(
        self,
        job: Job,
        rules: Rules,
        vocab: int,
        tokenizer_size: int | None = None,
        cores: int | None = None,
        measured: Measured | None = None,
    ):
        self.job = job
        self.rules = rules
        self.vocab = vocab
        self.tokenizer_size = tokenizer_size
        self.cores = cores
        self.measured = measured and replace(measured, same_layout=False)
        self.refused: Counter[str] = Counter()
        self.nearest: dict[str, str] = {}
        self.considered = 0
        self.candidates: list[Ranked] = []  # of the last search, fastest first
        self.known = True
        # by degrees, whether they fit where least is kept
        self.possible: dict[tuple[Value, ...], bool] = {}
        # by nodes and degrees, what is worth a look
        self.expert_layouts: dict[tuple[Value, ...], list[dict[str, Value]]] = {}

    def _candidate(self, job: Job, change: dict[str, Value]) -> Ranked:
        padded = padded_vocab_size(
            self.vocab,
            job.model.make_vocab_size_divisible_by,
            job.parallelism.tensor_model_parallel_size,
        )
        estimate = estimate_step(job, self.rules, padded)
        corrected = self.measured.calibration if self.measured else None
        part = corrected or 1.0
        if estimate is None:
            time = ranking_step(job, self.rules, padded, self.cores)
            if job.cluster.device.kind != "cpu" or not corrected:
                self.known = False
        else:
            time = estimate.time
        terms = {name: term / part for name, term in time.terms.items()}
        seconds = time.seconds / part
        tokens = job.global_batch_size * job.model.seq_length / seconds
        return Ranked(job, change, seconds, tokens, terms)

    def _legal(self, job: Job) -> Iterator[Ranked]:
        """Layouts of the job on its nodes that the engine takes."""
        for change in layouts(job, self.rules):
            tried = _changed(job, change)
            kinds = list(_variants(change))
            self.considered += len(kinds)
            found = next(iter(checks(tried, self.rules, self.tokenizer_size)), None)
            if found:
                self.refuse(found.code, change, len(kinds))
                continue
            for experts in self._experts(tried, change, len(kinds)):
                for kind in kinds:
                    laid = {**kind, **experts}
                    yield self._candidate(_changed(job, laid), {**laid, "nodes": job.nodes})

    def _experts(self, job: Job, change: dict[str, Value], kinds: int) -> list[dict[str, Value]]:
        """How experts are laid out under a layout: of all ways the fastest, that on most ranks,
        which needs least memory, and the fastest between them. Which these are hardly depends on
        schedule and recomputation.

        Args:
            job: with the layout.
            change: that gave it.
            kinds: layouts that differ from it in recomputation alone; they are counted.
        """
        if job.model.moe is None:
            return [{}]
        layout = layout_of(job)
        ways = expert_layouts(job, layout.tensor, layout.tensor * layout.data)
        key = (job.nodes, *(change[each] for each in (TP, PP, ZERO, MICRO)))
        if key not in self.expert_layouts:
            plain = {TP: change[TP], PP: change[PP], ZERO: change[ZERO], MICRO: change[MICRO]}
            seconds = [
                self._candidate(_changed(job, {**plain, **each}), {}).seconds for each in ways
            ]
            fastest = seconds.index(min(seconds))
            between = range(fastest + 1, len(ways) - 1)
            second = min(between, key=seconds.__getitem__, default=fastest)
            kept = sorted({fastest, second, len(ways) - 1})
            self.expert_layouts[key] = [ways[index] for index in kept]
        found = self.expert_layouts[key]
        self.considered += kinds * (len(ways) - 1)
        if len(ways) > len(found):
            self.refused["slower"] += kinds * (len(ways) - len(found))
        return found

    def refuse(self, code: str, change: dict[str, Value], count: int = 1) -> None:
        """Count layouts that are left out; the first of a reason is kept as its example."""
        self.refused[code] += count
        self.nearest.setdefault(code, describe(change))

    def _fits(self, job: Job) -> bool:
        layout = layout_of(job)
        padded = padded_vocab_size(
            self.vocab, job.model.make_vocab_size_divisible_by, layout.tensor
        )
        return fits(job, layout, self.rules, self.vocab, padded)

    def _has_room(self, found: Ranked) -> bool:
        """Whether it fits. Of layouts that differ in micro-batch, recomputation and sequence
        parallelism alone, none is looked at where that with the least of them does not fit."""
        job = found.job
        several = job.gradient_accumulation_steps > 1  # gradients are added up
        least: dict[str, Value] = {RECOMPUTE: "full", SEQUENCE: True}
        if several:
            least[MICRO] = 1
        key = (several, *(value for path, value in found.change.items() if path not in least))
        if self.possible.get(key) is False:
            return False
        if self._fits(job):
            return True
        if key not in self.possible:
            self.possible[key] = self._fits(_with(job, least))
        return False

    def search(self, nodes: list[int], top: int = 10) -> Search:
        """The `top` fastest layouts on any of these numbers of nodes.

        Args:
            nodes: numbers of nodes.
            top: how many.
        """
        self.refused.clear()
        self.possible.clear()
        on_nodes = (self.job.model_copy(update={"nodes": number}) for number in nodes)
        candidates = [each for job in on_nodes for each in self._legal(job)]
        candidates.sort(key=lambda found: -found.tokens_per_second)
        self.candidates = candidates
        ranked: list[Ranked] = []
        for index, found in enumerate(candidates):
            if len(ranked) == top:
                self.refused["slower"] += len(candidates) - index
                break
            if not self._has_room(found):
                self.refuse("memory", found.change)
                continue
            if planned := self._planned(found):
                ranked.append(planned)
        return Search(
            tuple(ranked),
            self._own(),
            self.refused,
            self.nearest,
            self.considered,
            self.known,
            self.measured.run if self.measured and self.measured.calibration else None,
            () if ranked else self._ways_out(nodes),
        )

    def _ways_out(self, nodes: list[int]) -> tuple[Change, ...]:
        """Other nodes or another batch, where it is their numbers that do not divide."""
        if not DIVIDE & self.refused.keys() or "memory" in self.refused:
            return ()
        job = self.job.model_copy(update={"nodes": nodes[-1]})
        return tuple(ways_out(job, self.rules, self._possible))

    def _possible(self, job: Job) -> bool:
        """Some layout of the job can be."""
        for change in layouts(job, self.rules):
            tried = _changed(job, change)
            if any(checks(tried, self.rules, self.tokenizer_size)):
                continue
            kinds = (_changed(job, kind) for kind in _variants(change))
            if any(self._fits(kind) for kind in kinds):
                return True
        return False

    def _planned(self, found: Ranked) -> Ranked | None:
        """Through the schema and the plan itself; None where one of them objects."""
        change = {
            **found.change,
            REPLICAS: 1,
            "training.global_batch_size": self.job.global_batch_size,
        }
        # one of both may be given
        plain = self.job.training.model_copy(update={"gradient_accumulation_steps": None})
        job = try_change(self.job.model_copy(update={"training": plain}), change)
        if job is None:
            self.refuse("schema", found.change)
            return None
        here = PreparedData(cores=self.cores)
        plan = make_plan(job, self.vocab, rules=self.rules, prepared=here, measured=self.measured)
        if plan.objections:
            self.refuse(plan.objections[0].code, found.change)
            return None
        return Ranked(job, found.change, found.seconds, found.tokens_per_second, found.terms, plan)

    def _own(self) -> Ranked | None:
        """The layout that the job asks for."""
        job = self.job
        if any(checks(job, self.rules, self.tokenizer_size)):
            return None
        found = self._candidate(job, {})
        return found if self._fits(job) else None


def describe(change: dict[str, Value]) -> str:
    """A layout in a line: TP 4, PP 2 (1f1b), ZeRO 1, micro-batch 2, recompute full."""
    text = f"TP {change[TP]}"
    if change.get(SEQUENCE):
        text += " + SP"
    text += f", PP {change[PP]}"
    if change[PP] != 1:
        text += f" ({change[SCHEDULE]}"
        if VIRTUAL in change:
            text += f" x {change[VIRTUAL]}"
        text += ")"
    if EP in change:
        text += f", EP {change[EP]}"
        if change[ETP] != 1:
            text += f" x ETP {change[ETP]}"
    text += f", ZeRO {change[ZERO]}, micro-batch {change[MICRO]}"
    if RECOMPUTE in change:
        text += f", recompute {change[RECOMPUTE]}"
    return text
