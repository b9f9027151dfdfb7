"""The processor time that a container may use, from planted control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwell.serving import device
from draftwell.serving.cpu_quota import cpu_quota
from tests.support.patching import replace_everywhere


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v1(quota: str, folder: str = "") -> dict[str, str]:
    place = f"sys/fs/cgroup/cpu,cpuacct/{folder}"
    return {f"{place}/cpu.cfs_quota_us": f"{quota}\n", f"{place}/cpu.cfs_period_us": "100000\n"}


V2 = {"proc/self/cgroup": "0::/\n"}
V1 = {"proc/self/cgroup": "4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        (V2, None),
        ({**V2, "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({**V2, "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({**V2, "sys/fs/cgroup/cpu.max": "20000 10000\n"}, 2.0),
        ({**V2, "sys/fs/cgroup/cpu.max": "nonsense\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/kube/pod/one\n",
                "sys/fs/cgroup/kube/pod/one/cpu.max": "max 100000\n",
                "sys/fs/cgroup/kube/pod/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/kube/cpu.max": "800000 100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "0::/docker/of/the/host\n",
                "sys/fs/cgroup/cpu.max": "250000 100000\n",
            },
            2.5,
        ),
        ({"proc/self/cgroup": "0::/../other\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        ({**V1, **v1("-1", "docker/ab")}, None),
        ({**V1, **v1("150000", "docker/ab"), **v1("-1")}, 1.5),
        ({**V1, **v1("150000")}, 1.5),
        ({"proc/self/cgroup": "2:cpuacct:/\n", **v1("150000")}, None),
    ],
)
def test_the_least_limit_of_the_groups_counts(
    tmp_path: Path, files: dict[str, str], cores: float | None
) -> None:
    assert cpu_quota(plant(tmp_path, files)) == cores


@pytest.mark.parametrize(("quota", "cores"), [(None, 4), (9.0, 4), (2.0, 2), (1.5, 1), (0.3, 1)])
def test_a_quota_pays_for_whole_cores_and_at_least_one(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int
) -> None:
    monkeypatch.setattr(device, "core_ids", lambda: [0, 1, 4, 5])
    monkeypatch.setattr(device, "cpu_quota", lambda: quota)
    assert device.usable_cores() == cores


def test_threads_that_nobody_named_keep_to_the_quota_and_named_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch, had = {"threads": 4}, []
    monkeypatch.setattr("torch.get_num_threads", lambda: torch["threads"])
    monkeypatch.setattr("torch.set_num_threads", had.append)
    replace_everywhere(monkeypatch, device, "usable_cores", lambda: 2)
    device.set_threads(None)
    device.set_threads(3)
    torch["threads"] = 1  # by OMP_NUM_THREADS
    device.set_threads(None)
    assert had == [2, 3, 1]
