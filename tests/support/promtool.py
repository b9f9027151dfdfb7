"""Prometheus' own checker of rules, and ours."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.support.paths import REPO

RULES = REPO / "deploy" / "prometheus" / "draftwell.rules.yaml"
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
