"""The entry point of a training process: the built-in GPT trainer, or a user's script.

    python -P -m unicron.train --spec spec.json --directory DIR

With a node agent (``unicron.forkserver`` calls ``child``) the training goes on after failures. Without one it runs to
its end as a single process, or as one of torchrun's processes. The built-in trainer (``unicron.trainer``) uses the same
interface as a user's own loop.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from unicron.errors import InvalidSpec, WrongLoop
from unicron.megatron import cpu as megatron_cpu
from unicron.process import output, processes
from unicron.protocol import environment
from unicron.trainer import spec

LEFT_EARLY = (
    "the script ended behind step {} of {}: its loop has to take every step that run.steps() yields. To train less, "
    "give fewer steps; to end early, stop the task"
)


OWN_GROUP = (
    "the script calls init_process_group, as under torchrun, before this process has a rank: delete the call. The "
    "process group is made anew in each generation, in the loop over run.steps(), and run.generation has rank and size"
)


def train(spec_path: Path, *, directory: str = "", resume: str = "", data_directory: Path | None = None) -> None:
    """Train the task of a specification to its end.

    Args:
        spec_path: the specification, a JSON file.
        directory: where checkpoints and results go; an agent names another folder.
        resume: a checkpoint to start from, where there is no agent.
        data_directory: where tokenised text is kept; None: ``data`` beside the specification. The environment's
            ``DATA_DIRECTORY`` (``unicron.protocol.environment``) comes first.

    Raises:
        InvalidSpec: the specification or its data cannot be used.
        OSError: the agent cannot be reached.
    """
    import torch

    from unicron.checkpoint import reader
    from unicron.link import agent_link
    from unicron.link.torchrun import standalone_generation
    from unicron.megatron.model import model_chunks
    from unicron.trainer import model
    from unicron.trainer.data import Samples
    from unicron.trainer.dropout import Dropout
    from unicron.trainer.passes import forward_backward
    from unicron.training.generations import Training
    from unicron.training.run import Run
    from unicron.training.step import Step

    task = spec.load(spec_path)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    cache = Path(environment.text(environment.DATA_DIRECTORY) or data_directory or spec_path.resolve().parent / "data")
    # This is done before this process attaches to the agent, so that a process that waits to join has nothing slow left
    # to do.
    samples = Samples(task, cache, recorded=reader.order_samples(resume) if resume else 0)
    standalone = standalone_generation(directory, tensor=task.tensor, pipeline=task.pipeline, resume=resume)
    link = agent_link.from_environment(standalone)

    def build(tensor: int, pipeline: int) -> tuple[Any, Any]:
        built, optimizer = model.build(task, tensor, pipeline)
        # This is an attribute of the model: the model built last is not the one in use if its state could not be
        # received.
        model_chunks(built)[0].reseeds = Dropout(task, built)
        return built, optimizer

    training = Training(
        link,
        steps=task.steps,
        micro_batches=task.micro_batches,
        build=build,
        initialise=lambda built: model.initialise(task, built),
        checkpoint_every=task.checkpoint_every,
        checkpoint_directory=task.checkpoint_directory,
        checkpoint_keep=task.checkpoint_keep,
        order_samples=samples.drawn,
        memory_every=task.memory_every,
        precision=task.precision,
        interleave=task.interleave,
    )
    run = Run(training)

    def compute(step: Step, ks: list[int]) -> None:
        ids = {k: samples.ids(step.number, k) for k in ks}
        batches = [(k, samples.batch(ids[k])) for k in ks]

        def done(k: int, loss: torch.Tensor | None, chunk: int | None = None) -> None:
            step.commit(k, loss, ids[k], chunk)

        forward_backward(task, run.model, model_chunks(run.model)[0].reseeds, step.number, batches, done)

    for step in run.steps():
        with step:
            if run.generation.pipeline > 1:
                # All micro-batches are in one schedule: otherwise a pipeline's stages are idle most of the time.
                ks = step.all_micro_batches()
                if ks:
                    compute(step, ks)
            else:
                for k in step.micro_batches():
                    compute(step, [k])
            step.reduce()
            if task.exact and task.clip > 0.0:
                step.clip_gradients(task.clip)
            run.optimizer.step()


def run_script(script: str, arguments: Sequence[str] = (), *, module: str = "", loop: str = spec.OWN_LOOP) -> None:
    """Run a user's training script as ``python script`` or ``python -m module`` does, as ``__main__``.

    The folder of the script is first on the path, or that of the module's outermost package.

    Args:
        script: its file.
        arguments: what it finds in ``sys.argv`` behind its own path.
        module: the module that the script is the file of; empty: it is run as a file.
        loop: whose loop it runs (``unicron.trainer.spec``).

    Raises:
        SeamDiffers: Megatron-LM, or megatron-bridge, is not of a version that its adapter knows.
        WrongLoop: the script makes a process group of its own, for which an agent has given this process no rank yet.
    """
    path = Path(script).resolve()
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, _folder_of(script, module))
    if loop == spec.MEGATRON_LM:
        from unicron.megatron_lm.script import replace_pretrain

        replace_pretrain()
    elif loop == spec.BRIDGE:
        from unicron.bridge import script as bridge

        bridge.replace_pretrain()
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(path), run_name="__main__")
    except ValueError as error:
        if environment.RANK in os.environ or "env:// rendezvous" not in str(error):
            raise
        raise WrongLoop(OWN_GROUP).with_traceback(error.__traceback__) from None


def _folder_of(script: str, module: str) -> str:
    """Return the folder that is first on the path: the script's, or that of the module's outermost package."""
    path = Path(script).resolve()
    above = len(module.split(".")) - (path.name != "__main__.py") if module else 0
    return str(path.parents[above])


def enter_directory() -> None:
    """Work in the folder, and find modules in those, that the task's environment names.

    Raises:
        OSError: there is no such folder on this node.
    """
    if folder := environment.text(environment.WORKING_DIRECTORY):
        os.chdir(folder)
    folders = (os.path.abspath(part) for part in environment.text(environment.SEARCH_PATH).split(os.pathsep) if part)
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def foreign_core(script: str, module: str = "") -> str:
    """Return the folder in which a script finds another megatron-core than this process has imported; empty: none.

    A process is forked with the megatron-core of the node agent's environment. A script of a checkout of Megatron-LM
    has that of the checkout, and modules of both would not fit together.
    """
    loaded = getattr(sys.modules.get("megatron.core"), "__file__", None)
    if loaded is None:
        return ""
    for place in (_folder_of(script, module), *sys.path):
        found = os.path.join(place or os.curdir, "megatron", "core", "__init__.py")
        if os.path.isfile(found):
            return "" if os.path.samefile(found, loaded) else os.path.abspath(place or os.curdir)
    return ""


_BEGIN_ANEW = "import sys; sys.path.append(sys.argv.pop()); from unicron import train; train.go_on()"
"""The program that the fresh interpreter runs. The task's search path may be without this library, which comes behind
all else."""


def begin_anew(folder: str, stacks: int) -> NoReturn:
    """Replace this forked process by a fresh interpreter, which looks for modules in a folder first.

    Args:
        folder: the folder.
        stacks: descriptor of the file to which this process's stacks are written.
    """
    os.set_inheritable(stacks, True)
    folders = (folder, environment.text(environment.SEARCH_PATH))
    os.environ[environment.SEARCH_PATH] = os.pathsep.join(filter(None, folders))
    os.environ[environment.STACKS] = str(stacks)
    print(f"unicron: megatron-core is that of {folder}", flush=True)
    os.execv(sys.executable, [sys.executable, "-P", "-c", _BEGIN_ANEW, str(Path(__file__).resolve().parents[1])])


def imports() -> None:
    """Import the modules that take seconds to import, in a process that forks training processes.

    An environment may be without megatron-core, which the scripts of a checkout of Megatron-LM have beside them.
    """
    if megatron_cpu.found():
        import megatron.core.datasets.gpt_dataset
        import megatron.core.dist_checkpointing
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel  # noqa: F401
    import safetensors.torch  # noqa: F401

    from unicron.join import own_identity

    own_identity.note_preloaded()


def child() -> int:
    """Train the task that the environment names, in a process that the fork server has forked; return the exit code.

    An error outside of a step is reported to the agent like an error inside one; its generation is 0 until this process
    has joined one. The end of a script that has done its last step is the end of the task.
    """
    from unicron.link import agent_link, reporting
    from unicron.link.torchrun import standalone_generation

    megatron_cpu.enable()
    stacks = int(os.environ.pop(environment.STACKS, "2"))  # no concern of the script, nor of what it starts
    path, code = Path(os.environ[environment.SPEC]), 0
    try:
        if refused := environment.text(environment.CODE_REFUSED):
            raise InvalidSpec(refused)
        task = spec.load(path)
        if task.script:
            enter_directory()
            if task.loop != spec.RESTART and (folder := foreign_core(task.script, task.module)):
                begin_anew(folder, stacks)
        if digest := environment.text(environment.CODE_DIGEST):
            print(f"unicron: runs the code {digest}, which has come along with the task", flush=True)
        if task.loop == spec.RESTART:
            from unicron.whole_restart import rank

            rank.run(task)
        elif task.script:
            run_script(task.script, task.arguments, module=task.module, loop=task.loop)
        else:
            train(path)
    except SystemExit as end:
        code = _exit_code(end)
    except Exception as error:
        link = agent_link.current() or agent_link.from_environment(standalone_generation(""))
        reporting.report(link, error, step=0, starting=link.generation == 0)
        if link.at_end is not None and reporting.is_communication(error):
            link.next_generation(0)  # a peer is lost: the answer to that ends this process, which is not to blame
        link.exit(1)
    attached = agent_link.current()
    if attached is not None:
        if code == 0 and (left := attached.undone()) is not None:
            reporting.report(attached, WrongLoop(LEFT_EARLY.format(*left)), step=left[0] + 1)
            code = 1
        if attached.at_end is not None and code == 0:
            attached.at_end()
        # Without destructors: a group's destructor may wait for peers that end too.
        attached.exit(code)
    return code


def _exit_code(end: SystemExit) -> int:
    """Return the exit code of a script that has ended itself; a text that it gives goes to its output, as in Python."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr, flush=True)
    return 1


def go_on() -> NoReturn:
    """Go on as the forked process that this interpreter has replaced (``begin_anew``), and end as it would."""
    output.protect()
    processes.write_stacks_to(int(os.environ[environment.STACKS]))
    code = child()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="unicron.train", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--spec", type=Path, default=os.environ.get(environment.SPEC), help="task specification (JSON)")
    parser.add_argument("--directory", default="", help="where checkpoints and results go")
    parser.add_argument("--checkpoint", default="", help="checkpoint to start from")
    options = parser.parse_args(arguments)
    if options.spec is None:
        parser.error(f"--spec is needed (or {environment.SPEC})")
    megatron_cpu.enable()
    cache = Path(options.directory) / "data" if options.directory else None
    train(Path(options.spec), directory=options.directory or ".", resume=options.checkpoint, data_directory=cache)
    return 0


if __name__ == "__main__":
    sys.exit(main())
