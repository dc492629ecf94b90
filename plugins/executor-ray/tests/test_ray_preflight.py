"""What nodes are asked before anything starts, and what is said when they differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_rig import finishes, start
from ray_rig import config_of

from drivetrain import UserError
from drivetrain_executor_ray import probe as probes
from drivetrain_executor_ray.preflight import absolute, check_nodes, differences
from drivetrain_executor_ray.probe import probe

KEYS = {"/models/m": "model.path", "/data/train.jsonl": "data.train.path"}


def seen(*, fault: str = "", config: str = "a", **files: int) -> dict[str, object]:
    return {"fault": fault, "config": config, "files": files}


def report(*, folder: str = "", model: object = None, data: object = None, **versions: str) -> dict[str, object]:
    have = {"python": "3.11", "torch": "2.9.0+cpu", "drivetrain-core": "0.1.0", **versions}
    return {
        "paths": {"/models/m": model or seen(weights=10), "/data/train.jsonl": data or seen(_=3)},
        "versions": {name: version for name, version in have.items() if version != "none"},
        "folder": folder,
    }


def test_nodes_that_agree() -> None:
    gpu = report(torch="2.9.0+cu128")  # another build of one version
    assert differences(report(), {"10.0.0.1": report(), "10.0.0.2": gpu}, KEYS) == []


@pytest.mark.parametrize(
    ("there", "what"),
    [
        (report(model=seen(fault="is not there")), "model.path: /models/m is not there"),
        (report(model=seen(weights=9)), "model.path: /models/m has weights: 9 bytes, the driver's 10 bytes"),
        (report(model=seen(weights=9, more=1)),
         "model.path: /models/m has more: 1 bytes, the driver's nothing, and 1 more files differ"),
        (report(model=seen(weights=10, config="b")), "model.path: /models/m has another config.json than the driver's"),
        (report(data=seen(fault="cannot be read: Permission denied")),
         "data.train.path: /data/train.jsonl cannot be read: Permission denied"),
        (report(folder="is not there"), "trainer.run_dir: it is not there"),
        (report(torch="2.10.0+cpu"), "torch is 2.10.0+cpu, the driver has 2.9.0+cpu"),
        (report(python="3.12"), "python is 3.12, the driver has 3.11"),
        (report(extra="1.0"), "extra 1.0 is installed, the driver does not have it"),
        (report(**{"drivetrain-core": "none"}), "drivetrain-core is not installed, the driver has 0.1.0"),
        ("did not answer within 9 s", "did not answer within 9 s"),
    ],
)  # fmt: skip
def test_one_node_that_differs(there: object, what: str) -> None:
    nodes = {"10.0.0.1": report(), "10.0.0.2": there}
    assert differences(report(), nodes, KEYS) == [("node 10.0.0.2", what)]


def test_what_the_driver_lacks_is_said_of_the_driver_alone() -> None:
    missing = report(model=seen(fault="is not there"))
    assert differences(missing, {"10.0.0.1": report()}, KEYS) == [
        ("driver", "model.path: /models/m is not there"),
    ]


def test_a_probe_sees_files_and_versions(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "inner").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "inner" / "weights").write_text("123")
    dist = tmp_path / "site" / "acme_extra-1.0.dist-info"
    dist.mkdir(parents=True)
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: acme_extra\nVersion: 1.0\n")
    (dist / "entry_points.txt").write_text("[drivetrain]\nextra = acme.extra\n")
    (tmp_path / "token").write_text("")
    found = probe([str(model), str(tmp_path / "no")], str(tmp_path), "token", [str(tmp_path / "site")])
    assert found["paths"][str(model)]["files"] == {"config.json": 2, "inner/weights": 3}
    assert found["paths"][str(model)]["config"] and not found["paths"][str(model)]["fault"]
    assert found["paths"][str(tmp_path / "no")]["fault"] == "is not there"
    assert found["versions"]["acme-extra"] == "1.0" and found["folder"] == ""
    assert {"python", "torch", "transformers", "ray", "drivetrain-core"} <= found["versions"].keys()
    assert probe([], str(tmp_path), "another", [])["folder"] == "is another folder than the driver's"
    assert probe([], str(tmp_path / "no"), "token", [])["folder"] == "is not there"
    (model / "link").symlink_to("nothing")
    assert "(link)" in probe([str(model)], "", "", [])["paths"][str(model)]["fault"]


AS_ANOTHER = """
import json
if os.geteuid() == 0:
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)
print(json.dumps({path: _look(path) for path in sys.argv[1:]}))
"""


def test_a_file_that_permissions_close() -> None:
    """As another user than root, whom permissions do not stop."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "open").write_text("1")
        (folder / "closed").write_text("1")
        (folder / "closed").chmod(0)
        source = Path(probes.__file__).read_text() + AS_ANOTHER
        command = [sys.executable, "-c", source, name, str(folder / "closed")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found[name]["fault"] == "cannot be read: Permission denied (closed)"
    assert found[str(folder / "closed")]["fault"] == "cannot be read: Permission denied"


def test_the_config_says_what_is_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    run = config_of(
        folder,
        f"rewards=[{{name: function, path: {tmp_path}/mine.py:score}}, {{name: function, path: 'a.b:c', label: b}}]",
        "ref={backend: {name: fsdp}, model: {path: some/ref, tokenizer: some/tokenizer}}", "algorithm.kl_coef=0.1",
    )  # fmt: skip
    found = dict(run.inputs())
    assert found == {
        "model.path": folder / "model", "ref.model.path": Path("some/ref"), "data.train.path": folder / "prompts.jsonl",
        "ref.model.tokenizer": Path("some/tokenizer"), "rewards.0.path": tmp_path / "mine.py",
    }  # fmt: skip
    assert dict(absolute(run).inputs())["ref.model.path"] == Path.cwd() / "some" / "ref"
    assert absolute(run).model_dump() != run.model_dump() and absolute(absolute(run)) == absolute(run)


def test_this_node_and_one_that_is_not_there(cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import ray

    here = ray.get_runtime_context().get_node_id()
    (tmp_path / "data").write_text("1")
    check_nodes([here, here], [("data.train.path", tmp_path / "data")], tmp_path, timeout_s=60)
    assert [path.name for path in tmp_path.iterdir()] == ["data"], "the file that marks the run folder is removed"
    missing = [("critic.model.path", tmp_path / "critic")]
    with pytest.raises(UserError, match="critic.model.path: .*critic is not there") as error:
        check_nodes([here], missing, tmp_path, timeout_s=60)
    labels = [label for label, _ in error.value.details]
    assert labels == ["driver", f"node {ray.util.get_node_ip_address()}"] and error.value.exit_code == 2
    check_nodes([here], missing, tmp_path, timeout_s=60, refuse=False)
    assert "warning: nodes differ" in capsys.readouterr().err


def test_a_run_whose_model_is_missing_starts_nothing(config: Path, tmp_path: Path) -> None:
    critic = "critic={backend: {name: fsdp}, optimizer: {name: adamw, lr: 1.0e-3}, model: {path: no/such/model}}"
    process = start("train", config, f"trainer.run_dir={tmp_path}", critic)
    out = finishes(process)
    assert process.returncode == 2, out
    assert f"critic.model.path: {Path.cwd() / 'no/such/model'} is not there" in out
    assert not (tmp_path / "logs").exists()


def install(site: Path, version: str) -> str:
    dist = site / f"acme_extra-{version}.dist-info"
    dist.mkdir(parents=True)
    (dist / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-extra\nVersion: {version}\n")
    (dist / "entry_points.txt").write_text("[drivetrain]\nextra = acme_extra\n")
    return str(site)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster of two nodes; the second has another acme-extra."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    site = install(tmp_path_factory.mktemp("node") / "site", "1.1")
    cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": site})
    yield cluster.address
    cluster.shutdown()


def test_a_node_with_other_versions(config: Path, tmp_path: Path, two_nodes: str) -> None:
    site = install(tmp_path / "site", "1.0")
    arguments = (
        "train", config, f"executor.address={two_nodes}", "executor.processes=null", "executor.num_cpus=null",
        "placement={pools: {all: [1, 1]}}", "trainer.steps=1",
    )  # fmt: skip
    environment = {"PYTHONPATH": site, "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled")}
    refused = start(*arguments, f"trainer.run_dir={tmp_path / 'refused'}", **environment)
    out = finishes(refused)
    assert refused.returncode == 2, out
    assert out.count("error:") == 1 and "(pre-flight)" in out
    assert [line for line in out.splitlines() if "acme-extra" in line and "node" in line] and out.count("node ") == 1
    assert "acme-extra is 1.1, the driver has 1.0" in out
    assert not (tmp_path / "refused" / "logs").exists(), "no process has started"
    warned = start(*arguments, "executor.preflight=warn", f"trainer.run_dir={tmp_path / 'warned'}", **environment)
    out = finishes(warned)
    assert warned.returncode == 0, out
    assert "warning: nodes differ" in out
    assert ", ranks 0 on " in out and ", 1 on " in out
