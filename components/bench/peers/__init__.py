"""Peers: what users run today, measured in the same run as our strategies.

`transformers` computes in this process, on the pair's own modules (`transformers_peer`). The others
are engines (`components/engines`) in environments of their own, made by `make peers`: a process of
their own decodes what the bench asks for, and is stopped while others compute. `loading` starts
them, `model_files` and `gguf_file` write what they read.
"""

from collections.abc import Sequence

from draftwell.components.engines.environments import DRIVERS, interpreter
from draftwell.serving.errors import DraftwellError

PEERS = ("transformers", *DRIVERS)


def check_peers(names: Sequence[str], *, device: str = "cpu", padded: bool = False) -> None:
    """Refuse, before models are loaded, peers that could not be measured as the strategies are.

    Raises:
        DraftwellError: an unknown name (`unknown_peer`), one that is not installed, a name twice,
            or a bench that is not one of the pair as it is on the CPU (`peer_settings`).
    """
    for name in names:
        if name not in PEERS:
            raise DraftwellError(
                f"unknown peer {name!r}: choose from {', '.join(PEERS)}", code="unknown_peer"
            )
        if names.count(name) > 1:
            raise DraftwellError(f"peers: {name} is named twice: leave one out", code="named_twice")
        if name in DRIVERS:
            interpreter(name)
            for wrong, what in (
                (device != "cpu", "on the CPU (--device cpu)"),
                (padded, "on the target as it is (without pad_target)"),
            ):
                if wrong:
                    raise DraftwellError(
                        (
                            f"the peer {name} is measured {what} only: change that or leave "
                            f"{name} out of peers"
                        ),
                        code="peer_settings",
                    )
