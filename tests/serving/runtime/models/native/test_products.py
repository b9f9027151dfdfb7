"""Products by the library: those of torch, and the same for a token in any company."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pytest
import torch

from draftwell.serving.number_format import Weights
from draftwell.serving.runtime.models.native import packing
from draftwell.serving.runtime.models.native.decoder import Product, dots
from draftwell.serving.runtime.models.native.library import SOURCE, compiler, find_library
from draftwell.serving.runtime.models.native.packing import ROOM, LargePages, place
from draftwell.serving.runtime.models.quantised import rounded
from tests.support.models.by_library import compiles

pytestmark = compiles
PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BFLOAT16, BFLOAT12 = 1, 4
"""As product.h numbers them."""
KINDS = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.bfloat16, "int8"),
    (torch.bfloat16, "int4"),
    (torch.float32, "int8"),
    (torch.float32, "int4"),
]


def product(weight: torch.Tensor, bias: torch.Tensor | None, weights: Weights | None) -> Product:
    library = find_library("on", [])
    assert library is not None
    return Product(library, weight, bias, weights)


@pytest.mark.parametrize("shape", [(96, 64), (33, 32), (50, 96), (7, 31)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "weights"), KINDS)
def test_a_token_is_multiplied_as_by_torch_and_alike_in_any_company(
    shape: tuple[int, int], bias: bool, dtype: torch.dtype, weights: Weights | None
) -> None:
    random = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=random).to(dtype)
    line = torch.randn(shape[0], generator=random).to(dtype) if bias else None
    x = torch.randn(70, shape[1], generator=random).to(dtype)
    own = product(weight, line, weights)
    used = weight.double() if weights is None else rounded(weight, weights).dense().double()
    wanted = x.double() @ used.T + (0 if line is None else line.double())
    found = own.in_float32(x)
    # where int4 is multiplied two at once, its weights are rounded to bfloat16
    limit = 0.2 if (dtype, weights) == (torch.bfloat16, "int4") else 1e-3
    torch.testing.assert_close(found.double(), wanted, atol=limit, rtol=1e-3)
    assert own.in_float32(x[:0]).shape == (0, shape[0])
    for tokens in (1, 2, 5, 6, 7, 11, 12, 13, 16, 17, 24, 25, 32, 33, 48, 69):
        assert torch.equal(own.in_float32(x[:tokens]), found[:tokens]), tokens


@pytest.mark.parametrize("shape", [(96, 64), (33, 32), (50, 96), (7, 31), (320, 192)], ids=str)
def test_bfloat16_in_twelve_bits_gives_what_sixteen_give(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also numbers of uncommon size, in neighbouring steps and blocks, and where all are zero.

    Without AMX both are the same layout.
    """
    library = find_library("on", [])
    assert library is not None
    random = torch.Generator().manual_seed(sum(shape))
    weight = (torch.randn(shape, generator=random) / 20).bfloat16()
    weight[0, :2], weight[-1, -1], weight[shape[0] // 2] = 3e38, -1e-35, 0
    for uncommon in range(0, weight.numel(), 601):
        weight.view(-1)[uncommon] = -(2.0 ** (uncommon % 200 - 100))
    x = torch.randn(70, shape[1], generator=random)
    line = torch.randn(shape[0], generator=random).bfloat16()
    short = Product(library, weight, line)
    assert short.packed.kind == (BFLOAT12 if library.draftwell_unpacks() else BFLOAT16)
    monkeypatch.setattr(packing, "shortened", lambda *_: None)
    whole = Product(library, weight, line)
    assert whole.packed.kind == BFLOAT16
    for tokens in (1, 2, 12, 13, 32, 33, 70):
        assert torch.equal(short.in_float32(x[:tokens]), whole.in_float32(x[:tokens])), tokens
    # each weight alone
    monkeypatch.undo()
    alone = Product(library, weight).in_float32(torch.eye(shape[1]))
    assert torch.equal(alone.T, weight.float())


@pytest.mark.parametrize("more", [0, 1])
def test_a_weight_is_shortened_up_to_its_share_of_uncommon_numbers(more: int) -> None:
    """Tiny and huge ones, infinity and NaN among them, which stay as they are."""
    library = find_library("on", [])
    assert library is not None
    common = torch.tensor([2.0**k for k in range(-8, 24, 2)])
    far = torch.tensor([2.0**k for k in (-126, -60, -12, 26, 60, 126)])
    uncommon = torch.cat([far, -far, torch.tensor([torch.inf, -torch.inf, torch.nan])])
    weight = common.repeat(1024).view(64, 256).bfloat16()
    places = weight.view(-1)[:: packing.PATCHED]
    places[:] = uncommon.repeat(len(places))[: len(places)]
    if more:
        weight[0, 1] = -1e20
    made = Product(library, weight)
    shortens = library.draftwell_unpacks() and not more
    assert made.packed.kind == (BFLOAT12 if shortens else BFLOAT16)
    for column in range(0, 256, packing.PATCHED):
        one = torch.zeros(1, 256)
        one[0, column] = 1.0
        finite = weight.float().isfinite().all(1)
        found = made.in_float32(one)[0]
        assert torch.equal(found[finite], weight.float()[finite, column])
        assert not found[~finite].isfinite().any(), "zero times infinity, or infinity"


def test_numbers_of_all_sizes_stay_in_sixteen_bits() -> None:
    library = find_library("on", [])
    assert library is not None
    bits = torch.arange(64 * 256).mul(40503).to(torch.int16).view(64, 256)
    assert Product(library, bits.view(torch.bfloat16)).packed.kind == BFLOAT16


def test_dot_products_do_not_depend_on_how_many_there_are() -> None:
    library = find_library("on", [])
    assert library is not None
    random = torch.Generator().manual_seed(2)
    x, rows = (torch.randn(count, 83, generator=random) for count in (5, 9))
    found = dots(library, x, rows)
    torch.testing.assert_close(found, x @ rows.T, atol=1e-4, rtol=0)
    for i in range(5):
        for j in range(9):
            assert torch.equal(dots(library, x[i : i + 1], rows[j : j + 1])[0, 0], found[i, j])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of another processor")
@pytest.mark.parametrize(
    ("flags", "instruction"),
    [(("-mavx512f", "-mavx512vl", "-mavx512bf16"), "vdpbf16ps"), (("-mavx2", "-mfma"), "vfmadd")],
)
def test_products_are_not_calls(flags: tuple[str, ...], instruction: str, tmp_path: Path) -> None:
    """The multiplications of six tokens stand in one loop, on every kind of processor."""
    options = ["-O2", "-std=c++17", "-ffp-contract=off", "-S", *flags]
    made = tmp_path / "decoder.s"
    command = [str(compiler()), *options, str(SOURCE), "-o", str(made)]
    subprocess.run(command, check=True, timeout=120)
    name = r"_\w*blockILi6ENS_8Bfloat16E\w*"
    found = re.search(
        rf"^({name}):$(.*?)^\s*\.size\s+\1,", made.read_text(), re.DOTALL | re.MULTILINE
    )
    assert found is not None
    assert found[2].count(instruction) >= 12, "six tokens by two vectors"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of another processor")
def test_tiles_multiply_where_a_processor_has_them(tmp_path: Path) -> None:
    flags = ("-mavx512f", "-mavx512vl", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
    made = tmp_path / "decoder.s"
    command = [str(compiler()), "-O2", "-std=c++17", "-fopenmp", "-S", *flags, str(SOURCE)]
    subprocess.run([*command, "-o", str(made)], check=True, timeout=120)
    products = re.findall(
        r"^(_\w*draftwellL\d+product\w*):$(.*?)^\s*\.size\s+\1,",
        made.read_text(),
        re.DOTALL | re.MULTILINE,
    )
    tiles = sum(body.count("tdpbf16ps") for _, body in products)
    assert tiles >= 16, "bfloat16 in 16 and 12 bits, int8 and int4, each 32 tokens by two vectors"


def test_weights_lie_side_by_side_and_stay_when_the_next_room_is_taken() -> None:
    pages, kept = LargePages(), []
    for number, size in enumerate([1, 63, 64, 65, ROOM - 64, ROOM, ROOM + 1, 128]):
        bytes_of = pages.take(size)
        assert len(bytes_of) == size
        bytes_of[:] = bytes([number]) * size
        kept.append(bytes_of)
    starts = [torch.frombuffer(one, dtype=torch.uint8).data_ptr() for one in kept]
    assert all(start % 64 == 0 for start in starts)
    assert all(one[0] == one[-1] == number for number, one in enumerate(kept))


@pytest.mark.skipif(
    not PAGES.exists() or "[never]" in PAGES.read_text(), reason="no large pages on this machine"
)
def test_the_system_may_use_large_pages_for_them() -> None:
    placed = place(torch.ones(ROOM, dtype=torch.uint8))
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    at = placed.data_ptr()

    def holds(one: str) -> bool:
        start, end = (int(side, 16) for side in one.split()[0].split("-"))
        return start <= at < end

    (own,) = (one for one in maps if one and holds(one))
    assert re.search(r"THPeligible:\s+1", own), own
