"""Who of a generation's members differs, and in what: pure, and on files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from unicron.join.comparison import hyperparameters
from unicron.join.identity import RECORDED, REPORTED, Difference, described, differing, digest, recordable, signature
from unicron.join.own_identity import SAMPLE_BYTES, SAMPLES, OwnIdentity, data_fields, of_task
from unicron.protocol import environment

OLD = {"code/train.py": "a", "setting/seed": "1", "optimizer/lr": "0.001"}
NEW = OLD | {"code/train.py": "b", "optimizer/lr": "0.1"}
BOTH = [Difference("code/train.py", "b", "a"), Difference("optimizer/lr", "0.1", "0.001")]


@pytest.mark.parametrize(
    ("identities", "proven", "recorded", "expected"),
    [
        ([OLD, OLD], [], {}, {}),
        ([OLD, NEW], [0], {}, {1: BOTH}),
        ([NEW, OLD], [1], {}, {0: BOTH}),
        ([NEW, OLD, NEW], [1], {}, {0: BOTH, 2: BOTH}),  # not what most have: what has trained counts
        ([OLD, NEW, NEW], [], {}, {0: [Difference(d.field, d.expected, d.own) for d in BOTH]}),
        ([OLD, NEW], [], {}, {1: BOTH}),  # of equally many the lowest rank
        ([NEW, NEW], [], OLD, {0: BOTH, 1: BOTH}),
        ([OLD, NEW], [], OLD, {1: BOTH}),
        ([NEW, NEW], [0], OLD, {}),  # a survivor comes before the log
    ],
)
def test_what_has_trained_counts_then_the_log_then_what_most_have(
    identities: list[dict[str, str]],
    proven: list[int],
    recorded: dict[str, str],
    expected: dict[int, list[Difference]],
) -> None:
    judged = set(range(len(identities))).difference(proven)
    assert differing(identities, proven, recorded, judged=judged) == expected


def test_only_fields_that_both_have_are_compared() -> None:
    """A rank that has trained has imported what comes later."""
    later = OLD | {"code/evaluate": "e"}
    assert digest(later) != digest(OLD)
    assert differing([later, OLD], [0], {}, judged=[1]) == {}
    assert differing([OLD, later], [0], {}, judged=[1]) == {}


def test_a_survivor_may_be_judged_by_what_it_computes_with() -> None:
    assert differing([OLD, NEW], [0, 1], {}, judged=[]) == {}
    assert differing([OLD, NEW], [0, 1], {}, judged=[0, 1]) == {1: BOTH}


def test_a_difference_names_its_kind_its_field_and_both_values() -> None:
    text = described(BOTH, "here", "on rank 0")
    assert text == "code: train.py is b here and a on rank 0; optimizer: lr is 0.1 here and 0.001 on rank 0"
    many = [Difference(f"code/m{n}", "b", "a") for n in range(REPORTED + 2)]
    assert described(many, "here", "on rank 0").endswith("; and 2 more")


def test_the_same_difference_is_the_same_at_another_step() -> None:
    lr = Difference("optimizer/lr", "0.1", "0.001")
    assert signature([lr]) == signature([lr._replace(own="0.09", expected="0.0009")])
    code = Difference("code/train.py", "b", "a")
    assert signature([code]) != signature([code._replace(own="c")])
    assert signature(BOTH) == signature([code])


def test_of_a_large_repository_the_log_has_as_many_modules_as_there_is_room_for() -> None:
    code = {f"code/m{n}": "a" for n in range(RECORDED)}
    assert recordable(OLD | code).keys() >= {"setting/seed", "optimizer/lr"}
    assert len(recordable(OLD | code)) == RECORDED
    assert recordable(OLD) == OLD


def test_a_digest_fits_a_signed_integer() -> None:
    assert all(0 <= digest({"code/a": str(n)}) < 2**63 for n in range(100))
    assert digest({"a": "b", "c": "d"}) == digest({"c": "d", "a": "b"})
    assert digest({"a": "b\0c"}) != digest({"a": "b"})


# ---- this process


def test_code_is_what_was_loaded_whatever_becomes_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "schedule.py"
    path.write_text("lr = 0.001\n")
    own = OwnIdentity({})
    assert "code/schedule" not in own.fields
    module = ModuleType("schedule")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "schedule", module)
    before = own.fields["code/schedule"]
    path.write_text("lr = 0.100\n")
    assert own.fields["code/schedule"] == before
    assert OwnIdentity({}).fields["code/schedule"] != before


def test_limits_of_a_task_are_no_settings_that_it_computes_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "task.json"
    path.write_text(json.dumps({"name": "a", "seed": 1, "finish_timeout_s": 90.0, "progress_timeout_s": 60.0}))
    monkeypatch.setenv(environment.SPEC, str(path))
    assert {name for name in of_task({}).fields if name.startswith("setting/")} == {"setting/seed"}


def test_installed_modules_and_this_library_are_no_code_of_the_task() -> None:
    code = {name for name in OwnIdentity({}).fields if name.startswith("code/")}
    assert {"os", "torch", "numpy", "pytest", "unicron", "unicron.join.identity"} <= sys.modules.keys()
    assert not {name for name in code if name.partition("/")[2].partition(".")[0] in sys.stdlib_module_names}
    assert not {name for name in code if name.startswith(("code/torch", "code/numpy", "code/pytest", "code/unicron"))}
    assert f"code/{__name__}" in code


@pytest.mark.parametrize("installed", [True, False])
def test_a_folder_into_which_packages_were_installed_may_have_any_name(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "somebodys.py").write_text("")
    if installed:
        (tmp_path / "somebodys-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    module = ModuleType("somebodys")
    module.__file__ = str(tmp_path / "somebodys.py")
    monkeypatch.setitem(sys.modules, "somebodys", module)
    assert ("code/somebodys" in OwnIdentity({}).fields) is not installed


def test_versions_are_those_of_libraries_that_compute() -> None:
    fields = OwnIdentity({}).fields
    assert fields["version/torch"] == str(torch.__version__)
    assert "version/unicron" not in fields


def test_data_is_its_size_and_a_hash_of_its_index(tmp_path: Path) -> None:
    for name in ("corpus.bin", "corpus.idx"):
        (tmp_path / name).write_bytes(b"x" * 100)
    before = dict(data_fields(str(tmp_path / "corpus")))
    assert before.keys() == {"corpus.bin", "corpus.idx"}
    assert dict(data_fields(str(tmp_path / "corpus.bin"))) == before
    os.utime(tmp_path / "corpus.bin", (1, 1))  # a copy on another node
    assert dict(data_fields(str(tmp_path / "corpus"))) == before
    (tmp_path / "corpus.idx").write_bytes(b"y" * 100)
    after = dict(data_fields(str(tmp_path / "corpus")))
    assert after["corpus.bin"] == before["corpus.bin"]
    assert after["corpus.idx"] != before["corpus.idx"]
    assert dict(data_fields(str(tmp_path / "none"))) == {}


@pytest.mark.parametrize("place", [0, SAMPLE_BYTES * SAMPLES * 5 - 1])
def test_of_large_data_size_beginning_and_end_count(tmp_path: Path, place: int) -> None:
    path = tmp_path / "text"
    content = bytearray(SAMPLE_BYTES * SAMPLES * 5)
    path.write_bytes(content)
    before = dict(data_fields(str(path)))
    content[place] = 1
    path.write_bytes(content)
    assert dict(data_fields(str(path))) != before
    path.write_bytes(bytes(len(content) + 1))
    assert dict(data_fields(str(path))) != before


# ---- hyperparameters


def two_groups(**second: float) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": parameters[:1]}, {"params": parameters[1:], **second}]
    return torch.optim.AdamW(groups, lr=0.001)


def test_hyperparameters_that_all_groups_have_in_common_are_fields_of_all_shards() -> None:
    one = hyperparameters(two_groups(weight_decay=0.5), (0, 0), 2)
    other = hyperparameters(two_groups(weight_decay=0.7), (0, 1), 2)
    assert one["optimizer/lr"] == other["optimizer/lr"] == "0.001"
    assert one["optimizer/weight_decay of group 1 of tensor rank 0, stage 0"] == "0.5"
    assert differing([one, other], [0], {}, judged=[1]) == {}
    again = hyperparameters(two_groups(weight_decay=0.7), (0, 0), 2)
    (found,) = differing([one, again], [0], {}, judged=[1])[1]
    assert (found.own, found.expected) == ("0.7", "0.5")


def test_a_learning_rate_in_a_tensor_counts_and_a_count_of_steps_does_not() -> None:
    tensor = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.5))
    fields = hyperparameters(tensor, (0, 0), 1)
    assert fields["optimizer/lr"] == "0.5"
    tensor.param_groups[0]["step"] = 3
    assert hyperparameters(tensor, (0, 0), 1) == fields
