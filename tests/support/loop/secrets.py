"""Secrets of tests, and a search for them in every file that was written."""

from __future__ import annotations

import base64
import gzip
import sqlite3
import urllib.parse
import zipfile
from collections.abc import Iterator
from pathlib import Path

SECRETS = {
    "MLFLOW_TRACKING_USERNAME": "keeper",  # no secret itself, but half of what is sent
    "MLFLOW_TRACKING_PASSWORD": "tracking+pass/word=one",
    "AWS_ACCESS_KEY_ID": "AKIAOFTHETESTALONE",
    "AWS_SECRET_ACCESS_KEY": "s3/secret+of=the/test",
    "DRAFTWELL_API_KEY": "sk-draftwell-of-the-test",
    "OPENAI_API_KEY": "sk-openai-of-the-test",
    "HF_TOKEN": "hf_TokenOfTheTestAlone",
    "PREFECT_API_KEY": "pnu_key-of-the-test",
    "PGPASSWORD": "postgres-of-the-test",
}


def forms_of(secrets: dict[str, str]) -> dict[str, bytes]:
    """What to look for: each secret as it is, quoted for an address, in base64, and as the header
    of basic auth."""
    both = f"{secrets['MLFLOW_TRACKING_USERNAME']}:{secrets['MLFLOW_TRACKING_PASSWORD']}"
    forms = {"basic auth": base64.b64encode(both.encode())}
    for name, value in secrets.items():
        if name != "MLFLOW_TRACKING_USERNAME":
            forms |= {
                name: value.encode(),
                f"{name}, quoted": urllib.parse.quote(value, safe="").encode(),
                f"{name}, base64": base64.b64encode(value.encode()),
            }
    return forms


def contents(path: Path) -> Iterator[bytes]:
    """The bytes of a file, and what is packed in it."""
    data = path.read_bytes()
    yield data
    if data.startswith(b"PAR1"):
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        yield repr(table.schema.metadata).encode()
        for column in table.columns:
            if str(column.type) == "string":
                yield "\n".join(str(value) for value in column.to_pylist()).encode()
    elif data.startswith(b"SQLite format 3"):  # with what is still in its journal
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            yield "\n".join(database.iterdump()).encode()
    elif data.startswith(b"\x1f\x8b"):
        yield gzip.decompress(data)
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as packed:
            yield from (packed.read(name) for name in packed.namelist())


def leaks(place: Path, secrets: dict[str, str]) -> list[str]:
    """`file: secret` of every secret found below a folder."""
    forms = forms_of(secrets)
    found = []
    for path in sorted(place.rglob("*")):
        if path.is_file() and not path.is_symlink():
            texts = list(contents(path))
            found += [
                f"{path.relative_to(place)}: {name}"
                for name, form in forms.items()
                if any(form in text for text in texts)
            ]
    return found
