"""``unicron run --check``: the verdict on command lines as users have them."""

from __future__ import annotations

import io
import json
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.launch import own_configuration
from cli.main import main
from shared.launch import settings
from shared.launch.arguments import read_arguments, table
from shared.launch.check import Verdict
from shared.launch.command import TORCHRUN_FLAGS, TORCHRUN_VALUES, parse_command
from shared.launch.script import Loop, loop_of
from tests.cli.conftest import Outcome

CONFIGURATIONS = yaml.safe_load((Path(__file__).parent / "data" / "megatron_configs.yaml").read_text())

CALLS_PRETRAIN = "from megatron.training import get_args, pretrain\n"
MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"

FULL = f"{MODEL} --global-batch-size 64 --train-iters 5"


def call(*arguments: str) -> Outcome:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["run", *arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


def verdict(command: str, code: int = 0) -> dict[str, Any]:
    done = call("--check", "-o", "json", "--", *shlex.split(command))
    assert done.code == code, done
    assert len(done.out.splitlines()) == 1
    document: dict[str, Any] = json.loads(done.out)
    assert {*document} == {"verdict", "settings", "task"}
    assert all({"argument", "what", "why", "instead"} <= {*setting} for setting in document["settings"])
    return document


def arguments(document: dict[str, Any]) -> set[str]:
    return {setting["argument"] for setting in document["settings"]}


def write_script(folder: Path, name: str, text: str, core: str = "0.16.1") -> None:
    """Write a script, and megatron-core's version beside it."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    place = (folder / name).parent / "megatron" / "core"
    place.mkdir(parents=True, exist_ok=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), core.split("."), strict=True)
    (place / "package_info.py").write_text("".join(f"{part} = {number}\n" for part, number in parts))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; without the variables that say where modules are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def test_the_list_has_all_configurations() -> None:
    names = [entry["name"] for entry in CONFIGURATIONS]
    assert len(names) == len({*names}) == 42


@pytest.mark.parametrize("entry", CONFIGURATIONS, ids=lambda entry: str(entry["name"]).replace(" ", "-"))
def test_public_configuration(entry: dict[str, Any], folder: Path) -> None:
    launch = parse_command(shlex.split(entry["command"]))
    name = Path(launch.script or launch.module.replace(".", "/") + ".py")
    if name.suffix == ".py":
        here = Path(name.name) if name.is_absolute() or ".." in name.parts else name
        write_script(folder, str(here), "\n".join(entry["script"]["imports"]), entry["script"].get("core", "0.16.1"))
        command = entry["command"].replace(launch.script, str(here)) if launch.script else entry["command"]
    else:
        command = entry["command"]
    found = verdict(command)
    assert found["verdict"] == entry["verdict"], found["settings"]
    assert {*entry["settings"]} <= arguments(found)
    if entry["verdict"] == "unchanged":
        assert found["settings"] == []


@pytest.mark.parametrize("entry", CONFIGURATIONS, ids=lambda entry: str(entry["name"]).replace(" ", "-"))
def test_public_configuration_whose_script_is_elsewhere(entry: dict[str, Any]) -> None:
    assert verdict(entry["command"])["verdict"] == entry["verdict"]


@pytest.mark.parametrize(
    ("options", "command", "said"),
    [
        ("", f"pretrain_gpt.py {MODEL} --train-iters 5", "the planner needs batch.global"),
        ("", f"podman run image python pretrain_gpt.py {MODEL} --train-iters 5", "starts a container"),
        ("--server http://127.0.0.1:9", f"WANDB_API_KEY=x pretrain_gpt.py {FULL}", "'WANDB_API_KEY'"),
        ("", f"WANDB_API_KEY=x numactl -m 0 python pretrain_gpt.py {FULL}", ""),
    ],
)
def test_the_check_says_what_a_run_would_be_refused_for(options: str, command: str, said: str) -> None:
    """A variable that looks secret stays on this machine unless there is a server."""
    done = call("--check", *shlex.split(options), "--", *shlex.split(command))
    assert done.code == 0
    assert "; arguments read by a table of its releases" in done.out
    assert ("not run: numactl" in done.out) == ("numactl" in command)
    assert said in done.err
    assert ("a run would be refused" in done.err) == bool(said)


def test_what_the_planner_needs_is_read() -> None:
    found = verdict(
        f"srun torchrun --nnodes=4 --nproc_per_node 8 --max_restarts=3 pretrain_gpt.py {MODEL} --global-batch-size 64 "
        "--train-samples 6400 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
        "--num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer --vocab-size 1000 --bf16"
    )
    task = found["task"]
    assert task["model"] == {"layers": 4, "hidden": 64, "heads": 4, "sequence_length": 32, "vocabulary": 1000}
    assert task["batch"] == {"global": 64, "micro": 1}
    assert task["parallel"] == {
        "tensor": 2, "pipeline": 2, "interleave": 2, "sequence_parallel": True, "distributed_optimizer": True,
        "overlap": False,
    }  # fmt: skip
    assert (task["steps"], task["workers"], task["least_workers"], task["max_restarts"]) == (100, 32, 4, 3)


@pytest.mark.parametrize(
    ("argument", "effect"),
    [
        ("--fp16", "unchanged"),
        ("--grad-reduce-in-bf16", "unchanged"),
        ("--use-precision-aware-optimizer", "unchanged"),
        ("--exp-avg-dtype fp8", "restart"),
        ("--exp-avg-sq-dtype bf16", "unchanged"),
        ("--dataloader-type external", "restart"),
        ("--dataloader-type cyclic", "unchanged"),
        ("--context-parallel-size 1", "unchanged"),
        ("--context-parallel-size 2", "restart"),
        ("--use-torch-fsdp2", "restart"),
        ("--exit-interval 100", "unchanged"),
        ("--exit-duration-in-mins 230", "unchanged"),
        ("--tp-comm-overlap", "speed-off"),
        ("--overlap-p2p-communication-warmup-flush", "speed-off"),
        ("--defer-embedding-wgrad-compute", "speed-off"),
        ("--cuda-graph-impl local", "speed-off"),
        ("--cuda-graph-impl none", "unchanged"),
        ("--async-save", "speed-off"),
        ("--wandb-project mine", "speed-off"),
        ("--log-straggler", "speed-off"),
        ("--adlr-autoresume", "speed-off"),
        ("--num-workers 8", "speed-off"),
        ("--num-workers 0", "unchanged"),
        ("--rerun-mode validate_results", "speed-off"),
        ("--rerun-mode disabled", "unchanged"),
        ("--exit-signal-handler-for-training", "speed-off"),
        ("--calculate-per-token-loss", "unchanged"),
        ("--an-argument-of-a-fork 1", "restart"),
    ],
)
def test_setting(argument: str, effect: str) -> None:
    found = verdict(f"pretrain_gpt.py {MODEL} {argument}")
    assert found["verdict"] == effect
    assert [(s["argument"], s["what"]) for s in found["settings"]] == (
        [] if effect == "unchanged" else [(argument.split()[0], effect)]
    )


@pytest.mark.parametrize("ramp", ["4 0 20", "0 4 20", "4 5 20", "16 4 20", "4 4 -1"])
def test_a_batch_that_cannot_grow_as_it_is_to_is_refused(ramp: str) -> None:
    asked = f"--global-batch-size 12 --train-samples 60 --rampup-batch-size {ramp}"
    found = verdict(f"pretrain_gpt.py {MODEL} {asked}", code=3)
    assert (found["verdict"], arguments(found), found["task"]["steps"]) == ("refused", {"--rampup-batch-size"}, None)


@pytest.mark.parametrize(("core", "effect"), [("0.17.1", "unchanged"), ("0.18.2", "restart")])
def test_a_batch_that_grows_is_healed_where_megatron_lets_it(core: str, effect: str, folder: Path) -> None:
    write_script(folder, "train.py", CALLS_PRETRAIN, core)
    found = verdict("train.py --global-batch-size 12 --train-samples 60 --rampup-batch-size 4 4 20")
    assert found["verdict"] == effect
    assert arguments(found) == ({"--rampup-batch-size"} if effect == "restart" else set())


def test_an_argument_that_the_script_adds_is_its_own(folder: Path) -> None:
    write_script(folder, "train.py", CALLS_PRETRAIN + "parser.add_argument('--of-mine')\n")
    assert verdict("train.py --of-mine 3")["verdict"] == "unchanged"


@pytest.mark.parametrize(
    ("core", "effect"),
    [
        ("0.15.3", "restart"),
        ("0.16.0", "unchanged"),
        ("0.18.2", "unchanged"),
        ("0.19.1", "unchanged"),
        ("0.20.0", "restart"),
    ],
)
def test_a_release_whose_seams_are_not_known_restarts_whole(core: str, effect: str, folder: Path) -> None:
    write_script(folder, "train.py", CALLS_PRETRAIN, core)
    found = verdict("train.py")
    assert (found["verdict"], found["task"]["megatron_core"]) == (effect, core)
    assert arguments(found) == (set() if effect == "unchanged" else {"megatron-core"})


@pytest.mark.parametrize(
    ("answer", "core", "effect"),
    [
        (None, metadata.version("megatron-core"), "unchanged"),
        ([True, "0.15.3", False], "0.15.3", "restart"),
        ([False, "0.15.3", False], "0.15.3", "restart"),
        ([True, "", False], None, "unchanged"),
        # Neither the library nor megatron-core: the script would run in the Python of the node agents.
        ([False, "", False], metadata.version("megatron-core"), "unchanged"),
    ],
)
def test_the_release_is_that_of_the_python_that_the_command_means(
    answer: list[Any] | None, core: str | None, effect: str, folder: Path
) -> None:
    (folder / "train.py").write_text(CALLS_PRETRAIN)
    python = folder / "python"
    says = f"echo '{json.dumps(answer)}'" if answer is not None else f'exec "{sys.executable}" "$@"'
    python.write_text(f"#!/bin/sh\n{says}\n")
    python.chmod(0o755)
    found = verdict(f"{python} train.py")
    assert (found["verdict"], found["task"]["megatron_core"]) == (effect, core)


@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim"])
def test_a_restart_that_would_lose_state_is_refused(flag: str) -> None:
    assert verdict(f"pretrain_gpt.py {MODEL} --load a --save b {flag}")["verdict"] == "unchanged"
    found = verdict(f"pretrain_gpt.py {MODEL} --load a --save a {flag}", code=3)
    assert (found["verdict"], arguments(found)) == ("refused", {flag})


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("--wandb-api-key 0123", "--wandb-api-key"),
        ("--hub_token=hf_abcdefghijklmnopqrstuvwxyz", "--hub_token"),
        ("--remote s3://me:pass@host/x", "--remote"),
        ("ghp_abcdefghijklmnopqrstuvwxyz0123", "argument 1"),
    ],
)
def test_a_secret_in_an_argument_is_refused_and_not_shown(argument: str, named: str) -> None:
    found = verdict(f"train.py {argument}", code=3)
    assert found["verdict"] == "refused"
    assert named in arguments(found)
    secret = argument.partition("=")[2] or argument.split()[-1]
    assert secret not in json.dumps(found)
    assert "secrets:" in next(s["instead"] for s in found["settings"] if s["argument"] == named)


def test_arguments_that_only_sound_secret_are_none() -> None:
    assert verdict("train.py --input-key prompt --eod-token 3 --url https://host/a@b")["verdict"] == "restart"


@pytest.mark.parametrize("wrong", ["--num-layers many", "--num-layers", "--optimizer best"])
def test_a_value_that_megatron_refuses_is_refused(wrong: str) -> None:
    found = verdict(f"pretrain_gpt.py {wrong}", code=3)
    assert [(s["argument"], s["what"]) for s in found["settings"]] == [(wrong.split()[0], "refused")]


@pytest.mark.parametrize(
    "command",
    ["", "bash run.sh", "torchrun --no-such-option train.py", "python -c 'print()'", "torchrun --nnodes", "python -m"],
)
def test_a_command_line_without_a_script_is_invalid(command: str) -> None:
    done = call("--check", "-o", "json", "--", *shlex.split(command))
    assert (done.code, done.out) == (2, "")


@pytest.mark.parametrize(
    ("text", "loop"),
    [
        (CALLS_PRETRAIN, Loop.MEGATRON_LM),
        ("from megatron.training.training import pretrain", Loop.MEGATRON_LM),
        (CALLS_PRETRAIN + "from mine import pretrain", Loop.OTHER),
        (CALLS_PRETRAIN + "import deepspeed", Loop.OTHER),
        ("import unicron", Loop.LIBRARY),
        ("from megatron.bridge.training.pretrain import pretrain", Loop.BRIDGE),
        ("import torch", Loop.OTHER),
        ("import runpy\nrunpy.run_path('pretrain_hybrid.py', run_name='__main__')", Loop.MEGATRON_LM),
        ("import runpy\nrunpy.run_path('mine.py', run_name='__main__')", Loop.OTHER),
        ("not Python", Loop.OTHER),
    ],
)
def test_loop(text: str, loop: Loop) -> None:
    assert loop_of(text)[0] is loop


def test_a_loop_on_the_library_is_healed_in_the_step_and_another_is_told_how(folder: Path) -> None:
    (folder / "healed.py").write_text("import unicron\n")
    (folder / "plain.py").write_text("import torch\n")
    assert verdict("healed.py --lr 1")["verdict"] == "unchanged"
    found = verdict("-m plain --lr 1")
    assert (found["verdict"], found["task"]["module"], found["task"]["heals"]) == ("restart", "plain", "restart")
    assert "run.steps()" in found["settings"][0]["instead"]
    assert "run.steps()" in call("--check", "--", "plain.py").out


def test_megatron_bridge_has_its_settings_in_objects_and_a_file_says_what_the_planner_needs(folder: Path) -> None:
    (folder / "recipe.py").write_text("from megatron.bridge.training.pretrain import pretrain\n")
    found = verdict("torchrun recipe.py --peft lora")
    assert (found["verdict"], found["task"]["heals"], arguments(found)) == ("restart", "restart", {"SCRIPT"})
    assert "`python -m unicron.bridge --fields task.yaml recipe.py ...`" in found["settings"][0]["instead"]
    (folder / "task.yaml").write_text("model: {}\nbatch: {}\nsteps: 20\n")
    healed = call("--check", "-o", "json", "--spec", "task.yaml", "--", "torchrun", "recipe.py")
    document = json.loads(healed.out)
    assert (healed.code, document["verdict"], document["task"]["read_by"]) == (0, "unchanged", "start")
    assert (
        "its settings are checked when it calls pretrain()"
        in call("--check", "--spec", "task.yaml", "--", "recipe.py").out
    )
    (folder / "task.yaml").write_text("weight: 2\n")
    assert call("--check", "--require-healing", "--spec", "task.yaml", "--", "recipe.py").code == 3


FIELDS = {
    "model": {"layers": 2, "hidden": 32, "heads": 2, "sequence_length": 32, "vocabulary": 64},
    "batch": {"global": 12, "micro": 1}, "steps": 20, "parallel": {"tensor": 2}, "workers": {"min": 2},
    "checkpoint": {"every": 5},
}  # fmt: skip


def write_python(folder: Path, asked: str, has_library: str = "true") -> Path:
    """Write a Python that has megatron-bridge, with what it does as it is asked for settings ($5)."""
    python = folder / "python"
    rendezvous = '[ -z "$MASTER_ADDR$WORLD_SIZE$RANK" ] || exit 1'
    has = f"echo '[{has_library}, \"\", false, true]'"
    python.write_text(f"#!/bin/sh\nif [ $4 = --settings ]; then {rendezvous}\n{asked}\nelse {has}; fi\n")
    python.chmod(0o755)
    return python


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; whoever adopts it may not have taken its end."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_script_of_megatron_bridge_says_its_settings_where_it_can_be_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is run without what processes find each other by; ``unicron.bridge`` does the rest (tests/bridge)."""
    (folder / "recipe.py").write_text("from megatron.bridge.training.pretrain import pretrain\n")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    setting = {"argument": "checkpoint.async_save", "value": True, "why": "it is.", "instead": "nothing"}
    answers = {what: {"task": FIELDS, "settings": [setting | {"what": what}]} for what in ("speed-off", "restart")}
    answers["unchanged"] = {"task": FIELDS, "settings": []}
    command = f"torchrun --nproc-per-node 2 {folder}/recipe.py --lr 1"
    for what, answer in answers.items():
        python = write_python(
            folder, f"echo '{json.dumps(answer)}' > $5; [ \"$6 $7 $8\" = '{folder}/recipe.py --lr 1' ]"
        )
        found = verdict(f"WORLD_SIZE=2 {python} -m torch.distributed.run {command.removeprefix('torchrun ')}")
        assert (found["verdict"], found["task"]["read_by"], found["task"]["steps"]) == (what, "script", 20)
        assert found["settings"] == answer["settings"]
        assert (found["task"]["least_workers"], found["task"]["saves_every"]) == (2, 5)


def test_a_script_that_names_no_pretrain_is_not_run(folder: Path) -> None:
    (folder / "convert.py").write_text("from megatron.bridge import AutoBridge\n")
    found = verdict(f"{write_python(folder, 'touch run')} convert.py")
    assert found["settings"][0]["why"].endswith("it names no pretrain()")
    assert not (folder / "run").exists()


def test_a_python_of_megatron_bridge_without_the_library_is_named(folder: Path) -> None:
    (folder / "recipe.py").write_text("from megatron.bridge.training.pretrain import pretrain\n")
    python = write_python(folder, "exit 1", has_library="false")
    found = verdict(f"{python} recipe.py")
    assert found["verdict"] == "restart"
    assert f"{python} has no library (install its wheel there, docs/deploy.md#wheels)" in found["settings"][0]["why"]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (
            'echo \'{"problem": "it ends with KeyError before pretrain()"}\' > $5',
            "it ends with KeyError before pretrain()",
        ),
        ("echo 'No module named x'; exit 3", "it ends with 3 before pretrain(): No module named x"),
        ("echo '{\"settings\": [{}]}' > $5", "it ends with 0 before pretrain(): it prints nothing"),
        ("sleep 600 & echo $! > $5.pid; wait", "it has not come to pretrain() within 0 s"),
    ],
)
def test_a_script_that_does_not_come_to_its_pretrain_restarts_whole(
    asked: str, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "recipe.py").write_text("from megatron.bridge.training.pretrain import pretrain\n")
    monkeypatch.setattr(own_configuration, "LIMIT_S", 0.4 if "sleep" in asked else 60.0)
    children = folder / "children"
    found = verdict(f"{write_python(folder, asked.replace('$5.pid', str(children)))} recipe.py")
    assert (found["verdict"], found["task"]["read_by"]) == ("restart", "table")
    assert found["settings"][0]["why"].endswith(f", and {why}")
    assert "unicron.bridge --fields" in found["settings"][0]["instead"]
    if children.exists():
        while is_running(int(children.read_text())):
            pass


def test_megatrons_own_parser_reads_the_arguments(folder: Path) -> None:
    """A small stand-in of Megatron-LM's training module, with an argument that no release has."""
    write_script(folder, "lm/pretrain_gpt.py", CALLS_PRETRAIN)
    training = folder / "lm" / "megatron" / "training"
    training.mkdir()
    (training / "arguments.py").write_text(
        "print('imported')\n"
        "def add_megatron_arguments(parser):\n"
        "    parser.add_argument('--num-layers', type=int)\n"
        "    parser.add_argument('--layers-of-the-fork', dest='num_layers', type=int)\n"
        "    parser.add_argument('--tp-comm-overlap', action='store_true')\n"
        "    return parser\n"
    )
    found = verdict("torchrun lm/pretrain_gpt.py --layers-of-the-fork 7 --tp-comm-overlap")
    assert (found["verdict"], found["task"]["read_by"]) == ("speed-off", "megatron")
    assert found["task"]["model"]["layers"] == 7
    assert verdict("lm/pretrain_gpt.py --num-layers x", code=3)["verdict"] == "refused"
    (training / "arguments.py").write_text("import no_such_module\n")
    assert verdict("lm/pretrain_gpt.py --num-layers 7")["task"]["read_by"] == "table"


def test_torchruns_options_are_those_of_torch() -> None:
    from torch.distributed.run import get_args_parser

    actions = [action for action in get_args_parser()._actions if action.option_strings]
    names = {
        next(text for text in action.option_strings if text.startswith("--")): action.nargs == 0 for action in actions
    }
    assert {name for name, flag in names.items() if flag} - {"--help", "--module"} == TORCHRUN_FLAGS
    assert {name for name, flag in names.items() if not flag} == TORCHRUN_VALUES


def test_the_table_and_the_library_name_the_same_settings() -> None:
    """What the library refuses (or supports one day) is said here of the argument that sets it."""
    from unicron.megatron import supported

    library = {
        setting.name: setting.allowed
        for group in (supported._DDP_SETTINGS, supported._MODEL_SETTINGS, supported._OPTIMIZER_SETTINGS)
        for setting in group
    }
    ours = {name: setting for setting in settings.SETTINGS for name in setting.core}
    elsewhere = {"overlap_p2p_comm_warmup_flush", "overlap_param_gather_with_optimizer_step"}
    """Checked by functions of their own there."""
    assert {*library} - {*ours} == {*settings.NO_ARGUMENT} - {"overlap_param_gather"}
    assert {*ours} - {*library} == elsewhere
    for name in {*ours} & {*library}:
        assert {*ours[name].heals_with} == {*library[name]}, name


def test_the_check_and_the_adapter_say_the_same_of_each_argument() -> None:
    from unicron.megatron_lm import settings as adapter

    found = {setting.dest: setting for setting in settings.SETTINGS}
    restart = {name: one.heals_with for name, one in found.items() if one.effect is settings.Effect.RESTART}
    refused = {one.name: one.allowed for one in adapter.REFUSED}
    assert refused == restart
    said = {name: one.heals_with[0] for name, one in found.items() if one.effect is settings.Effect.OFF}
    off = {name: value for name, value, _ in adapter.OFF if name not in adapter._OF_GROUPS}
    """No argument switches those groups on, which are there by default."""
    assert said == off
    assert {name for name, one in found.items() if one.if_written} == {*adapter._DEFAULTS} - {*adapter._OF_GROUPS}


def test_every_setting_is_an_argument_of_megatron() -> None:
    destinations = {option["dest"] for option in table().values()}
    assert {setting.dest for setting in settings.SETTINGS} <= destinations
    assert {effect.value for effect in settings.Effect} < {value.value for value in Verdict}


def test_values_are_read_as_argparse_does() -> None:
    found = read_arguments(
        "--lr -1e-3 --num-layers=2 --rampup-batch-size 1 2 3 --data-path a b --bf16 --no-masked-softmax-fusion".split()
    )
    assert found.values["lr"] == -1e-3
    assert found.values["num_layers"] == 2
    assert found.values["data_path"] == ["a", "b"]
    assert found.values["bf16"] is True
    assert [*map(int, found.values["rampup_batch_size"])] == [1, 2, 3]
    assert found.wrong == {}
