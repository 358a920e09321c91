"""One fault in each call of a kind, one save for each, and what must be true after each of them.

First the calls of an undisturbed save are recorded. Then each call of the kind gets its own run:
a new run directory with steps 0 and 1, the save with the fault in that call, the checks.
TensorStore may divide its work among several threads, each with a count of its own; then another
call is hit, or none. So the call that was really hit is read from strace's log, and the
sweep goes on until each recorded call was hit: none is missed, and `Sweep.missed` would tell.
"""

import contextlib
import dataclasses
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys

import flaxckpt
from flaxckpt.testing import differences
from tests.faults.child import KEEP, Counter, items, state
from tests.faults.tracing import Call, Tracer, injection
from tests.processes import ROOT, environment

KILL = "signal=SIGKILL"
PASSES = 25
TIMEOUT_SECS = 60


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is saved into a run with the steps 0 and 1, of which two are kept.

    Attributes:
      saved: the step; its state is `state(2)`.
      allowed: the steps that there may be after a fault; the last are those without one.
      broken: which part of the protocol is broken on purpose.
      atomic_rename: whether steps become visible by a rename, or by a marker.
      has_items: whether every step has `items` beside its state; `saved` is a new one then.
      swept: a pattern: only calls on paths in which it is found get a fault.
    """

    saved: int
    allowed: tuple[list[int], ...]
    broken: str = ""
    atomic_rename: bool = True
    has_items: bool = False
    swept: str = ""

    @property
    def options(self):
        """Those of the managers."""
        return flaxckpt.Options(atomic_rename=self.atomic_rename)

    def states(self, step):
        """What may be in `step`."""
        return [state(step), state(2)] if step == self.saved else [state(step)]

    def beside(self, step):
        """What is saved beside the state of `step`."""
        return items(step) if self.has_items else {}


# Before the commit of step 2, after it, and after the deletion of step 0.
RETENTION = Scenario(2, ([0, 1], [0, 1, 2], [1, 2]))
# Step 1 is there before and after it is replaced.
OVERWRITE = Scenario(1, ([0, 1],))
SCENARIOS = {"retention": RETENTION, "overwrite": OVERWRITE}
MARKER = dataclasses.replace(RETENTION, atomic_rename=False)
ALL_SCENARIOS = SCENARIOS | {"marker": MARKER}
ITEMS = dataclasses.replace(RETENTION, has_items=True, swept="/(ema|config|data)(/|$)")


class Child:
    """The server of tests/faults/child.py."""

    def __init__(self):
        self._worker = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.child"],
            bufsize=0,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.hear() == {"up": True}

    def say(self, line):
        """Gives the child a line."""
        self._process.stdin.write(f"{line}\n".encode())

    def hear(self):
        """The child's next line; a worker that hangs is killed, and `hung` says so."""
        if not select.select([self._process.stdout], [], [], TIMEOUT_SECS)[0]:
            assert self._worker, "the child does not start"
            os.kill(self._worker, signal.SIGKILL)
            return self.hear() | {"hung": True}
        heard = json.loads(self._process.stdout.readline())
        if "crash" in heard:
            raise AssertionError(f"{heard}, then {self.hear()}")
        return heard

    def begin(self, directory, scenario):
        """Has a worker make ready for the save; the ids of its threads, main first."""
        task = {
            "directory": str(directory),
            "saved": scenario.saved,
            "broken": scenario.broken,
            "atomic_rename": scenario.atomic_rename,
            "has_items": scenario.has_items,
        }
        self.say(json.dumps(task))
        heard = self.hear()
        self._worker = heard["ready"]
        return [self._worker, *sorted(set(heard["threads"]) - {self._worker})]

    def close(self):
        """Ends worker and server."""
        self._process.stdin.close()
        self._process.stdout.read()
        self._process.stdout.close()
        self._process.wait()


@dataclasses.dataclass(frozen=True)
class Run:
    """One save with one fault.

    Attributes:
      calls: what was called by the threads that were traced.
      outcome: how the save ended, in the child's words.
      problems: what is not as it must be.
    """

    calls: list[Call]
    outcome: dict
    problems: list[str]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A fault in every call of a kind.

    Attributes:
      wanted: the calls that were to be hit.
      runs: those in which one was hit.
      missed: the calls that were not hit.
    """

    wanted: list[Call]
    runs: list[Run]
    missed: list[Call]

    @property
    def problems(self):
        """Those of all runs."""
        return [problem for run in self.runs for problem in run.problems]


def record(child, directory, scenario):
    """The calls of an undisturbed save."""
    run = _run(child, directory, scenario, None, "")
    assert run.outcome == {"error": None}, run.outcome
    assert run.problems == []
    return [call for call in run.calls if call.writes]


def sweep(child, tmp_path, scenario, kind, fault):
    """Puts `fault` into every call of `kind` of a save."""
    calls = [c for c in record(child, tmp_path / "undisturbed", scenario) if c.kind == kind]
    wanted = [c for c in calls if re.search(scenario.swept, c.path)]
    missed = {call.identity: call for call in wanted}
    runs = []
    for number, call in [(number, call) for number in range(PASSES) for call in wanted]:
        if call.identity not in missed:
            continue
        run = _run(child, tmp_path / f"{number}-{len(runs)}", scenario, call, fault)
        if hit := [c for c in run.calls if c.hit]:
            runs.append(run)
        for each in hit:
            missed.pop(each.identity, None)
    return Sweep(wanted, runs, list(missed.values()))


def _run(child, directory, scenario, call, fault):
    """One save with `fault` in `call`, and what is wrong after it; without `call` just the save."""
    threads = child.begin(directory, scenario)
    chosen = threads if call is None else threads[:1] if call.main else threads[1:]
    log = directory.with_name(f"{directory.name}.strace")
    tracer = Tracer(chosen, log, [] if call is None else injection(call, fault))
    child.say("save")
    outcome = child.hear()
    tracer.stop()
    calls = tracer.calls(directory, threads[0])
    hit = [c for c in calls if c.hit]
    if "exit" in outcome:
        problems = problems_after_kill(directory, scenario)
        problems += ["the save hung"] if "hung" in outcome else []
    else:
        problems = problems_after_error(directory, scenario, outcome, hit)
        child.say("save step 3")
        problems += problems_of_next(directory, scenario, child.hear())
    where = f"{fault} in {', '.join(f'{c.name} #{c.number} of {c.path}' for c in hit)}"
    if not problems:
        shutil.rmtree(directory)
    return Run(calls, outcome, [f"{where}: {problem}" for problem in problems])


@contextlib.contextmanager
def _noted(problems, what):
    """Makes a problem of an exception."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the test shall say so
        problems.append(f"{what} failed: {error!r}")


def problems_of_steps(directory, scenario, allowed):
    """What is wrong with the list of steps, and with the steps that are listed."""
    problems = []
    with _noted(problems, "reading"):
        reader = flaxckpt.CheckpointManager(directory, read_only=True)
        if (steps := reader.steps()) not in allowed:
            problems.append(f"the steps are {steps}")
        for step in steps:
            problems += flaxckpt.verify(directory / str(step)).problems
            found = reader.restore(step=step)
            problems += min((differences(s, found) for s in scenario.states(step)), key=len)
            if scenario.has_items:
                problems += problems_of_items(directory / str(step), step)
    return problems


def problems_of_items(path, step):
    """What is wrong with the items of a step."""
    counter = Counter()
    found = flaxckpt.restore_items(path, {"ema": None, "config": None, "data": counter})
    expected = items(step)
    problems = differences(expected["ema"], found["ema"])
    if (found["config"], counter.count) != (expected["config"], step):
        problems.append(f"the items of step {step} are {found['config']} and {counter.count}")
    return problems


def problems_of_files(directory):
    """What is in the run directory beside steps.

    An empty directory may stay of a step that was about to be claimed, or was just deleted.
    """
    steps = map(str, flaxckpt.CheckpointManager(directory, read_only=True).steps())
    names = sorted({*os.listdir(directory)} - {*steps})
    return [f"rubbish: {name}" for name in names if os.listdir(directory / name)]


def problems_after_kill(directory, scenario):
    """What is wrong after the death of the process that was saving."""
    problems = problems_of_steps(directory, scenario, scenario.allowed)
    with _noted(problems, "the next save"):
        with flaxckpt.CheckpointManager(directory, keep=KEEP, options=scenario.options) as manager:
            problems += problems_of_files(directory)
            step = manager.next_step
            expected = [*manager.steps(), step][-2:]
            manager.save(step, state(step), items=scenario.beside(step))
        problems += problems_of_steps(directory, scenario, [expected]) + problems_of_files(
            directory
        )
    return problems


def problems_after_error(directory, scenario, outcome, hit):
    """What is wrong when the save has ended, before anything else is done."""
    allowed = scenario.allowed if hit else scenario.allowed[-1:]
    problems = problems_of_steps(directory, scenario, allowed)
    # That a directory exists is no news to mkdir; it is checked, whatever mkdir said.
    harmless = all(c.name in ("mkdir", "mkdirat") and c.occurrence > 1 for c in hit)
    if outcome["error"] is None and not harmless:
        problems.append("no error reached the caller")
    return problems


def problems_of_next(directory, scenario, outcome):
    """What is wrong when the manager that met the error has saved step 3."""
    problems = []
    if outcome != {"error": None}:
        problems.append(f"the next save of the same manager failed: {outcome}")
    problems += problems_of_steps(directory, scenario, ([1, 3], [2, 3]))
    with _noted(problems, "opening"):
        flaxckpt.CheckpointManager(directory, keep=KEEP, options=scenario.options).close()
        problems += problems_of_steps(directory, scenario, ([1, 3], [2, 3])) + problems_of_files(
            directory
        )
    return problems


def tracing_refused():
    """Why no process can be traced here; empty when it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        Tracer([sleeper.pid], os.devnull).stop()
    except PermissionError as error:
        return str(error)
    finally:
        sleeper.kill()
        sleeper.wait()
    return ""
