"""Ask every node, before a process starts, whether it can read what the run reads, and has the driver's versions."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drivetrain import Section, UserError
from drivetrain_executor_ray import probe
from drivetrain_executor_ray.feasibility import address_key, cluster_nodes

Report = Mapping[str, Any]  # of probe.probe
DRIVER = "driver"


def check_nodes(
    node_ids: Iterable[str], inputs: Iterable[tuple[str, Path]], run_dir: Path, *, timeout_s: float,
    refuse: bool = True,
) -> None:  # fmt: skip
    """Compare nodes with each other and with the driver.

    Args:
        node_ids: the nodes where processes are going to be.
        inputs: what is going to be read, each with its key; every path is absolute.
        run_dir: the run folder, which all nodes share.
        timeout_s: longest wait for the answers.
        refuse: False prints the differences as a warning.

    Raises:
        UserError: a path is not there or cannot be read, or something differs; it lists what, by node.
    """
    keys: dict[str, str] = {}
    for key, path in inputs:
        keys.setdefault(str(path), key)
    search = [str(Path(folder).absolute()) for folder in sys.path]
    folder = str(run_dir) if run_dir.is_dir() else ""  # nothing is written to a folder that nobody made
    with tempfile.NamedTemporaryFile(prefix=".preflight-", dir=folder or None) as token:
        asked = (list(keys), folder, Path(token.name).name, search)
        driver = probe.probe(*asked)
        nodes = _reports(list(dict.fromkeys(node_ids)), asked, timeout_s)
    rows = differences(driver, nodes, keys)
    if not rows:
        return
    error = UserError("nodes differ from what the run needs", where="pre-flight", details=_grouped(rows),
                      mend="make files readable, and install the same versions, wherever processes run")  # fmt: skip
    if refuse:
        raise error
    print(f"warning: {error}", file=sys.stderr, flush=True)


def differences(driver: Report, nodes: Mapping[str, Report | str], keys: Mapping[str, str]) -> list[tuple[str, str]]:
    """What is wrong where.

    Args:
        driver: the report of the driver's process, which the others are compared with.
        nodes: the report of each node by its name, or why there is none.
        keys: the config's key of each path.

    Returns:
        rows: ``(node, what is wrong)``.
    """
    rows = [(DRIVER, f"{keys[path]}: {path} {seen['fault']}") for path, seen in driver["paths"].items()
            if seen["fault"]]  # fmt: skip
    for name, report in nodes.items():
        if isinstance(report, str):
            rows.append((f"node {name}", report))
            continue
        found = [f"{keys[path]}: {path} {what}" for path, seen in report["paths"].items()
                 if (what := seen["fault"] or _content(seen, driver["paths"][path]))]  # fmt: skip
        if report["folder"]:
            found.append(f"trainer.run_dir: it {report['folder']}")
        found += _versions(report["versions"], driver["versions"])
        rows += [(f"node {name}", what) for what in found]
    return rows


def _content(seen: Report, there: Report) -> str:
    """How files differ from the driver's, in names and sizes; of contents only those of config.json are compared."""
    if there["fault"]:
        return ""
    here, theirs = seen["files"], there["files"]
    wrong = sorted(name for name in {*here, *theirs} if here.get(name) != theirs.get(name))
    if not wrong:
        return "" if seen["config"] == there["config"] else "has another config.json than the driver's"
    name = wrong[0]
    sizes = [f"{files[name]} bytes" if name in files else "nothing" for files in (here, theirs)]
    more = f", and {len(wrong) - 1} more files differ" if len(wrong) > 1 else ""
    return f"{f'has {name}: ' if name else 'has '}{sizes[0]}, the driver's {sizes[1]}{more}"


def _versions(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[str]:
    """Differences; builds of one version, such as 2.9.0+cpu and 2.9.0+cu128, agree."""
    for name in sorted({*here, *there}):
        if name not in here:
            yield f"{name} is not installed, the driver has {there[name]}"
        elif name not in there:
            yield f"{name} {here[name]} is installed, the driver does not have it"
        elif here[name].partition("+")[0] != there[name].partition("+")[0]:
            yield f"{name} is {here[name]}, the driver has {there[name]}"


def _reports(node_ids: Sequence[str], asked: tuple[Any, ...], timeout_s: float) -> dict[str, Report | str]:
    """The report of each node, or why there is none, by address in the order of ranks."""
    addresses = {node.id: node.address for node in cluster_nodes()}
    node_ids = sorted(node_ids, key=lambda node: address_key(addresses[node]))
    ray.cloudpickle.register_pickle_by_value(probe)
    try:
        task = ray.remote(num_cpus=0, max_retries=0)(probe.probe)
        refs = []
        for node in node_ids:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            refs.append(task.options(scheduling_strategy=there).remote(*asked))
    finally:
        ray.cloudpickle.unregister_pickle_by_value(probe)
    until = time.monotonic() + timeout_s
    found: dict[str, Report | str] = {}
    for node, ref in zip(node_ids, refs):
        name = addresses[node]
        if list(addresses.values()).count(name) > 1:
            name += f" ({node[:6]})"
        try:
            found[name] = ray.get(ref, timeout=max(0.0, until - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            ray.cancel(ref, force=True)
            found[name] = f"did not answer within {timeout_s:g} s"
        except ray.exceptions.RayError as error:
            found[name] = f"could not be asked: {str(error).strip().splitlines()[-1]}"
    return found


def _grouped(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Rows in which a node is named once."""
    return [(name if at == 0 or rows[at - 1][0] != name else "", text) for at, (name, text) in enumerate(rows)]


def absolute(value: Any) -> Any:
    """A config section whose paths are absolute: processes on nodes are not started where the driver was."""
    if isinstance(value, Path):
        return value.absolute()
    if isinstance(value, tuple):
        return tuple(absolute(inner) for inner in value)
    if isinstance(value, Section):
        return value.model_copy(update={name: absolute(getattr(value, name)) for name in type(value).model_fields})
    return value
