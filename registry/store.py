"""The store: artifacts as versions of MLflow models, with their lineage.

One experiment per pair (`draftwell/<pair>`), one registered model per `<kind>.<pair>`, one run per
version. A version appears last, when all its files are there: whoever can see it can load it. Runs
are always named by id (MLflow's active run belongs to a thread), and files are read back as plain
data: this project never calls `load_model`.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.registry.cards.datasets import trace_input
from draftwell.registry.cards.model_card import (
    describe,
    describe_model,
    figures_of,
    fitting,
    write_model,
)
from draftwell.registry.cards.trials import log_trials, trials_of
from draftwell.registry.connection import artifact_folder, connect, default_uri, registry_errors
from draftwell.registry.folders import base_pair, copy_artifact, model_name
from draftwell.registry.published import (
    FORMAT_TAG,
    TENANTS,
    Published,
    insert_or_change,
    is_ours,
    published_of,
)
from draftwell.registry.strict import validate
from draftwell.serving.artifacts.base import (
    MANIFEST,
    Provenance,
    check_files,
    digest_of,
    read_manifest,
)
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import make_folder, sync_tree, whole_folder
from draftwell.serving.format import FORMAT

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion

__all__ = ["Published", "Store"]
Curve = Sequence[tuple[int, float]]
"""Pairs of step and value, ascending; the last value is the metric's."""
RENEWED = ("trace_digest", "git_commit", "device_class", "parents", TENANTS)
"""Tags of where data comes from, which may be made again."""
SHOWN_AS_TAGS = {"strategy", "temperature"}
"""Settings that are tags, too."""
MOST_AT_ONCE = 1000
"""Metrics that MLflow takes in one call."""


class Store:
    """The registry of artifacts.

    Args:
        tracking_uri: MLflow's address; None takes `$MLFLOW_TRACKING_URI`, else SQLite in the home.
    """

    def __init__(self, tracking_uri: str | None = None):
        self.uri = tracking_uri or default_uri()
        self.client = connect(self.uri)

    def publish(
        self,
        folder: Path,
        *,
        pair: str,
        metrics: Mapping[str, float | Curve] | None = None,
        parameters: Mapping[str, Any] | None = None,
        plots: Iterable[Path] = (),
        description: str = "",
        parents: Mapping[str, str] | None = None,
    ) -> Published:
        """Register an artifact folder as the next version of `<kind>.<pair>`.

        The same data for the same pair is registered once: a second call returns the version that
        exists, whose tags are those of the last time it was made; its run, figures and description
        are those of the first.

        Args:
            metrics: numbers that MLflow compares, or curves of which it draws the steps; the
                numbers of the artifact itself are added.
            parameters: settings that MLflow compares; those of the artifact itself are added.
            plots: pictures and reports, kept with the run.
            description: Markdown for a person; made from the figures where it is empty.
            parents: kind → digest of what it was made from; those of the provenance are added.
        """
        manifest, digest = read_manifest(folder), digest_of(folder)
        check_files(folder, manifest)
        kind, made = (
            manifest["kind"],
            validate(Provenance, manifest["provenance"], str(folder)).model_dump(),
        )
        manifest = {**manifest, "provenance": made}
        name = model_name(kind, pair)
        tags = _tags(kind, base_pair(kind, pair), digest, made, parents or {})
        with registry_errors(self.uri):
            figures, settings = figures_of(folder, manifest)
            curves = metrics or {}
            figures |= {key: one for key, one in curves.items() if isinstance(one, int | float)}
            settings |= parameters or {}
            words = fitting(description or describe(manifest, figures, settings))
            tags |= {one: str(settings[one]) for one in settings.keys() & SHOWN_AS_TAGS}
            if existing := self._find(name, digest, made["fingerprint"]):
                return self._renew(existing, tags)
            every, base = {**figures, **curves}, base_pair(kind, pair)
            run_id, model_id, source = self._log(
                folder, manifest, base, every, settings, plots, words
            )
            published = self._register(name, source, run_id, model_id, tags, words)
            # killed in between, the version lacks nothing but this view
            if kind == "decoding_config" and published.run_id == run_id:
                config = json.loads((folder / "config.json").read_text())
                log_trials(self.client, self._experiment(base), run_id, trials_of(config))
            return published

    def _renew(self, known: Published, tags: Mapping[str, str]) -> Published:
        """Change the tags that may differ although the data is the same; returns the version with
        them."""
        whose = {*known.tenants, *tags.get(TENANTS, "").split()}  # the same texts of several
        tags = {**tags, TENANTS: " ".join(sorted(whose))}
        changed = {
            key: tags[key] for key in RENEWED if tags.get(key, "") != known.tags.get(key, "")
        }
        for key, value in changed.items():
            self.set_tag(known, key, value)
        return replace(known, tags={**known.tags, **changed})

    def _find(self, name: str, digest: str, fingerprint: str) -> Published | None:
        query = f"name = '{name}' and tag.digest = '{digest}' and tag.fingerprint = '{fingerprint}'"
        found = self.client.search_model_versions(
            query, order_by=["version_number ASC"], max_results=1
        )
        return published_of(found[0]) if found else None

    def _log(
        self,
        folder: Path,
        manifest: dict[str, Any],
        pair: str,
        metrics: Mapping[str, float | Curve],
        parameters: Mapping[str, Any],
        plots: Iterable[Path],
        words: str,
    ) -> tuple[str, str, str]:
        """One run with a logged model: (run id, model id, address of the files)."""
        from mlflow.entities import LoggedModelOutput, Metric, Param

        kind, client = manifest["kind"], self.client
        settings = {key: str(value) for key, value in parameters.items()}
        commit = (
            {"mlflow.source.git.commit": c} if (c := manifest["provenance"]["git_commit"]) else {}
        )
        experiment = self._experiment(pair)
        run = client.create_run(
            experiment, run_name=kind, tags={"mlflow.note.content": words, **commit}
        )
        run_id = run.info.run_id
        try:
            model = client.create_logged_model(
                experiment, kind, run_id, params=settings, model_type=kind
            )
            with tempfile.TemporaryDirectory() as place:
                write_model(
                    folder,
                    Path(place) / "model",
                    manifest,
                    location=model.artifact_location,
                    run_id=run_id,
                    model_id=model.model_id,
                )
                self._upload(model, Path(place) / "model")
            if (traces := trace_input(kind, manifest["provenance"])) is not None:
                insert_or_change(lambda: client.log_inputs(run_id, [traces]))
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, 0)])
            now = int(time.time() * 1000)
            client.log_batch(run_id, params=[Param(k, v) for k, v in settings.items()])
            points = [
                Metric(k, float(value), now, step, model_id=model.model_id, run_id=run_id)
                for k, v in metrics.items()
                for step, value in ([(0, v)] if isinstance(v, int | float) else v)
            ]
            for start in range(0, len(points), MOST_AT_ONCE):
                client.log_batch(run_id, points[start : start + MOST_AT_ONCE])
            for plot in plots:
                client.log_artifact(run_id, str(plot), "plots")
            client.finalize_logged_model(model.model_id, "READY")
        except BaseException:
            client.set_terminated(run_id, "FAILED")
            raise
        client.set_terminated(run_id)
        return run_id, model.model_id, model.artifact_location

    def _upload(self, model: LoggedModel, folder: Path) -> None:
        """Hand a model's files to MLflow. Those that it keeps in a folder are on disk before a
        version names them, as its database is."""
        from mlflow.utils.file_utils import local_file_uri_to_path
        from mlflow.utils.uri import is_local_uri

        local = is_local_uri(model.artifact_location, is_tracking_or_registry_uri=False)
        kept = Path(local_file_uri_to_path(model.artifact_location)) if local else None
        if kept is not None:
            make_folder(kept)
        self.client.log_model_artifacts(model.model_id, str(folder))
        if kept is not None:
            sync_tree(kept)

    def _register(
        self, name: str, source: str, run_id: str, model_id: str, tags: dict[str, str], words: str
    ) -> Published:
        """The new version; where another process registered the same data meanwhile, its version,
        and this one goes."""
        from mlflow.exceptions import MlflowException

        try:
            known = {key: tags[key] for key in ("kind", "pair")}
            self.client.create_registered_model(
                name, known, description=describe_model(tags["kind"])
            )
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        version = self.client.create_model_version(
            name, source, run_id, tags, description=words, model_id=model_id
        )
        first = self._find(name, tags["digest"], tags["fingerprint"])
        if first is not None and first.version < int(version.version):
            self.client.delete_model_version(name, version.version)  # nobody can have pinned it yet
            if first.run_id != run_id:
                self.client.delete_run(run_id)
                return first
            # A request that was sent again after a lost answer: both versions are of this run,
            # which stays.
            version = self.client.get_model_version(name, str(first.version))
        self.client.update_run(run_id, name=f"{name} version {version.version}")
        link = json.dumps([{"name": name, "version": version.version}])
        # the UI's link from model to version
        self.client.set_logged_model_tags(model_id, {"mlflow.modelVersions": link})
        return published_of(version)

    def _experiment(self, pair: str) -> str:
        from mlflow.exceptions import MlflowException

        name, root = f"draftwell/{pair}", artifact_folder(self.uri)
        if (known := self.client.get_experiment_by_name(name)) is not None:
            return str(known.experiment_id)
        try:
            return str(
                self.client.create_experiment(
                    name, artifact_location=f"{root}/{pair}" if root else None
                )
            )
        except MlflowException:  # another process was faster
            if (known := self.client.get_experiment_by_name(name)) is None:
                raise
            return str(known.experiment_id)

    def resolve(self, kind: str, pair: str, version_or_alias: int | str) -> Published:
        """A version by number or by alias."""
        name, wanted = model_name(kind, pair), str(version_or_alias)
        from mlflow.exceptions import MlflowException

        with registry_errors(self.uri):
            try:
                if wanted.isdecimal():
                    return published_of(self.client.get_model_version(name, wanted))
                return published_of(self.client.get_model_version_by_alias(name, wanted))
            except MlflowException as error:
                if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    raise
        known = ", ".join(f"{alias} = {v}" for alias, v in self.get_aliases(kind, pair).items())
        what = f"version {wanted}" if wanted.isdecimal() else f"alias {wanted}"
        have = f"it has {known}" if known else "run `draftwell tune`, or train, calibrate and gate "
        have += "" if known else f"this pair first{self._renamed(kind, pair)}"
        raise DraftwellError(
            f"the registry holds no {what} of {name}: {have}", code="not_registered"
        )

    def _renamed(self, kind: str, pair: str) -> str:
        """A hint at a registered model of the kind and pair that has another name than ours."""
        from mlflow.exceptions import MlflowException

        name, base = model_name(kind, pair), base_pair(kind, pair)
        try:
            models = self.client.search_registered_models(
                f"tags.kind = '{kind}' and tags.pair = '{base}'"
            )
        except MlflowException:  # an old server: there was something to say already
            return ""
        others = [model.name for model in models if not model.name.startswith(f"{kind}.{base}")]
        return f"; if {others[0]!r} was renamed in MLflow, name it {name} again" if others else ""

    def download(self, published: Published, into: Path) -> Path:
        """The version's artifact files in the folder `into`, which is replaced; digests are checked
        first."""
        from mlflow.artifacts import download_artifacts

        into.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=into.parent, prefix=f".{into.name}.") as place:
            _refuse_missing(published)
            with registry_errors(self.uri):
                raw = Path(
                    download_artifacts(
                        artifact_uri=published.source, dst_path=place, tracking_uri=self.uri
                    )
                )
            manifest = read_manifest(raw)
            check_files(raw, manifest)
            if digest_of(raw) != published.digest:
                raise DraftwellError(
                    f"the files of {published.name} version {published.version} are not those that "
                    "were published: where its tag digest was changed in MLflow, set it to "
                    f"{digest_of(raw)}; else delete that version there and publish it again",
                    code="published_files_changed",
                )
            with whole_folder(into) as clean:
                copy_artifact(raw, clean)
        return into

    def set_alias(self, published: Published, alias: str) -> None:
        """Let an alias name this version; it leaves the version that had it."""
        with registry_errors(self.uri):
            insert_or_change(
                lambda: self.client.set_registered_model_alias(
                    published.name, alias, str(published.version)
                )
            )

    def get_aliases(self, kind: str, pair: str) -> dict[str, int]:
        """alias → version (a search for versions does not return their aliases)."""
        from mlflow.exceptions import MlflowException

        with registry_errors(self.uri):
            try:
                model = self.client.get_registered_model(model_name(kind, pair))
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return {}
                raise
        return {alias: int(version) for alias, version in sorted(model.aliases.items())}

    def set_tag(self, published: Published, key: str, value: str) -> None:
        """Add a tag to a version, or change it."""
        with registry_errors(self.uri):
            insert_or_change(
                lambda: self.client.set_model_version_tag(
                    published.name, str(published.version), key, value
                )
            )

    def delete_tag(self, published: Published, key: str) -> None:
        """Take a tag from a version."""
        with registry_errors(self.uri):
            self.client.delete_model_version_tag(published.name, str(published.version), key)

    def append(
        self, kind: str, pair: str, about: Published, tags: Mapping[str, str], words: str
    ) -> None:
        """Add a version of `<kind>.<pair>` that has no files and leads to another version; its
        number comes after all others, also after those that were deleted."""
        from mlflow.exceptions import MlflowException

        name, source = model_name(kind, pair), f"models:/{about.name}/{about.version}"
        tags = {FORMAT_TAG: str(FORMAT), **tags}
        with registry_errors(self.uri):
            try:
                self.client.create_registered_model(name, description=describe_model(kind))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            insert_or_change(
                lambda: self.client.create_model_version(
                    name, source, tags=tags, description=fitting(words)
                )
            )

    def describe(self, published: Published, words: str) -> None:
        """Replace a version's description."""
        with registry_errors(self.uri):
            self.client.update_model_version(published.name, str(published.version), fitting(words))

    def description(self, published: Published) -> str:
        """A version's description."""
        with registry_errors(self.uri):
            return (
                self.client.get_model_version(published.name, str(published.version)).description
                or ""
            )

    def log_text(self, published: Published, text: str, file: str) -> None:
        """Keep a text with the version's run."""
        with registry_errors(self.uri):
            self.client.log_text(published.run_id, text, file)

    def log_files(self, published: Published, files: Iterable[Path], folder: str) -> None:
        """Keep files with the version's run, under a folder of its artifacts."""
        with registry_errors(self.uri):
            for file in files:
                self.client.log_artifact(published.run_id, str(file), folder)

    def read_file(self, published: Published, file: str) -> bytes | None:
        """A file that was kept with the version's run; None where it is gone."""
        from mlflow.exceptions import MlflowException

        with registry_errors(self.uri), tempfile.TemporaryDirectory() as place:
            try:
                found = self.client.download_artifacts(published.run_id, file, place)
            except (MlflowException, FileNotFoundError):
                known = self.client.list_artifacts(published.run_id, str(Path(file).parent))
                if any(one.path == file for one in known):
                    raise
                return None
            return Path(found).read_bytes()

    def log_metrics(self, published: Published, metrics: Mapping[str, float]) -> None:
        """Add metrics to the version's run, which MLflow's compare view reads."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        with registry_errors(self.uri):
            self.client.log_batch(
                published.run_id,
                [Metric(key, float(value), now, 0) for key, value in metrics.items()],
            )

    def metrics(self, published: Published) -> dict[str, float]:
        """The metrics of the version's run."""
        with registry_errors(self.uri):
            return dict(self.client.get_run(published.run_id).data.metrics)

    def all_of(self, kind: str) -> list[Published]:
        """All versions of a kind that Draftwell made, of every pair."""
        return self._search(f"tag.kind = '{kind}'")

    def delete(self, published: Published) -> None:
        """Delete a version with its files and those of its run; the run's numbers stay. A deletion
        that was killed can be begun again.

        Raises:
            DraftwellError: the store of its files deletes none (`files_not_deleted`).
        """
        with registry_errors(self.uri):
            version = self.client.get_model_version(published.name, str(published.version))
            self._delete_files(published.source, published.run_id, version.model_id)
            self.client.delete_model_version(published.name, str(published.version))

    def _delete_files(self, source: str, run_id: str | None, model_id: str | None) -> None:
        """Delete a logged model with its files and those of its run."""
        from mlflow.exceptions import MlflowException
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        of_run = [self.client.get_run(run_id).info.artifact_uri] if run_id else []
        for place in (source, *of_run):
            try:
                get_artifact_repository(place, tracking_uri=self.uri).delete_artifacts()
            except NotImplementedError as error:
                raise DraftwellError(
                    f"the files in {place} cannot be deleted here: delete them, then run it again",
                    code="files_not_deleted",
                ) from error
        if model_id:
            try:
                self.client.delete_logged_model(model_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise

    def unnamed(self, kind: str) -> list[LoggedModel]:
        """Published artifacts of a kind whose versions a person has deleted in MLflow, which keeps
        their files."""
        named = {one.source for one in self.all_of(kind)}
        with registry_errors(self.uri):
            homes = self.client.search_experiments(filter_string="name LIKE 'draftwell/%'")
            experiments = [one.experiment_id for one in homes]
            found: list[LoggedModel] = []
            token: str | None = None
            while experiments and token != "":
                page = self.client.search_logged_models(experiments, page_token=token)
                found += page
                token = page.token or ""
        return [
            one
            for one in found
            if one.model_type == kind
            and one.artifact_location not in named
            and one.status == "READY"
        ]

    def tenants_of(self, model: LoggedModel) -> list[str]:
        """Whose recorded requests an `unnamed` artifact was made of."""
        from mlflow.artifacts import download_artifacts

        with registry_errors(self.uri), tempfile.TemporaryDirectory() as place:
            wanted = f"{model.artifact_location}/{MANIFEST}"
            download_artifacts(artifact_uri=wanted, dst_path=place, tracking_uri=self.uri)
            return list(read_manifest(Path(place))["provenance"].get("tenants", ()))

    def delete_unnamed(self, model: LoggedModel) -> None:
        """Delete an `unnamed` artifact, as `delete` does."""
        with registry_errors(self.uri):
            self._delete_files(model.artifact_location, model.source_run_id, model.model_id)

    def versions(self, kind: str, pair: str) -> list[Published]:
        """All versions that Draftwell made, the oldest first."""
        found = self._search(f"name = '{model_name(kind, pair)}'")
        return sorted(found, key=lambda published: published.version)

    def _search(self, condition: str) -> list[Published]:
        """The versions that Draftwell made and that meet a condition of MLflow's."""
        with registry_errors(self.uri):
            found: list[ModelVersion] = []
            token: str | None = None
            while token != "":
                page = self.client.search_model_versions(condition, page_token=token)
                found += page
                token = page.token or ""
        return [published_of(version) for version in found if is_ours(version)]


def _refuse_missing(published: Published) -> None:
    """Refuse a version whose files were deleted from a folder of this machine."""
    from mlflow.utils.file_utils import local_file_uri_to_path
    from mlflow.utils.uri import is_local_uri

    if not is_local_uri(published.source, is_tracking_or_registry_uri=False):
        return
    if not (folder := Path(local_file_uri_to_path(published.source))).is_dir():
        raise DraftwellError(
            f"the files of {published.name} version {published.version} are not in {folder}: put "
            "them back from a backup, or delete that version in MLflow and publish the same again",
            code="published_files_missing",
        )


def _tags(
    kind: str, pair: str, digest: str, made: Mapping[str, Any], parents: Mapping[str, str]
) -> dict[str, str]:
    """What a version's tags say of its provenance."""
    return {
        "kind": kind,
        FORMAT_TAG: str(FORMAT),
        "pair": pair,
        "digest": digest,
        "fingerprint": made["fingerprint"],
        "trace_digest": made["trace_digest"] or "",
        "git_commit": made["git_commit"] or "",
        "device_class": made["device_class"] or "",
        TENANTS: " ".join(made["tenants"]),
        "parents": json.dumps({**made["parents"], **parents}, sort_keys=True),
    }
