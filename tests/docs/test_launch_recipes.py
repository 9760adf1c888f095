"""The launch recipes, with stand-ins for torchrun and srun: what they are called with, and what is done when they fail.

That ranks started so train and are started again is in tests/dist/launch.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.source_tree import ROOT

LAUNCH = ROOT / "examples" / "launch"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the recipes are bash scripts")


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """`torchrun` and `srun` write down their arguments; the n-th call ends with the n-th line of `statuses`, or 0."""
    for name in ("torchrun", "srun"):
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nn=$(wc -l < {tmp_path}/calls)\n'
            f'exit "$(sed -n "${{n}}p" {tmp_path}/statuses 2>/dev/null | grep . || echo 0)"\n'
        )
        program.chmod(0o755)
    return tmp_path


def run(stand_ins: Path, recipe: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environ = {"PATH": f"{stand_ins}{os.pathsep}{os.environ['PATH']}", **variables}
    return subprocess.run([recipe, *arguments], env=environ, capture_output=True, text=True, check=False)


def read_calls(stand_ins: Path) -> list[str]:
    path = stand_ins / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_one_node(stand_ins):
    done = run(stand_ins, LAUNCH / "one_node.sh", "a.toml", "parallel.tp=2", RANKS="2")
    assert done.returncode == 0, done.stderr
    assert read_calls(stand_ins) == [
        "--standalone --nproc-per-node 2 --max-restarts 10 -m plait train a.toml parallel.tp=2"
    ]


@pytest.mark.parametrize("recipe", ["one_node.sh", "several_nodes.sh"])
def test_a_variable_that_is_missing_is_named(stand_ins, recipe):
    done = run(stand_ins, LAUNCH / recipe, "a.toml", NODE="0", NODES="2")
    assert done.returncode != 0
    assert "set RANKS" in done.stderr
    assert read_calls(stand_ins) == []


@pytest.mark.parametrize(("node", "is_host"), [("0", "true"), ("1", "false")])
def test_several_nodes_meet_at_the_first(stand_ins, node, is_host):
    done = run(stand_ins, LAUNCH / "several_nodes.sh", "a.toml", NODE=node, NODES="2", RANKS="4", HOST="h", ADDRESS="a")
    assert done.returncode == 0, done.stderr
    assert read_calls(stand_ins) == [
        f"--nnodes 2 --nproc-per-node 4 --node-rank {node} --local-addr a --rdzv-backend c10d --rdzv-id plait "
        f"--rdzv-conf is_host={is_host} --rdzv-endpoint h:29400 --max-restarts 10 -m plait train a.toml"
    ]


@pytest.mark.parametrize(
    ("statuses", "status", "num_calls"),
    [([0], 0, 1), ([2], 2, 1), ([130], 130, 1), ([3, 137, 0], 0, 3), ([3, 2], 2, 2), ([3, 3, 3, 3], 3, 3)],
)
def test_slurm_starts_again_what_lost_a_rank_and_nothing_else(stand_ins, statuses, status, num_calls):
    (stand_ins / "statuses").write_text("".join(f"{each}\n" for each in statuses))
    done = run(stand_ins, LAUNCH / "slurm.sbatch", "a.toml", "seed=3", MAX_RESTARTS="2")
    assert done.returncode == status, done.stderr
    assert read_calls(stand_ins) == ["--kill-on-bad-exit=1 plait train a.toml seed=3"] * num_calls
    assert done.stderr.count("restart ") == num_calls - 1


def test_the_pods_of_kubernetes_are_nodes_that_find_each_other(stand_ins):
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert (service["kind"], job["kind"], spec["completionMode"]) == ("Service", "Job", "Indexed")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["publishNotReadyAddresses"] is True, "pods look for each other before they are ready"
    assert pod["restartPolicy"] == "Never", "what a job with a policy for failures of pods requires"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert given["NODES"] == str(spec["parallelism"]) == str(spec["completions"])
    assert given["HOST"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert given["RANKS"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    (script,) = container["command"]
    for index in range(spec["parallelism"]):
        rendered = {**given, "NODE": str(index), "ADDRESS": f"10.1.0.{index}"}
        assert {each["name"] for each in container["env"]} == set(rendered)
        done = run(stand_ins, LAUNCH / Path(script).name, *container["args"], **rendered)
        assert done.returncode == 0, done.stderr
    first, second = read_calls(stand_ins)
    assert "--rdzv-endpoint plait-0.plait:29400" in first
    assert first.endswith("-m plait train config.toml parallel.dp_replicate=2")
    assert service["spec"]["ports"][0]["port"] == 29400
    assert (
        first.replace("is_host=true", "is_host=false")
        .replace("--node-rank 0", "--node-rank 1")
        .replace("10.1.0.0", "10.1.0.1")
        == second
    )
