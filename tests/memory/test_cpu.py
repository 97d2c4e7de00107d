"""The precision for a CPU."""

from pathlib import Path

import pytest

from empo2.memory import cpu


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 avx512_vnni", "bfloat16"),
        ("flags\t\t: fpu avx2 avx512f amx_bf16", "bfloat16"),
        ("Features\t: fp asimd i8mm bf16", "bfloat16"),
        ("flags\t\t: fpu avx2 avx512f avx512bw avx512_vnni", "float32"),
        ("flags\t\t: fpu avx2 fma", "float32"),
        (None, "float32"),
    ],
    ids=["Zen 4", "Sapphire Rapids", "Neoverse V1", "Cascade Lake", "Zen 3", "no such file"],
)
def test_bfloat16_where_the_cpu_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str | None, dtype: str
) -> None:
    file = tmp_path / "cpuinfo"
    if flags is not None:
        file.write_text(f"processor\t: 0\n{flags}\n")
    monkeypatch.setattr(cpu, "Path", lambda _: file)
    assert cpu.fast_dtype() == dtype
