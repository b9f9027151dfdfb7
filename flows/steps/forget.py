"""Deletes what one tenant's recorded requests have left on this machine and in the registry.

All of it is found by names: those of the spool's files, and the ids of prompts made of them, which
traces, plans and reports carry on (`draftwell.serving.recording.tenants`). Models made of numbers
alone stay. What leads to the rest goes last, so that a run that was killed can be run again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from draftwell.components.collect.plan import PLAN, forget as forget_trace, read_plan
from draftwell.flows.workspace import TURN
from draftwell.registry.bundles.judged import judged_folder
from draftwell.registry.connection import registry_exists
from draftwell.registry.published import Published
from draftwell.registry.releases import FORGOTTEN, ReleaseFile, ReleaseVersion, is_champion
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import MANIFEST, ArtifactError, read_manifest
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import file_lock, write_atomically
from draftwell.serving.recording.tenants import KEYLESS, prompt_id, short_tenant, tenants_of
from draftwell.serving.server.feedback.spool import HALF, OURS
from draftwell.serving.server.model.snapshots import LOCK, NAMES, read_snapshot

TEXT_KINDS = ("datastore", "correction_memory")
"""Artifacts that hold tokens of what was asked and answered."""
READABLE = {".json", ".jsonl", ".ndjson", ".md", ".html", ".csv", ".txt"}
"""Files of a workspace that may name prompts."""


@dataclass
class Forgetting:
    """One run.

    Args:
        tenant: as names carry it.
        dry_run: nothing is deleted.
        removed: what was deleted, or would be.
        left: what this run cannot reach, or cannot tell.
    """

    tenant: str
    dry_run: bool = False
    removed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def unlink(self, file: Path) -> None:
        """Delete a file."""
        self.removed.append(str(file))
        if not self.dry_run:
            file.unlink(missing_ok=True)


def forget(
    tenant: str, *, state_dir: Path | None = None, spool: Path | None = None, dry_run: bool = False
) -> Forgetting:
    """Delete what a tenant's requests have left.

    Args:
        tenant: as names carry it (`draftwell.serving.recording.tenants`).
        state_dir: of a server's online state.
        spool: None takes those in the home.
        dry_run: only say what would be deleted.
    Raises:
        DraftwellError: a server holds the state, or another command changes a workspace; nothing
            was deleted then.
    """
    run, home = Forgetting(tenant, dry_run), draftwell_home()
    roots = [place for place in sorted((home / "pairs").glob("*/*")) if place.is_dir()]
    if spool is not None and not spool.is_dir():
        raise DraftwellError(f"there is no spool {spool}: check --set spool=…", code="no_spool")
    with ExitStack() as locks:
        if state_dir is not None:
            _hold_state(state_dir, locks)
        for root in roots:
            _hold_workspace(root, locks)
        _forget_published(run)
        for root in roots:
            _forget_derived(run, root)
        if state_dir is not None:
            _forget_state(run, state_dir)
        for folder in [spool] if spool is not None else sorted((home / "spool").glob("*/")):
            _forget_spool(run, folder)
    return run


def _hold_state(folder: Path, locks: ExitStack) -> None:
    """Keep servers from the folder of their online state."""
    if not folder.is_dir():
        raise DraftwellError(
            f"there is no state folder {folder}: check --set state_dir=…", code="no_state_folder"
        )
    if not locks.enter_context(file_lock(folder / LOCK, wait=False)):
        raise DraftwellError(
            f"a server keeps its state in {folder} and would write it again: stop it first",
            code="state_folder_in_use",
        )


def _hold_workspace(root: Path, locks: ExitStack) -> None:
    """Keep other commands from a workspace."""
    if not locks.enter_context(file_lock(root / TURN, wait=False)):
        holder = (root / TURN).read_text() or "another command"
        raise DraftwellError(
            f"{holder} is changing {root}: wait for it, then run it again", code="workspace_in_use"
        )


def _forget_published(run: Forgetting) -> None:
    """Delete versions made of the tenant's texts; releases that pin one are withdrawn before."""
    if not registry_exists():
        return
    store = Store()
    gone = [
        (kind, one)
        for kind in TEXT_KINDS
        for one in store.all_of(kind)
        if run.tenant in one.tenants
    ]
    digests = {(kind, one.digest) for kind, one in gone}  # a model may have been renamed
    for release in store.all_of("release"):
        try:
            pinned = sorted(digests & release.parents.items())
        except DraftwellError as error:
            run.left.append(f"what {release.name} version {release.version} pins: {error}")
            continue
        if pinned:
            _withdraw(run, store, release, [kind for kind, _ in pinned])
    for _, one in gone:
        run.removed.append(f"{one.name} version {one.version} in the registry")
        if not run.dry_run:
            store.delete(one)
    for kind in TEXT_KINDS:
        _forget_unnamed(run, store, kind)


def _forget_unnamed(run: Forgetting, store: Store, kind: str) -> None:
    """Delete what versions of the tenant's texts left that a person has deleted in MLflow."""
    for model in store.unnamed(kind):
        place = f"a {kind} whose version was deleted in MLflow, {model.artifact_location}"
        try:
            whose = store.tenants_of(model)
        except (DraftwellError, OSError) as error:
            run.left.append(f"{place}: whose it is cannot be read ({error}); delete it by hand")
            continue
        if run.tenant in whose:
            run.removed.append(place)
            if not run.dry_run:
                store.delete_unnamed(model)


def _withdraw(run: Forgetting, store: Store, published: Published, kinds: list[str]) -> None:
    """Let a release be neither promoted nor deployed, and delete the bundle that was judged."""
    pair, device = published.tags["pair"], published.tags["device_class"]
    # not read: its model may have been renamed, and its files may be gone
    release = ReleaseVersion(
        pair, device, published, ReleaseFile(device=device, pins={}, models={})
    )
    champion = ", the champion" if is_champion(store, release) else ""
    run.removed.append(f"{release.name}{champion}: withdrawn, it pins {' and '.join(kinds)}")
    run.left.append(f"deployed bundles of {release.name}, here and elsewhere: replace and delete")
    folder = judged_folder(release)
    if folder.is_dir():
        run.removed.append(str(folder))
    if not run.dry_run:
        store.set_tag(published, FORGOTTEN, " and ".join(kinds))
        shutil.rmtree(folder, ignore_errors=True)


def _forget_derived(run: Forgetting, root: Path) -> None:
    """Delete the tenant's artifacts of texts, traces, plans, prompts, and reports that name them,
    from a workspace and its recalibrations."""
    for manifest in sorted(root.rglob(MANIFEST)):
        try:
            found = read_manifest(manifest.parent)
        except ArtifactError:
            continue
        made = found["provenance"].get("tenants", ())
        if found["kind"] in TEXT_KINDS and run.tenant in made:
            _remove(run, manifest)
    for plan in sorted(root.rglob(PLAN)):
        known = read_plan(plan.parent)
        if known is not None and run.tenant in tenants_of(known.prompt_hashes):
            run.removed.append(str(plan.parent))
            if not run.dry_run:
                forget_trace(plan.parent)
                shutil.rmtree(plan.parent, ignore_errors=True)
    if (root / "eagle3").is_dir():
        run.left.append(
            f"{root / 'eagle3'}: token ids that a head is trained on, of nobody by name"
        )
    for file in _naming(run.tenant, root):
        if file.suffix == ".jsonl" and _is_prompts(file):
            _rewrite(run, file)
        else:
            run.unlink(file)


def _remove(run: Forgetting, manifest: Path) -> None:
    """Delete an artifact, its manifest last."""
    run.removed.append(str(manifest.parent))
    if not run.dry_run:
        for file in manifest.parent.iterdir():
            if file != manifest:
                file.unlink()
        manifest.unlink()
        manifest.parent.rmdir()


def _naming(tenant: str, root: Path) -> Iterator[Path]:
    """Files of a workspace, unfinished ones too, that name a prompt of the tenant."""
    mark = prompt_id(tenant, "").encode()
    for file in sorted(root.rglob("*")):
        if not READABLE & set(file.suffixes) or file.name in (MANIFEST, PLAN):
            continue
        if file.is_file() and mark in file.read_bytes():
            yield file


def _is_prompts(file: Path) -> bool:
    """Whether each line is a prompt."""
    try:
        rows = [json.loads(line) for line in file.read_bytes().splitlines()]
    except ValueError:
        return False
    return all(isinstance(row, dict) and "id" in row for row in rows)


def _rewrite(run: Forgetting, file: Path) -> None:
    """Delete the tenant's prompts from a file; the others stay. A file without any is not left: the
    next flow would take it for settled."""
    lines = file.read_bytes().splitlines(keepends=True)  # texts have other ends of lines within
    kept = [line for line in lines if run.tenant not in tenants_of([str(json.loads(line)["id"])])]
    run.removed.append(f"{len(lines) - len(kept)} of {len(lines)} prompts of {file}")
    if kept and not run.dry_run:
        write_atomically(file, b"".join(kept))
    elif not kept:
        run.unlink(file)


def _forget_state(run: Forgetting, folder: Path) -> None:
    """Delete the tenant's online state."""
    for path in sorted(folder.iterdir()):
        if not NAMES.fullmatch(path.name):
            continue
        try:
            owner = short_tenant(read_snapshot(path).tenant)
        except (OSError, ValueError) as error:
            run.left.append(f"{path}, whose it is cannot be read ({error}): delete it by hand")
            continue
        if owner == run.tenant:
            run.unlink(path)
        elif owner == KEYLESS:
            run.left.append(f"{path}: with --state shared, it is learnt from all requests")


def _forget_spool(run: Forgetting, folder: Path) -> None:
    """Delete the tenant's recorded requests; half-written files, too."""
    unnamed = 0
    for path in sorted(folder.iterdir()):
        found = OURS.fullmatch(path.name) or HALF.fullmatch(path.name)
        if found is None:
            continue
        if found[4] == f"-{run.tenant}":
            run.unlink(path)
        unnamed += found[4] is None
    if unnamed:
        run.left.append(
            f"{unnamed} files in {folder} that an earlier version recorded, which name no tenant: "
            "delete them, or wait until they are too old"
        )
