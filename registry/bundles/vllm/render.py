"""The files of a bundle that vLLM serves, rendered from `VllmServing`.

`serve.sh` and `Dockerfile` for one machine, `compose.yaml` with a GPU reserved, `chart/` for Helm,
`ray_serve.yaml` for Ray Serve. All start the same arguments. `serve.sh`, which the image runs too,
first checks the manifest (`check.py`: digests, and that engine, version and device are those that
the gate judged). Plug-ins are imported from their wheels, whose digests are checked, and need not
be installed. YAML is dumped from data, so that it is YAML whatever a name holds. The same settings
give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from draftwell.registry.bundles.vllm.readme import readme
from draftwell.registry.bundles.vllm.settings import BUNDLED, EngineGate, VllmServing
from draftwell.serving.bundle.signature import SIGNATURE
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest, sha256_file

MANIFEST = "manifest.json"
SCHEMA = 1
HERE = Path(__file__).parent / "files"
ROOT = "/bundle"
"""Where the bundle is in containers, and on the nodes of a Ray cluster."""
SPOOL = "/spool"
"""Where a plug-in of a container writes what it counted, for `draftwell monitor`."""
WORDS = "Rendered by `draftwell deploy`; a change here is refused at start."
USER = 1000
"""Number of the user whom the image runs as."""
DRAIN, MARGIN = 60, 15
"""Seconds that a container has to end, and how many of them are left when vLLM stops waiting for
its requests."""
FREE = (".env", "Caddyfile", "chart/values.yaml", "compose.yaml")
"""What whoever installs the bundle may change; the check at start leaves it out."""
OWN_WORDS = (
    "Rendered by `draftwell deploy`; yours to change: the check at start leaves this file out."
)
EXECUTABLE = ("serve.sh",)
PROXY = "caddy:2.10-alpine"
"""Image of the reverse proxy before several replicas of a compose project."""
CPU_FILE = "cpu.py"
"""Of `files/`: what `serve.sh` asks on CPUs."""

SERVE = Template("""\
#!/bin/sh
# Serves $pair, release $release, with vLLM $version on $device; options are passed to vLLM. $words
set -eu
case "$${DRAFTWELL_SPOOL:-}" in ""|/*) ;; *) export DRAFTWELL_SPOOL="$$PWD/$$DRAFTWELL_SPOOL";; esac # not a folder in the bundle
cd -P "$$(dirname "$$0")" # -P: the link `current` may move while this bundle is served
PYTHON="$${PYTHON:-python3}"
DIGEST=$$("$$PYTHON" -P check.py --digest)
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
INDUCTOR="$${VLLM_CACHE_ROOT:-$${XDG_CACHE_HOME:-$${HOME:-/tmp}/.cache}/vllm}/inductor"
if [ -z "$${VLLM_CACHE_ROOT:-}" ]; then
  # a folder for each bundle: vLLM does not read what it compiled with other settings
  export VLLM_CACHE_ROOT="$${XDG_CACHE_HOME:-$${HOME:-/tmp}/.cache}/vllm/draftwell-$$DIGEST"
fi
${cores}${plugins}${environment}export DRAFTWELL_BUNDLE=$bundle
MODEL=$model
exec "$$PYTHON" -P -m vllm.entrypoints.openai.api_server --model "$$MODEL" --port "$${PORT:-$port}" --host 127.0.0.1 --shutdown-timeout $drain \\
  $arguments "$$@"
""")  # noqa: E501
CORES = Template("""\
# the cores and libraries that it was measured with, unless you name others; by itself vLLM keeps a core back and takes another OpenMP
if [ -z "$${VLLM_CPU_OMP_THREADS_BIND:-}" ]; then
  VLLM_CPU_OMP_THREADS_BIND=$$("$$PYTHON" -P cpu.py cores$threads)
  export VLLM_CPU_OMP_THREADS_BIND
fi
# vLLM cannot load again what it compiles ahead of time on CPUs, and would compile at each start
export VLLM_USE_AOT_COMPILE="$${VLLM_USE_AOT_COMPILE:-0}"
# found by what was compiled, so that bundles share it; by itself in /tmp
export TORCHINDUCTOR_CACHE_DIR="$${TORCHINDUCTOR_CACHE_DIR:-$$INDUCTOR}"
if [ -z "$${LD_PRELOAD+named}" ]; then
  LD_PRELOAD=$$("$$PYTHON" -P cpu.py libraries)
  export LD_PRELOAD
fi
""")  # noqa: E501
DOCKERFILE = Template("""\
# $words
#   docker build -t $image . && docker run --rm -p $port:$port$gpus $image
FROM $base
USER root
${installs}COPY . $root
ENV PYTHONUNBUFFERED=1
WORKDIR $root
# vLLM compiles into its user's home; a name, because libraries ask for the user's.
ENV HOME=/tmp USER=draftwell
RUN install -d -o $user -g $user /spool /hub
USER $user:$user
EXPOSE $port
HEALTHCHECK --start-period=600s CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:$port/health', timeout=5)"]
ENTRYPOINT ["/bin/sh", "$root/serve.sh", "--host", "0.0.0.0"]
""")  # noqa: E501
CADDYFILE = Template("""\
# $words
{
	admin off
	auto_https off
}
:$port {
	reverse_proxy $replicas {
		lb_policy least_conn
		# a request whose replica cannot be connected to goes to another one; one that was sent is not sent again
		lb_try_duration 30s
		lb_try_interval 250ms
		health_uri /health
		health_interval 5s
		health_timeout 5s
		fail_duration 5s
		flush_interval -1
		# a replica that ends closes idle connections; a request that is being sent on one of them would be lost
		transport http {
			keepalive off
		}
	}
}
""")  # noqa: E501


def write_bundle(settings: VllmServing, folder: Path) -> Path:
    """Write the rendered files, and the manifest over all that is in the folder, beside the models
    and wheels that are there already.

    Args:
        folder: the bundle, without a manifest yet.
    Returns:
        the manifest.
    Raises:
        DraftwellError: a plug-in or a model that the settings place in the bundle is not there
            (`missing_file`).
    """
    named = [
        *settings.plugins,
        *([settings.requirements] if settings.requirements else []),
        *(model for model, _ in settings.models().values() if model.startswith(BUNDLED)),
    ]
    for name in named:
        if not (folder / name).exists():
            raise DraftwellError(
                f"{folder / name}, which the settings name, is not in the bundle: put it there",
                code="missing_file",
            )
    texts = rendered(settings)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755 if name in EXECUTABLE else 0o644)
    for source in sorted(HERE.rglob("*")):
        within = source.relative_to(HERE)
        wanted = {
            "chart": settings.base_image is not None,
            CPU_FILE: settings.gate.device == "cpu",
        }.get(within.parts[0], True)
        if source.is_file() and "__pycache__" not in source.parts and wanted:
            (folder / within).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / within)
    # what a later version, whose templates differ, tells a user's changes by
    free = {
        name: hashlib.sha256(texts[name].encode()).hexdigest() if name in texts else None
        for name in FREE
    }
    body: dict[str, Any] = {
        "schema_version": SCHEMA,
        "kind": "vllm",
        "settings": settings.model_dump(mode="json"),
        "files": file_records(folder),
        "free": free,
    }
    manifest = folder / MANIFEST
    manifest.write_text(
        json.dumps({**body, "digest": json_digest(body)}, indent=2, sort_keys=True) + "\n",
        encoding="utf-8",
    )
    return manifest


def file_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Path in the bundle → sha256 and size of every file that the manifest lists."""
    return {
        name: {"sha256": sha256_file(path), "size": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and (name := path.relative_to(folder).as_posix()) not in (MANIFEST, SIGNATURE, *FREE)
    }


def rendered(settings: VllmServing) -> dict[str, str]:
    """Path in the bundle → text of every file that depends on the settings; those of containers
    only where there is an image to make them from."""
    bare = {
        "serve.sh": serve_script(settings),
        "README.md": readme(settings),
        "ray_serve.yaml": _yaml(ray_serve(settings)),
    }
    if settings.base_image is None:
        return bare
    proxy = {"Caddyfile": caddyfile(settings)} if settings.replicas > 1 else {}
    return {
        **bare,
        **proxy,
        "Dockerfile": dockerfile(settings),
        "compose.yaml": _yaml(compose(settings), OWN_WORDS),
        "chart/Chart.yaml": _yaml(chart(settings)),
        "chart/values.yaml": _yaml(chart_values(settings), OWN_WORDS),
        ".dockerignore": ".env\n",
    }


def serve_script(settings: VllmServing) -> str:
    """`serve.sh`: checks the bundle, then becomes vLLM's server."""
    words = [f"--served-model-name {shlex.quote(settings.model_name)}"]
    for name, value in settings.engine_arguments().items():
        text = json.dumps(value, sort_keys=True) if isinstance(value, dict) else str(value)
        words.append(f"--{name.replace('_', '-')} {shlex.quote(text)}")
    environment = "".join(
        f"export {name}={shlex.quote(value)}\n"
        for name, value in sorted(settings.environment.items())
    )
    # names of wheels hold nothing that a shell reads
    wheels = ":".join(f"$PWD/{name}" for name in settings.plugins)
    plugins = f'export PYTHONPATH="{wheels}${{PYTHONPATH:+:$PYTHONPATH}}"\n' if wheels else ""
    return SERVE.substitute(
        pair=settings.pair,
        release=settings.release,
        version=settings.gate.version,
        device=settings.gate.device,
        words=WORDS,
        cores=cores_of(settings.gate),
        plugins=plugins,
        environment=environment,
        drain=DRAIN - MARGIN,
        model=shlex.quote(settings.model),
        port=settings.port,
        bundle=shlex.quote(settings.bundle),
        arguments=" ".join(words),
    )


def cores_of(gate: EngineGate) -> str:
    """The part of `serve.sh` that CPUs need."""
    if gate.device != "cpu":
        return ""
    return CORES.substitute(threads="" if gate.threads is None else f" {gate.threads}")


def dockerfile(settings: VllmServing) -> str:
    """`Dockerfile` on vLLM's image: what the plug-ins need, whose hashes pip checks, and the
    bundle."""
    installs = ""
    if settings.requirements:
        installs += (
            f"COPY {settings.requirements} /install/\n"
            "RUN pip install --no-cache-dir --require-hashes --no-deps -r "
            f"/install/{settings.requirements}\n"
        )
    return DOCKERFILE.substitute(
        words=WORDS,
        image=settings.image_name,
        port=settings.port,
        base=settings.base_image,
        installs=installs,
        root=ROOT,
        user=USER,
        gpus=" --gpus all --ipc host" if settings.gate.device == "cuda" else "",
    )


def compose(settings: VllmServing) -> dict[str, Any]:
    """`compose.yaml`: the replicas, each with GPUs or cores of its own, and where there are several
    a proxy before them; the spool is a volume that a worker may share."""
    names = replica_names(settings)
    services = {name: replica_service(settings, number) for number, name in enumerate(names, 1)}
    port = {"ports": [f"127.0.0.1:{settings.port}:{settings.port}"]}
    if len(names) == 1:
        services[names[0]] |= port
    else:
        services["proxy"] = {**proxy_service(names), **port}
    return {"name": settings.name, "services": services, "volumes": {"spool": {}, "hub": {}}}


def replica_names(settings: VllmServing) -> list[str]:
    """What compose calls the replicas: vllm, or vllm-1, vllm-2 and so on."""
    return (
        ["vllm"]
        if settings.replicas == 1
        else [f"vllm-{number}" for number in range(1, settings.replicas + 1)]
    )


def replica_service(settings: VllmServing, number: int) -> dict[str, Any]:
    """A replica of a compose project, from 1."""
    service: dict[str, Any] = {
        "image": settings.image_name,
        "build": ".",
        "restart": "unless-stopped",
        "security_opt": ["no-new-privileges:true"],
        # where vLLM compiles, and loads what it compiled
        "cap_drop": ["ALL"],
        "read_only": True,
        "tmpfs": ["/tmp:exec"],
        "environment": {
            "DRAFTWELL_SPOOL": f"{SPOOL}/{settings.pair}",
            "HF_TOKEN": "${HF_TOKEN:-}",
            "HF_HOME": "/hub",
            "VLLM_API_KEY": "${VLLM_API_KEY:?give it a value in .env beside this file}",
        },
        "volumes": [f"spool:{SPOOL}", "hub:/hub"],
        "command": ["--shutdown-timeout", str(DRAIN - MARGIN)],
        "stop_grace_period": f"{DRAIN}s",
        "healthcheck": {
            "test": ["CMD", "python3", "-c", _probe(settings)],
            "interval": "10s",
            "start_period": "10m",
            "retries": 6,
        },
    }
    several = settings.replicas > 1
    if settings.gate.device == "cuda":
        service["ipc"] = "host"
        own = [str(gpu) for gpu in range((number - 1) * settings.gpus, number * settings.gpus)]
        service["deploy"] = {
            "resources": {
                "reservations": {
                    "devices": [
                        {
                            "driver": "nvidia",
                            **({"device_ids": own} if several else {"count": settings.gpus}),
                            "capabilities": ["gpu"],
                        }
                    ]
                }
            }
        }
    else:
        service["deploy"] = {"resources": {"reservations": {"cpus": str(settings.cpus)}}}
        if several:
            service["cpuset"] = f"{(number - 1) * settings.cpus}-{number * settings.cpus - 1}"
    return service


def proxy_service(names: Sequence[str]) -> dict[str, Any]:
    """The reverse proxy before the replicas: to those that are healthy, again where a connection
    fails."""
    return {
        "image": PROXY,
        "restart": "unless-stopped",
        "security_opt": ["no-new-privileges:true"],
        "cap_drop": ["ALL"],
        # the image's caddy has it as a file capability, and does not start without
        "cap_add": ["NET_BIND_SERVICE"],
        "read_only": True,
        "tmpfs": ["/data", "/config"],
        "volumes": ["./Caddyfile:/etc/caddy/Caddyfile:ro"],
        "depends_on": {name: {"condition": "service_started"} for name in names},
        "stop_grace_period": f"{DRAIN}s",
    }


def caddyfile(settings: VllmServing) -> str:
    """`Caddyfile` of the proxy."""
    replicas = " ".join(f"{name}:{settings.port}" for name in replica_names(settings))
    return CADDYFILE.substitute(words=OWN_WORDS, port=settings.port, replicas=replicas)


def chart(settings: VllmServing) -> dict[str, Any]:
    """`chart/Chart.yaml`."""
    return {
        "apiVersion": "v2",
        "name": settings.name,
        "type": "application",
        "version": f"{settings.release}.0.0",
        "appVersion": settings.gate.version,
        "description": f"{settings.pair}, release {settings.release}, served by vLLM",
    }


def chart_values(settings: VllmServing) -> dict[str, Any]:
    """`chart/values.yaml`: what an installation may change; the engine's arguments are the
    image's."""
    on_gpu = settings.gate.device == "cuda"
    return {
        "image": {"name": settings.image_name, "pullPolicy": "IfNotPresent"},
        "replicas": settings.replicas,
        "port": settings.port,
        "resources": {
            "requests": {"cpu": settings.cpus},
            "limits": {"nvidia.com/gpu": settings.gpus} if on_gpu else {},
        },
        "runtimeClass": "",
        "sharedMemory": "8Gi",
        "spool": {"path": f"{SPOOL}/{settings.pair}", "claim": ""},
        "hub": {"claim": "", "tokenSecret": ""},
        "apiKeySecret": "",
        "security": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "nodeSelector": {},
        "tolerations": [],
        "startSeconds": 1200,
        "drainSeconds": DRAIN,
    }


def ray_serve(settings: VllmServing) -> dict[str, Any]:
    """`ray_serve.yaml`: Ray Serve LLM with several replicas; the bundle is at /bundle on every
    node."""
    deployment: dict[str, Any] = {
        "num_replicas": settings.replicas,
        "max_ongoing_requests": 2 * settings.max_num_seqs,
    }
    source = settings.place(settings.model, f"{ROOT}/")
    plugins = (
        {"PYTHONPATH": ":".join(f"{ROOT}/{name}" for name in settings.plugins)}
        if settings.plugins
        else {}
    )
    # as in `serve.sh`
    on_cpu = {"VLLM_USE_AOT_COMPILE": "0"} if settings.gate.device == "cpu" else {}
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": settings.model_name, "model_source": source},
        "deployment_config": deployment,
        "engine_kwargs": settings.engine_arguments(f"{ROOT}/"),
        "runtime_env": {
            "env_vars": {
                "DRAFTWELL_SPOOL": f"{SPOOL}/{settings.pair}",
                "VLLM_NO_USAGE_STATS": "1",
                **on_cpu,
                **plugins,
                **settings.environment,
                "DRAFTWELL_BUNDLE": settings.bundle,
            }
        },
    }
    if settings.gate.device == "cpu":
        config["placement_group_config"] = {"bundles": [{"CPU": settings.cpus}]}
    application = {
        "name": settings.name,
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [config]},
    }
    return {
        "http_options": {"host": "0.0.0.0", "port": settings.port},
        "applications": [application],
    }


def _probe(settings: VllmServing) -> str:
    return (
        f"import urllib.request as r; r.urlopen('http://127.0.0.1:{settings.port}/health', "
        "timeout=5)"
    )


def _yaml(data: Mapping[str, Any], words: str = WORDS) -> str:
    import yaml

    return f"# {words}\n" + yaml.safe_dump(
        dict(data), sort_keys=False, allow_unicode=True, width=120
    )
