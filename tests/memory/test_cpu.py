"""The precision for a CPU."""

from pathlib import Path

import pytest

from empo2.memory import cpu


@pytest.mark.parametrize(
    ("lines", "dtype"),
    [
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f avx512_bf16 avx512_vnni", "bfloat16"),
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile", "bfloat16"),
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx2 avx512f avx512_bf16 avx512_fp16", "float32"),
        ("Features\t: fp asimd i8mm bf16", "bfloat16"),
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx2 avx512f avx512bw avx512_vnni", "float32"),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 fma", "float32"),
        (None, "float32"),
    ],
    ids=["Zen 4", "Emerald Rapids", "without AMX", "Neoverse V1", "Cascade Lake", "Zen 3", "no such file"],
)
def test_bfloat16_where_the_cpu_is_faster_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str | None, dtype: str
) -> None:
    file = tmp_path / "cpuinfo"
    if lines is not None:
        file.write_text(f"processor\t: 0\n{lines}\n")
    monkeypatch.setattr(cpu, "Path", lambda _: file)
    assert cpu.fast_dtype() == dtype
