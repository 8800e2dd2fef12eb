"""Record names and parameters of every seam of a checkout of Megatron-LM: ``python -m tests.megatron_lm.record``.

The record has an entry for each release. The environment variable ``UNICRON_MEGATRON_LM`` names the checkout. The table
is compared with the record everywhere, and the record with the checkout where there is one, so that the table cannot
match its author alone.
"""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

from shared.launch.script import core_of
from unicron.megatron_lm.seams import SEAMS, Seam

RECORD = Path(__file__).with_name("seams.json")

RE_EXPORTED = {
    "mpu.get_data_parallel_world_size": "megatron/core/parallel_state.py",
    "get_forward_backward_func": "megatron/core/pipeline_parallel/schedules.py",
    "save_checkpoint": "megatron/training/checkpointing.py",
    "set_jit_fusion_options": "megatron/training/initialize.py",
    "open_file": "megatron/core/msc_utils.py",
    "update_num_microbatches": "megatron/core/num_microbatches_calculator.py",
}
"""Seams that their module has from another one: where they are defined."""


MOVED = {"megatron/training/utils.py": "megatron/training/utils/common_utils.py"}
"""Files that are another one from core 0.18 on."""


def source_of(seam: Seam, checkout: Path) -> str:
    """Return the file that defines a seam, in a checkout."""
    found = RE_EXPORTED.get(seam.name, seam.module.replace(".", "/") + ".py")
    return MOVED[found] if found in MOVED and not (checkout / found).exists() else found


def parameters(seam: Seam, checkout: Path) -> list[str] | None:
    """Return the parameters of a seam in a checkout, whose source is read and not run; None: there is no such one.

    What has another name there is an attribute that is found when it is asked for: nothing is known of its parameters.
    """
    tree = ast.parse((checkout / source_of(seam, checkout)).read_text())
    found = parameters_in(tree, seam.name)
    if found is None and seam.renamed:
        names = {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
                 if isinstance(target, ast.Name)}  # fmt: skip
        return [] if seam.renamed.partition(".")[0] in names else None
    return found


def parameters_in(tree: ast.Module, dotted: str) -> list[str] | None:
    """Return the parameters of a function, a method or a class in a module; None: there is no such one."""
    owner, _, name = dotted.rpartition(".")
    body: list[ast.stmt] = tree.body
    if owner:
        above = next((node for node in body if getattr(node, "name", None) == owner), None)
        if isinstance(above, ast.FunctionDef):  # what a decorator gives it
            return [] if above.decorator_list else None
        body = above.body if isinstance(above, ast.ClassDef) else body
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            one = node.args
            extra = [item.arg for item in (one.vararg, one.kwarg) if item is not None]
            return [item.arg for item in (*one.posonlyargs, *one.args, *one.kwonlyargs)] + extra
        if isinstance(node, ast.ClassDef) and node.name == name:
            return (parameters_in(ast.Module(node.body, []), "__init__") or ["self", *_fields(node)])[1:]
    return None


def _fields(node: ast.ClassDef) -> list[str]:
    """Return the fields of a dataclass."""
    return [one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]


def of_checkout(checkout: Path) -> dict[str, list[str] | None]:
    """Return the parameters of all seams by name."""
    return {seam.name: parameters(seam, checkout) for seam in SEAMS}


if __name__ == "__main__":
    checkout = Path(os.environ["UNICRON_MEGATRON_LM"])
    found = json.loads(RECORD.read_text()) | {core_of([checkout]): of_checkout(checkout)}
    RECORD.write_text(json.dumps(found, indent=1) + "\n")
