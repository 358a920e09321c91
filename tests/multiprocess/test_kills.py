"""A process that is killed at any point of a save costs that save at most.

What is there afterwards is the old newest step or the new one, whole, to a process of its own; and
the next job resumes from it, saves the step that was killed, and removes what was left. The jobs
form a chain: each finishes what the one before it began, and is killed itself at the next point.
"""

import dataclasses
import pkgutil
import re
import signal

import pytest

from tests import cluster, stores
from tests.multiprocess import jobs


@dataclasses.dataclass(frozen=True)
class Point:
    """Where a process dies.

    Attributes:
      function: one that the save calls.
      after: whether it dies when the function has returned, not when it is called.
      key: only in a call one of whose first three arguments matches this.
      commits: whether the step is committed then, or by the others.
    """

    function: str
    after: bool = False
    key: str = ""
    commits: bool = False

    def arm(self, context):
        """Makes this process die there."""
        owner, _, name = self.function.rpartition(".")
        owner = pkgutil.resolve_name(owner)
        function = getattr(owner, name)

        def deadly(*args, **kwargs):
            meant = any(re.search(self.key, str(argument)) for argument in args[:3])
            if meant and not self.after:
                context.die()
            result = function(*args, **kwargs)
            if meant:
                context.die()
            return result

        setattr(owner, name, deadly)


WRITING = "^b'[0-9a-f]{12} writing'$"
MARKER = r"/\d+/commit_success.txt$"
EVERYBODY = {
    "after the decision": Point("flaxckpt.run.writer.write"),
    "before its data": Point("flaxckpt.store.ocdbt.write_all"),
    "after its data": Point("flaxckpt.store.ocdbt.write_all", after=True),
    "after its part": Point("flaxckpt.saving.writing._write_shards", after=True),
}
LEADER = EVERYBODY | {
    "before the others begin": Point("flaxckpt.multihost.Collective.publish", key="^begun$"),
    "after the others begin": Point(
        "flaxckpt.multihost.Collective.publish", after=True, key="^begun$"
    ),
    "when all are done": Point("flaxckpt.multihost.Collective.gather", after=True),
    "before the merge": Point("flaxckpt.store.ocdbt.merge"),
    "after the merge": Point("flaxckpt.store.ocdbt.merge", after=True),
    "before the commit": Point("flaxckpt.saving.writing._write_metadata", after=True),
    "before the outcome": Point(
        "flaxckpt.multihost.Collective.publish", key="^outcome$", commits=True
    ),
}
OTHER = EVERYBODY | {
    "before it has begun": Point("flaxckpt.multihost.Collective.wait_for"),
    # Process 0 needs it no more.
    "after its done record": Point(
        "flaxckpt.multihost.Collective._set", after=True, key="arrived/1", commits=True
    ),
}
ON_DISK = {
    "before the rename": Point("flaxckpt.store.local._make_visible"),
    "after the rename": Point("flaxckpt.store.local._make_visible", after=True, commits=True),
}
IN_A_BUCKET = {
    "after the claim": Point("flaxckpt.store.bucket.BucketStore._claim", after=True),
    "before the marker": Point("flaxckpt.store.bucket.BucketStore._put", key=MARKER),
    "after the marker": Point("flaxckpt.store.bucket.BucketStore._put", True, MARKER),
    "before the claim says so": Point("flaxckpt.store.bucket.BucketStore.replace", key=WRITING),
    "after the claim says so": Point(
        "flaxckpt.store.bucket.BucketStore.replace", True, WRITING, commits=True
    ),
}


def resume_and_die(context, url, options, newest, victim, point):
    """Resumes at `newest`, saves the step after it, and dies in the save of the one after that."""
    with jobs.manager(url, options) as ckpt:
        jobs.check(ckpt.restore(jobs.state(0)), newest)
        assert ckpt.next_step == newest + 1
        ckpt.save(newest + 1, jobs.state(newest + 1), wait=True)
        if context.index == victim:
            point.arm(context)
        context.mark("saving")
        ckpt.save(newest + 2, jobs.state(newest + 2), wait=True)


def begin(context, url, options):
    with jobs.manager(url, options) as ckpt:
        ckpt.save(0, jobs.state(0))


def kill_at_each(store, run, points, count=2):
    """Kills a job at each of `points`, of which each has a victim."""
    url, options = store.url(run), store.options(timeout_secs=60)
    cluster.run(begin, count, url, options, env=store.env)
    newest = 0
    for victim, title, point in points:
        arguments = (url, options, newest, victim, point)
        # Who has all that it needs goes on, and is to end by itself.
        grace = 20 if point.commits and victim else 0.1
        results = cluster.run(
            resume_and_die, count, *arguments, env=store.env, check=False, grace=grace
        )
        killed, log = results[victim], "\n".join(map(str, results))
        where = f"process {victim} {title}"
        assert killed.returncode == -signal.SIGKILL, f"{where}\n{log}"
        assert not killed.killed, f"{where}: it did not die by itself\n{log}"
        assert all("saving" in result.marks for result in results), f"{where}\n{log}"
        if point.commits and victim:
            assert results[0].returncode == 0, f"{where}\n{log}"
        newest += 2 if point.commits else 1
        steps = jobs.check_alone(store, run, newest)
        assert steps == list(range(newest + 1)), where
    # The last one was killed too: the next job finishes, and leaves nothing unfinished.
    cluster.run(finish, count, url, options, newest, env=store.env)
    jobs.check_alone(store, run, newest + 1)
    assert store.strays(run) == []


def finish(context, url, options, newest):
    with jobs.manager(url, options) as ckpt:
        jobs.check(ckpt.restore(jobs.state(0)), newest)
        ckpt.save(newest + 1, jobs.state(newest + 1))


@pytest.mark.parametrize("kind", stores.ALL)
def test_process_0_is_killed_at_each_point(kind, tmp_path):
    points = LEADER | (ON_DISK if kind == "disk" else IN_A_BUCKET)
    with stores.opened(kind, tmp_path) as store:
        kill_at_each(store, "run", [(0, *point) for point in points.items()])


@pytest.mark.parametrize("kind", stores.ALL)
def test_another_process_is_killed_at_each_point(kind, tmp_path):
    with stores.opened(kind, tmp_path) as store:
        kill_at_each(store, "run", [(1, *point) for point in OTHER.items()])


def test_of_three_processes_two_are_killed_one_after_the_other(tmp_path):
    late = dataclasses.replace(OTHER["after its done record"], key="arrived/2")
    points = [(1, "after its part", OTHER["after its part"]), (2, "after its done record", late)]
    with stores.opened("disk", tmp_path) as store:
        kill_at_each(store, "run", points, count=3)
