"""`/draftwell/draft`, a path of vLLM's server (`vllm.endpoint_plugins`): which draft is loaded, and
another one's weights in its place, without a restart.

vLLM's own paths for that need its development mode, which opens much else. This one takes folders
below `DRAFTWELL_DRAFTS` from whoever sends the key in `DRAFTWELL_SWAP_KEY`; without both it is not
there. vLLM loads it where `VLLM_PLUGINS` names it. Requests that run end first, new ones wait
meanwhile, so that none is lost and no cache holds what another draft computed.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from .spool import BUNDLE

PATH, KEY, ROOT = "/draftwell/draft", "DRAFTWELL_SWAP_KEY", "DRAFTWELL_DRAFTS"
HEADER = "x-draftwell-key"
CONFIG = "config.json"
UNTOLD = ("_name_or_path", "transformers_version")
"""Keys of a configuration that say nothing of a model's shape."""

log = logging.getLogger("vllm.draftwell")


class DraftRoute:
    """The path and what it needs of vLLM (an `EndpointPlugin`)."""

    name = "draftwell_draft"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._key = os.environ.get(KEY, "").encode()
        self._root = os.environ.get(ROOT)
        self._engine: Any = None
        self._folder = ""
        self._lock = asyncio.Lock()

    def attach_router(self, app: Any) -> None:
        """Add the path, where there are a key and a root."""
        if self._key and self._root:
            app.add_route(PATH, self.answer, methods=["GET", "POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """vLLM calls this once, when it is ready."""
        self._engine = engine_client
        self._folder = str(getattr(engine_client.vllm_config.speculative_config, "model", ""))

    async def answer(self, request: Request) -> JSONResponse:
        """What is loaded (GET), or what came of loading another draft (POST)."""
        given = request.headers.get(HEADER, "").encode()
        if not hmac.compare_digest(given, self._key):
            return refusal(404, f"send the key of {KEY} in the header {HEADER}")
        if request.method == "GET":
            return JSONResponse(self.loaded())
        try:
            body = await request.json()
            folder, bundle = self._checked(Path(body["folder"])), str(body["bundle"])
        except (KeyError, TypeError, json.JSONDecodeError):
            return refusal(400, "name the folder of a draft and its bundle")
        except ValueError as error:
            return refusal(409, str(error))
        if self._lock.locked():
            busy = refusal(429, "another draft is being loaded: ask again when that is done")
            busy.headers["retry-after"] = "2"
            return busy
        async with self._lock:
            try:
                await self._load(folder)
            except Exception as error:
                log.exception("the draft of %s was not loaded", folder)
                return refusal(500, f"{type(error).__name__}: {error}")
            self._folder = str(folder)
            os.environ[BUNDLE] = bundle  # by which lines of acceptance are known from now on
            log.info("the draft is that of %s now (%s)", folder, bundle)
        return JSONResponse(self.loaded())

    def loaded(self) -> dict[str, Any]:
        """The draft that is loaded, how it speculates, and the bundle that it is of."""
        config = self._engine.vllm_config.speculative_config
        return {
            "folder": self._folder,
            "bundle": os.environ.get(BUNDLE),
            "method": getattr(config, "method", None),
            "num_speculative_tokens": getattr(config, "num_speculative_tokens", None),
        }

    def _checked(self, folder: Path) -> Path:
        """A folder below the root, of a draft of the same shape as what is loaded.

        Raises:
            ValueError: it is not; one line.
        """
        root = Path(self._root or "").resolve()
        found = (root / folder).resolve()
        if root not in found.parents:
            raise ValueError(f"{folder} is not below {root} on the server's machine")
        try:
            new, old = shape_of(found), shape_of(Path(self._folder))
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} has no {CONFIG} that can be read: {error}") from error
        if differing := sorted(
            key for key in new.keys() | old.keys() if new.get(key) != old.get(key)
        ):
            raise ValueError(f"{folder} has another {differing[0]}: restart vLLM with it")
        return found

    async def _load(self, folder: Path) -> None:
        await self._engine.pause_generation(mode="wait", clear_cache=True)
        try:
            await self._engine.start_draft_weight_update()
            await self._engine.collective_rpc(
                "update_weights", kwargs={"update_info": {"folder": str(folder)}}
            )
            await self._engine.finish_weight_update()
        finally:
            await self._engine.resume_generation()


def shape_of(folder: Path) -> dict[str, Any]:
    """A model's configuration without what says nothing of its shape."""
    found = dict(json.loads((folder / CONFIG).read_text()))
    return {key: value for key, value in found.items() if key not in UNTOLD}


def refusal(status: int, message: str) -> JSONResponse:
    """An error as vLLM words its own."""
    return JSONResponse({"error": {"message": message, "code": status}}, status)
