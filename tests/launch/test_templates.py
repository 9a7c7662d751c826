"""The files in deploy/: manifests hold what their controllers read; scripts run with stand-ins for Slurm's tools."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from plait.cluster.roles import find_role
from plait.launch import ray

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
SCRIPTS = sorted(DEPLOY.glob("slurm/*.sbatch"))


def read(name):
    return yaml.safe_load((DEPLOY / "kubernetes" / name).read_text())


def variables(container):
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def test_all_templates_are_there():
    assert [path.name for path in MANIFESTS] == ["parameter-server.yaml", "pytorchjob.yaml", "trainer.yaml"]
    assert [path.name for path in SCRIPTS] == ["collective.sbatch", "parameter-server.sbatch"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_value_in_an_environment_is_a_string_and_every_name_stands_once(path):
    def environments(tree):
        if isinstance(tree, dict):
            if "env" in tree:
                yield tree["env"]
            for value in tree.values():
                yield from environments(value)
        elif isinstance(tree, list):
            for value in tree:
                yield from environments(value)

    found = list(environments(read(path.name)))
    assert found
    for env in found:
        assert len({one["name"] for one in env}) == len(env)
        assert all(isinstance(one.get("value", ""), str) for one in env)
        assert all(("value" in one) != ("valueFrom" in one) for one in env)


def test_the_pytorchjob_is_one_elastic_group_of_a_fixed_size():
    job = read("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    assert set(spec) == {"nprocPerNode", "elasticPolicy", "pytorchReplicaSpecs"}
    assert isinstance(spec["nprocPerNode"], str)
    policy = spec["elasticPolicy"]
    assert set(policy) == {"rdzvBackend", "minReplicas", "maxReplicas", "maxRestarts"}
    assert list(spec["pytorchReplicaSpecs"]) == ["Worker"]  # with a Master, torchrun's elastic agent is not used
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == policy["minReplicas"] == policy["maxReplicas"]
    assert worker["restartPolicy"] == "OnFailure"
    check_pod(worker["template"]["spec"], "pytorch", "torchrun")
    assert variables(worker["template"]["spec"]["containers"][0])["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_the_trainjob_gives_torchrun_a_rendezvous():
    job = read("trainer.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert set(job["spec"]) == {"runtimeRef", "trainer"}
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    assert set(trainer) == {"image", "numNodes", "numProcPerNode", "command", "env", "resourcesPerNode"}
    assert trainer["command"][0] == "torchrun"
    options = dict(word.removeprefix("--").split("=") for word in trainer["command"] if word.startswith("--"))
    assert int(options["nnodes"]) == trainer["numNodes"]
    assert options["rdzv-endpoint"] == "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"  # the runtime sets them
    assert not [name for name in variables(trainer) if name.startswith("PET_")]  # which it refuses from others
    assert variables(trainer)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_torchrun_has_the_options_that_the_trainjob_uses():
    command = read("trainer.yaml")["spec"]["trainer"]["command"]
    found = get_args_parser().parse_args(command[1:])
    assert (found.max_restarts, found.rdzv_backend, found.training_script) == (3, "c10d", "train.py")


def check_pod(pod, name, program):
    (container,) = pod["containers"]
    assert container["name"] == name
    assert container["command"][0] == program
    claims = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= claims


def roles_of(jobs, name):
    """The role that each pod of a job would find."""
    template = jobs[name]["template"]["spec"]
    fields = {"metadata.labels['jobset.sigs.k8s.io/replicatedjob-name']": name}
    for index in range(template["completions"]):
        fields["metadata.annotations['batch.kubernetes.io/job-completion-index']"] = str(index)
        container = template["template"]["spec"]["containers"][0]
        environ = variables(container)
        for one in container["env"]:
            if "fieldRef" in one.get("valueFrom", {}):
                environ[one["name"]] = fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        yield find_role(environ)


def test_the_pods_of_the_jobset_find_their_roles():
    jobset = read("parameter-server.yaml")
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec, name = jobset["spec"], jobset["metadata"]["name"]
    assert set(spec) == {"network", "successPolicy", "replicatedJobs"}
    assert spec["network"] == {"enableDNSHostnames": True}
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["worker"]}
    jobs = {job["name"]: job for job in spec["replicatedJobs"]}
    for kind in ("server", "worker"):
        template = jobs[kind]["template"]["spec"]
        assert jobs[kind]["replicas"] == 1
        assert template["completions"] == template["parallelism"]
        assert template["template"]["spec"]["restartPolicy"] == "OnFailure"
        check_pod(template["template"]["spec"], kind, "python")
        found = list(roles_of(jobs, kind))
        assert [(role.kind, role.index) for role in found] == [(kind, index) for index in range(len(found))]
        assert {role.workers for role in found} == {jobs["worker"]["template"]["spec"]["completions"]}
        count = jobs["server"]["template"]["spec"]["completions"]
        hosts = tuple(f"{name}-server-0-{index}.{name}:7164" for index in range(count))
        assert {role.server_endpoints for role in found} == {hosts}


SRUN = """
import json, os, subprocess, sys
words = sys.argv[1:]
options = [word for word in words[:words.index("python")]]
command = [sys.executable, *words[words.index("python") + 1:]]
for step in map(str, range(100)):
    try:
        open(os.path.join(os.environ["STEPS"], step), "x").close()
        break
    except FileExistsError:
        pass
tasks = next((word[9:] for word in options if word.startswith("--ntasks=")), os.environ["SLURM_NTASKS"])
slurm = {"SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": tasks, "SLURM_NTASKS": tasks, "OPTIONS": json.dumps(options)}
slurm["SLURM_STEP_NODELIST"] = os.environ["SLURM_JOB_NODELIST"]
processes = [
    subprocess.Popen(command, env={**os.environ, **slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2)})
    for rank in range(int(tasks))
]
sys.exit(max(process.wait() for process in processes))
"""
TASK = """
import json, os, sys, time
kind = os.environ.get("PLAIT_ROLE", "task")
rank = os.environ.get("PLAIT_INDEX", os.environ["SLURM_PROCID"])
restart = os.environ["PLAIT_RESTART"]
with open(f"{kind}-{rank}-{restart}.json", "x") as file:
    json.dump({**os.environ, "ARGUMENTS": json.dumps(sys.argv[1:])}, file)
if kind == "worker" and "wait" in sys.argv[1:]:
    time.sleep(60)
sys.exit(7 if f"{kind}-{rank}-{restart}" in sys.argv[1:] else 0)
"""


@pytest.fixture
def sbatch(tmp_path):
    """Run a batch script where `srun` starts processes here and `scontrol` knows two hosts."""
    tools, steps = tmp_path / "bin", tmp_path / "steps"
    tools.mkdir()
    steps.mkdir()
    (tmp_path / "srun.py").write_text(SRUN)
    (tmp_path / "task.py").write_text(TASK)
    (tools / "srun").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{tmp_path / "srun.py"}" "$@"\n')
    (tools / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)

    def run(name, *arguments, tasks, **environ):
        slurm = {"SLURM_NTASKS": str(tasks), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "77"}
        slurm |= {"SLURM_CPUS_PER_TASK": "4", "STEPS": str(steps), "PATH": f"{tools}:{os.environ['PATH']}"}
        command = ["bash", str(DEPLOY / "slurm" / name), "task.py", *arguments]
        errors = tmp_path / "errors"
        with errors.open("wb") as file:
            job = subprocess.Popen(
                command, env={**slurm, **environ}, cwd=tmp_path, stdout=file, stderr=file, start_new_session=True
            )
            try:
                code = job.wait(60)
            finally:  # what a batch script leaves running, Slurm ends
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        found = {path.stem: json.loads(path.read_text()) for path in sorted(tmp_path.glob("*-*-*.json"))}
        return types.SimpleNamespace(returncode=code, stderr=errors.read_text()), found

    return run


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_batch_scripts_are_well_formed(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]  # Slurm stops reading at a command
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(path)], check=True)


def test_slurm_tasks_find_their_roles(sbatch):
    done, found = sbatch("collective.sbatch", "--lr", "0.1", tasks=3)
    assert done.returncode == 0, done.stderr
    roles = [find_role(found[f"task-{rank}-0"]) for rank in range(3)]
    assert [(role.index, role.workers, role.servers, role.restart) for role in roles] == [
        (i, 3, 0, 0) for i in range(3)
    ]
    assert len({role.master for role in roles}) == 1
    assert roles[0].master.startswith("node1:")
    assert found["task-0-0"]["ARGUMENTS"] == '["--lr", "0.1"]'
    assert found["task-0-0"]["OMP_NUM_THREADS"] == "4"


def test_a_slurm_group_is_started_again_and_meets_elsewhere(sbatch):
    done, found = sbatch("collective.sbatch", "task-1-0", tasks=2)
    assert done.returncode == 0
    assert done.stderr == "attempt 0 ended with exit code 7\n"
    first, second = (find_role(found[f"task-0-{restart}"]) for restart in range(2))
    assert (first.restart, second.restart) == (0, 1)
    assert first.master != second.master


def test_a_slurm_group_gives_up_with_the_exit_code_of_its_last_attempt(sbatch):
    done, found = sbatch("collective.sbatch", *(f"task-1-{restart}" for restart in range(4)), tasks=2)
    assert done.returncode == 7
    assert len(found) == 8


def test_servers_and_workers_on_slurm_find_their_roles(sbatch):
    done, found = sbatch("parameter-server.sbatch", "worker-1-0", "server-0-0", tasks=5, SERVERS="2")
    assert done.returncode == 0, done.stderr
    names = ["server-0-0", "server-0-1", "server-1-0", "worker-0-0", "worker-1-0", "worker-1-1", "worker-2-0"]
    assert sorted(found) == names
    for name in names:
        role = find_role(found[name])
        assert f"{role.kind}-{role.index}-{role.restart}" == name
        assert (role.workers, role.servers) == (3, 2)
        assert role.server_endpoints == ("node1:7164", "node2:7165")
    hosts = {name: [word for word in json.loads(found[name]["OPTIONS"]) if "nodelist" in word] for name in names}
    assert hosts["server-0-0"] == hosts["server-0-1"] == hosts["worker-0-0"] == ["--nodelist=node1"]
    assert hosts["server-1-0"] == hosts["worker-1-0"] == ["--nodelist=node2"]


def test_a_worker_on_slurm_that_fails_too_often_ends_the_job(sbatch):
    done, _ = sbatch("parameter-server.sbatch", *(f"worker-0-{restart}" for restart in range(4)), tasks=2)
    assert done.returncode == 7
    assert done.stderr.count("worker 0 ended with exit code 7") == 4


def test_a_server_on_slurm_that_fails_too_often_ends_the_job(sbatch):
    done, _ = sbatch("parameter-server.sbatch", "wait", *(f"server-0-{restart}" for restart in range(4)), tasks=2)
    assert done.returncode == 7


def test_the_ray_job_launches_what_it_is_told(monkeypatch):
    called = []
    monkeypatch.setattr(ray, "run", lambda command, **options: called.append((command, options)) or 3)
    words = ["job.py", "--workers", "4", "--servers", "2", "--cpus", "0.5", "train.py", "--workers", "9"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(DEPLOY / "ray" / "job.py"), run_name="__main__")
    assert stopped.value.code == 3
    expected = {"workers": 4, "servers": 2, "max_restarts": 3, "cpus": 0.5, "gpus": 0, "log_dir": None}
    assert called == [(["train.py", "--workers", "9"], expected)]
