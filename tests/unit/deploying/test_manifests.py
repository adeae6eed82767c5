"""The Kubernetes resources fit the server: flags, routes, ports, times, and who may reach Ray."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from sensorium.cli.deploy import make_config, parse_arguments
from sensorium.cli.keys import VARIABLE
from sensorium.cli.serve import make_options
from sensorium.scale.options import ScaleOptions
from sensorium.server.options import ServeOptions
from tests.unit.deploying.reading import (
    ROOT,
    can_get,
    get_instruction,
    parse_serve,
    read_manifests,
)

PLAIN = read_manifests("deployment.yaml")
RAY = read_manifests("rayservice.yaml")
POD = PLAIN["Deployment"]["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
SERVICE = RAY["RayService"]["spec"]
CLUSTER = SERVICE["rayClusterConfig"]
CONFIG = yaml.safe_load(SERVICE["serveConfigV2"])
(APP,) = CONFIG["applications"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]
GROUPS = [CLUSTER["headGroupSpec"], WORKERS]


def list_references(value: Any) -> set[str]:
    """Return the names of variables that a text refers to as `$(NAME)`."""
    return set(re.findall(r"\$\((\w+)\)", str(value)))


def get_options() -> ServeOptions:
    return parse_serve(SERVER["args"])


# ---- the Deployment


def test_the_arguments_of_the_pod_are_accepted_and_it_listens_for_others() -> None:
    options = get_options()
    assert options.host == "0.0.0.0"
    (port,) = SERVER["ports"]
    assert port["containerPort"] == options.port
    (service_port,) = PLAIN["Service"]["spec"]["ports"]
    assert service_port["targetPort"] == port["name"]
    assert get_instruction("EXPOSE") == str(options.port)


def test_the_key_comes_from_the_secret_and_stands_in_no_command_line() -> None:
    assert get_options().api_key == ()
    variables = {each["name"]: each for each in SERVER["env"]}
    assert list_references(SERVER["args"]) == set()
    assert "secretKeyRef" in variables[VARIABLE]["valueFrom"]


@pytest.mark.parametrize(
    ("probe", "path"),
    [("startupProbe", "/health"), ("readinessProbe", "/health"), ("livenessProbe", "/ping")],
)
def test_probes_ask_routes_that_exist_and_need_no_key(probe: str, path: str) -> None:
    asked = SERVER[probe]["httpGet"]
    assert asked["path"] == path
    assert can_get(path)
    assert asked["port"] in [each["name"] for each in SERVER["ports"]]


def test_a_pod_that_ends_has_time_for_its_requests() -> None:
    command, seconds = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    needed = int(seconds) + get_options().shutdown_timeout
    assert POD["terminationGracePeriodSeconds"] >= needed + 10


def test_an_update_never_takes_the_last_pod_away() -> None:
    update = PLAIN["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert (update["maxUnavailable"], update["maxSurge"]) == (0, 1)
    # Both pods have the volume then, maybe on different nodes.
    assert PLAIN["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_names_in_the_resources_of_the_deployment_agree() -> None:
    labels = PLAIN["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert PLAIN["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert PLAIN["Service"]["spec"]["selector"] == labels
    volumes = {each["name"]: each for each in POD["volumes"]}
    mounts = {each["mountPath"]: each["name"] for each in SERVER["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    claim = volumes[mounts[get_instruction("VOLUME")]]["persistentVolumeClaim"]["claimName"]
    assert claim == PLAIN["PersistentVolumeClaim"]["metadata"]["name"]
    assert "/tmp" in mounts  # the rest of the container's files is read-only
    assert SERVER["securityContext"]["readOnlyRootFilesystem"]


# ---- the RayService


def test_the_config_is_what_print_config_prints() -> None:
    arguments = parse_arguments(APP["args"])
    assert json.loads(make_config(arguments, make_options(arguments))) == CONFIG


@pytest.mark.processes
def test_ray_serve_accepts_the_config() -> None:
    # In a process of its own, because Ray warns when it is imported.
    code = (
        "import json, sys\n"
        "from ray.serve.schema import ServeDeploySchema\n"
        "config = ServeDeploySchema.model_validate(json.load(sys.stdin))\n"
        "print(config.applications[0].import_path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(CONFIG),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sensorium.cli.deploy:build_app\n"


def test_commented_lines_of_the_config_are_also_accepted() -> None:
    off = re.compile(r"(?m)^( *)# (\w+: \S+)$")
    text, count = off.subn(r"\1\2", SERVICE["serveConfigV2"])
    assert count == 2
    (app,) = yaml.safe_load(text)["applications"]
    options = make_options(parse_arguments(app["args"]))
    assert options.api_key == ("SECRET",)
    assert options.media.mm_remote_cache is not None


def test_frontends_take_requests_for_the_name_of_the_service() -> None:
    options = make_options(parse_arguments(APP["args"]))
    assert options.host == CONFIG["http_options"]["host"] == "0.0.0.0"


def test_engines_and_frontends_fit_on_the_workers() -> None:
    defaults = ScaleOptions()
    args = {name: getattr(defaults, name) for name in ScaleOptions.__slots__} | APP["args"]
    limits = WORKERS["template"]["spec"]["containers"][0]["resources"]["limits"]
    cpus, gpus, count = int(limits["cpu"]), int(limits["nvidia.com/gpu"]), WORKERS["replicas"]
    assert args["engine_gpus"] == gpus  # one engine for each worker
    assert args["replicas"] == count
    # Even if all frontends are placed on one worker.
    assert args["engine_cpus"] + args["frontends"] * args["frontend_cpus"] <= cpus
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_old_clusters_and_workers_live_longer_than_their_requests() -> None:
    timeout = make_options(parse_arguments(APP["args"])).shutdown_timeout
    assert SERVICE["rayClusterDeletionDelaySeconds"] > timeout + 10
    assert WORKERS["template"]["spec"]["terminationGracePeriodSeconds"] > timeout + 10


def test_ray_has_the_version_that_is_tested_and_asks_for_a_token() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={CLUSTER['rayVersion']}" in constraints
    assert CLUSTER["authOptions"]["mode"] == "token"


def test_pods_have_the_port_of_the_proxy_and_one_image() -> None:
    containers = [group["template"]["spec"]["containers"][0] for group in GROUPS]
    for container in containers:
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports["serve"] == CONFIG["http_options"]["port"]
    assert len({container["image"] for container in containers}) == 1


def test_only_the_cluster_itself_reaches_all_ports_of_ray() -> None:
    policy = RAY["NetworkPolicy"]["spec"]
    labels = policy["podSelector"]["matchLabels"]
    for group in GROUPS:
        assert labels.items() <= group["template"]["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    dashboard = next(
        each["containerPort"]
        for each in CLUSTER["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]
        if each["name"] == "dashboard"
    )
    http = CONFIG["http_options"]["port"]
    opened = [
        ([each["port"] for each in rule.get("ports", [])], rule["from"])
        for rule in policy["ingress"]
    ]
    (own, operator, clients) = opened
    assert own == ([], [{"podSelector": {"matchLabels": labels}}])
    assert operator[0] == [dashboard, http]
    assert all(set(each) == {"namespaceSelector", "podSelector"} for each in operator[1])
    assert clients[0] == [http]
