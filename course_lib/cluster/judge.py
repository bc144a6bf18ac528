"""From what all ranks have measured to a table, the faults by name, and one finding. Nothing here measures anything.

Three rules. What must be equal is compared with what most ranks have. What ranks, pairs and groups of a kind do is
compared with the median of the others, since no number is right for every machine. Where the links are known, a
collective is compared with its model (course_lib/timing/collectives.py) as well.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from course_lib.hardware import Cluster
from course_lib.layout import Layout
from course_lib.timing.collectives import bus_bandwidth, collective_s
from course_lib.validate import Amount, Checked, Positive, Share, checked

GB = 10**9
MOST_ROWS = 8  # of one kind in the table; the worst are shown


@dataclass(frozen=True)
class Limits(Checked):
    """From where on something is a fault.

    slower_than        times the median of the others: a rank's multiplication, a pair's message, a group's collective
    noise_s            seconds: a smaller difference from that median is no fault, whatever the ratio
    least_of_model     share of the modelled bandwidth that a collective must reach
    clock_s            seconds by which clocks of two hosts may differ: logs are read side by side
    temperature_c      of a GPU under load
    """

    slower_than: Positive = 1.3
    noise_s: Amount = 1e-4
    least_of_model: Share = 0.5
    clock_s: Positive = 0.5
    temperature_c: Positive = 85.0


@dataclass(frozen=True)
class Finding:
    """One line of the table: what was measured where, what it is compared with, and the fault in words if it is one."""

    kind: str
    where: str
    measured: str
    compared: str
    fault: str = ""
    badness: float = 0.0  # of rows of one kind the largest are shown


@dataclass(frozen=True)
class Report:
    """What a check found; the same on every rank."""

    title: str
    rows: tuple[Finding, ...]

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(row.fault for row in self.rows if row.fault)

    @property
    def finding(self) -> str:
        """One line: nothing, or how many faults and the first, which is nearest to a cause."""
        if not self.faults:
            return "found: nothing wrong"
        count = f"{len(self.faults)} fault{'s' if len(self.faults) > 1 else ''}"
        return f"found: {count}, first: {self.faults[0]}"

    def table(self) -> str:
        """Lines of at most 100 columns, without the finding; a fault stands below its row."""
        lines = [self.title]
        for kind in dict.fromkeys(row.kind for row in self.rows):
            rows = sorted((row for row in self.rows if row.kind == kind), key=lambda row: (not row.fault, -row.badness))
            for row in rows[:MOST_ROWS]:
                lines.append(f"{row.kind:<19}{row.where:<23}{row.measured:>17}  {row.compared}".rstrip())
                lines += [f"   FAULT  {row.fault}"] if row.fault else []
            if (more := len(rows) - MOST_ROWS) > 0:
                lines.append(f"{kind:<19}and {more} more, none of them worse")
        return "\n".join(lines)

    def to_dict(self) -> dict:
        """All of it as JSON can hold it."""
        return {**asdict(self), "faults": list(self.faults), "healthy": not self.faults}


@checked
def judge(
    of_ranks: Sequence[Mapping], layout: Layout, limits: Limits = Limits(), cluster: Cluster | None = None
) -> Report:
    """Return the report of what `measure` gave on every rank. Causes stand before what follows from them."""
    hosts = [told["host"] for told in of_ranks]
    rows = [
        *_versions(of_ranks, hosts),
        *_folder(of_ranks, hosts),
        *_clocks(of_ranks, hosts, limits),
        *_gpus(of_ranks, hosts, limits),
        *_computing(of_ranks, hosts, limits),
        *_links(of_ranks, hosts, limits),
        *_collectives(of_ranks, limits, cluster),
    ]
    count = len(set(hosts))
    first = of_ranks[0]
    title = (
        f"{len(of_ranks)} ranks on {count} host{'s' * (count > 1)}, {first['backend']}, {first['device']}; "
        f"layout {layout}; messages of {first['message_bytes'] / 10**6:g} MB"
    )
    return Report(title, tuple(rows))


@checked
def compare_seconds(seconds: Mapping, limits: Limits = Limits()) -> dict[object, tuple[float, bool]]:
    """Return of each how many times the median of all others it takes (alone: 1), and whether that is a fault."""
    found = {}
    for key, value in seconds.items():
        usual = median([other for at, other in seconds.items() if at != key] or [value])
        found[key] = value / usual, value > limits.slower_than * usual and value - usual > limits.noise_s
    return found


def _name(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank} on {hosts[rank]}"


def _versions(of_ranks: Sequence[Mapping], hosts: Sequence[str]) -> list[Finding]:
    rows = []
    told = [{**one["versions"], "device": one["device"]} for one in of_ranks]
    for name in told[0]:
        (most, _), *others = Counter(one[name] for one in told).most_common()
        wrong = [f"{_name(rank, hosts)} has {one[name]}" for rank, one in enumerate(told) if one[name] != most]
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        fault = f"{name}: {', '.join(wrong[:3])}{more}, most have {most}" if others else ""
        rows.append(Finding("version", name, most if len(most) <= 18 else "", most if len(most) > 18 else "", fault))
    return rows


def _folder(of_ranks: Sequence[Mapping], hosts: Sequence[str]) -> list[Finding]:
    if of_ranks[0]["folder"] is None:
        return [Finding("shared folder", "", "", "not looked at; give one with --folder")]
    blind = [rank for rank, one in enumerate(of_ranks) if not one["folder"]["seen"]]
    folder = of_ranks[0]["folder"]["folder"]
    shown = folder if len(folder) < 38 else f"..{folder[-35:]}"
    rows = [Finding("shared folder", "", f"seen by {len(of_ranks) - len(blind)} ranks", shown)]
    for rank in blind:
        where = of_ranks[rank]["folder"]["folder"]
        fault = f"{_name(rank, hosts)} does not see in {where} what rank 0 on {hosts[0]} wrote: the folder is local"
        rows.append(Finding("shared folder", f"rank {rank}", "not seen", "", fault))
    return rows


def _clocks(of_ranks: Sequence[Mapping], hosts: Sequence[str], limits: Limits) -> list[Finding]:
    rows = []
    for rank, clock in ((rank, one["clock"]) for rank, one in enumerate(of_ranks) if one["clock"]):
        offset, error = clock["offset_s"], clock["error_s"]
        wrong = abs(offset) - error > limits.clock_s
        fault = f"the clock of {hosts[rank]} is {offset:+.1f} s off that of {hosts[0]}: is it synchronised?"
        measured, compared = f"{offset:+.4f} s", f"known to {error:.4f} s"
        rows.append(Finding("clock", hosts[rank], measured, compared, fault if wrong else "", abs(offset)))
    return rows or [Finding("clock", "", "", "one host: nothing to compare")]


def _gpus(of_ranks: Sequence[Mapping], hosts: Sequence[str], limits: Limits) -> list[Finding]:
    rows = []
    for rank, gpu in ((rank, one["gpu"]) for rank, one in enumerate(of_ranks) if one["gpu"]):
        wrong, celsius = list(gpu["slowed_by"]), gpu["temperature_c"]
        if gpu["ecc_errors"]:
            wrong.append(f"{gpu['ecc_errors']} uncorrected ECC errors since its driver was loaded")
        if (celsius or 0) > limits.temperature_c:
            wrong.append(f"{celsius} C")
        fault = f"the GPU of {_name(rank, hosts)}: {'; '.join(wrong)}" if wrong else ""
        clocks = f"{gpu['clock_mhz']} of {gpu['most_clock_mhz']} MHz"
        rows.append(Finding("GPU", f"rank {rank}", clocks, f"{celsius} C", fault, celsius or 0))
    blind = len(of_ranks) - len(rows)
    where = f"{blind} ranks" if rows else ""
    return [*rows, Finding("GPU", where, "", "no NVML: not looked at")] if blind else rows


def _computing(of_ranks: Sequence[Mapping], hosts: Sequence[str], limits: Limits) -> list[Finding]:
    seconds = {rank: min(one["compute_s"]) for rank, one in enumerate(of_ranks)}
    rows = []
    for rank, (times, wrong) in compare_seconds(seconds, limits).items():
        fault = f"{_name(rank, hosts)} computes {times:.1f} times slower than the others' median"
        rate = f"{of_ranks[rank]['flops'] / seconds[rank] / 1e12:.3f} TFLOP/s"
        compared = f"{1 / times:.2f} of the others' median" if len(seconds) > 1 else "the only rank"
        rows.append(Finding("computing", f"rank {rank}", rate, compared, fault if wrong else "", times))
    return rows


def _links(of_ranks: Sequence[Mapping], hosts: Sequence[str], limits: Limits) -> list[Finding]:
    """Pairs inside nodes and pairs between them apart. A rank in whose pairs all is slow is named, not its pairs."""
    seconds = {
        tuple(map(int, pair.split("-"))): min(rounds) for one in of_ranks for pair, rounds in one["links"].items()
    }
    of_node, size = of_ranks[0]["ranks_per_node"], of_ranks[0]["message_bytes"]
    rows = []
    for kind in ("inside a node", "between nodes"):
        here = {pair: s for pair, s in seconds.items() if _kind_of_link(pair, of_node) == kind}
        compared = compare_seconds(here, limits)
        slow = {pair for pair, (_, wrong) in compared.items() if wrong}
        of_rank = {rank: {pair for pair in here if rank in pair} for rank in range(len(of_ranks))}
        for pair, (times, _) in sorted(compared.items()):
            (low, high), fault = pair, ""
            if named := [rank for rank in pair if len(of_rank[rank]) > 1 and of_rank[rank] <= slow]:
                fault = f"every link of {_name(named[0], hosts)} is slow: this one {times:.1f} times the others' median"
            elif pair in slow:
                fault = (
                    f"the link between {_name(low, hosts)} and {_name(high, hosts)} is {times:.1f} times slower than "
                    "the median of the others"
                )
            where, rate = f"{low} - {high}, {kind}", _rate(size / here[pair])
            rows.append(Finding("link", where, rate, f"{1 / times:.2f} of the others' median", fault, times))
    return rows


def _kind_of_link(pair: tuple[int, int], ranks_per_node: int) -> str:
    return "inside a node" if pair[0] // ranks_per_node == pair[1] // ranks_per_node else "between nodes"


def _collectives(of_ranks: Sequence[Mapping], limits: Limits, cluster: Cluster | None) -> list[Finding]:
    """Of each axis and collective one row for each group; a round has taken as long as its last rank."""
    rows = []
    of_node = of_ranks[0]["ranks_per_node"]
    for axis in of_ranks[0]["collectives"]:
        groups = {tuple(one["collectives"][axis]["ranks"]) for one in of_ranks}
        payload = of_ranks[0]["collectives"][axis]["payload_bytes"]
        for name in of_ranks[0]["collectives"][axis]["seconds"]:
            seconds = {}
            for group in sorted(groups):
                rounds = zip(*(of_ranks[rank]["collectives"][axis]["seconds"][name] for rank in group), strict=True)
                seconds[group] = min(map(max, rounds))
            for group, (times, wrong) in compare_seconds(seconds, limits).items():
                ranks = ", ".join(map(str, group)) if len(group) <= 4 else f"{group[0]}, {group[1]} .. {group[-1]}"
                bus, share = bus_bandwidth(name, payload, seconds[group], len(group)), 1 / times
                compared = f"{share:.2f} of the other groups' median" if len(seconds) > 1 else "the only group"
                fault = f"{name} over {axis} is {times:.1f} times slower in ranks {ranks} than in others" * wrong
                if cluster is not None:
                    modelled = _modelled_s(name, payload, group, cluster, of_node)
                    share = modelled / seconds[group]
                    expected = bus_bandwidth(name, payload, modelled, len(group))
                    compared = f"{share:.2f} of the modelled {_rate(expected)}"
                    if share < limits.least_of_model:
                        fault = f"{name} over {axis} in ranks {ranks} reaches {share:.2f} of the modelled bandwidth"
                what, where = f"{axis} {name}", f"ranks {ranks}"
                rows.append(Finding(what, where, f"{_rate(bus)} bus", compared, fault, 1 / share))
    return rows


def _modelled_s(name: str, payload: int, group: Sequence[int], cluster: Cluster, ranks_per_node: int) -> float:
    """Seconds by the model; a send around the ring takes as long as its slowest link, one between nodes if there is."""
    nodes = Counter(rank // ranks_per_node for rank in group)
    per_node = min(nodes.values())
    if name == "send":
        return collective_s(name, payload, 2, cluster.inside if len(nodes) == 1 else cluster.between)
    return collective_s(name, payload, len(group), cluster, per_node if len(group) % per_node == 0 else 1)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GB:.2f} GB/s" if bytes_per_s >= GB else f"{bytes_per_s / 10**6:.1f} MB/s"
