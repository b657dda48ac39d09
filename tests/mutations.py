"""Break each guard of the core in turn, and show which tests notice:

    python tests/mutations.py --first       # all of them; one test that notices is enough
    python tests/mutations.py random cache  # those with such a name, and all tests that notice

The package and its tests are copied, one line of the copy is changed, and the tests named there run
on it. A mutation that no test notices is a hole in the tests, and ends the script with an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
COPIED = ("lightning_ckpt", "tests", "conf", "docs", "examples")

CORE = "lightning_ckpt/core"
EQUALITY, CALLS = "tests/core/test_equality.py", "tests/core/test_calls.py"
REPLAY, COUNTS = "tests/core/test_replay.py", "tests/core/test_recompute_counts.py"
IDENTITY, BAD_INPUT = "tests/core/test_identity.py", "tests/core/test_bad_input.py"
RULES, TRAINING = (
    "tests/core/test_transformers_rules.py",
    "tests/core/test_transformers_training.py",
)
VERIFY, SNAPSHOT = "tests/core/test_verify.py", "tests/core/test_snapshot.py"
OFFLOAD, MEMORY = "tests/core/test_offload.py", "tests/core/test_memory.py"
MATRIX = "tests/matrix/test_matrix.py"
MONITOR = "tests/lightning/test_monitor.py"
SITUATIONS = "tests/lightning/test_monitor_situations.py"
PICTURES = "tests/lightning/test_monitor_pictures.py"
VERIFY_IN_FIT = "tests/lightning/test_verify_in_fit.py"
FAKE = "tests/core/test_fake.py"
BY_SIZE, FITTED = "tests/core/test_by_size.py", "tests/core/test_fitted.py"
CHANGING = "tests/core/test_changing_plans.py"
TIMELINE, MEASURE = "tests/core/test_memory_timeline.py", "tests/core/test_measure.py"
HOST, FORK = "tests/core/test_offload_host.py", "tests/core/test_offload_fork.py"
REPEAT, UNDO = "tests/core/test_repeat.py", "tests/core/test_undo.py"
SURVIVING = "tests/lightning/test_surviving.py"
SAVING = "tests/core/test_saving.py"
FOUND, WEIGHED = "tests/core/test_offload_found.py", "tests/core/test_offload_weighed.py"
BUDGET = f"{CORE}/budget"


class Mutation(NamedTuple):
    """One guard, and what breaks it.

    Attributes:
        name: what the guard is for.
        file: where it stands.
        old, new: its line, which stands there once, and what takes its place.
        tests: what runs on the broken copy.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = [
    Mutation(
        "random numbers of torch",
        f"{CORE}/recompute.py",
        "result = checkpoint(region, *flat.tensors, use_reentrant=False)",
        "result = checkpoint(region, *flat.tensors, use_reentrant=False, preserve_rng_state=False)",
        (EQUALITY,),
    ),
    Mutation("buffers", f"{CORE}/state.py", "copies=kept,", "copies=[],", (EQUALITY,)),
    Mutation(
        "keyword arguments",
        f"{CORE}/recompute.py",
        "args, kwargs = self._build(tensors)",
        "args, kwargs = self._build(tensors)[0], {}",
        (CALLS,),
    ),
    Mutation(
        "random numbers of Python and NumPy",
        f"{CORE}/state.py",
        "generators=[(g, s) for g, s in self._generators if not is_same(get_state(g), s)],",
        "generators=[],",
        (EQUALITY, REPLAY),
    ),
    Mutation("attributes", f"{CORE}/state.py", "values=self._values,", "values=[],", (REPLAY,)),
    Mutation(
        "what the forward made",
        f"{CORE}/state.py",
        "for name in owner.keys() - names - self._passed(owner)",
        "for name in ()",
        (REPLAY, EQUALITY),
    ),
    Mutation(
        "watched arguments", f"{CORE}/state.py", "watched=self._watched,", "watched=[],", (REPLAY,)
    ),
    Mutation(
        "state put back after the recompute",
        f"{CORE}/replay.py",
        "        for owner, name, value in reversed(exchanged):\n"
        "            _put(owner, name, value)\n",
        "",
        (EQUALITY, REPLAY),
    ),
    Mutation(
        "generators put back after the recompute",
        f"{CORE}/replay.py",
        "            if not is_same(get_state(generator), state):\n                set_state",
        "            if False:\n                set_state",
        (EQUALITY,),
    ),
    Mutation(
        "flags of the forward",
        f"{CORE}/replay.py",
        "        _set_requires_grad(place.tensor, place.requires_grad)\n        # Lent",
        "        # Lent",
        (EQUALITY,),
    ),
    Mutation(
        "surroundings",
        f"{CORE}/recompute.py",
        "self._surroundings.run(run, self._forward, self._module, *args, **kwargs)",
        "run(self._forward, self._module, *args, **kwargs)",
        (REPLAY,),
    ),
    Mutation(
        "no recompute without need",
        f"{CORE}/recompute.py",
        "if not _needs_grad(flat.tensors, (module, *given)) or _is_lazy(module):",
        "if False:",
        (COUNTS, EQUALITY),
    ),
    Mutation(
        "changes between forward and backward",
        f"{CORE}/recompute.py",
        "            check_unchanged(replay, self._module)\n        self._is_checked = False",
        "            pass\n        self._is_checked = False",
        (REPLAY,),
    ),
    Mutation(
        "iterators",
        f"{CORE}/recompute.py",
        "    _refuse_iterators(module, flat.others)\n",
        "",
        (REPLAY,),
    ),
    Mutation(
        "arguments let go",
        f"{CORE}/recompute.py",
        "        self._given = None\n        run = ",
        "        run = ",
        (COUNTS, OFFLOAD, CALLS),
    ),
    Mutation(
        "tracing",
        f"{CORE}/recompute.py",
        "if not torch.is_grad_enabled() or torch.jit.is_tracing():",
        "if not torch.is_grad_enabled():",
        (REPLAY,),
    ),
    Mutation(
        "caches by keyword",
        f"{CORE}/_transformers.py",
        "        dropped.update(dict.fromkeys(named))\n",
        "",
        (RULES, TRAINING),
    ),
    Mutation(
        "caches with content",
        f"{CORE}/_transformers.py",
        "            _refuse_used(value, block, kwargs)",
        "            pass",
        (RULES,),
    ),
    Mutation(
        "the library's own switch",
        f"{CORE}/_transformers.py",
        'undo += [_set(module, "gradient_checkpointing", False)] if is_on else []',
        "pass",
        (RULES, TRAINING),
    ),
    Mutation(
        "nested plans",
        f"{CORE}/apply.py",
        "    refuse_nested(blocks)\n    offloader",
        "    offloader",
        (IDENTITY, BAD_INPUT),
    ),
    Mutation(
        "checkpointed by torch",
        f"{CORE}/apply.py",
        "    refuse_checkpointed(module, blocks)\n",
        "",
        (IDENTITY, BAD_INPUT),
    ),
    Mutation(
        "class given back",
        f"{CORE}/swap.py",
        "        _set_class(block, plain_class(type(block)))",
        "        pass",
        (IDENTITY,),
    ),
    Mutation(
        "plain pickles",
        f"{CORE}/swap.py",
        '        "__reduce_ex__": _reduce_plainly,\n',
        "",
        (IDENTITY,),
    ),
    Mutation(
        "parameters stay on the device",
        f"{CORE}/offload/engine.py",
        "if isinstance(view_base(tensor), nn.Parameter):",
        "if False:",
        (OFFLOAD,),
    ),
    Mutation(
        "in-place changes of saved inputs",
        f"{CORE}/offload/engine.py",
        "if tensor_version(packed.tensor) != packed.version:",
        "if False:",
        (OFFLOAD,),
    ),
    Mutation(
        "a Ctrl-C is not dropped in a destructor",
        f"{CORE}/offload/slots.py",
        "    def rest(self) -> None:",
        "    def __del__(self) -> None:\n        self.held = None\n\n    def rest(self) -> None:",
        ("tests/core/test_offload_interrupt.py",),
    ),
    Mutation(
        "an interrupted copy is made by the next who comes",
        f"{CORE}/offload/worker.py",
        "except Exception as error",
        "except BaseException as error",
        ("tests/core/test_offload_disk.py",),
    ),
    Mutation(
        "a fork writes to a file of its own",
        f"{CORE}/offload/disk.py",
        "if self._process != os.getpid():",
        "if False:",
        ("tests/core/test_offload_fork.py",),
    ),
    Mutation(
        "memory that a copy writes to is held",
        f"{CORE}/offload/host.py",
        "        _arriving[id(self._bytes)] = streams.of(device), self._bytes\n",
        "",
        ("tests/core/test_offload_host.py",),
    ),
    Mutation(
        "copies run beside the compute",
        f"{CORE}/offload/streams.py",
        "        with stream:\n",
        "        if True:\n",
        (HOST,),
    ),
    Mutation(
        "a copy does not let the host wait",
        f"{CORE}/offload/streams.py",
        ", non_blocking=True",
        "",
        (HOST,),
    ),
    Mutation(
        "bytes come back to the device",
        f"{CORE}/offload/streams.py",
        ", device=device)",
        ")",
        (HOST,),
    ),
    Mutation(
        "times are told of what has come",
        f"{CORE}/offload/streams.py",
        "while self._waits and self._waits[0][1].query():",
        "while self._waits:",
        (HOST,),
    ),
    Mutation(
        "what is known of copies does not grow",
        f"{CORE}/offload/streams.py",
        "into.nbytes, timer))\n        self._sum_up()\n",
        "into.nbytes, timer))\n",
        (HOST,),
    ),
    Mutation(
        "a copy that has ended costs the compute nothing",
        f"{CORE}/offload/streams.py",
        "        if self.copied.query():\n            return\n",
        "",
        (HOST,),
    ),
    Mutation(
        "what was fetched for nothing is free after its copy",
        f"{CORE}/offload/host.py",
        "        self._home.wait_event(self._copied)\n        self._let_go()",
        "        self._let_go()",
        (HOST,),
    ),
    Mutation(
        "two streams use what one has fetched",
        f"{CORE}/offload/host.py",
        "            self._home.wait_event(self._copied)\n            self._bytes",
        "            self._bytes",
        (HOST,),
    ),
    Mutation(
        "a fork does no job of the other process",
        f"{CORE}/offload/worker.py",
        "        check_process(self._process)\n",
        "",
        (FORK,),
    ),
    Mutation(
        "a fork reads nothing of the other process",
        f"{CORE}/offload/disk.py",
        "        check_process(self._process)\n",
        "",
        (FORK,),
    ),
    Mutation(
        "what was under way stays in a fork",
        f"{CORE}/offload/schedule.py",
        "            self._leaving.forget()\n",
        "",
        (FORK,),
    ),
    Mutation(
        "a fork has a lock of its own",
        f"{CORE}/offload/schedule.py",
        "            self._lock = threading.RLock()\n",
        "",
        (FORK,),
    ),
    Mutation(
        "a buffer is the device's until its copy has ended",
        f"{CORE}/offload/staged.py",
        "        self._stage.hold(self._buffer, copied)\n",
        "",
        ("tests/core/test_offload_staged.py",),
    ),
    Mutation(
        "each storage once",
        f"{CORE}/memory/live_bytes.py",
        "known = self._counted.get(id(storage))",
        "known = None",
        (MEMORY,),
    ),
    Mutation(
        "verify leaves no trace",
        f"{CORE}/verify.py",
        "    finally:\n        start.restore()",
        "    finally:\n        pass",
        (VERIFY,),
    ),
    Mutation(
        "verify starts from one state",
        f"{CORE}/step.py",
        "        self.start.restore()\n        values",
        "        values",
        (VERIFY,),
    ),
    Mutation(
        "verify tells noise apart",
        f"{CORE}/verify.py",
        "noisy, begins = _noise(step, plain, blocks)",
        "noisy, begins = list[Key](), ()",
        (VERIFY,),
    ),
    Mutation(
        "verify looks at state",
        f"{CORE}/step.py",
        "for path, value in self.start.changes().items():",
        "for path, value in ():",
        (VERIFY,),
    ),
    Mutation(
        "verify clears casts",
        f"{CORE}/step.py",
        "        torch.clear_autocast_cache()  # or",
        "        # or",
        (VERIFY,),
    ),
    Mutation(
        "verify leaves no casts",
        f"{CORE}/step.py",
        "allow_unused=True)\n        torch.clear_autocast_cache()\n",
        "allow_unused=True)\n",
        (VERIFY,),
    ),
    Mutation(
        "snapshots look into objects",
        f"{CORE}/snapshot.py",
        "own = list(vars(value).items())",
        "own = list(vars(value).items()) if isinstance(value, nn.Module) else []",
        (SNAPSHOT, VERIFY),
    ),
    Mutation(
        "snapshots undo changes of containers",
        f"{CORE}/contents.py",
        "        if not _is_untouched(owner, content):\n            _put(owner, content)",
        "        pass",
        (SNAPSHOT,),
    ),
    Mutation(
        "forked workers do not count",
        f"{CORE}/memory/mode_stack.py",
        "        mode.on = False\n\n\nif",
        "        pass\n\n\nif",
        (MEMORY,),
    ),
    Mutation(
        "watchers see what they asked for",
        f"{CORE}/watchers.py",
        "        _watchers.remove(watcher)",
        "        pass",
        (TIMELINE, MEASURE),
    ),
    Mutation(
        "the monitor ends no training",
        "lightning_ckpt/guarded.py",
        "            self.give_up(reason_of(error))\n            return None",
        "            raise",
        (MONITOR,),
    ),
    Mutation(
        "the monitor gives up once",
        "lightning_ckpt/guarded.py",
        '{reason}.")\n        self.stop()',
        '{reason}.")',
        (MONITOR,),
    ),
    Mutation(
        "an epoch's figure has optimizer states",
        "lightning_ckpt/epoch_memory.py",
        "1 if has_states else 2",
        "1",
        (SITUATIONS,),
    ),
    Mutation(
        "parts of the rank with the peak",
        "lightning_ckpt/epoch_memory.py",
        "among = rows if key in _PEAKS else [rows[rank]]",
        "among = rows",
        (SITUATIONS,),
    ),
    Mutation(
        "the monitor looks away from verify",
        "lightning_ckpt/extra_steps.py",
        "if isinstance(callback, LooksAway):",
        "if False:",
        (VERIFY_IN_FIT,),
    ),
    Mutation(
        "TensorBoard gets the picture",
        "lightning_ckpt/images.py",
        "(255 * imread",
        "(imread",
        (PICTURES,),
    ),
    Mutation(
        "the label of a late peak beside the legend",
        "lightning_ckpt/plot.py",
        "is_late = times[at] > end / 2",
        "is_late = times[at] > end",
        (PICTURES,),
    ),
    Mutation(
        "a title of many words in lines",
        "lightning_ckpt/plot.py",
        "axes.set_title(fill(title, _TITLE_WIDTH), loc=",
        "axes.set_title(title, loc=",
        (PICTURES,),
    ),
    Mutation(
        "a peak that offload lowers by little",
        f"{CORE}/offload/report.py",
        "was_lowered and moment.away_bytes >= _LITTLE * moment.peak_bytes",
        "was_lowered",
        ("tests/core/test_offload_report.py",),
    ),
    Mutation(
        "what dominates the peak in the loss",
        f"{CORE}/offload/report.py",
        'if "loss" in phase:',
        "if False:",
        ("tests/core/test_offload_report.py",),
    ),
    Mutation(
        "a directory without a name",
        f"{CORE}/offload/machine.py",
        "if not os.path.isdir(path):",
        "if not os.path.isdir(os.path.abspath(path)):",
        ("tests/core/test_offload_config.py",),
    ),
    Mutation(
        "a part of a gradient once, after an error",
        f"{CORE}/out_of_memory/sums.py",
        "self._hooks.append(parameter.register_hook(partial(self._give_nothing, parameter)))",
        "pass",
        (REPEAT,),
    ),
    Mutation(
        "-0.0 is what changes nothing",
        f"{CORE}/out_of_memory/sums.py",
        "complex(-0.0, -0.0) if grad.is_complex() else -0.0",
        "0.0",
        (REPEAT,),
    ),
    Mutation(
        "gradients that a failed backward made",
        f"{CORE}/out_of_memory/sums.py",
        "before.parameter.grad = None",
        "pass",
        (REPEAT,),
    ),
    Mutation(
        "gradients that are zeroed in each try",
        f"{CORE}/out_of_memory/sums.py",
        "if parameter.grad is not grad or tensor_version(grad) != version:",
        "if False:",
        (REPEAT,),
    ),
    Mutation(
        "a gradient that comes no second time",
        f"{CORE}/out_of_memory/sums.py",
        "if any(number != 1 for number in self._num_given.values()):",
        "if False:",
        (REPEAT,),
    ),
    Mutation(
        "a sum that moved twice",
        f"{CORE}/out_of_memory/sums.py",
        "tensor_version(grad) == before.version + 1",
        "tensor_version(grad) >= before.version + 1",
        (REPEAT,),
    ),
    Mutation(
        "sums of another kind",
        f"{CORE}/out_of_memory/sums.py",
        "is_strided = type(grad) is Tensor and grad.layout == torch.strided",
        "is_strided = True",
        (REPEAT,),
    ),
    Mutation(
        "the frames of an error",
        f"{CORE}/out_of_memory/repeat.py",
        "met.__traceback__ = None",
        "pass",
        (REPEAT,),
    ),
    Mutation(
        "autograd's queue after an error",
        f"{CORE}/out_of_memory/repeat.py",
        "oldest.backward(retain_graph=True)",
        "pass",
        (REPEAT,),
    ),
    Mutation(
        "state after an error",
        f"{CORE}/out_of_memory/repeat.py",
        "state.restore()",
        "pass",
        (REPEAT, SURVIVING),
    ),
    Mutation(
        "what has moved and is not known",
        f"{CORE}/out_of_memory/repeat.py",
        "state.obstacle() or sums.obstacle()",
        "None",
        (REPEAT,),
    ),
    Mutation(
        "the last try",
        f"{CORE}/out_of_memory/repeat.py",
        "retry.tighter(number >= NUM_TRIES)",
        "retry.tighter(False)",
        (REPEAT,),
    ),
    Mutation(
        "an error in a measured step",
        f"{CORE}/out_of_memory/repeat.py",
        "_MEASURED if retry.is_measured() else",
        "_MEASURED if False else",
        (SURVIVING,),
    ),
    Mutation(
        "errors of another kind",
        f"{CORE}/out_of_memory/repeat.py",
        "if not retry.is_out_of_memory(error):",
        "if False:",
        (REPEAT,),
    ),
    Mutation(
        "containers after an error",
        f"{CORE}/out_of_memory/undo.py",
        "put_contents(reversed(self._contents))",
        "pass",
        (UNDO,),
    ),
    Mutation(
        "arrays after an error",
        f"{CORE}/out_of_memory/undo.py",
        "array[...] = copy",
        "pass",
        (UNDO,),
    ),
    Mutation(
        "small tensors after an error",
        f"{CORE}/out_of_memory/undo.py",
        "tensor.data.copy_(copy)",
        "pass",
        (UNDO, REPEAT),
    ),
    Mutation(
        "generators after an error",
        f"{CORE}/out_of_memory/undo.py",
        "set_state(stream, state)",
        "pass",
        (UNDO, REPEAT),
    ),
    Mutation(
        "beyond what was measured only where it is exact",
        f"{CORE}/budget/fitted.py",
        "    if is_beyond and",
        "    if False and",
        (FITTED,),
    ),
    Mutation(
        "larger by more than an eighth",
        f"{CORE}/budget/by_size.py",
        "_REACH = 1.125",
        "_REACH = 9.0",
        (BY_SIZE,),
    ),
    Mutation(
        "iterators cannot be turned back",
        f"{CORE}/out_of_memory/undo.py",
        "            self._iterator = value",
        "            pass",
        (UNDO,),
    ),
    Mutation(
        "callbacks take part in a batch",
        "lightning_ckpt/surviving.py",
        "[trainer], _taking_part(trainer))",
        "[trainer])",
        (SURVIVING,),
    ),
    Mutation(
        "a batch is looked into",
        f"{CORE}/out_of_memory/undo.py",
        "self._look(given, _DEPTH)",
        "pass",
        (UNDO, SURVIVING),
    ),
    Mutation(
        "metrics that keep everything",
        f"{CORE}/out_of_memory/undo.py",
        "for tensor in tensors if len(tensors) > _MANY else ():",
        "for tensor in ():",
        (UNDO,),
    ),
    Mutation(
        "large tensors that moved",
        f"{CORE}/out_of_memory/undo.py",
        "if seen.copy is None and tensor_version(seen.tensor) != seen.version:",
        "if False:",
        (UNDO, REPEAT),
    ),
    Mutation(
        "what `self.log` collected",
        "lightning_ckpt/_lightning.py",
        "given = (kwargs, trainer.fit_loop.epoch_loop._results, loop.optim_progress)",
        "given = (kwargs, loop.optim_progress)",
        (SURVIVING,),
    ),
    Mutation(
        "progress",
        "lightning_ckpt/_lightning.py",
        "given = (kwargs, trainer.fit_loop.epoch_loop._results, loop.optim_progress)",
        "given = (kwargs, trainer.fit_loop.epoch_loop._results)",
        (SURVIVING,),
    ),
    Mutation(
        "a closure that holds itself",
        "lightning_ckpt/_lightning.py",
        "outer = copy(inner)  # so that neither holds itself, and with it the batch",
        "outer = inner",
        (SURVIVING,),
    ),
    Mutation(
        "a tuner's errors",
        "lightning_ckpt/surviving.py",
        "if self not in trainer.callbacks:",
        "if False:",
        (SURVIVING,),
    ),
    Mutation(
        "the words of a tightened offload",
        "lightning_ckpt/fitting.py",
        "self.handle = apply_plan_quietly(module, plan, config)",
        "self.handle = apply_plan_quietly(module, plan)",
        (SURVIVING,),
    ),
    Mutation(
        "a lowered budget is no error",
        f"{CORE}/budget/by_size.py",
        "if self._is_lowered:",
        "if False:",
        ("tests/core/test_by_size.py",),
    ),
    Mutation(
        "what a step meets unnamed was there before",
        f"{CORE}/budget/measure.py",
        "more += met - raw.met_bytes",
        "more += 0",
        (MEASURE,),
    ),
    Mutation(
        "what a segment meets unnamed was there at its start",
        f"{CORE}/memory/live_bytes.py",
        "self.peak += num_bytes  # it was there then, too",
        "pass",
        (MEASURE,),
    ),
    Mutation(
        "whole numbers have values in an estimate",
        f"{CORE}/fake.py",
        "with FakeTensorMode(allow_non_fake_inputs=True), _WholeNumbers():",
        "with FakeTensorMode(allow_non_fake_inputs=True):",
        (FAKE,),
    ),
    Mutation(
        "the first step counts no more once others are known",
        f"{CORE}/budget/by_size.py",
        "settled = [row for row in rows.values() if row.is_settled]",
        "settled = list(rows.values())",
        (BY_SIZE,),
    ),
    Mutation(
        "the optimizer counts in each micro-batch",
        f"{CORE}/budget/by_size.py",
        "peak=max(last.peak, self._tail)",
        "peak=last.peak",
        (BY_SIZE,),
    ),
    Mutation(
        "an error names the largest batch",
        f"{BUDGET}/by_size.py",
        "sorted(found, key=lambda each: -each[0].num_elements)",
        "found",
        (BY_SIZE,),
    ),
    Mutation(
        "buckets were there in all micro-batches",
        f"{BUDGET}/by_size.py",
        "step = with_more(canonical(measured), UNNAMED, unnamed)",
        "step = canonical(measured)",
        (BY_SIZE,),
    ),
    Mutation(
        "buckets count with the first steps alone",
        f"{BUDGET}/by_size.py",
        "unnamed = 0 if is_settled else max(",
        "unnamed = max(",
        (BY_SIZE,),
    ),
    Mutation(
        "what fits no ranks together is recomputed",
        f"{BUDGET}/by_size.py",
        "return self._recomputed(largest, steps[0])",
        "raise",
        (BY_SIZE,),
    ),
    Mutation(
        "ranks wait until each size is known",
        f"{BUDGET}/by_size.py",
        "            if None in found:\n                return None\n",
        "            found = [each for each in found if each]\n",
        (BY_SIZE,),
    ),
    Mutation(
        "steps without calls tell nothing of others",
        f"{BUDGET}/by_size.py",
        "if not step.calls and len(empty) < len(rows):",
        "if False:",
        (BY_SIZE,),
    ),
    Mutation(
        "steps without calls make room for others",
        f"{BUDGET}/by_size.py",
        "for each in empty if step.calls else ():",
        "for each in ():",
        (BY_SIZE,),
    ),
    Mutation(
        "what backward does not come to may hold all",
        f"{BUDGET}/traces.py",
        "return Option(made, 0, None, 0.0)",
        "return Option(0, 0, None, 0.0)",
        (MEASURE,),
    ),
    Mutation(
        "what is not fitted exactly is taken too large",
        f"{CORE}/budget/fitted.py",
        "_SAFETY * np.abs(weights).sum() * residuals",
        "0 * residuals",
        (FITTED,),
    ),
    Mutation(
        "sizes far from all are measured",
        f"{CORE}/budget/fitted.py",
        "np.abs(weights).sum() > _MOST_WEIGHT or ",
        "",
        (FITTED,),
    ),
    Mutation(
        "sizes larger than all are measured",
        f"{CORE}/budget/fitted.py",
        "(own > reach * high).any() or ",
        "",
        (FITTED,),
    ),
    Mutation(
        "classes of a plan that changes stay",
        f"{CORE}/handle.py",
        "                self._classes.add(type(block))\n",
        "",
        (CHANGING,),
    ),
    Mutation(
        "a result that its block holds stays when the next one offloads it",
        f"{BUDGET}/needs.py",
        "needs.beside.output[row, column] = option.output",
        "needs.beside.output[row, column] = 0",
        (FOUND,),
    ),
    Mutation(
        "a result is there twice when its block has it back",
        f"{BUDGET}/needs.py",
        "needs.beside.result[row, column] = option.result",
        "needs.beside.result[row, column] = 0",
        (FOUND,),
    ),
    Mutation(
        "a result that is held late",
        f"{BUDGET}/needs.py",
        "np.maximum(late, lates, out=late)",
        "pass",
        (FOUND,),
    ),
    Mutation(
        "what goes by two choices is not taken for both",
        f"{BUDGET}/planner.py",
        "more = before.output if needs.moves[index, number] else before.result",
        "more = before.output + before.result",
        (FOUND,),
    ),
    Mutation(
        "the search knows the choice before",
        f"{BUDGET}/planner.py",
        "first.setdefault(tuple(map(int, each)), column)",
        "first.setdefault((), column)",
        (FOUND,),
    ),
    Mutation(
        "the forward asks last",
        f"{BUDGET}/finding.py",
        "frozenset(_forward_segments(step) if offloads else ())",
        "frozenset[int]()",
        (FOUND,),
    ),
    Mutation(
        "faster plans come first",
        f"{BUDGET}/planner.py",
        "heappush(queue, (total, ",
        "heappush(queue, (0.0, ",
        (FOUND,),
    ),
    Mutation(
        "how fast the blocks before can be goes by what they may hold",
        f"{BUDGET}/planner.py",
        'np.searchsorted(held, most, "right")',
        "len(held)",
        (FOUND,),
    ),
    Mutation(
        "plans after the first are tried",
        f"{BUDGET}/finding.py",
        "_MANY, _FEW = 2000, 200",
        "_MANY, _FEW = 0, 200",
        (FOUND,),
    ),
    Mutation(
        "what is computed in the middle of a forward is not kept",
        f"{CORE}/recompute.py",
        "with keeping.paused():",
        "with nullcontext():",
        (SAVING,),
    ),
    Mutation(
        "kept results are known by the place of their call",
        f"{CORE}/keeping.py",
        "return tuple(place)",
        "return ()",
        (SAVING,),
    ),
    Mutation(
        "the place of a call does not go through what modules do",
        f"{CORE}/keeping.py",
        "if frame.f_code.co_filename != _OF_MODULES:",
        "if True:",
        (SAVING,),
    ),
    Mutation(
        "what was changed in place is not taken",
        f"{CORE}/keeping.py",
        "if kept is None or now != kept.versions:",
        "if kept is None:",
        (SAVING,),
    ),
    Mutation(
        "what was written into an argument is not kept",
        f"{CORE}/keeping.py",
        " or changes_arguments(func):",
        ":",
        (SAVING,),
    ),
    Mutation(
        "a taken result that drew moves the generator",
        f"{CORE}/keeping.py",
        "if kept.drawn:",
        "if False:",
        (SAVING,),
    ),
    Mutation(
        "each kept result is taken once",
        f"{CORE}/keeping.py",
        "waiting.popleft() if waiting",
        "waiting[0] if waiting",
        (SAVING,),
    ),
    Mutation(
        "the place of a call begins at its block",
        f"{CORE}/saving.py",
        "place_of(sys._getframe(1), _RUN)",
        "place_of(sys._getframe(1), None)",
        (SAVING,),
    ),
    Mutation(
        "an alias knows of changes in place",
        f"{CORE}/_torch.py",
        "ADInplaceOrView, False)",
        "ADInplaceOrView, True)",
        (SAVING,),
    ),
    Mutation(
        "the choice of experts is kept where their scores are scaled in place",
        f"{CORE}/keeping.py",
        "if kept and func in ROUTING and now[1] == kept.versions[1]:",
        "if False:",
        ("tests/core/test_plan.py",),
    ),
    Mutation(
        "compiled code has no contexts in its graph",
        f"{CORE}/saving.py",
        "if is_compiling():",
        "if False:",
        (SAVING,),
    ),
    Mutation(
        "calls are known that come to a product",
        f"{CORE}/saving.py",
        '"inner", ',
        "",
        (SAVING,),
    ),
    Mutation(
        "what is written in Python may call anything",
        f"{CORE}/saving.py",
        'may_keep = getattr(func, "__name__", "") not in _IN_PYTHON',
        "may_keep = False",
        (SAVING,),
    ),
    Mutation(
        "the contexts stand around dear calls alone",
        f"{CORE}/saving.py",
        "may_keep = func.__name__ in self._names",
        "may_keep = True",
        (SAVING,),
    ),
    Mutation(
        "what is kept costs time, too",
        f"{BUDGET}/saved_results.py",
        "lost += overhead.kept",
        "lost += 0 * overhead.kept",
        (MEASURE,),
    ),
    Mutation(
        "the contexts take longer between large tensors",
        f"{BUDGET}/clock.py",
        "between.add_(1)",
        "pass",
        (MEASURE,),
    ),
    Mutation(
        "how large those are that operations give",
        f"{BUDGET}/measure.py",
        "statistics.mean(sizes or [0])",
        "0",
        (MEASURE,),
    ),
    Mutation(
        "the least is improved, too",
        f"{BUDGET}/finding.py",
        "return best if is_sure else self._lowered(best)",
        "return best",
        (FOUND,),
    ),
    Mutation(
        "a call that is recomputed twice has no window",
        f"{BUDGET}/waiting.py",
        "found.pop(call, None)",
        "pass",
        (WEIGHED,),
    ),
    Mutation(
        "what waits elsewhere needs room",
        f"{BUDGET}/waiting.py",
        "if more > free:",
        "if False:",
        (WEIGHED,),
    ),
    Mutation(
        "copies that compute does not hide are waited for",
        f"{BUDGET}/waiting.py",
        "waited = max(0.0, out - out_window) + max(0.0, back - in_window)",
        "waited = 0.0",
        (WEIGHED,),
    ),
    Mutation(
        "an input that others hold frees nothing",
        f"{BUDGET}/inputs.py",
        "return bool(boxes) and storage_uses(boxes[0].tensor) < uses_of_one + len(boxes)",
        "return bool(boxes)",
        (WEIGHED,),
    ),
]


def mutation(name: str) -> Mutation:
    return next(m for m in MUTATIONS if m.name == name)


def copy_repository(folder: Path) -> None:
    """What the tests need, without what Python has compiled."""
    for name in COPIED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", folder)


def red_tests(change: Mutation, folder: Path, *options: str) -> list[str]:
    """Break the copy in `folder`, run the tests, and mend it; returns the ids of those that fail.

    Raises:
        ValueError: the line is not there, or not once.
        RuntimeError: the tests could not run.
    """
    file = folder / change.file
    text = file.read_text()
    if text.count(change.old) != 1:
        raise ValueError(
            f"{change.name}: {change.file} has its line {text.count(change.old)} times"
        )
    file.write_text(text.replace(change.old, change.new))
    flags = ["-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-p", "no:randomly"]
    try:
        done = subprocess.run(
            [sys.executable, "-B", "-m", "pytest", *flags, *options, *change.tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
        )
    finally:
        file.write_text(text)
    if done.returncode not in (0, 1):  # neither passed nor failed: broken in another way
        raise RuntimeError(f"{change.name}: pytest ended with {done.returncode}: {done.stdout}")
    return re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", done.stdout, re.MULTILINE)


def main(words: list[str]) -> int:
    options = ["-x"] if "--first" in words else []
    words = [word for word in words if word != "--first"]
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    unnoticed = []
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        for change in chosen:
            red = red_tests(change, Path(folder), *options)
            print(f"{'red' if red else 'GREEN':6}{change.name}: {len(red)} tests", flush=True)
            for test in red[:5]:
                print(f"        {test}")
            unnoticed += [] if red else [change.name]
    return len(unnoticed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
