"""How a checkpoint becomes visible in a bucket: by its marker, for whoever holds the claim to it.

Stores have no rename, no locks, and cannot list a directory without all that is below it. So next
to the checkpoints there is `_claims/`, with one small object for each that exists or is being
written; a run is listed by it, however many objects its steps have. Step by step:

1. The claim is created with the attempt's id, on the condition that there is none. One writer can.
2. The objects are written, those with a name of their own on the condition that there is none.
3. The writer looks whether the claim is still its own, creates the marker with the attempt's id on
   the condition that there is none, and looks once more. From here on it is committed.
4. Deleting begins with the marker and ends with the claim.

Nobody can see whether the writer of a claim without a marker lives. A run has one writer, so the
next one takes over: it puts an id of its own into the claim, looks once more for the marker, and
deletes. Each of the two changes its object first and looks at the other's then, so of a writer
that lives after all and of one that takes over, at least one sees the other: the writer fails
without a commit, or the other leaves what is committed alone.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator

from flaxckpt.errors import DirectoryError, StepExistsError
from flaxckpt.storage import layout
from flaxckpt.storage.bucket import BucketPath

# What a dead process of an attempt may still have written after the others had cleaned up.
_LEFTOVER = re.compile(rf"{layout.ITEM}/{layout.CHILD}\d+-[0-9a-f]{{12}}/.*")


@contextlib.contextmanager
def commit_by_claim(final: BucketPath, attempt: str, *, overwrite: bool) -> Iterator[BucketPath]:
    """As `commit.commit_by_rename`, for a bucket; `final` is written in place.

    Raises:
      StepExistsError: when `final` is committed, or claimed by another writer.
      DirectoryError: when it has objects that flaxckpt did not write.
    """
    _claim(final, attempt, overwrite=overwrite)
    try:
        yield final
        _publish(final, attempt)
    except BaseException:
        give_up(final, attempt)
        raise


def _claim(final: BucketPath, attempt: str, *, overwrite: bool) -> None:
    """Creates the claim of `attempt`, and makes sure that nothing else is there."""
    if not _claim_of(final).create(attempt.encode()):
        advice = "; in a bucket it cannot be replaced safely" if overwrite else ""
        raise StepExistsError(
            f"{final} exists already, or is being written by another writer{advice}. Delete it "
            "first, or save another step."
        )
    names = final.names()
    if foreign := [name for name in names if not _LEFTOVER.fullmatch(name)]:
        _claim_of(final).delete()
        raise DirectoryError(
            f"{final} has objects that flaxckpt did not write, such as {foreign[0]}, so it is not "
            "touched. Save somewhere else, or remove them yourself."
        )
    if names:
        final.delete_all()


def _publish(final: BucketPath, attempt: str) -> None:
    """Creates the marker, while the claim is that of `attempt`."""
    claim, marker = _claim_of(final), final / layout.COMMIT_SUCCESS
    ours = attempt.encode()
    if claim.read() == ours and marker.create(ours):
        if claim.read() == ours:
            return
        marker.delete()
    raise StepExistsError(
        f"{final} was taken over by another writer while it was written. Nothing of that is lost, "
        "but this save is. Only one job may write a run."
    )


def give_up(final: BucketPath, attempt: str) -> None:
    """Deletes what `attempt` wrote, unless it is committed or somebody has taken over."""
    claim = _claim_of(final)
    if claim.read() == attempt.encode() and not is_committed(final):
        final.delete_all()
        claim.delete()


def is_committed(final: BucketPath) -> bool:
    """Whether there is a checkpoint."""
    return (final / layout.COMMIT_SUCCESS).exists()


def remove(final: BucketPath) -> None:
    """Deletes a checkpoint: its marker first, and its claim last."""
    (final / layout.COMMIT_SUCCESS).delete()
    final.delete_all()
    _claim_of(final).delete()


def claimed(parent: BucketPath) -> list[str]:
    """The names of what is or may become a checkpoint: one listing, whatever they hold."""
    return (parent / layout.CLAIMS).names()


def take_over(parent: BucketPath, name: str | None = None) -> list[BucketPath]:
    """Removes what writers before left unfinished; returns what was removed.

    Args:
      parent: where it lies.
      name: only that of the checkpoint of this name.
    """
    names = claimed(parent) if name is None else [name]
    return [parent / name for name in names if _is_removed(parent / name)]


def _is_removed(final: BucketPath) -> bool:
    """Removes `final` if it is unfinished; returns whether it was."""
    claim, marker = _claim_of(final), final / layout.COMMIT_SUCCESS
    before, after = claim.read(), layout.new_attempt().encode()
    if before is None or marker.read() == before or not claim.replace(before, after):
        return False
    if marker.read() == before:  # its writer lived
        claim.replace(after, before)
        return False
    remove(final)
    return True


def check_conditions(parent: BucketPath) -> None:
    """Makes sure that the store heeds conditions on writes.

    Raises:
      DirectoryError: when it does not: two writers could then destroy each other's checkpoints.
    """
    probe = parent / f"{layout.PROBE}{uuid.uuid4().hex}"
    try:
        if not probe.is_created_twice(b""):
            return
    finally:
        probe.delete()
    raise DirectoryError(
        f"{parent.bucket.url} ignores conditional writes (If-None-Match), so nothing can be saved "
        "there safely. Use a store that has them: AWS S3, GCS, MinIO, Ceph 19 or later."
    )


def _claim_of(final: BucketPath) -> BucketPath:
    """The claim to `final`."""
    return final.parent / layout.CLAIMS / final.name
